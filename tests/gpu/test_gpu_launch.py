"""What a call of attention() promises on a CUDA GPU besides its result: no copies, equal bits in every run,
offsets beyond 2^31, the device of its tensors, little host time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import judge_forward

from attnlib import attention, node
from attnlib.bench import timing
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.common import launcher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="states what was measured on an H200: needs a GPU of compute capability 9.x",
)

IMPLS = pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=hopper)])

SLACK = 4 << 20
"""Bytes by which the allocator may round up a block."""


def _peak_bytes(call) -> int:
    """The most memory allocated at a time during a call, above what was there before."""
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _rows_before_heads(batch, heads, seqlen, head_dim):
    """q, k and v of shape (B, H, S, D), each a view of (B, S, H, D)."""
    return [
        torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.float16).transpose(1, 2)
        for _ in range(3)
    ]


def _packed(batch, heads, seqlen, head_dim):
    """q, k and v as views of one (B, S, 3, H, D), as one projection gives them."""
    qkv = torch.randn(batch, seqlen, 3, heads, head_dim, device="cuda", dtype=torch.float16)
    return [x.transpose(1, 2) for x in qkv.unbind(2)]


@IMPLS
@pytest.mark.parametrize("layout", [_rows_before_heads, _packed])
def test_strided_inputs_are_not_copied(layout, impl):
    q, k, v = layout(2, 16, 2048, 128)
    size = q.numel() * q.element_size()  # 16 MiB, of one input and of the output
    peak = _peak_bytes(lambda: attention(q, k, v, causal=True, impl=impl))
    assert peak <= size + SLACK, f"{peak / size:.2f} times the size of the output"
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl=impl)
    judge_forward(out, lse, Oracle(q, k, v, causal=True), layout.__name__)


def test_a_copy_would_be_seen():
    """The counterpart of the test above: what no descriptor can express is copied, and that shows."""
    q, k, v = make_inputs(Shape(2, 16, 2048, 128), device="cuda")
    apart = torch.stack([k, k], -1)[..., 0]
    size = q.numel() * q.element_size()
    assert _peak_bytes(lambda: attention(q, apart, v, causal=True, impl="triton")) >= 2 * size


@IMPLS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize(
    "shape",
    [Shape(4, 32, 2048, 64), Shape(2, 16, 2049, 128), Shape(1, 8, 2048, 256)],
    ids=["d64", "d128", "d256"],
)
def test_twenty_runs_agree_bit_by_bit(shape, causal, impl):
    """With the Hopper kernel, which program computes a tile, and when, differs from run to run."""
    q, k, v = make_inputs(shape, device="cuda")
    first = attention(q, k, v, causal=causal, return_lse=True, impl=impl)
    for _ in range(19):
        again = attention(q, k, v, causal=causal, return_lse=True, impl=impl)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def _need_free(gib: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, found {free:.0f}")


@IMPLS
def test_tensors_of_more_than_2_31_elements(impl):
    _need_free(30)
    shape = (8200, 16, 128, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16) for _ in range(3))
    assert q.numel() > 2**31
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl=impl)
    for part in (slice(0, 2), slice(-2, None)):  # the last head of the last batch element among them
        oracle = Oracle(q[part], k[part], v[part], causal=True)
        judge_forward(out[part], lse[part], oracle, f"batch elements {part}")
    # The suite's torch.empty returns NaN, so this says that everything between was written too.
    assert out.sum(dtype=torch.float32).isfinite() and lse.sum().isfinite()
    del q, k, v, out, lse, oracle
    torch.cuda.empty_cache()


@IMPLS
def test_strides_of_more_than_2_31_elements(impl):
    _need_free(6)
    seqlen, head_dim, far = 300, 128, 2**31 + 1024
    size = seqlen * head_dim
    memory = torch.full((far + 3 * size,), float("nan"), device="cuda", dtype=torch.float16)
    contiguous = make_inputs(Shape(1, 2, seqlen, head_dim), device="cuda")
    q, k, v = (
        memory.as_strided((1, 2, seqlen, head_dim), (2 * far, far, head_dim, 1), number * size).copy_(x)
        for number, x in enumerate(contiguous)
    )
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl=impl)
    judge_forward(out, lse, Oracle(*contiguous, causal=True), "heads 2^31 elements apart")
    del memory, q, k, v
    torch.cuda.empty_cache()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one():
    shape = Shape(1, 4, 300, 64)
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            q, k, v = make_inputs(shape, device=f"cuda:{other}")
            for _ in range(2):  # the first call compiles, the second does not
                out, lse = attention(q, k, v, causal=True, return_lse=True)
                assert torch.cuda.current_device() == current
                assert out.device == lse.device == q.device
                judge_forward(out, lse, Oracle(q, k, v, causal=True), f"on cuda:{other}")
            with pytest.raises(ValueError, match="k: expected device"):
                attention(q, k.to(f"cuda:{current}"), v)


@IMPLS
def test_a_thread_without_a_context(impl):
    """A new thread that finds all memory in PyTorch's cache has not called CUDA when attnlib does.

    Where a profiler listens, Triton launches."""
    q, k, v = make_inputs(Shape(1, 2, 300, 64), device="cuda")

    def call():
        with launcher.through_triton():
            return attention(q, k, v, causal=True, impl=impl)

    expected = call().clone()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(call).result(), expected)


def test_no_element_and_no_key():
    q = torch.randn(2, 3, 5, 64, device="cuda", dtype=torch.float16)
    out, lse = attention(q, q[:, :, :0], q[:, :, :0], return_lse=True)
    assert not out.any() and lse.isneginf().all()
    assert attention(q[:, :, :0], q, q).shape == (2, 3, 0, 64)
    assert attention(q[:0], q[:0], q[:0]).shape == (0, 3, 5, 64)


@hopper
@pytest.mark.parametrize(("head_dim", "words"), [(64, 0), (128, 0), (256, 2)])
def test_one_launch_without_spills_in_a_loop(head_dim, words):
    """tests/compile/test_hopper.py says where the two words are."""
    q, k, v = make_inputs(Shape(1, 8, 1024, head_dim), device="cuda")
    for _ in range(2):  # compiled now or before
        with timing.launched_kernels() as kernels:
            attention(q, k, v, causal=True)
        assert len(kernels) == 1
    assert timing.resources(kernels)["spills"] == words


@hopper
def test_host_time_of_a_launch(monkeypatch):
    """In C++, in Python with launches in C, and with Triton's own."""
    # The suite's torch.empty fills what it returns, which is a launch of its own.
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, getattr(torch._C._VariableFunctions, name))
    q, k, v = make_inputs(Shape(1, 16, 512, 128), device="cuda")

    # How long depends on the host's processor (chapter 08 has the time beside one H200), so this compares
    # with Triton's own way. Others may run on this machine too: the best of five is what the call takes, not
    # what they take.
    def host_us():
        return min(timing.host_us(lambda: attention(q, k, v, causal=True, impl="triton")) for _ in range(5))

    in_cpp = host_us()
    monkeypatch.setattr(node, "shortcut", lambda *args: None)
    direct = host_us()
    monkeypatch.setattr(launcher, "observed", lambda: True)  # every launch as the first one
    through_triton = host_us()
    print(f"host time: {in_cpp:.1f} us, {direct:.1f} without node.cpp, {through_triton:.1f} by kernel[grid]")
    assert in_cpp < 0.75 * direct and direct < 0.75 * through_triton
