"""Windows and packed sequences on a CUDA GPU, with both kernels: against dense attention in fp64, nothing of
a neighbor, equal bits in every run, CUDA graphs that are replayed with other lengths."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cases import judge_forward

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.hopper import launch as launch_hopper
from attnlib.kernels.hopper.configs import LONG, TALL
from attnlib.kernels.portable import launch
from attnlib.params import Packed, band

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
IMPLS = pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=hopper)])
DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])
FORWARD = {"triton": launch.forward, "hopper": launch_hopper.forward}


def configs(impl, head_dim):
    """Those to try: None, and at D = 64 the tiles that small calls do not get."""
    return [None, TALL, LONG] if impl == "hopper" and head_dim <= 64 else [None]


def check_window(impl, shape, window, kind="normal", sm_scale=None):
    q, k, v = make_inputs(shape, kind, device="cuda")
    scale = shape.head_dim**-0.5 if sm_scale is None else sm_scale
    oracle = Oracle(q, k, v, shape.causal, scale, window=window)
    for config in configs(impl, shape.head_dim):
        found = FORWARD[impl](q, k, v, band(shape.causal, window), scale, True, config=config)
        judge_forward(*found, oracle, f"{shape.label} window {window} {config}")


def packed_inputs(lengths, heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, seed=0):
    """(q, k, v), Packed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = [list(column) for column in zip(*lengths, strict=True)]
    ends = [torch.tensor([0, *column]).cumsum(0).to("cuda", torch.int32) for column in columns]
    sizes = [(sum(columns[0]), heads), (sum(columns[1]), kv_heads), (sum(columns[1]), kv_heads)]
    tensors = [torch.randn(*size, head_dim, generator=generator, device="cuda").to(dtype) for size in sizes]
    return tensors, Packed(*ends, *map(max, columns))


def check_packed(impl, lengths, causal=False, window=None, sm_scale=0.1, **arguments):
    tensors, packed = packed_inputs(lengths, **arguments)
    oracle = Oracle(*tensors, causal, sm_scale, window=window, cu_seqlens=packed[:2])
    for config in configs(impl, tensors[0].shape[-1]):
        out, lse = FORWARD[impl](*tensors, band(causal, window), sm_scale, True, packed, config)
        oracle.judge(out, lse).raise_if_bad(f"{lengths} window {window} {config}")
        assert not out.transpose(0, 1)[oracle.lse == -math.inf].any(), "a row that sees no key is not 0"


WINDOWS = [(0, 0), (1, 0), (63, 0), (64, 0), (127, 5), (128, 128), (300, -1), (-1, 70), (900, 0)]
SHAPES = [(1000, 1000), (512, 512), (300, 900), (700, 200), (1, 400)]
MIXED = [(0, 0), (1, 1), (17, 17), (64, 64), (129, 129), (0, 5), (5, 0), (300, 500), (500, 300), (1000, 1000)]


@IMPLS
@DIMS
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window, head_dim, impl):
    for queries, keys in SHAPES:
        for causal in (True, False):
            check_window(impl, Shape(1, 4, queries, head_dim, causal, heads_kv=2, seqlen_k=keys), window)


@IMPLS
@DIMS
def test_windows_of_other_inputs(head_dim, impl):
    shape = Shape(2, 3, 700, head_dim, dtype="bfloat16")
    check_window(impl, shape, (200, 0), "large")
    check_window(impl, shape, (100, 30), "outlier", -0.2)
    check_window(impl, Shape(2, 3, 700, head_dim - 24, heads_kv=1, seqlen_k=900), (333, 0), "sink")


@IMPLS
@DIMS
@pytest.mark.parametrize("window", [None, (100, 0), (64, 33), (-1, 9)], ids=str)
def test_packed_sequences(window, head_dim, impl):
    for causal in (True, False):
        check_packed(impl, MIXED, causal, window, head_dim=head_dim)
        check_packed(impl, [(0, 0), (0, 3), (200, 200)], causal, window, -0.2, heads=3, kv_heads=3,
                     head_dim=head_dim, dtype=torch.bfloat16)  # fmt: skip


@IMPLS
@DIMS
def test_many_sequences_of_all_lengths(head_dim, impl):
    """Most of the tiles lie beyond the end of their sequence, and programs draw many of these in a row."""
    rng = random.Random(head_dim)
    lengths = [(rng.choice((0, 1, 30, 64, 200)),) * 2 for _ in range(300)] + [(3000, 3000)]
    for causal in (True, False):
        check_packed(impl, lengths, causal, head_dim=head_dim)
    check_packed(impl, [(0, 7)] * 300 + [(1, 1)], True, head_dim=head_dim)
    assert not any(counter.item() for counter in launch_hopper._counters.values()), "a counter is not at 0"


@IMPLS
@DIMS
def test_a_neighbor_that_is_not_finite_changes_no_bit(head_dim, impl):
    lengths = [(70, 70), (40, 50), (1, 9), (300, 264), (129, 129)]
    (q, k, v), packed = packed_inputs(lengths, head_dim=head_dim)
    for causal, window in [(True, None), (False, None), (False, (50, 9))]:
        arguments = band(causal, window), 0.1, True, packed
        out, lse = FORWARD[impl](q, k, v, *arguments)
        for b in range(len(lengths)):
            rows, keys = (slice(*ends[b : b + 2].tolist()) for ends in packed[:2])
            poisoned = [x.clone() for x in (q, k, v)]
            for x, part in zip(poisoned, (rows, keys, keys), strict=True):
                x[part] = math.nan
            found, found_lse = FORWARD[impl](*poisoned, *arguments)
            others = torch.ones(len(q), dtype=torch.bool, device="cuda")
            others[rows] = False
            assert torch.equal(found[others], out[others])
            assert torch.equal(found_lse[:, others], lse[:, others])
            assert not found[rows].isfinite().any()


@IMPLS
@DIMS
def test_equal_lengths_agree_with_a_batch_and_runs_with_each_other(head_dim, impl):
    (q, k, v), packed = packed_inputs([(640, 640)] * 5, head_dim=head_dim)
    for window in (None, (200, 0)):
        first = FORWARD[impl](q, k, v, band(True, window), 0.1, True, packed)
        for _ in range(10):
            again = FORWARD[impl](q, k, v, band(True, window), 0.1, True, packed)
            assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
        batch = [x.unflatten(0, (5, 640)).transpose(1, 2) for x in (q, k, v)]
        out, lse = FORWARD[impl](*batch, band(True, window), 0.1, True)
        torch.testing.assert_close(first[0], out.transpose(1, 2).flatten(0, 1), rtol=0, atol=2e-3)
        torch.testing.assert_close(first[1], lse.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


@IMPLS
@DIMS
def test_a_graph_is_replayed_with_other_lengths(head_dim, impl):
    """Which the host never reads: the tensors' sizes and the longest lengths are those of the capture."""
    (q, k, v), packed = packed_inputs([(400, 400), (100, 100), (500, 500)], head_dim=head_dim)
    arguments = band(True, None), 0.1, True, packed
    FORWARD[impl](q, k, v, *arguments)  # compiles, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = FORWARD[impl](q, k, v, *arguments)
    for ends in [(0, 400, 500, 1000), (0, 0, 500, 1000), (0, 333, 700, 1000), (0, 499, 500, 1000)]:
        for cu_seqlens in packed[:2]:
            cu_seqlens.copy_(torch.tensor(ends))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        Oracle(q, k, v, True, 0.1, cu_seqlens=packed[:2]).judge(out, lse).raise_if_bad(f"replayed {ends}")
