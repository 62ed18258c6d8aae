"""Windows and varlen sequences on a CUDA GPU, with both kernels: against dense attention in fp64, nothing of
a neighbor, equal bits in every run, CUDA graphs that are replayed with other lengths."""

from __future__ import annotations

import math
import random

import families
import pytest
import torch
from cases import judge_forward

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import FAMILIES
from attnlib.kernels.common import counters
from attnlib.kernels.hopper.configs import M192N128, M256N64
from attnlib.params import Params, Varlen, mask_window

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
IMPLS = pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=hopper)])
DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])


def forward(impl, q, k, v, params):
    return families.forward(FAMILIES[impl], q, k, v, params)


def configs(impl, head_dim):
    """Those to try: None, and at D = 64 the tiles that small calls do not get."""
    return [None, M256N64, M192N128] if impl == "hopper" and head_dim <= 64 else [None]


def check_window(impl, shape, window, kind="normal", sm_scale=None):
    q, k, v = make_inputs(shape, kind, device="cuda")
    scale = shape.head_dim**-0.5 if sm_scale is None else sm_scale
    oracle = Oracle(q, k, v, shape.causal, scale, window=window)
    for config in configs(impl, shape.head_dim):
        params = Params(mask_window(shape.causal, window), scale, return_lse=True, config=config)
        found = forward(impl, q, k, v, params)
        judge_forward(*found, oracle, f"{shape.label} window {window} {config}")


def varlen_inputs(lengths, heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, seed=0):
    """(q, k, v), Varlen."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = [list(column) for column in zip(*lengths, strict=True)]
    ends = [torch.tensor([0, *column]).cumsum(0).to("cuda", torch.int32) for column in columns]
    sizes = [(sum(columns[0]), heads), (sum(columns[1]), kv_heads), (sum(columns[1]), kv_heads)]
    tensors = [torch.randn(*size, head_dim, generator=generator, device="cuda").to(dtype) for size in sizes]
    return tensors, Varlen(*ends, *map(max, columns))


def check_varlen(impl, lengths, causal=False, window=None, sm_scale=0.1, **arguments):
    tensors, varlen = varlen_inputs(lengths, **arguments)
    oracle = Oracle(*tensors, causal, sm_scale, window=window, cu_seqlens=varlen[:2])
    for config in configs(impl, tensors[0].shape[-1]):
        params = Params(mask_window(causal, window), sm_scale, varlen, return_lse=True, config=config)
        out, lse = forward(impl, *tensors, params)
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
def test_varlen_sequences(window, head_dim, impl):
    for causal in (True, False):
        check_varlen(impl, MIXED, causal, window, head_dim=head_dim)
        check_varlen(impl, [(0, 0), (0, 3), (200, 200)], causal, window, -0.2, heads=3, kv_heads=3,
                     head_dim=head_dim, dtype=torch.bfloat16)  # fmt: skip


@IMPLS
@DIMS
def test_many_sequences_of_all_lengths(head_dim, impl):
    """Most of the tiles lie beyond the end of their sequence, and programs draw many of these in a row."""
    rng = random.Random(head_dim)
    lengths = [(rng.choice((0, 1, 30, 64, 200)),) * 2 for _ in range(300)] + [(3000, 3000)]
    for causal in (True, False):
        check_varlen(impl, lengths, causal, head_dim=head_dim)
    check_varlen(impl, [(0, 7)] * 300 + [(1, 1)], True, head_dim=head_dim)
    assert not any(counter.item() for counter in counters._counters.values()), "a counter is not at 0"


@IMPLS
@DIMS
def test_a_neighbor_that_is_not_finite_changes_no_bit(head_dim, impl):
    lengths = [(70, 70), (40, 50), (1, 9), (300, 264), (129, 129)]
    (q, k, v), varlen = varlen_inputs(lengths, head_dim=head_dim)
    for causal, window in [(True, None), (False, None), (False, (50, 9))]:
        params = Params(mask_window(causal, window), 0.1, varlen, return_lse=True)
        out, lse = forward(impl, q, k, v, params)
        for b in range(len(lengths)):
            rows, keys = (slice(*ends[b : b + 2].tolist()) for ends in varlen[:2])
            poisoned = [x.clone() for x in (q, k, v)]
            for x, part in zip(poisoned, (rows, keys, keys), strict=True):
                x[part] = math.nan
            found, found_lse = forward(impl, *poisoned, params)
            others = torch.ones(len(q), dtype=torch.bool, device="cuda")
            others[rows] = False
            assert torch.equal(found[others], out[others])
            assert torch.equal(found_lse[:, others], lse[:, others])
            assert not found[rows].isfinite().any()


@IMPLS
@DIMS
def test_equal_lengths_agree_with_a_batch_and_runs_with_each_other(head_dim, impl):
    (q, k, v), varlen = varlen_inputs([(640, 640)] * 5, head_dim=head_dim)
    for window in (None, (200, 0)):
        params = Params(mask_window(True, window), 0.1, varlen, return_lse=True)
        first = forward(impl, q, k, v, params)
        for _ in range(10):
            again = forward(impl, q, k, v, params)
            assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
        batch = [x.unflatten(0, (5, 640)).transpose(1, 2) for x in (q, k, v)]
        out, lse = forward(impl, *batch, params._replace(varlen=None))
        torch.testing.assert_close(first[0], out.transpose(1, 2).flatten(0, 1), rtol=0, atol=2e-3)
        torch.testing.assert_close(first[1], lse.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


@IMPLS
@DIMS
def test_a_graph_is_replayed_with_other_lengths(head_dim, impl):
    """Which the host never reads: the tensors' sizes and the longest lengths are those of the capture."""
    (q, k, v), varlen = varlen_inputs([(400, 400), (100, 100), (500, 500)], head_dim=head_dim)
    params = Params(mask_window(True, None), 0.1, varlen, return_lse=True)
    forward(impl, q, k, v, params)  # compiles, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = forward(impl, q, k, v, params)
    for ends in [(0, 400, 500, 1000), (0, 0, 500, 1000), (0, 333, 700, 1000), (0, 499, 500, 1000)]:
        for cu_seqlens in varlen[:2]:
            cu_seqlens.copy_(torch.tensor(ends))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        Oracle(q, k, v, True, 0.1, cu_seqlens=varlen[:2]).judge(out, lse).raise_if_bad(f"replayed {ends}")
