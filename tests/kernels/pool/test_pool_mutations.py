"""The checks catch planted bugs: in the pooling kernels, in what the Hopper kernel keeps, in lists."""

from __future__ import annotations

import inspect

import pytest
import torch
from cases import INTERPRETER_REMARKS
from emulated import mutate, on_the_cpu
from families import fresh_launches  # noqa: F401  (a fixture)
from mutations import Mutation, load
from pooled_cases import CASES, PooledCase, check

from attnlib import BlockMask
from attnlib.block_mask.lists import lists_of
from attnlib.kernels.hopper import maxima
from attnlib.kernels.lists import list_kernel
from attnlib.kernels.pool import pool_kernels

pytestmark = INTERPRETER_REMARKS
MAP = "Tensor-likes are not close"
EMULATED = {
    "two halves": PooledCase(S=70, keys=330, D=128, heads=2, kv_heads=2, impl="hopper"),
}

SCORES = [
    Mutation("keys after the query count", "<= o_m[:, None] + (S_k - S_q) if", "< S_k + 0 * o_m[:, None] if",
             "causal", MAP),
    Mutation("keys past the end count", "else o_n[None, :] < S_k", "else o_n[None, :] < S_k + 64",
             "one key in the last block", MAP),
    Mutation("the smallest of a row is taken", "b_top = tl.max(tl.where(there, b_s, float(\"-inf\")), 1)",
             "b_top = tl.min(tl.where(there, b_s, float(\"inf\")), 1)", "causal", MAP),
    Mutation("the LSE is of another head", "lse_ptr + head.to(tl.int64) * S_q + o_m",
             "lse_ptr + 0 * head.to(tl.int64) * S_q + o_m", "causal", MAP),
    Mutation("the last block is left out", "tl.cdiv(seen, BLOCK_N), num", "seen // BLOCK_N, num", "causal",
             MAP),
]  # fmt: skip
MAXIMA = [
    Mutation("a unit too few is seen", "o_n[:, None] * UNIT <= last", "o_n[:, None] * UNIT + UNIT <= last",
             "two halves", MAP),
]  # fmt: skip
KEPT = [
    Mutation("the halves are swapped", "gl.store(at, left * qk_scale)", "gl.store(at, right * qk_scale)",
             "two halves", MAP,
             (("gl.store(at + rows, right * qk_scale)", "gl.store(at + rows, left * qk_scale)"),), maxima),
    Mutation("scores are not scaled", "gl.store(at, left * qk_scale)", "gl.store(at, left)", "two halves",
             MAP, (), maxima),
    Mutation("heads share their maxima", "head.to(gl.int64) * blocks", "0 * head.to(gl.int64) * blocks",
             "two halves", MAP, (), maxima),
]  # fmt: skip
LISTS = [
    Mutation("the diagonal is not always seen", "below & (chosen | same)", "below & chosen", "128", "steps"),
    Mutation("a block that half the rows see counts as whole", "whole, some = a & b & c & d & ~diagonal",
             "whole, some = a & b & d & ~diagonal", "64", "bits"),
    Mutation("words are of the mirrored tile", "+ 2 * b.to(tl.int32) + 4 * c.to(tl.int32)",
             "+ 2 * c.to(tl.int32) + 4 * b.to(tl.int32)", "64", "bits"),
    Mutation("the last tile is as any", "tl.where(last, 17, 15)", "15 + 0 * last.to(tl.int32)", "128",
             "bits"),
]  # fmt: skip


@pytest.mark.parametrize("mutation", SCORES, ids=str)
def test_pool_scores(mutation, tmp_path, monkeypatch, fresh_launches):
    mutant = load(mutation.of(inspect.getsource(pool_kernels)), tmp_path)
    monkeypatch.setattr(pool_kernels, "pool_scores", mutant.pool_scores)
    with pytest.raises(AssertionError, match=mutation.verdict):
        check(CASES[mutation.caught_by])


@pytest.mark.parametrize("mutation", MAXIMA, ids=str)
def test_pool_maxima(mutation, tmp_path, monkeypatch, fresh_launches):
    mutant = load(mutation.of(inspect.getsource(pool_kernels)), tmp_path)
    monkeypatch.setattr(pool_kernels, "pool_maxima", mutant.pool_maxima)
    with on_the_cpu(), pytest.raises(AssertionError, match=mutation.verdict):
        check(EMULATED[mutation.caught_by])


@pytest.mark.parametrize("mutation", KEPT, ids=str)
def test_kept_maxima(mutation):
    with on_the_cpu(mutants=mutate(mutation)), pytest.raises(AssertionError):
        check(EMULATED[mutation.caught_by])


@pytest.mark.parametrize("mutation", LISTS, ids=str)
def test_lists(mutation, tmp_path, monkeypatch):
    blocks = torch.rand(1, 2, 11, 11, generator=torch.Generator().manual_seed(3)) < 0.6
    size = int(mutation.caught_by)
    length = 11 * size - 30
    mask = BlockMask.from_chosen(blocks, length, block_size=size)
    wanted = lists_of(mask._tiles, 128, columns=False)

    def compared() -> None:
        found = BlockMask.from_chosen(blocks, length, block_size=size).lists(128)
        n = int(wanted.starts[-1])
        for name in ("starts", "steps", "bits"):
            assert torch.equal(getattr(found, name)[:n], getattr(wanted, name)[:n]), name

    compared()
    mutant = load(mutation.of(inspect.getsource(list_kernel)), tmp_path)
    monkeypatch.setattr(list_kernel, "chosen_lists", mutant.chosen_lists)
    with pytest.raises(AssertionError):
        compared()
