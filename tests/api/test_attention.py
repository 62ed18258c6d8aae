"""attention() against dense attention in fp64, within the error budget; on the GPU or in the interpreter."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from cases import CASES, INTERPRETER_REMARKS, Case, check_forward, judge_forward
from families import forget_launches, forward, fresh_launches  # noqa: F401  (a fixture)
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import attention
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import portable
from attnlib.kernels.common.descriptors import readable
from attnlib.kernels.common.signature import signature
from attnlib.kernels.portable import launch
from attnlib.kernels.portable.configs import ForwardConfig, Order, forward_config
from attnlib.params import MaskWindow, Params, mask_window

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_lse_are_within_the_error_budget(case, device):
    check_forward(case, device)


@settings(max_examples=25)
@given(
    seqlen=st.integers(1, 150),
    keys=st.integers(1, 150),
    head_dim=st.integers(1, 10).map(lambda n: 8 * n),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    causal=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    sm_scale=st.sampled_from([None, -0.3, 0.7]),
)
def test_any_shape(seqlen, keys, head_dim, kv_heads, group, causal, dtype, sm_scale):
    shape = Shape(1, kv_heads * group, seqlen, head_dim, causal, dtype, kv_heads, keys)
    check_forward(Case(shape, sm_scale=sm_scale), "cuda" if torch.cuda.is_available() else "cpu")


# What other GPUs run, and tiles that nothing chooses today: the kernel promises any.
OTHER_CONFIGS = [
    *(forward_config(head_dim, arch=(8, 0)) for head_dim in (64, 128, 256)),
    ForwardConfig(128, 32, num_warps=8, num_stages=2, heads_per_section=3),
    ForwardConfig(32, 16, num_warps=4, num_stages=1, q_in_registers=True),
]
ORDERS = get_args(Order)
CAUSAL = MaskWindow(None, 0)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize("config", OTHER_CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}")
def test_result_does_not_depend_on_the_configuration(config, causal, device):
    q, k, v = make_inputs(Shape(1, 4, 140, 64, heads_kv=2, seqlen_k=129), device=device)
    params = Params(mask_window(causal, None), 0.125, return_lse=True, config=config)
    out, lse = forward(portable, q, k, v, params)
    judge_forward(out, lse, Oracle(q, k, v, causal), repr(config))


# Whole tiles, ends within one, more keys than queries, fewer, a diagonal that misses the corners of tiles.
LENGTHS = [(128, 128), (129, 129), (70, 192), (129, 63), (64, 192), (200, 17), (1, 100)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize(("tile", "sm_scale"), [((64, 64), -2.0), ((64, 32), 0.125)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_the_loop(order, tile, sm_scale, causal, device):
    for queries, keys in LENGTHS:
        q, k, v = make_inputs(Shape(1, 2, queries, 32, heads_kv=1, seqlen_k=keys), device=device)
        config = ForwardConfig(*tile, 4, 2, order=order, q_in_registers=order != "one loop")
        params = Params(mask_window(causal, None), sm_scale, return_lse=True, config=config)
        out, lse = forward(portable, q, k, v, params)
        judge_forward(out, lse, Oracle(q, k, v, causal, sm_scale), f"{queries}x{keys}")


@pytest.mark.parametrize("section", [1, 3])
def test_more_heads_than_a_grid_has_rows(section, monkeypatch, fresh_launches, device):
    """Where the second or the third dimension of the grid is too short, there is only the first."""
    q, k, v = make_inputs(Shape(2, 12, 70, 16, heads_kv=6), device=device)
    config = ForwardConfig(64, 32, 4, 2, heads_per_section=section)
    params = Params(CAUSAL, 0.125, return_lse=True, config=config)
    expected = forward(portable, q, k, v, params)
    call = signature(params, q, k, q, k, v)
    [launched] = launch.prepare(call).launches.launches
    assert launched.grid == (2 * section, 12 // section, 2)
    monkeypatch.setattr(launch, "GRID_YZ", 1)
    forget_launches()
    found = forward(portable, q, k, v, params)
    [launched] = launch.prepare(call).launches.launches
    assert launched.grid == (2 * 2 * 12, 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    judge_forward(*found, Oracle(q, k, v, True, 0.125), "one dimension")


@pytest.mark.parametrize("label", ["B1 H2 S129 D64 causal fp16", "B1 H2 S129x63 D64 dense fp16"])
def test_lse_comes_only_when_asked_and_changes_nothing(label, device):
    shape = CASES[label].shape
    inputs = make_inputs(shape, device=device)
    out, lse = attention(*inputs, causal=shape.causal, return_lse=True, impl="triton")
    alone = attention(*inputs, causal=shape.causal, impl="triton")
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out)
    assert out.dtype == torch.float16 and out.shape == inputs[0].shape
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:3]


def test_default_scale_is_one_over_the_root_of_the_head_dimension(device):
    q, k, v = make_inputs(Shape(1, 1, 20, 40), device=device)
    default = attention(q, k, v, impl="triton")
    assert torch.equal(default, attention(q, k, v, sm_scale=40**-0.5, impl="triton"))
    assert not torch.equal(default, attention(q, k, v, sm_scale=64**-0.5, impl="triton"))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_scale_zero_is_the_mean_of_the_visible_values(impl, device):
    q, k, v = make_inputs(Shape(1, 1, 80, 64, dtype="float32"), device=device)
    out, lse = attention(q, k, v, causal=True, sm_scale=0, return_lse=True, impl=impl)
    visible = torch.arange(1, 81, device=device)
    torch.testing.assert_close(out, v.cumsum(2) / visible[:, None], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, visible.float().log().expand(1, 1, 80), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sm_scale", [1e26, -1e26])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_the_largest_scale_and_the_largest_float16(impl, sm_scale, device):
    """Scores stay finite, so every row is the mean of the values with the largest one."""
    q = torch.full((1, 1, 20, 256), 65504.0, dtype=torch.float16, device=device)
    k, v = torch.randn(2, 1, 1, 40, 256, device=device).half()
    k[:, :, 7] = 65504.0 if sm_scale > 0 else -65504.0
    out, lse = attention(q, k, v, sm_scale=sm_scale, return_lse=True, impl=impl)
    assert torch.equal(out, v[:, :, 7:8].expand_as(out)) and lse.isfinite().all()


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_the_smallest_scales(impl, device):
    """Products that are as large as the scale is small."""
    q, k, v = make_inputs(Shape(1, 1, 20, 16, dtype="float32"), device=device)
    expected = attention(q, k, v, sm_scale=0.5, impl="reference")
    for exponent in (30, 60, 62):
        found = attention(q * 2.0**exponent, k * 2.0**exponent, v, sm_scale=0.5 * 4.0**-exponent, impl=impl)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sm_scale", [None, -0.1])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_rows_with_nothing_to_attend_to(impl, sm_scale, device):
    q, k, v = make_inputs(Shape(1, 2, 150, 64, seqlen_k=10), device=device)
    out, lse = attention(q, k, v, causal=True, sm_scale=sm_scale, return_lse=True, impl=impl)
    assert (out[:, :, :140] == 0).all() and (lse[:, :, :140] == -math.inf).all()
    assert torch.equal(out[:, :, 140], v[:, :, 0])  # the first row that sees a key sees one
    assert out[:, :, 140:].any(-1).all() and lse[:, :, 140:].isfinite().all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize("impl", ["triton", "reference", None])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen", "keys"),
    [(0, 4, 2, 5, 5), (2, 0, 0, 5, 5), (2, 4, 2, 0, 5), (2, 4, 2, 5, 0), (2, 4, 2, 0, 0)],
)
def test_nothing_to_compute(batch, heads, kv_heads, seqlen, keys, impl, causal, device):
    q = torch.randn(batch, heads, seqlen, 64, device=device, dtype=torch.float16)
    k, v = torch.randn(2, batch, kv_heads, keys, 64, device=device, dtype=torch.float16)
    out, lse = attention(q, k, v, causal=causal, return_lse=True, impl=impl)
    assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert (out == 0).all() and (lse == -math.inf).all()
    assert torch.equal(attention(q, k, v, causal=causal, impl=impl), out)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_nan_reaches_the_rows_that_see_it_and_no_others(impl, device):
    q, k, v = make_inputs(Shape(1, 1, 130, 64), device=device)
    q[0, 0, 5, 3] = k[0, 0, 70, 0] = math.nan
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl=impl)
    broken = torch.zeros(130, dtype=torch.bool, device=device)
    broken[5] = broken[70:] = True
    assert torch.equal(out[0, 0].isnan().any(-1), broken) and torch.equal(lse[0, 0].isnan(), broken)


# ---------------------------------------------------------------- layouts


def bshd(x):
    """As projections write it: (B, S, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def projected(x):
    """One of three in a (B, S, 3, H, D) buffer."""
    buffer = torch.full((x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]), 7.0).to(x)
    buffer[:, :, 1] = x.transpose(1, 2)
    return buffer[:, :, 1].transpose(1, 2)


def in_a_cache(x):
    """The first S positions of a longer buffer, whose rest is NaN."""
    buffer = torch.full((*x.shape[:2], x.shape[2] + 30, x.shape[3]), math.nan).to(x)
    buffer[:, :, : x.shape[2]] = x
    return buffer[:, :, : x.shape[2]]


def wider_head(x, before=8, after=8):
    """A slice of a longer head dimension; the rest of it is NaN."""
    buffer = torch.full((*x.shape[:3], before + x.shape[3] + after), math.nan).to(x)
    buffer[..., before : before + x.shape[3]] = x
    return buffer[..., before : before + x.shape[3]]


def every_other_column(x):
    return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]


def column_major(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    ("layout", "in_place"),  # in place: a descriptor can express it; else the input is copied
    [
        pytest.param(bshd, True, id="bshd"),
        pytest.param(projected, True, id="projected"),
        pytest.param(in_a_cache, True, id="in a cache"),
        pytest.param(wider_head, True, id="wider head"),
        pytest.param(lambda x: wider_head(x, before=1, after=7), False, id="address not a multiple of 16"),
        pytest.param(lambda x: wider_head(x, before=0, after=1), False, id="stride not a multiple of 16"),
        pytest.param(every_other_column, False, id="every other column"),
        pytest.param(column_major, False, id="column major"),
    ],
)
def test_layout_changes_nothing(layout, in_place, device):
    contiguous = make_inputs(Shape(2, 4, 70, 40, heads_kv=2, seqlen_k=90), device=device)
    want = attention(*contiguous, causal=True, return_lse=True, impl="triton")
    strided = [layout(x) for x in contiguous]
    for x, y in zip(strided, contiguous, strict=True):
        assert torch.equal(x, y) and not x.is_contiguous()
        assert (readable(x).data_ptr() == x.data_ptr()) == in_place
    got = attention(*strided, causal=True, return_lse=True, impl="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_slice_in_every_dtype(dtype, device):
    """bfloat16 is cast in the interpreter, which leaves the strides of a slice behind."""
    contiguous = make_inputs(Shape(1, 2, 40, 16, dtype=dtype), device=device)
    want = attention(*contiguous, causal=True, return_lse=True, impl="triton")
    for layout in (wider_head, in_a_cache):
        got = attention(*map(layout, contiguous), causal=True, return_lse=True, impl="triton")
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_expanded_inputs(device):
    """Key/value heads and batches that are one in memory, as `expand` makes them: stride 0."""
    q, k, v = make_inputs(Shape(2, 4, 40, 64, heads_kv=1), device=device)
    k, v = k[:1].expand(2, 4, -1, -1), v[:1].expand(2, 4, -1, -1)
    q = q[:, :1].expand(-1, 4, -1, -1)
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl="triton")
    judge_forward(out, lse, Oracle(q, k, v, True), "expanded")
    assert torch.equal(out[:, 0], out[:, 3]) and not torch.equal(out[0], out[1])


def test_output_is_laid_out_as_q(device):
    """A caller with (B, S, H, D) in memory gets that back and can flatten the heads without a copy."""
    q, k, v = (bshd(x) for x in make_inputs(Shape(2, 2, 17, 64), device=device))
    assert attention(q, k, v, impl="triton").stride() == q.stride()
    assert attention(column_major(q), k, v, impl="triton").is_contiguous()
