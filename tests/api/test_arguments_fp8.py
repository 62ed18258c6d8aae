"""attention_fp8() and its relatives: every wrong argument is named, with what was expected and what came."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy
import pytest
import torch
from argument_rows import check_mistake, mistakes
from cases import INTERPRETER_REMARKS

from attnlib import attention_fp8, attention_fp8_varlen, quantize_fp8
from attnlib.kernels.common.fp8 import Recipe
from attnlib.kernels.reference.fp8 import quantize

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def fp8(shape, role, rotate=True, **lengths):
    """Prepared by the model: no kernel runs while tests are collected."""
    return quantize(zeros(*shape), role, Recipe("block", rotate), **lengths)


OFFSETS_Q, OFFSETS_K = offsets(0, 3, 8), offsets(0, 6, 8)
GOOD = {"q": zeros(2, 4, 8, 16), "k": zeros(2, 2, 8, 16), "v": zeros(2, 2, 8, 16), "impl": "reference"}
GOOD_VARLEN = {
    "q": zeros(8, 4, 16), "k": zeros(8, 2, 16), "v": zeros(8, 2, 16),
    "cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K, "max_seqlen_q": 5, "max_seqlen_k": 6,
    "impl": "reference",
}  # fmt: skip
GOOD_QUANTIZE = {"x": zeros(2, 4, 8, 16), "role": "q"}
GOOD_QUANTIZE_VARLEN = {"x": zeros(8, 4, 16), "role": "q", "cu_seqlens": OFFSETS_Q, "max_seqlen": 5}

Q, K, V = (fp8(GOOD[role].shape, role) for role in "qkv")
V_VARLEN = fp8((8, 2, 16), "v", cu_seqlens=OFFSETS_K, max_seqlen=6)
MEAN = "v.mean: expected shape (2, 2, 64), got"
K_PLAIN = fp8(GOOD["k"].shape, "k", rotate=False)
K_VARLEN = fp8((8, 2, 16), "k", cu_seqlens=OFFSETS_K, max_seqlen=6)
DENSE = "expected a dense tensor (layout torch.strided), got"
DTYPES = "expected dtype float16, bfloat16 or float32, got"
DIMS = "expected a head dimension that is a multiple of 8 from 8 to 256, got"
EITHER = "expected a torch.Tensor or an Fp8, got"
SCALINGS, ROLES = "expected 'block', 'head' or 'tensor'", "expected 'q', 'k' or 'v'"
IMPL, OUT = "expected 'hopper', 'reference' or None", "expected None, float16, bfloat16 or float32"
ITSELF = "expected an Fp8 that was quantized with the tensor cu_seqlens_k itself, got one with another tensor"
NEVER = "expected a pair of ints (left, right), got"

# What is changed in a good call; the error; its message.
TENSORS = [
    ({"q": None}, TypeError, f"q: {EITHER} NoneType"),
    ({"k": [[1.0]]}, TypeError, f"k: {EITHER} list"),
    ({"v": numpy.zeros((2, 2, 8, 16))}, TypeError, f"v: {EITHER} numpy.ndarray"),
    ({"k": zeros(2, 2, 8, 16).to_sparse()}, TypeError, f"k: {DENSE} torch.sparse_coo"),
    ({"q": torch.nested.nested_tensor([zeros(4, 8, 16), zeros(4, 7, 16)])}, TypeError,
     f"q: {DENSE} a nested tensor"),
    ({"q": zeros(8, 4, 16)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (8, 4, 16)"),
    ({"q": zeros(2, 4, 8, 16, dtype=torch.float64)}, TypeError, f"q: {DTYPES} torch.float64"),
    ({"v": zeros(2, 2, 8, 16, dtype=torch.float8_e4m3fn)}, TypeError, f"v: {DTYPES} torch.float8_e4m3fn"),
    ({"k": zeros(2, 2, 8, 16, dtype=torch.bfloat16)}, TypeError,
     "k: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"q": Q, "v": zeros(2, 2, 8, 16, dtype=torch.bfloat16)}, TypeError,
     "v: expected dtype torch.float16 as k has, got torch.bfloat16"),
    ({"k": zeros(2, 2, 8, 16, device="meta")}, ValueError, "k: expected device cpu as q has, got meta"),
    ({"q": zeros(2, 4, 8, 12)}, ValueError, f"q: {DIMS} 12"),
    ({"q": zeros(2, 4, 8, 264)}, ValueError, f"q: {DIMS} 264"),
    ({"k": zeros(3, 2, 8, 16)}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"v": zeros(2, 2, 8, 24)}, ValueError, "v: expected head dimension 16 as q has, got 24"),
    ({"v": zeros(2, 2, 9, 16)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 2, 9, 16)"),
    ({"k": zeros(2, 3, 8, 16), "v": zeros(2, 3, 8, 16)}, ValueError,
     "k: expected a number of heads that divides q's 4, got 3"),
    ({"k": zeros(2, 0, 8, 16), "v": zeros(2, 0, 8, 16)}, ValueError,
     "k: expected a number of heads that divides q's 4, got 0"),
]  # fmt: skip
PREPARED = [
    ({"q": K}, ValueError, "q: expected an Fp8 of role 'q', got role 'k'"),
    ({"k": V, "v": K}, ValueError, "k: expected an Fp8 of role 'k', got role 'v'"),
    ({"v": Q}, ValueError, "v: expected an Fp8 of role 'v', got role 'q'"),
    ({"q": Q, "k": K_PLAIN}, ValueError, "k: expected to be rotated as q is, got it not rotated"),
    ({"q": fp8((2, 4, 8, 16), "q", rotate=False), "k": K}, ValueError,
     "k: expected to be not rotated as q is, got it rotated"),
    ({"k": K_VARLEN}, ValueError,
     "k: expected an Fp8 of a batch, got varlen sequences; attention_fp8_varlen takes them"),
    ({"k": fp8((2, 2, 8, 24), "k")}, ValueError, "k: expected head dimension 16 as q has, got 24"),
    ({"k": fp8((2, 2, 9, 16), "k")}, ValueError,
     "v: expected shape (2, 2, 9, 16) as k has, got (2, 2, 8, 16)"),
    ({"k": K, "v": fp8((2, 2, 9, 16), "v")}, ValueError,
     "v: expected shape (2, 2, 8, 16) as k has, got (2, 2, 9, 16)"),
    ({"k": fp8((3, 2, 8, 16), "k")}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"q": zeros(2, 4, 8, 16, device="meta"), "k": K}, ValueError,
     "k: expected device meta as q has, got cpu"),
    ({"k": replace(K, data=None)}, TypeError, "k.data: expected a torch.Tensor, got NoneType"),
    ({"k": replace(K, data=K.data.float())}, TypeError,
     "k.data: expected dtype torch.float8_e4m3fn, got torch.float32"),
    ({"k": replace(K, data=K.data[0])}, ValueError, "k.data: expected 4 dimensions, got shape (2, 8, 64)"),
    ({"k": replace(K, data=K.data[:, :, :7])}, ValueError,
     "k.data: expected shape (2, 2, 8, 64), got (2, 2, 7, 64)"),
    ({"v": replace(V, data=V.data[..., :8])}, ValueError,
     "v.data: expected shape (2, 2, 64, 16), got (2, 2, 64, 8)"),
    ({"k": replace(K, data=K.data.mT.contiguous().mT)}, ValueError,
     "k.data: expected a contiguous last dimension, other strides and the address in multiples of 16 bytes, "
     "got strides (1024, 512, 1, 8)"),
    ({"k": replace(K, scale=2.0)}, TypeError, "k.scale: expected a torch.Tensor, got float"),
    ({"k": replace(K, scale=K.scale.half())}, TypeError,
     "k.scale: expected dtype torch.float32, got torch.float16"),
    ({"k": replace(K, scale=K.scale.to("meta"))}, ValueError,
     "k.scale: expected device cpu as the data has, got meta"),
    ({"k": replace(K, scale=K.scale[:1])}, ValueError, "k.scale: expected shape (2, 2, 1), got (1, 2, 1)"),
    ({"v": replace(V, scale=V.scale[..., None])}, ValueError,
     "v.scale: expected shape (2, 2), got (2, 2, 1)"),
    ({"k": replace(K, mean=V.mean)}, ValueError,
     "k.mean: expected None, as only values are centered, got torch.Tensor"),
    ({"v": replace(V, mean=0.5)}, TypeError, "v.mean: expected None or a torch.Tensor, got float"),
    ({"v": replace(V, mean=V.mean.half())}, TypeError,
     "v.mean: expected dtype torch.float32, got torch.float16"),
    ({"v": replace(V, mean=V.mean.to("meta"))}, ValueError,
     "v.mean: expected device cpu as the data has, got meta"),
    ({"v": replace(V, mean=V.mean[..., :16])}, ValueError, f"{MEAN} (2, 2, 16)"),
    ({"v": replace(V, mean=V.mean[:1])}, ValueError, f"{MEAN} (1, 2, 64)"),
    ({"v": replace(V, mean=V.mean[:1, :1].expand(2, 2, 64))}, ValueError,
     "v.mean: expected a contiguous tensor, got strides (0, 0, 1)"),
    ({"v": replace(V, mean=zeros(V.mean.numel() + 1, dtype=torch.float32)[1:].view(V.mean.shape))},
     ValueError, "v.mean: expected an address that is a multiple of 16 bytes, got one 4 past"),
]  # fmt: skip
OPTIONS = [
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"causal": None}, TypeError, "causal: expected a bool, got NoneType"),
    ({"window": 5}, TypeError, "window: expected None or a pair of ints (left, right), got int"),
    ({"window": (1, 2, 3)}, ValueError, "window: expected a pair (left, right), got 3 values"),
    ({"window": (1.0, 2)}, TypeError, f"window: {NEVER} float in it"),
    ({"window": (-2, 2)}, ValueError, "window: expected ints from 0 on, or -1 for no bound, got (-2, 2)"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a number from -1e26 to 1e26, got nan"),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool, got int"),
    ({"scaling": None}, TypeError, f"scaling: {SCALINGS}, got NoneType"),
    ({"scaling": "row"}, ValueError, f"scaling: {SCALINGS}, got 'row'"),
    ({"rotate": 1}, TypeError, "rotate: expected a bool, got int"),
    ({"center": 1}, TypeError, "center: expected a bool, got int"),
    ({"out_dtype": "float16"}, TypeError, f"out_dtype: {OUT}, got str"),
    ({"out_dtype": torch.float64}, TypeError, f"out_dtype: {OUT}, got torch.float64"),
    ({"impl": 1}, TypeError, f"impl: {IMPL}, got int"),
    ({"impl": "triton"}, ValueError, f"impl: {IMPL}, got 'triton'"),
]
VARLEN = [
    ({"q": zeros(2, 4, 8, 16)}, ValueError, "q: expected 3 dimensions (T, H, D), got shape (2, 4, 8, 16)"),
    ({"k": zeros(9, 2, 16)}, ValueError, "v: expected shape (9, 2, 16) as k has, got (8, 2, 16)"),
    ({"cu_seqlens_q": [0, 3, 8]}, TypeError, "cu_seqlens_q: expected a torch.Tensor, got list"),
    ({"cu_seqlens_k": offsets(0, 6, 8, dtype=torch.int64)}, TypeError,
     "cu_seqlens_k: expected dtype int32, got torch.int64"),
    ({"cu_seqlens_k": offsets(0, 8)}, ValueError,
     "cu_seqlens_k: expected 3 entries as cu_seqlens_q has, got 2"),
    ({"cu_seqlens_q": offsets(1, 3, 8)}, ValueError, "cu_seqlens_q: expected to start at 0, got 1"),
    ({"cu_seqlens_k": offsets(0, 6, 7)}, ValueError,
     "cu_seqlens_k: expected to end at k's number of tokens, 8, got 7"),
    ({"max_seqlen_q": 5.0}, TypeError, "max_seqlen_q: expected an int, got float"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: expected 0 or more, got -1"),
    ({"max_seqlen_k": 5}, ValueError,
     "max_seqlen_k: expected at least 6, the longest sequence in cu_seqlens_k, got 5"),
    ({"k": K}, ValueError,
     "k: expected an Fp8 of varlen sequences, got a batch; attention_fp8 takes batches"),
    ({"k": K_VARLEN, "cu_seqlens_k": offsets(0, 6, 8)}, ValueError,
     f"k: {ITSELF}"),
    ({"v": fp8((8, 2, 16), "v", cu_seqlens=OFFSETS_Q, max_seqlen=5)}, ValueError,
     f"v: {ITSELF}"),
    ({"v": replace(V_VARLEN, mean=V_VARLEN.mean[0])}, ValueError, f"{MEAN} (2, 64)"),
]  # fmt: skip
QUANTIZE = [
    ({"x": None}, TypeError, "x: expected a torch.Tensor, got NoneType"),
    ({"x": Q}, TypeError, "x: expected a torch.Tensor, got attnlib.kernels.common.fp8.Fp8"),
    ({"x": zeros(8, 4, 16)}, ValueError, "x: expected 4 dimensions (B, H, S, D), got shape (8, 4, 16)"),
    ({"x": zeros(2, 4, 8, 16, dtype=torch.int8)}, TypeError, f"x: {DTYPES} torch.int8"),
    ({"x": zeros(2, 4, 8, 4)}, ValueError, f"x: {DIMS} 4"),
    ({"role": None}, TypeError, f"role: {ROLES}, got NoneType"),
    ({"role": "o"}, ValueError, f"role: {ROLES}, got 'o'"),
    ({"scaling": 128}, TypeError, f"scaling: {SCALINGS}, got int"),
    ({"scaling": "blocks"}, ValueError, f"scaling: {SCALINGS}, got 'blocks'"),
    ({"rotate": None}, TypeError, "rotate: expected a bool, got NoneType"),
    ({"center": "yes"}, TypeError, "center: expected a bool, got str"),
    ({"max_seqlen": 8}, ValueError, "max_seqlen: expected None without cu_seqlens, got 8"),
]
QUANTIZE_VARLEN = [
    ({"x": zeros(2, 4, 8, 16)}, ValueError, "x: expected 3 dimensions (T, H, D), got shape (2, 4, 8, 16)"),
    ({"cu_seqlens": [0, 3, 8]}, TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
    ({"cu_seqlens": offsets(0)}, ValueError,
     "cu_seqlens: expected 1 dimension (B + 1) with B at least 1, got shape (1,)"),
    ({"cu_seqlens": offsets(0, 3, 8).to("meta")}, ValueError,
     "cu_seqlens: expected device cpu as x has, got meta"),
    ({"cu_seqlens": offsets(0, 9, 8)}, ValueError,
     "cu_seqlens: expected values that never go down, got 8 after 9 at index 2"),
    ({"cu_seqlens": offsets(0, 3, 7)}, ValueError,
     "cu_seqlens: expected to end at x's number of tokens, 8, got 7"),
    ({"max_seqlen": None}, TypeError, "max_seqlen: expected an int, got NoneType"),
    ({"max_seqlen": 4}, ValueError,
     "max_seqlen: expected at least 5, the longest sequence in cu_seqlens, got 4"),
]  # fmt: skip
TABLES = (
    (attention_fp8, GOOD, TENSORS + PREPARED + OPTIONS),
    (attention_fp8_varlen, GOOD_VARLEN, VARLEN + OPTIONS),
    (quantize_fp8, GOOD_QUANTIZE, QUANTIZE),
    (quantize_fp8, GOOD_QUANTIZE_VARLEN, QUANTIZE_VARLEN),
)


@mistakes(TABLES)
def test_wrong_arguments(mistake) -> None:
    check_mistake(mistake)


def test_good_arguments() -> None:
    for function, good, _ in TABLES:
        function(**good)
    attention_fp8(Q, K, V, impl="reference")
    attention_fp8(GOOD["q"], K_PLAIN, GOOD["v"], impl="reference")
    attention_fp8(GOOD["q"].bfloat16(), K, V, impl="reference")
    attention_fp8_varlen(**(GOOD_VARLEN | {"k": K_VARLEN, "v": V_VARLEN}))
    attention_fp8(GOOD["q"], K, replace(V, mean=None), impl="reference")


def test_every_argument_has_a_row() -> None:
    for function in (attention_fp8, attention_fp8_varlen, quantize_fp8):
        rows = [row for owner, _, rows in TABLES if owner is function for row in rows]
        changed = {name for change, *_ in rows for name in change}
        missing = set(inspect.signature(function).parameters) - changed
        assert missing <= ({"v"} if function is attention_fp8_varlen else set()), missing
