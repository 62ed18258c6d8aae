"""Layouts that launches make are those of `torch.empty_like`."""

from __future__ import annotations

import random

import torch

from attnlib.kernels.common.descriptors import strides_like


def draw(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides: any, or of a permuted tensor with gaps."""
    dims = rng.choice((3, 4))
    shape = tuple(rng.choice((1, 1, 2, 3, 4)) for _ in range(dims))
    if rng.random() < 0.5:
        return shape, tuple(rng.choice((0, 1, 1, 2, 3, 4, 6, 12, 24)) for _ in range(dims))
    strides, step = [0] * dims, 1
    for dim in rng.sample(range(dims), dims):
        strides[dim] = step
        step *= shape[dim] * rng.choice((1, 1, 2))
    return shape, tuple(strides)


def test_strides_are_those_of_empty_like():
    rng, kept = random.Random(0), 0
    for _ in range(5000):
        shape, strides = draw(rng)
        found = torch.empty_like(torch.empty_strided(shape, strides)).stride()
        assert strides_like(shape, strides) == found, (shape, strides)
        kept += found == strides
    assert 500 < kept < 4500
