"""Checks of the exercises of chapter 36."""

import numpy as np
import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson
from attnlib.kernels.common.distr import Grouping
from attnlib.kernels.common.launcher import Launches
from attnlib.kernels.distr import launch_group
from attnlib.kernels.reference import distr as model

PUBLISHED = Grouping(2, "q", 128)
"""Groups of two, of hashed queries, for each 128 of them."""


def check_sum_columns(sum_columns):
    """Sums of whole numbers, which are exact in float32 in any order, but not in TF32; nothing is written
    beyond the last row."""
    rng = torch.Generator().manual_seed(0)
    for S, D, group in ((16, 16, 1), (40, 32, 2), (33, 64, 4), (7, 128, 2), (20, 64, 1)):
        columns = max(16, D // group)
        x = torch.randint(-50000, 50000, (S + 16, D), generator=rng).float()  # room for a tile
        x = x.to(lesson.device())
        places = torch.randperm(D, generator=rng).int().to(lesson.device())
        y = torch.full((S + 16, columns), -777.0, device=lesson.device())
        sum_columns[(-(-S // 16),)](x, places, y, S, group, D, columns, 16)
        expected = x[:S, places.argsort()].reshape(S, -1, group).sum(2)
        case = f"S = {S}, D = {D}, groups of {group}"
        wrong = y[:S, : D // group] != expected
        assert not wrong.any(), f"{case}: {int(wrong.sum())} of {wrong.numel()} sums are wrong"
        assert not y[:S, D // group :].any(), f"{case}: expected 0 in columns of y that no group has"
        assert (y[S:] == -777.0).all(), f"{case}: rows beyond S are written"


def check_summed_keys(summed_keys):
    """fp64 attention of keys that hold a group's sum, rounded, in the column that Q keeps."""
    rng = torch.Generator().manual_seed(1)
    for S, D, group in ((40, 32, 2), (70, 64, 4), (33, 16, 1)):
        q, k, v = make_inputs(Shape(1, 2, S, D, causal=False), device=lesson.device())
        members = torch.randperm(D, generator=rng).int().view(-1, group).to(q.device)
        sums = torch.zeros_like(k)
        sums[..., members[:, 0].long()] = k[..., members.long()].float().sum(-1).to(k.dtype)
        with np.errstate(all="ignore"):
            out = summed_keys(q, k, v, members[:, 0].contiguous(), members.contiguous())
        found = Oracle(q, sums, v).judge(out)
        assert found.ok, f"S = {S}, D = {D}, groups of {group}: {found.reason}"


def check_length_that_pays(length_that_pays):
    """At that length both take the same time."""
    for flops, written, group, head_dim in (
        (600e12, 2e12, 2, 64), (700e12, 1.5e12, 4, 128), (1e12, 1e12, 8, 64)
    ):  # fmt: skip
        length = length_that_pays(flops, written, group)
        writing = 2 * 2 * head_dim / group / written
        saved = 2 * head_dim * length / 2 * (1 - 1 / group) / flops
        assert np.isclose(writing, saved, atol=0), (
            f"{flops:.3g} FLOP/s, {written:.3g} B/s, groups of {group}: with S = {length:.4g} the writing "
            f"of a token takes {writing:.3g} s, the products save {saved:.3g} s"
        )


def places_of_blocks(q, k):
    """(B, H, blocks, D) int32: the place of each column in the order that each 128 queries have by their
    hashes. The first two of the package's four launches, which copy nothing of Q and K."""
    call = launch_group.Call(
        q.shape, k.shape, (q.stride(), k.stride()), q.dtype, q.get_device(), PUBLISHED, True
    )
    plan = launch_group.prepare(call)
    partial = torch.empty(plan.partial, dtype=torch.float32, device=q.device)
    places = torch.empty(plan.places, dtype=torch.int32, device=q.device)
    first_two = Launches(plan.launches.launches[:2], q.get_device(), launch_group.TENSORS)
    first_two(q, k, partial, places, None, None)
    return places


def oracle_of_blocks(q, k, v, heads=slice(None)):
    """fp64 attention of the queries that hold a group's sum in one of its columns."""
    same = model.scattered(q, places_of_blocks(q, k), PUBLISHED).to(q.dtype)
    return Oracle(same[:, heads], k[:, heads], v[:, heads], causal=True)


def judge_published(attention):
    """Small causal calls: one block of queries, several, a part of one."""
    for S, D in ((128, 64), (300, 32), (5, 64)):
        q, k, v = make_inputs(Shape(1, 2, S, D), device=lesson.device())
        with np.errstate(all="ignore"):
            out = attention(q, k, v)
        found = oracle_of_blocks(q, k, v).judge(out)
        assert found.ok, f"S = {S}, D = {D}: {found.reason}"
