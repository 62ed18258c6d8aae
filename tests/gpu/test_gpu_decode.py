"""attention_decode() on a CUDA GPU: against fp64 at full size, in CUDA graphs whose lengths change, on two
streams, without a wait and without a copy of the cache."""

from __future__ import annotations

import math
import random

import pytest
import torch
from decode_cases import CASES, DecodeCase, check, judge, make, run

from attnlib import attention, attention_decode, explain, node
from attnlib.bench import timing
from attnlib.bench.oracle import Oracle
from attnlib.bench.oracle import make_inputs as inputs_of
from attnlib.bench.shapes import Shape
from attnlib.kernels.decode import configs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="states what was measured on an H200: needs a GPU of compute capability 9.x",
)
RAGGED = (1024, 1024, 2048, 2048, 4096, 4096, 32768, 65536)
BOTH_MERGES = pytest.mark.parametrize("same_launch", [False, True], ids=["two launches", "one launch"])


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    check(CASES[name], device)


@pytest.mark.parametrize("split", ["none", "fixed", "stream_k", 5, None])
@BOTH_MERGES
@pytest.mark.parametrize("page", [None, 16])
def test_a_ragged_batch(page, same_launch, split, device):
    check(DecodeCase("ragged", RAGGED, heads=32, kv_heads=8, head_dim=128, page=page, split=split,
                     same_launch=same_launch), device)  # fmt: skip


@pytest.mark.parametrize("page", [None, 256])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_ragged_batch_of_other_widths(head_dim, page, device):
    check(DecodeCase("ragged", RAGGED, heads=32, kv_heads=8, head_dim=head_dim, page=page), device)


@BOTH_MERGES
@pytest.mark.parametrize("pairs", [1, 8, 56, 132, 133, 200])
def test_numbers_of_pairs(pairs, same_launch, device):
    check(DecodeCase("pairs", (4000,) * pairs, heads=4, kv_heads=1, head_dim=128, split="stream_k",
                     same_launch=same_launch), device)  # fmt: skip


fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="FP8 needs compute capability 8.9",
)


@fp8
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_ragged_batch_in_fp8(head_dim, dtype, page, device):
    check(DecodeCase("ragged", RAGGED, heads=32, kv_heads=8, head_dim=head_dim, dtype=dtype, page=page,
                     scales="pairs"), device)  # fmt: skip


@fp8
@pytest.mark.parametrize("seed", range(16))
def test_draws_in_fp8(seed, device):
    draw = random.Random(1000 + seed)
    kv_heads, page = draw.choice([1, 2, 3, 8]), draw.choice([None, None, 16, 48, 80, 128])
    count = draw.choice([1, 3, 17, 150])
    most = 9000 // count + 1
    lengths = tuple(draw.choice([0, 1, draw.randrange(300), draw.randrange(most)]) for _ in range(count))
    case = DecodeCase(
        f"draw {seed}", lengths, heads=kv_heads * draw.choice([1, 2, 4, 7, 32]), kv_heads=kv_heads,
        queries=draw.randrange(1, 17), head_dim=draw.choice([64, 128, 256, 8 * draw.randrange(1, 33)]),
        dtype=draw.choice(["float16", "bfloat16"]), page=page, causal=draw.random() < 0.7,
        window=draw.choice([None, None, (draw.randrange(2000), draw.randrange(4))]),
        split=draw.choice(["none", "fixed", "stream_k", None, 3]), same_launch=draw.random() < 0.4,
        scales=draw.choice(["nothing", "all", "heads", "pairs"]),
    )  # fmt: skip
    check(case, device)


@fp8
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_of_fp8_that_is_none_reaches_the_output(dtype, device):
    """What is too large for FP8 became NaN when the cache was written: an output that hides it is wrong.
    Triton's interpreter takes it for 480."""
    inputs = make(DecodeCase("NaN", (40, 33), scales="pairs", dtype=dtype), device)
    for cache in inputs[1:3]:
        cache[0, 0, 5] = math.nan
    named = {"lengths": inputs.lengths, "k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    out = attention_decode(*inputs[:3], **named)
    assert out[0, :2].isnan().all() and out[0, 2:].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("seed", range(16))
def test_draws(seed, device):
    draw = random.Random(seed)
    kv_heads, page = draw.choice([1, 2, 3, 8]), draw.choice([None, None, 16, 48, 80, 128])
    count = draw.choice([1, 3, 17, 150])
    most = 9000 // count + 1
    lengths = tuple(draw.choice([0, 1, draw.randrange(300), draw.randrange(most)]) for _ in range(count))
    case = DecodeCase(
        f"draw {seed}", lengths, heads=kv_heads * draw.choice([1, 2, 4, 7, 32]), kv_heads=kv_heads,
        queries=draw.randrange(1, 17), head_dim=8 * draw.randrange(1, 33),
        dtype=draw.choice(["float16", "bfloat16", "float32"]), page=page,
        causal=draw.random() < 0.7,
        window=draw.choice([None, None, (draw.randrange(2000), draw.randrange(4))]),
        split=draw.choice(["none", "fixed", "stream_k", None, 3]), same_launch=draw.random() < 0.4,
    )  # fmt: skip
    check(case, device)


@BOTH_MERGES
@pytest.mark.parametrize("split", ["fixed", "stream_k"])
def test_twenty_runs_agree_bit_by_bit(split, same_launch, device):
    """Which program merges, and when, differs from run to run."""
    case = DecodeCase("bits", RAGGED, heads=32, kv_heads=8, head_dim=128, split=split,
                      same_launch=same_launch)  # fmt: skip
    inputs = make(case, device)
    first = run(case, inputs)
    for _ in range(19):
        for found, expected in zip(run(case, inputs), first, strict=True):
            assert torch.equal(found, expected)


@BOTH_MERGES
@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_is_right_after_the_lengths_have_changed(page, same_launch, device):
    room = 5000
    case = DecodeCase("graph", (room,) * 4, heads=8, kv_heads=2, head_dim=128, page=page, split="stream_k",
                      same_launch=same_launch)  # fmt: skip
    inputs = make(case, device)
    run(case, inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(case, inputs)
    for lengths in [(room,) * 4, (1, 0, 17, 4999), (4999, 3, 2000, 0)]:
        changed = DecodeCase("graph", lengths, heads=8, kv_heads=2, head_dim=128, page=page, room=room)
        other = make(changed, device)
        for to, new in zip(inputs[:5], other[:5], strict=True):
            if to is not None:
                to.copy_(new.clamp(max=len(inputs.k) - 1) if new is other.table else new)
        for _ in range(2):  # the counters are at 0 again
            graph.replay()
        torch.cuda.synchronize()
        judge(changed, other, out, lse)


@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_is_right_where_lengths_become_equal_and_unlike(page, device):
    """As many pairs as multiprocessors: whole where they are nearly equal, split where they are not."""
    room, batch = 1500, torch.cuda.get_device_properties(device).multi_processor_count
    options = {"heads": 4, "kv_heads": 1, "head_dim": 128, "page": page}
    case = DecodeCase("graph", (room,) * batch, **options)
    inputs = make(case, device)
    run(case, inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(case, inputs)
    near, rising = (tuple(f(i) for i in range(batch)) for f in (lambda i: room - i % 5, lambda i: 11 * i))
    for lengths, in_parts in [(near, False), (rising, True), ((0,) * batch, False), ((room,) * batch, False)]:
        changed = DecodeCase("graph", lengths, room=room, in_parts=in_parts, **options)
        other = make(changed, device)
        check(changed, device)
        for to, new in zip(inputs[:5], other[:5], strict=True):
            if to is not None:
                to.copy_(new.clamp(max=len(inputs.k) - 1) if new is other.table else new)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        judge(changed, other, out, lse)


@BOTH_MERGES
def test_two_streams(same_launch, device):
    case = [
        DecodeCase(f"stream {i}", lengths, heads=32, kv_heads=8, head_dim=128, split="stream_k",
                   same_launch=same_launch)
        for i, lengths in enumerate([(30000, 5000), (100, 40000, 7)])
    ]  # fmt: skip
    inputs = [make(each, device) for each in case]
    for each, tensors in zip(case, inputs, strict=True):
        run(each, tensors)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in case], [None, None]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i] = run(case[i], inputs[i])
    torch.cuda.synchronize()
    for each, tensors, (out, lse) in zip(case, inputs, found, strict=True):
        judge(each, tensors, out, lse)


def test_the_host_waits_for_nothing_and_copies_nothing(device):
    case = DecodeCase("no wait", RAGGED, heads=32, kv_heads=8, head_dim=128)
    inputs = make(case, device)
    cache = inputs.k.transpose(1, 2).contiguous().transpose(1, 2)  # rows before heads
    attention_decode(inputs.q, cache, inputs.v, lengths=inputs.lengths)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention_decode(inputs.q, cache, inputs.v, lengths=inputs.lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 16 << 20
    assert out.isfinite().all()


def test_a_cache_of_more_than_2_31_elements(device):
    free = torch.cuda.mem_get_info()[0]
    room, D = (1 << 22) + 100, 256
    if free < 3 * 2 * 2 * room * D * 2:
        pytest.skip("needs more GPU memory")
    q = torch.randn(2, 2, 1, D, device=device).half()
    k = torch.empty(2, 2, room, D, device=device, dtype=torch.float16).normal_()
    assert k.numel() > 2**31
    out, lse = attention_decode(q, k, k, return_lse=True, split="stream_k")
    scores = (q[1, 1].float() @ k[1, 1].float().T) * D**-0.5
    torch.testing.assert_close(lse[1, 1], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[1, 1].float(), scores.softmax(-1) @ k[1, 1].float(), rtol=0, atol=1e-3)


@hopper
@pytest.mark.parametrize("scales", [None, "pairs"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_launches_without_spills(head_dim, scales, device):
    case = DecodeCase("spills", (9000, 500), heads=8, kv_heads=2, head_dim=head_dim, scales=scales)
    inputs = make(case, device)
    for _ in range(2):
        with timing.launched_kernels() as kernels:
            run(case, inputs)
        assert len(kernels) == 2
    named = {"lengths": inputs.lengths, "k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    with timing.launched_kernels() as without_lse:  # other registers
        attention_decode(*inputs[:3], **named)
    assert all(kernel.n_spills == 0 for kernel in (*kernels, *without_lse))
    asked = configs.Work(4, head_dim, "float16", 4, 9000, 132, fp8=scales is not None)
    programs = configs.residency(16, asked).programs
    assert programs * (kernels[0].metadata.shared + 1024) <= 228 * 1024


@hopper
def test_host_time(monkeypatch, device):
    # The suite's torch.empty fills what it returns, which is a launch of its own.
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, getattr(torch._C._VariableFunctions, name))
    inputs = make(DecodeCase("host", (500, 900), heads=32, kv_heads=8, head_dim=128), device)
    q, k, v, lengths, *_ = inputs

    def host_us():
        return min(timing.host_us(lambda: attention_decode(q, k, v, lengths=lengths)) for _ in range(5))

    assert node.wait() is not None
    in_cpp = host_us()
    monkeypatch.setattr(node, "shortcut", lambda *args: None)
    in_python = host_us()
    print(f"host time of attention_decode: {in_cpp:.1f} us, through Python {in_python:.1f} us")
    assert in_cpp < 40  # how long depends on the host: this notices a wait or a preparation at each call
    assert in_cpp < 0.7 * in_python


# ---------------------------------------------------------------- in PyTorch's world


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("scales", [None, pytest.param("pairs", marks=fp8)])
@pytest.mark.parametrize("page", [None, 16])
def test_compiled_in_one_graph(mode, page, scales, device):
    """reduce-overhead replays CUDA graphs; the lengths change between the replays."""
    torch.compiler.reset()

    @torch.compile(fullgraph=True, mode=mode)
    def step(q, k, v, lengths, table):
        return attention_decode(q + 0, k, v, lengths=lengths, page_table=table, **scaled) * 1

    case = DecodeCase("compiled", (3000, 17, 0, 5000), heads=8, kv_heads=2, head_dim=128, page=page,
                      scales=scales)  # fmt: skip
    inputs = make(case, device)
    scaled = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    try:
        for lengths in [(3000, 17, 0, 5000), (5000, 1, 9, 40), (1, 2, 3, 4)]:
            inputs.lengths.copy_(torch.tensor(lengths))
            k, v = (x.float().nan_to_num().to(x.dtype) for x in inputs[1:3])
            table = None if page is None else inputs.table.clamp(max=len(k) - 1)
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                out = step(inputs.q, k, v, inputs.lengths, table)
            plain = attention_decode(inputs.q, k, v, lengths=inputs.lengths, page_table=table, **scaled)
            assert torch.equal(out, plain)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("rows", "causal", "window"), [(1, False, None), (16, True, None), (5, True, (300, 0))]
)
def test_attention_takes_this_road(dtype, rows, causal, window, device):
    shape = Shape(2, 32, rows, 128, causal, dtype, 8, 20000)
    q, k, v = inputs_of(shape, device=device)
    options = {"causal": causal, "window": window}
    choice = explain(q, k, v, **options)
    assert (choice.kernel == "decode") == (window is None), choice
    for impl in (None, "decode"):
        out, lse = attention(q, k, v, **options, return_lse=True, impl=impl)
        Oracle(q, k, v, **options).judge(out, lse).raise_if_bad(f"{impl} {options}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, **options)
    k.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attention(q, k, v, **options))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, k, v, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
