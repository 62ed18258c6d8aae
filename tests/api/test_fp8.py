"""attention_fp8() on a CPU: the model in PyTorch, prepared operands, and what is not supported."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import INTERPRETER_REMARKS

from attnlib import attention_fp8, attention_fp8_varlen, quantize_fp8
from attnlib.kernels.common.fp8 import scaled_by_row
from attnlib.kernels.reference.dense import attention_fp64, attention_varlen_fp64

pytestmark = INTERPRETER_REMARKS
SCALE = 0.1


def tensors(*heads: int, S: int = 150, D: int = 64, dtype: torch.dtype = torch.float16, device: str = "cpu"):
    torch.manual_seed(0)
    return tuple(torch.randn(2, h, S, D).to(dtype).to(device) for h in heads or (2, 2, 2))


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).square().mean().sqrt().item()


def reference(*operands, **options):
    return attention_fp8(*operands, impl="reference", **options)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (20, 5)}, {"causal": True, "window": (9, -1)}, {"sm_scale": -0.2},
    {"scaling": "head"}, {"scaling": "tensor", "rotate": False}, {"window": (-1, 0)},
], ids=str)  # fmt: skip
def test_near_exact_attention(options: dict, device: str) -> None:
    """e4m3 has 4 significant bits: its errors are some hundredths of what is summed."""
    q, k, v = tensors(4, 2, 2, device=device)
    q = q[:, :, :120]
    out, lse = reference(q, k, v, return_lse=True, **options)
    exact = {name: value for name, value in options.items() if name in ("causal", "window", "sm_scale")}
    truth, lse64 = attention_fp64(q, k, v, **exact)
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and out.shape == q.shape
    assert 1e-4 < rms(out, truth) < 0.1 * truth.square().mean().sqrt()
    assert (lse - lse64).abs().max() < 0.3


def test_varlen_is_each_sequence(device: str) -> None:
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors(4, 2, 2, device=device))
    starts = (0, 20, 20, 150), (0, 7, 70, 150)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in starts)
    out, lse = attention_fp8_varlen(
        q, k, v, cu_q, cu_k, 130, 80, causal=True, return_lse=True, impl="reference"
    )
    truth, lse64 = attention_varlen_fp64(q, k, v, cu_q, cu_k, causal=True)
    assert out.shape == q.shape and lse.shape == (4, 150)
    assert rms(out, truth) < 0.1 * truth.square().mean().sqrt()
    assert torch.equal(lse == -math.inf, lse64 == -math.inf)
    for (a, b), (c, d) in (((0, 20), (0, 7)), ((20, 150), (70, 150))):
        parts = (x[i:j].transpose(0, 1)[None] for x, i, j in ((q, a, b), (k, c, d), (v, c, d)))
        alone = reference(*parts, causal=True, scaling="block", rotate=True)
        # V has one scale for each head, here over all sequences.
        torch.testing.assert_close(out[a:b].transpose(0, 1)[None], alone, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("D", [8, 72, 128, 200, 256])
def test_padded_head_dimensions(D: int, device: str) -> None:
    q, k, v = tensors(S=40, D=D, device=device)
    out = reference(q, k, v)
    truth, _ = attention_fp64(q, k, v)
    assert out.shape == q.shape and rms(out, truth) < 0.1 * truth.square().mean().sqrt()


@pytest.mark.parametrize("mean, options", [(1.0, {"causal": True}), (100.0, {"scaling": "tensor"})], ids=str)
def test_a_part_that_values_have_in_common_costs_nothing(mean: float, options: dict, device: str) -> None:
    """Another one in each column, head and batch element: the error stays that of values without it. With
    `center=False` it grows with the part."""
    q, k, v = tensors(4, 2, 2, S=70, dtype=torch.float32, device=device)
    parts = mean * torch.randn(2, 2, 1, 64, device=device)
    exact = {name: value for name, value in options.items() if name != "scaling"}
    truth, _ = attention_fp64(q, k, v, **exact)
    shift = parts.double().repeat_interleave(2, 1)
    before = rms(reference(q, k, v, **options), truth)
    assert rms(reference(q, k, v + parts, **options), truth + shift) <= 1.2 * before + 1e-6 * mean
    plain = rms(reference(q, k, v + parts, center=False, **options), truth + shift)
    assert plain > 0.004 * mean and plain > 1.05 * before


def test_means_of_sequences(device: str) -> None:
    """Each of varlen sequences has its own, empty ones too; rows without keys stay 0."""
    q, k, v = (x[0].transpose(0, 1).contiguous().float() for x in tensors(4, 2, 2, device=device))
    starts = torch.tensor([0, 20, 20, 90, 150]), torch.tensor([0, 7, 70, 70, 150])
    cu_q, cu_k = (x.int().to(device) for x in starts)
    lengths = cu_k.diff().tolist()
    each = torch.arange(1.0, 5.0, device=device).repeat_interleave(torch.tensor(lengths, device=device))
    v = v + 10 * each[:, None, None]
    v8 = quantize_fp8(v, "v", cu_seqlens=cu_k, max_seqlen=80)
    assert v8.mean.shape == (4, 2, 64) and v8.centered
    assert (v8.mean[2] == 0).all() and ((v8.mean[3] - 40).abs() < 1).all()
    out = attention_fp8_varlen(q, k, v8, cu_q, cu_k, 70, 80, impl="reference")
    truth, _ = attention_varlen_fp64(q, k, v, cu_q, cu_k)
    assert (out[20:90] == 0).all() and rms(out, truth) < 0.05


@pytest.mark.parametrize("role", "qkv")
def test_offsets_that_were_changed_after_quantizing(role: str) -> None:
    """An operand's blocks, scales and means lie where the sequences were."""
    x = dict.fromkeys("qkv", torch.randn(150, 2, 64).half())
    offsets = {side: torch.tensor([0, 70, 150], dtype=torch.int32) for side in "qk"}
    side = "q" if role == "q" else "k"
    x[role] = quantize_fp8(x[role], role, cu_seqlens=offsets[side], max_seqlen=80)

    def call():
        return attention_fp8_varlen(**x, **{f"cu_seqlens_{name}": of for name, of in offsets.items()},
                                    max_seqlen_q=100, max_seqlen_k=100, impl="reference")  # fmt: skip

    expected = call()
    offsets[side][1] = 80
    message = f"^{role}: expected an Fp8 that was quantized with the values that are in cu_seqlens_{side}, "
    with pytest.raises(ValueError, match=message + "got one with others: the tensor was changed since$"):
        call()
    offsets[side][1] = 70
    assert torch.equal(call(), expected)


def test_quantizing_twice_the_mean_once(device: str) -> None:
    """What is taken away is what an operand says, not what a call says."""
    q, k, v = tensors(device=device)
    v = v + 5
    plain, centered = (quantize_fp8(v, "v", center=center) for center in (False, True))
    assert plain.mean is None and not plain.centered and centered.centered
    outs = [reference(q, k, x, center=center) for x in (plain, centered) for center in (False, True)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3])
    assert quantize_fp8(k, "k").mean is None and "centered=True" in repr(centered)


def test_prepared_operands_are_the_same(device: str) -> None:
    """But for queries, of which a call gives each row a scale, and `quantize_fp8` each 64."""
    q, k, v = tensors(device=device)
    prepared = [quantize_fp8(x, role) for x, role in zip((q, k, v), "qkv", strict=True)]
    expected = {True: reference(*prepared), False: reference(q, k, v)}
    for mix in range(8):
        given = [prepared[i] if mix >> i & 1 else (q, k, v)[i] for i in range(3)]
        assert torch.equal(reference(*given), expected[mix & 1 == 1])
    assert not torch.equal(expected[True], expected[False])
    assert rms(expected[True], expected[False]) < 0.05 * expected[True].double().square().mean().sqrt()


def test_whose_queries_have_a_scale_for_each_row(device: str) -> None:
    """Those of 16 bits with scaling "block", of up to 128 columns."""
    q, _, _ = tensors(device=device)
    assert scaled_by_row(q, "block") and scaled_by_row(q.bfloat16(), "block")
    assert scaled_by_row(tensors(D=128, device=device)[0], "block")
    others = (q.float(), "block"), (tensors(D=136, device=device)[0], "block"), (q, "head"), (q, "tensor")
    assert not any(scaled_by_row(*other) for other in others)
    assert not scaled_by_row(quantize_fp8(q, "q"), "block")


def test_a_tensor_is_rotated_as_its_partner_is(device: str) -> None:
    q, k, v = tensors(device=device)
    plain = reference(q, k, v, rotate=False)
    q8, k8 = (quantize_fp8(x, role, rotate=False) for x, role in ((q, "q"), (k, "k")))
    assert torch.equal(reference(q, k8, v), plain)
    assert torch.equal(reference(q8, k, v), reference(q8, k8, v))
    assert not torch.equal(reference(q, k, v), plain)


def test_output_dtype(device: str) -> None:
    q, k, v = tensors(dtype=torch.bfloat16, device=device)
    assert reference(q, k, v).dtype == torch.bfloat16
    assert reference(quantize_fp8(q, "q"), k, v).dtype == torch.bfloat16
    for dtype in (torch.float16, torch.float32):
        assert reference(q, k, v, out_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("q_shape, k_shape", [((2, 2, 5, 64), (2, 2, 0, 64)), ((2, 2, 0, 64), (2, 2, 5, 64)),
                                              ((0, 2, 5, 64), (0, 2, 5, 64))])  # fmt: skip
def test_nothing_to_attend_to(q_shape, k_shape, device: str) -> None:
    q, k = torch.ones(q_shape, device=device).half(), torch.ones(k_shape, device=device).half()
    out, lse = reference(q, k, k, return_lse=True)
    assert out.shape == q_shape and (out == 0).all() and (lse == -math.inf).all()


def test_rows_without_keys(device: str) -> None:
    q, k, v = tensors(S=30, device=device)
    out, lse = reference(q, k[:, :, :20], 3 + v[:, :, :20], causal=True, return_lse=True)
    assert (out[:, :, :10] == 0).all() and (lse[:, :, :10] == -math.inf).all()
    assert lse[:, :, 10:].isfinite().all()


def test_nan_stays_where_it_is_seen(device: str) -> None:
    q, k, v = tensors(S=40, device=device)
    q[0, 0, 3, 5] = math.nan
    v[1, 1, 20, 7] = math.inf
    out = reference(q, k, v, causal=True)
    spoilt = out.isnan()
    assert spoilt[0, 0, 3].all() and spoilt[1, 1, 20:, 7].all()
    assert spoilt.sum() == 64 + 20


# ---------------------------------------------------------------- what is not supported


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
@pytest.mark.parametrize("impl, start", [(None, "q: attention_fp8"), ("hopper", "impl: 'hopper'")])
def test_no_hopper_gpu(impl: str | None, start: str) -> None:
    with pytest.raises(ValueError) as raised:
        attention_fp8(*tensors(), impl=impl)
    message = f"{start} needs CUDA tensors; q is on cpu; impl='reference' runs on any device"
    assert str(raised.value) == message


@pytest.mark.parametrize("name", "qkv")
def test_no_gradient(name: str) -> None:
    given = dict(zip("qkv", tensors(), strict=True))
    given[name].requires_grad_()
    message = f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that does: "
    with pytest.raises(RuntimeError, match="^" + message.replace("(", r"\(").replace(")", r"\)")):
        reference(**given)
    with pytest.raises(RuntimeError, match="^x: expected a tensor that does not require grad"):
        quantize_fp8(given[name], name)
    with torch.no_grad():
        assert not reference(**given).requires_grad


@pytest.mark.parametrize("part", ["mean", "scale", "data"])
def test_no_gradient_of_a_part(part: str) -> None:
    q, k, v = tensors()
    v8 = quantize_fp8(v, "v")
    v8 = replace(v8, **{part: getattr(v8, part).clone().requires_grad_()})
    with pytest.raises(RuntimeError, match=rf"^v\.{part}: expected a tensor that does not require grad"):
        reference(q, k, v8)
    with torch.no_grad():
        assert not reference(q, k, v8).requires_grad


def test_no_forward_derivative() -> None:
    q, k, v = tensors()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode"):
            reference(dual, k, v)


def test_no_transformation() -> None:
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match=r"^attention_fp8 under torch.func: not supported"):
        torch.vmap(reference)(q[None], k[None], v[None])
    told = "expected a tensor with values, got one on device meta"
    with pytest.raises(NotImplementedError, match=f"^q: {told}$"):
        reference(*(x.to("meta") for x in (q, k, v)))
    with pytest.raises(NotImplementedError, match=f"^x: {told}$"):
        quantize_fp8(q.to("meta"), "q")


def test_negative_bit(device: str) -> None:
    q, k, v = tensors(device=device)
    negative = torch._neg_view(q)
    assert negative.is_neg() and torch.equal(reference(negative, k, v), reference(-q, k, v))
