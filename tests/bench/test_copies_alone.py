"""The kernel that only copies, on the emulator: it copies what the kernel under a block mask copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulated import on_the_cpu

from attnlib import BlockMask, attention
from attnlib.bench import copies_alone
from attnlib.emulator import language

NAME = copies_alone.KERNEL.rpartition(".")[2]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_copies_what_the_kernel_copies(head_dim, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, 400, head_dim, generator=rng).half() for _ in range(3))
    mask = BlockMask.from_function(lambda b, h, i, j: (i >= j) & (i - j < 200), 400, 400)
    copied: list[tuple] = []

    def recorded(kind: type):
        def make(desc, coordinates, *rest):
            copied.append((desc.memory.data_ptr(), *map(int, coordinates)))
            return kind(desc, coordinates, *rest)

        return make

    monkeypatch.setattr(language, "CopyIn", recorded(language.CopyIn))
    with on_the_cpu():
        out = attention(q, k, v, block_mask=mask, impl="hopper")
        whole = sorted(copied)
    copied.clear()
    with on_the_cpu(mutants={NAME: copies_alone.module()}):
        nothing = attention(q, k, v, block_mask=mask, impl="hopper")
    assert sorted(copied) == whole and len(whole) > 3 * 4 * 6
    assert out.any() and not nothing.any()


def test_a_call_of_it_leaves_the_kernel_as_it_is(monkeypatch):
    """Its launch is its own: neither a call before nor one after gets the other's."""
    q, k, v = (torch.ones(1, 1, 128, 64, dtype=torch.float16) for _ in range(3))
    mask = BlockMask.from_function(lambda b, h, i, j: i >= j, 128, 128)
    with on_the_cpu(mutants={NAME: copies_alone.module()}) as copies:
        emulated = SimpleNamespace(**{NAME: copies[NAME]})
    monkeypatch.setattr(copies_alone, "module", lambda: emulated)
    with on_the_cpu():
        for _ in range(2):
            assert (attention(q, k, v, block_mask=mask, impl="hopper") == 1).all()
            call = copies_alone.call_of(q, k, v, mask)
        assert len(copies[NAME].reports) == 2 and not call().any()
