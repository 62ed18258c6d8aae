"""FP8 attention on a Hopper GPU: the quantizing kernels bit by bit, the forward kernel against the model,
equal bits in every run, streams, CUDA graphs, more than 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_cases import (
    CASES,
    QuantizeCase,
    check_forward,
    check_quantize,
    compare_with_model,
    own_queries,
)

from attnlib import attention_fp8, attention_fp8_varlen, quantize_fp8
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import fp8
from attnlib.kernels.common.fp8 import Recipe, scaled_by_row
from attnlib.kernels.hopper import launch_fp8
from attnlib.kernels.hopper.configs_fp8 import fp8_config
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import Params, Varlen, mask_window

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
DEVICE = "cuda"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_quantizing_is_the_model(case: QuantizeCase) -> None:
    check_quantize(case, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("role", ["q", "v"])
def test_every_number(dtype: torch.dtype, role: str) -> None:
    numbers = torch.arange(65536, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)
    numbers = numbers.view(1, 1, 1024, 64)
    for x in (numbers, numbers.where(numbers.float().abs() <= 448, 0.0)):
        recipe = Recipe("tensor", False)
        compare_with_model(fp8.quantize(x, role, recipe), x, recipe, "every number")


@pytest.mark.parametrize("role", "qkv")
def test_large_tensors(role: str) -> None:
    """Blocks in loops, as only large tensors have them."""
    x = torch.randn(2, 8, 8192 + 40, 128, device=DEVICE).bfloat16()
    for recipe in (Recipe(), Recipe("head", False), Recipe(center=False)):
        compare_with_model(fp8.quantize(x, role, recipe), x, recipe, f"large {role}")


@pytest.mark.parametrize("role", "qkv")
def test_more_than_2_31_elements(role: str) -> None:
    x = torch.zeros(1, 2, (1 << 24) + 128, 64, device=DEVICE, dtype=torch.float16)
    x[0, 1, -128:] = torch.randn(128, 64, device=DEVICE)
    found = quantize_fp8(x, role, rotate=False, center=False)
    alone = quantize_fp8(x[:, 1:, -128:].contiguous(), role, rotate=False, center=False)
    tail = found.data[0, 1, :, -128:] if role == "v" else found.data[0, 1, -128:]
    assert torch.equal(tail.view(torch.uint8), alone.data[0, 0].view(torch.uint8))
    if role == "v":
        x += 3
        found = quantize_fp8(x, role)
        expected = x[0, 1].float().mean(0)  # of 2^24 numbers in float32
        assert (found.mean[0, 1] - expected).abs().max() < 1e-3 and (found.mean[0, 0] - 3).abs().max() < 1e-4


def check(q, k, v, name: str, **options) -> None:
    roles = {"scaling": options.pop("scaling", "block"), "rotate": options.pop("rotate", True)}
    roles["center"] = options.pop("center", True)
    operands = tuple(quantize_fp8(x, role, **roles) for x, role in zip((q, k, v), "qkv", strict=True))
    scale = options.get("sm_scale", q.shape[-1] ** -0.5)
    params = Params(mask_window(options.get("causal", False), options.get("window")), scale)
    check_forward(attention_fp8(*operands, return_lse=True, **options), operands, params, name)
    if scaled_by_row(q, roles["scaling"]):
        found = attention_fp8(q, *operands[1:], return_lse=True, **options)
        operands = own_queries(q, roles["rotate"]), *operands[1:]
        check_forward(found, operands, params, f"{name}, own queries")


@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 72, 200])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (300, 20)}, {"causal": True, "window": (100, -1)}, {"sm_scale": -0.1},
    {"scaling": "head", "causal": True}, {"scaling": "tensor", "rotate": False}, {"out_dtype": torch.float32},
    {"center": False}, {"rotate": False},
], ids=str)  # fmt: skip
def test_forward(head_dim: int, options: dict) -> None:
    for rows, keys in ((1000, 1100), (33, 700)):
        q, k, v = make_inputs(Shape(2, 4, rows, head_dim, True, "bfloat16", 2, keys), device=DEVICE)
        check(q, k, v, f"D{head_dim} {rows}x{keys} {options}", **options)


@pytest.mark.parametrize("mean", [1.0, 100.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 72])
def test_values_with_a_mean(head_dim: int, causal: bool, mean: float) -> None:
    """Another one in each column and head: the error is that of values without it, and rows without keys
    are 0."""
    shape = Shape(2, 8, 1100, head_dim, causal, "float32", 4, 1000)
    q, k, v = make_inputs(shape, device=DEVICE)
    parts = mean * torch.randn(2, 4, 1, head_dim, device=DEVICE)
    check(q, k, v + parts, f"D{head_dim} mean {mean} {causal=}", causal=causal)
    truth, lse = attention_fp64(q, k, v, causal=causal)
    seen = (lse > -torch.inf)[..., None]
    out = attention_fp8(q, k, v, causal=causal)
    shifted = attention_fp8(q, k, v + parts, causal=causal)
    assert (shifted.where(~seen, 0.0) == 0).all() and bool(seen.all()) != causal
    expected = truth + parts.double().repeat_interleave(2, 1) * seen
    errors = [(a.double() - b).square().mean().sqrt().item() for a, b in ((out, truth), (shifted, expected))]
    assert errors[1] <= 1.2 * errors[0] + 1e-5 * mean, errors


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_mean_over_many_keys(head_dim: int) -> None:
    """What costs 19% without centering costs nothing with it."""
    q, k, v = make_inputs(Shape(1, 2, 16384, head_dim, False), device=DEVICE)
    truth, _ = attention_fp64(q, k, v)
    error = {
        (mean, center): (attention_fp8(q, k, v + mean, center=center).double() - truth - mean)
        .square().mean().sqrt().item()
        for mean, center in ((0, True), (1, True), (1, False))
    }  # fmt: skip
    assert error[1, True] <= 1.5 * error[0, True] + 2.0**-12, error
    assert error[1, False] > 20 * error[1, True], error


@pytest.mark.parametrize("kind", ["outlier", "sink", "large", "constant"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_inputs(kind: str, head_dim: int) -> None:
    q, k, v = make_inputs(Shape(1, 4, 2048, head_dim), kind, device=DEVICE)
    check(q, k, v, f"D{head_dim} {kind}", causal=True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["normal", "outlier", "sink", "large", "constant"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kept_shifts(kind: str, head_dim: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(fp8_config(head_dim), keep_shift=True, late_wait=late, pin=late)
    monkeypatch.setattr(launch_fp8, "fp8_config", lambda *_: config)
    for causal in (False, True):
        check(*make_inputs(Shape(1, 2, 1000, head_dim), kind, device=DEVICE), f"kept {kind}", causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(head_dim: int, causal: bool) -> None:
    lengths = [(15, 70), (0, 10), (300, 300), (129, 0), (64, 500), (1, 1), (257, 128)]
    starts = [torch.tensor([0, *x]).cumsum(0).int().to(DEVICE) for x in zip(*lengths, strict=True)]
    tokens = [int(x[-1]) for x in starts]
    longest = [max(x) for x in zip(*lengths, strict=True)]
    q, k, v = (
        torch.randn(n, h, head_dim, device=DEVICE).bfloat16()
        for n, h in ((tokens[0], 4), (tokens[1], 2), (tokens[1], 2))
    )
    sides = ("q", q, 0), ("k", k, 1), ("v", v, 1)
    operands = tuple(
        quantize_fp8(x, role, cu_seqlens=starts[i], max_seqlen=longest[i]) for role, x, i in sides
    )
    found = attention_fp8_varlen(*operands, *starts, *longest, causal=causal, return_lse=True)
    params = Params(mask_window(causal, None), head_dim**-0.5, Varlen(*starts, *longest))
    check_forward(found, operands, params, f"varlen D{head_dim} causal {causal}")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_same_bits_every_time(head_dim: int) -> None:
    q, k, v = make_inputs(Shape(2, 8, 2000, head_dim), device=DEVICE)
    first = attention_fp8(q, k, v, causal=True)
    assert all(torch.equal(attention_fp8(q, k, v, causal=True), first) for _ in range(10))
    mean = quantize_fp8(v, "v").mean
    assert all(torch.equal(quantize_fp8(v, "v").mean, mean) for _ in range(10))


def test_streams_and_graphs() -> None:
    q, k, v = make_inputs(Shape(1, 4, 1024, 128), device=DEVICE)
    expected = attention_fp8(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention_fp8(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_fp8(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, attention_fp8(q, k, v))
