"""attnlib.distributed.row_parallel_output on two GPUs with NCCL: equal to one GPU with all heads."""

from __future__ import annotations

import output_jobs as jobs
import pytest
import torch
from output_jobs import Layer
from ranks import Ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
BIG = {"heads": 16, "kv_heads": 4, "rows": 2048, "keys": 2048, "outputs": 512, "head_dim": 128,
       "dtype": "bfloat16", "impl": None}  # fmt: skip
LAYERS = [
    Layer(chunks, causal, window, **BIG)
    for chunks in (1, 4, (1024, 600, 424))
    for causal, window in ((True, None), (False, None), (True, (300, -1)))
] + [Layer(3, batch=2, **BIG), Layer(4, **{**BIG, "rows": 1000}), Layer(16, **{**BIG, "dtype": "float16"})]
ROUNDINGS = 2e-2
"""Largest differences over the largest number: some three roundings to bfloat16, of sums of up to 2048."""


def on_this_gpu() -> list[list[float]]:
    return jobs.errors(LAYERS, f"cuda:{torch.cuda.current_device()}")


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2, backend="nccl")
    yield ranks
    ranks.close()


def test_equal_to_one_gpu(two):
    for found in two.run(on_this_gpu, timeout=240):
        for layer, errors in zip(LAYERS, found, strict=True):
            assert all(error <= ROUNDINGS for error in errors), (layer, errors)
