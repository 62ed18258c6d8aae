"""attention(), attention_decode(), attention_entmax() and what they have for varlen sequences: every wrong
argument is named, with what was expected and what came."""

from __future__ import annotations

import gc
import inspect
import math

import numpy
import pytest
import torch
import triton
from cases import INTERPRETER_REMARKS
from torch.nn.attention.flex_attention import create_block_mask

from attnlib import (
    BlockMask,
    Score,
    attention,
    attention_decode,
    attention_entmax,
    attention_entmax_varlen,
    attention_varlen,
    explain,
)
from attnlib.arguments import offsets as offset_checks
from attnlib.params import Varlen

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def offsets(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def all_of(*shape, **kwargs):
    return dict.fromkeys("qkv", zeros(*shape, **kwargs))


GOOD = {"q": zeros(2, 4, 8, 16), "k": zeros(2, 2, 8, 16), "v": zeros(2, 2, 8, 16)}
# Sequences of 3 and 5 queries, 6 and 2 keys.
GOOD_VARLEN = {
    "q": zeros(8, 4, 16), "k": zeros(8, 2, 16), "v": zeros(8, 2, 16),
    "cu_seqlens_q": offsets(0, 3, 8), "cu_seqlens_k": offsets(0, 6, 8), "max_seqlen_q": 5, "max_seqlen_k": 6,
}  # fmt: skip

DENSE = "expected a dense tensor (layout torch.strided), got"
NUMPY_BOOL = f"numpy.{numpy.bool_.__name__}"  # "bool" from NumPy 2 on
IMPL = "impl: expected 'decode', 'hopper', 'triton', 'reference' or None"
NESTED = f"{DENSE} a nested tensor; attention_varlen takes sequences of different lengths"


def nested(layout):
    return torch.nested.nested_tensor([zeros(4, 8, 16), zeros(4, 7, 16)], layout=layout)


def quantized(*shape):
    return torch.quantize_per_tensor(zeros(*shape, dtype=torch.float32), 1.0, 0, torch.qint8)


# What is changed in a good call; the error; its message.
TENSORS = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"k": [[1.0]]}, TypeError, "k: expected a torch.Tensor, got list"),
    ({"v": numpy.zeros((2, 2, 8, 16))}, TypeError, "v: expected a torch.Tensor, got numpy.ndarray"),
    ({"q": nested(torch.strided)}, TypeError, f"q: {NESTED}"),
    ({"k": nested(torch.jagged)}, TypeError, f"k: {NESTED}"),
    ({"v": nested(torch.strided)}, TypeError, f"v: {NESTED}"),
]
DENSE_TENSORS = [
    ({"q": zeros(2, 8, 16)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (2, 8, 16)"),
    ({"k": zeros(16)}, ValueError, "k: expected 4 dimensions (B, H, S, D), got shape (16,)"),
    ({"v": zeros(1, 1, 1, 1, 1)}, ValueError,
     "v: expected 4 dimensions (B, H, S, D), got shape (1, 1, 1, 1, 1)"),
    ({"q": GOOD["q"].to_sparse()}, TypeError, f"q: {DENSE} torch.sparse_coo"),
    ({"k": GOOD["k"].to_sparse()}, TypeError, f"k: {DENSE} torch.sparse_coo"),
    ({"v": GOOD["v"].to_mkldnn()}, TypeError, f"v: {DENSE} torch._mkldnn"),
    ({"q": zeros(2, 4, 8, 16, dtype=torch.float64)}, TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.float64"),
    *(
        (all_of(2, 2, 8, 16, dtype=dtype), TypeError,
         f"q: expected dtype float16, bfloat16 or float32, got {dtype}")
        for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ),
    (dict.fromkeys("qkv", quantized(2, 2, 8, 16)), TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.qint8"),
    ({"k": zeros(2, 2, 8, 16, dtype=torch.bfloat16)}, TypeError,
     "k: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"v": zeros(2, 2, 8, 16, dtype=torch.float32)}, TypeError,
     "v: expected dtype torch.float16 as q has, got torch.float32"),
    ({"k": zeros(2, 2, 8, 16, device="meta")}, ValueError, "k: expected device cpu as q has, got meta"),
    ({"v": zeros(2, 2, 8, 16, device="meta")}, ValueError, "v: expected device cpu as q has, got meta"),
    ({"q": zeros(2, 4, 8, 16, device="meta")}, ValueError, "k: expected device meta as q has, got cpu"),
    ({"k": zeros(3, 2, 8, 16)}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"v": zeros(1, 2, 8, 16)}, ValueError, "v: expected batch size 2 as q has, got 1"),
    ({"k": zeros(2, 2, 8, 24)}, ValueError, "k: expected head dimension 16 as q has, got 24"),
    ({"v": zeros(2, 2, 9, 16)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 2, 9, 16)"),
    ({"v": zeros(2, 4, 8, 16)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 4, 8, 16)"),
    *(
        (all_of(2, 2, 8, head_dim), ValueError,
         f"q: expected a head dimension that is a multiple of 8 from 8 to 256, got {head_dim}")
        for head_dim in (0, 4, 12, 264)
    ),
    *(
        (dict.fromkeys("kv", zeros(2, heads, 8, 16)), ValueError,
         f"k: expected a number of heads that divides q's 4, got {heads}")
        for heads in (0, 3, 8)
    ),
]  # fmt: skip
ONE_WIDTH = {"v": zeros(2, 2, 8, 8)}, ValueError, "v: expected head dimension 16 as q has, got 8"
WIDE = {"v": zeros(2, 2, 8, 24)}
DIMS = "expected a head dimension that is a multiple of 8 from 8 to 256, got"
OWN_VALUES = [  # a head dimension of their own, for which there is not everything
    *(({"v": zeros(2, 2, 8, columns)}, ValueError, f"v: {DIMS} {columns}") for columns in (0, 4, 20, 264)),
    ({"v": zeros(2, 2, 9, 24)}, ValueError,
     "v: expected shape (2, 2, 8, 24) as k has but for its head dimension, got (2, 2, 9, 24)"),
    (WIDE | {"block_mask": BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool), 8, 8)}, ValueError,
     "block_mask: expected None beside values of head dimension 24, where q has 16, got "
     "attnlib.block_mask.mask.BlockMask"),
    (WIDE | {"score": Score(soft_cap=9.0)}, ValueError,
     "score: expected None beside values of head dimension 24, where q has 16, got attnlib.scores.Score"),
    (WIDE | {"impl": "decode"}, ValueError,
     "impl: 'decode' needs values of head dimension 16 as q has; v has 24"),
]  # fmt: skip
OPTIONS = [
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"causal": None}, TypeError, "causal: expected a bool, got NoneType"),
    ({"causal": numpy.bool_(True)}, TypeError, f"causal: expected a bool, got {NUMPY_BOOL}"),
    ({"causal": zeros(2)}, TypeError, "causal: expected a bool, got torch.Tensor"),
    ({"window": numpy.array([3, 2])}, TypeError,
     "window: expected None or a pair of ints (left, right), got numpy.ndarray"),
    ({"window": (numpy.int64(3), 2)}, TypeError,
     "window: expected a pair of ints (left, right), got numpy.int64 in it"),
    ({"window": (3, zeros(2))}, TypeError,
     "window: expected a pair of ints (left, right), got torch.Tensor in it"),
    ({"window": 128}, TypeError, "window: expected None or a pair of ints (left, right), got int"),
    ({"window": "ab"}, TypeError, "window: expected None or a pair of ints (left, right), got str"),
    ({"window": (1, 2, 3)}, ValueError, "window: expected a pair (left, right), got 3 values"),
    ({"window": ()}, ValueError, "window: expected a pair (left, right), got 0 values"),
    ({"window": (True, 0)}, TypeError, "window: expected a pair of ints (left, right), got bool in it"),
    ({"window": (0, 1.0)}, TypeError, "window: expected a pair of ints (left, right), got float in it"),
    ({"window": (None, 0)}, TypeError, "window: expected a pair of ints (left, right), got NoneType in it"),
    ({"window": (-2, 0)}, ValueError, "window: expected ints from 0 on, or -1 for no bound, got (-2, 0)"),
    ({"window": [3, -7]}, ValueError, "window: expected ints from 0 on, or -1 for no bound, got (3, -7)"),
    ({"sm_scale": "0.1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": True}, TypeError, "sm_scale: expected a number or None, got bool"),
    ({"sm_scale": 1j}, TypeError, "sm_scale: expected a number or None, got complex"),
    ({"sm_scale": zeros(1)}, TypeError, "sm_scale: expected a number or None, got torch.Tensor"),
    ({"sm_scale": numpy.float32(0.1)}, TypeError, "sm_scale: expected a number or None, got numpy.float32"),
    ({"sm_scale": numpy.ones(2)}, TypeError, "sm_scale: expected a number or None, got numpy.ndarray"),
    *(
        ({"sm_scale": scale}, ValueError, f"sm_scale: expected a number from -1e26 to 1e26, got {scale}")
        for scale in (math.nan, -math.inf, 1.1e26, -1e38, 1e39, 10**400)
    ),
    ({"return_lse": "yes"}, TypeError, "return_lse: expected a bool, got str"),
    ({"return_lse": 0}, TypeError, "return_lse: expected a bool, got int"),
    ({"return_lse": numpy.bool_(True)}, TypeError, f"return_lse: expected a bool, got {NUMPY_BOOL}"),
    ({"deterministic": numpy.bool_(True)}, TypeError, f"deterministic: expected a bool, got {NUMPY_BOOL}"),
    ({"deterministic": 1}, TypeError, "deterministic: expected a bool, got int"),
    ({"deterministic": None}, TypeError, "deterministic: expected a bool, got NoneType"),
    ({"impl": "flash"}, ValueError, f"{IMPL}, got 'flash'"),
    ({"impl": "Triton"}, ValueError, f"{IMPL}, got 'Triton'"),
    *(
        ({"impl": impl}, TypeError, f"{IMPL}, got {kind}")
        for impl, kind in (
            (True, "bool"),
            (["triton"], "list"),
            (numpy.array(["triton", "hopper"]), "numpy.ndarray"),
            (zeros(2), "torch.Tensor"),
        )
    ),
]  # fmt: skip
PACKED_TENSORS = [
    ({"q": zeros(1, 4, 8, 16)}, ValueError, "q: expected 3 dimensions (T, H, D), got shape (1, 4, 8, 16)"),
    ({"k": zeros(8, 16)}, ValueError, "k: expected 3 dimensions (T, H, D), got shape (8, 16)"),
    ({"q": GOOD_VARLEN["q"].to_sparse()}, TypeError, f"q: {DENSE} torch.sparse_coo"),
    ({"q": zeros(8, 4, 16, dtype=torch.float64)}, TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.float64"),
    ({"v": zeros(8, 2, 16, dtype=torch.bfloat16)}, TypeError,
     "v: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"k": zeros(8, 2, 16, device="meta")}, ValueError, "k: expected device cpu as q has, got meta"),
    ({"k": zeros(8, 2, 24)}, ValueError, "k: expected head dimension 16 as q has, got 24"),
    ({"v": zeros(9, 2, 16)}, ValueError, "v: expected shape (8, 2, 16) as k has, got (9, 2, 16)"),
    ({"v": zeros(8, 2, 20)}, ValueError, f"v: {DIMS} 20"),
    ({"v": zeros(9, 2, 24)}, ValueError,
     "v: expected shape (8, 2, 24) as k has but for its head dimension, got (9, 2, 24)"),
    (dict.fromkeys("kv", zeros(8, 3, 16)), ValueError,
     "k: expected a number of heads that divides q's 4, got 3"),
    (all_of(8, 4, 12), ValueError,
     "q: expected a head dimension that is a multiple of 8 from 8 to 256, got 12"),
]  # fmt: skip
SEQUENCES = [
    *(
        row
        for name, side in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k"))
        for row in [
            ({name: [0, 8]}, TypeError, f"{name}: expected a torch.Tensor, got list"),
            ({name: numpy.array([0, 8])}, TypeError, f"{name}: expected a torch.Tensor, got numpy.ndarray"),
            ({name: offsets(0, 3, 8, dtype=torch.int64)}, TypeError,
             f"{name}: expected dtype int32, got torch.int64"),
            ({name: offsets(0, 3, 8, dtype=torch.float32)}, TypeError,
             f"{name}: expected dtype int32, got torch.float32"),
            ({name: offsets(0, 3, 8).to_sparse()}, TypeError, f"{name}: {DENSE} torch.sparse_coo"),
            ({name: offsets(0, 3, 8)[None]}, ValueError,
             f"{name}: expected 1 dimension (B + 1) with B at least 1, got shape (1, 3)"),
            ({name: offsets(8)}, ValueError,
             f"{name}: expected 1 dimension (B + 1) with B at least 1, got shape (1,)"),
            ({name: offsets()}, ValueError,
             f"{name}: expected 1 dimension (B + 1) with B at least 1, got shape (0,)"),
            ({name: offsets(0, 3, 8, device="meta")}, ValueError,
             f"{name}: expected device cpu as q has, got meta"),
            ({name: offsets(1, 3, 8)}, ValueError, f"{name}: expected to start at 0, got 1"),
            ({name: offsets(-1, 3, 8)}, ValueError, f"{name}: expected to start at 0, got -1"),
            ({name: offsets(0, 9, 8)}, ValueError,
             f"{name}: expected values that never go down, got 8 after 9 at index 2"),
            ({name: offsets(0, -3, 8)}, ValueError,
             f"{name}: expected values that never go down, got -3 after 0 at index 1"),
            ({name: offsets(0, 3, 7)}, ValueError,
             f"{name}: expected to end at {side}'s number of tokens, 8, got 7"),
            ({name: offsets(0, 3, 9)}, ValueError,
             f"{name}: expected to end at {side}'s number of tokens, 8, got 9"),
        ]
    ),
    ({"cu_seqlens_k": offsets(0, 4, 6, 8)}, ValueError,
     "cu_seqlens_k: expected 3 entries as cu_seqlens_q has, got 4"),
    ({"max_seqlen_q": 4}, ValueError,
     "max_seqlen_q: expected at least 5, the longest sequence in cu_seqlens_q, got 4"),
    ({"max_seqlen_k": 0}, ValueError,
     "max_seqlen_k: expected at least 6, the longest sequence in cu_seqlens_k, got 0"),
    *(
        row
        for name in ("max_seqlen_q", "max_seqlen_k")
        for row in [
            ({name: 8.0}, TypeError, f"{name}: expected an int, got float"),
            ({name: None}, TypeError, f"{name}: expected an int, got NoneType"),
            ({name: True}, TypeError, f"{name}: expected an int, got bool"),
            ({name: numpy.int64(8)}, TypeError, f"{name}: expected an int, got numpy.int64"),
            ({name: numpy.array([8, 8])}, TypeError, f"{name}: expected an int, got numpy.ndarray"),
            ({name: torch.tensor(8)}, TypeError, f"{name}: expected an int, got torch.Tensor"),
            ({name: -1}, ValueError, f"{name}: expected 0 or more, got -1"),
        ]
    ),
]  # fmt: skip

# Two sequences of 20 and 7 keys in three pages of 16.
GOOD_DECODE = {
    "q": zeros(2, 4, 3, 16), "k_cache": zeros(3, 2, 16, 16), "v_cache": zeros(3, 2, 16, 16),
    "lengths": offsets(20, 7), "page_table": offsets(1, 0, 2, 99).view(2, 2),
}  # fmt: skip
ROOM = {"q": zeros(2, 4, 3, 16), "page_table": None}
ROOM |= dict.fromkeys(("k_cache", "v_cache"), zeros(2, 2, 8, 16))


def caches(*shape, **kwargs):
    return dict.fromkeys(("k_cache", "v_cache"), zeros(*shape, **kwargs))


FP8_CACHES = caches(3, 2, 16, 16, dtype=torch.float8_e4m3fn)
FP8_ROOM = {"page_table": None, "lengths": None} | caches(2, 2, 8, 16, dtype=torch.float8_e4m3fn)

DECODE = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"k_cache": [[1.0]]}, TypeError, "k_cache: expected a torch.Tensor, got list"),
    ({"v_cache": numpy.zeros(3)}, TypeError, "v_cache: expected a torch.Tensor, got numpy.ndarray"),
    ({"q": nested(torch.strided)}, TypeError, f"q: {NESTED}"),
    ({"k_cache": zeros(3, 2, 16, 16).to_sparse()}, TypeError, f"k_cache: {DENSE} torch.sparse_coo"),
    ({"q": zeros(2, 4, 16)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (2, 4, 16)"),
    ({"k_cache": zeros(16)}, ValueError, "k_cache: expected 4 dimensions (B, H, S, D), got shape (16,)"),
    ({"q": zeros(2, 4, 3, 16, dtype=torch.float64)}, TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.float64"),
    ({"k_cache": zeros(3, 2, 16, 16, dtype=torch.bfloat16)}, TypeError,
     "k_cache: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"v_cache": zeros(3, 2, 16, 16, dtype=torch.float8_e4m3fn)}, TypeError,
     "v_cache: expected dtype torch.float16 as q has, got torch.float8_e4m3fn"),
    ({"k_cache": zeros(3, 2, 16, 16, device="meta")}, ValueError,
     "k_cache: expected device cpu as q has, got meta"),
    *(
        ({"q": zeros(2, 4, queries, 16)}, ValueError,
         f"q: expected 1 to 16 queries of each sequence, got {queries}")
        for queries in (0, 17)
    ),
    *(
        ({"q": zeros(2, 4, 3, head_dim), **caches(3, 2, 16, head_dim)}, ValueError,
         f"q: expected a head dimension that is a multiple of 8 from 8 to 256, got {head_dim}")
        for head_dim in (0, 12, 264)
    ),
    (caches(3, 2, 16, 24), ValueError, "k_cache: expected head dimension 16 as q has, got 24"),
    *(
        (caches(3, heads, 16, 16), ValueError,
         f"k_cache: expected a number of heads that divides q's 4, got {heads}")
        for heads in (0, 3, 8)
    ),
    *(
        (caches(3, 2, size, 16), ValueError,
         f"k_cache: expected pages of a multiple of 16 keys (dimension 2), got {size}")
        for size in (0, 8, 24, 100)
    ),
    ({"v_cache": zeros(3, 2, 32, 16)}, ValueError,
     "v_cache: expected shape (3, 2, 16, 16) as k_cache has, got (3, 2, 32, 16)"),
    ({"page_table": None}, ValueError, "k_cache: expected batch size 2 as q has, got 3"),
    ({"page_table": [[0, 1]]}, TypeError, "page_table: expected a torch.Tensor or None, got list"),
    ({"page_table": zeros(2, 2)}, TypeError, "page_table: expected dtype int32, got torch.float16"),
    ({"page_table": offsets(0, 1)}, ValueError,
     "page_table: expected 2 dimensions (B, pages), got shape (2,)"),
    ({"page_table": offsets(0, 1, 2).view(3, 1)}, ValueError,
     "page_table: expected batch size 2 as q has, got 3"),
    ({"page_table": offsets(0, 1, 2, 1, device="meta").view(2, 2)}, ValueError,
     "page_table: expected device cpu as q has, got meta"),
    ({"page_table": offsets(0, 1, 3, 1).view(2, 2)}, ValueError,
     "page_table: expected pages from 0 to 2, got 3"),
    ({"page_table": offsets(0, -1, 0, 1).view(2, 2)}, ValueError,
     "page_table: expected pages from 0 to 2, got -1"),
    ({"page_table": offsets(0, 1, 0, 3).view(2, 2), "lengths": None}, ValueError,
     "page_table: expected pages from 0 to 2, got 3"),
    ({"lengths": [20, 7]}, TypeError, "lengths: expected a torch.Tensor or None, got list"),
    ({"lengths": 20}, TypeError, "lengths: expected a torch.Tensor or None, got int"),
    ({"lengths": offsets(20, 7, dtype=torch.int64)}, TypeError,
     "lengths: expected dtype int32, got torch.int64"),
    ({"lengths": offsets(20, 7).to_sparse()}, TypeError, f"lengths: {DENSE} torch.sparse_coo"),
    ({"lengths": offsets(20, 7)[None]}, ValueError, "lengths: expected 1 dimension (B), got shape (1, 2)"),
    ({"lengths": offsets(20)}, ValueError, "lengths: expected batch size 2 as q has, got 1"),
    ({"lengths": offsets(20, 7, device="meta")}, ValueError,
     "lengths: expected device cpu as q has, got meta"),
    ({**FP8_CACHES, "q": zeros(2, 4, 3, 16, dtype=torch.float32)}, TypeError,
     "q: expected dtype float16 or bfloat16 beside a k_cache in torch.float8_e4m3fn, got torch.float32"),
    ({**FP8_CACHES, "v_cache": zeros(3, 2, 16, 16)}, TypeError,
     "v_cache: expected dtype torch.float8_e4m3fn as k_cache has, got torch.float16"),
    ({**FP8_CACHES, "v_cache": [1.0]}, TypeError, "v_cache: expected a torch.Tensor, got list"),
    ({**FP8_CACHES, "q": zeros(2, 4, 16)}, ValueError,
     "q: expected 4 dimensions (B, H, S, D), got shape (2, 4, 16)"),
    ({**FP8_CACHES, "v_cache": zeros(3, 2, 16, 16, dtype=torch.float8_e4m3fn, device="meta")}, ValueError,
     "v_cache: expected device cpu as q has, got meta"),
    ({**FP8_CACHES, "v_cache": zeros(3, 2, 32, 16, dtype=torch.float8_e4m3fn)}, ValueError,
     "v_cache: expected shape (3, 2, 16, 16) as k_cache has, got (3, 2, 32, 16)"),
    *(
        row
        for name in ("k_scale", "v_scale")
        for row in [
            ({name: torch.ones(3, 2)}, ValueError,
             f"{name}: expected None beside a k_cache in torch.float16, got a torch.Tensor"),
            ({**FP8_CACHES, name: 0.5}, TypeError, f"{name}: expected a torch.Tensor or None, got float"),
            ({**FP8_CACHES, name: zeros(3, 2)}, TypeError,
             f"{name}: expected dtype float32, got torch.float16"),
            ({**FP8_CACHES, name: torch.nested.nested_tensor([torch.ones(2)])}, TypeError,
             f"{name}: {DENSE} a nested tensor"),
            ({**FP8_CACHES, name: torch.ones(3, 2).to_sparse()}, TypeError,
             f"{name}: {DENSE} torch.sparse_coo"),
            ({**FP8_CACHES, name: torch.ones(2)}, ValueError,
             f"{name}: expected shape () or (pages, Hkv), (3, 2), got (2,)"),
            ({**FP8_CACHES, **FP8_ROOM, name: torch.ones(3, 2)}, ValueError,
             f"{name}: expected shape () or (B, Hkv), (2, 2), got (3, 2)"),
            ({**FP8_CACHES, name: torch.ones(3, 2, device="meta")}, ValueError,
             f"{name}: expected device cpu as q has, got meta"),
        ]
    ),
    ({"starts": [2, 7]}, TypeError, "starts: expected a torch.Tensor or None, got list"),
    ({"starts": offsets(2, 7, dtype=torch.int64)}, TypeError,
     "starts: expected dtype int32, got torch.int64"),
    ({"starts": offsets(2, 7)[None]}, ValueError, "starts: expected 1 dimension (B), got shape (1, 2)"),
    ({"starts": offsets(2)}, ValueError, "starts: expected batch size 2 as q has, got 1"),
    ({"starts": offsets(2, 7, device="meta")}, ValueError,
     "starts: expected device cpu as q has, got meta"),
    ({"starts": offsets(2, -7)}, ValueError,
     "starts: expected 0 to 32, which the cache has room for, got -7"),
    ({"lengths": offsets(33, 7)}, ValueError,
     "lengths: expected 0 to 32, which the cache has room for, got 33"),
    ({"lengths": offsets(20, -1)}, ValueError,
     "lengths: expected 0 to 32, which the cache has room for, got -1"),
    ({**ROOM, "lengths": offsets(9, 1)}, ValueError,
     "lengths: expected 0 to 8, which the cache has room for, got 9"),
    *(
        ({"split": split}, TypeError,
         f"split: expected 'none', 'fixed', 'stream_k', a number of splits or None, got {kind}")
        for split, kind in ((True, "bool"), (2.0, "float"), (zeros(1), "torch.Tensor"), (["none"], "list"))
    ),
    *(
        ({"split": split}, ValueError,
         f"split: expected 'none', 'fixed', 'stream_k', a number of splits or None, got {split!r}")
        for split in ("stream-k", "", 0, -1)
    ),
]  # fmt: skip

ALPHA = "alpha: expected a number from 1 + 2^-10 to 2 (softmax, alpha = 1, is attention), got"
ENTMAX_IMPL = "impl: expected 'triton', 'reference' or None"
ENTMAX = [
    *(({"alpha": alpha}, TypeError, f"{ALPHA} {name}")
      for alpha, name in ((None, "NoneType"), ("1.5", "str"), (True, "bool"), (1.5 + 0j, "complex"))),
    *(({"alpha": alpha}, ValueError, f"{ALPHA} {alpha}")
      for alpha in (1, 1.0, 1.0009, 2.001, 0.5, -1.5, math.inf, math.nan)),
    ({"return_tau": 1}, TypeError, "return_tau: expected a bool, got int"),
    ({"return_tau": None}, TypeError, "return_tau: expected a bool, got NoneType"),
    ({"impl": 1}, TypeError, f"{ENTMAX_IMPL}, got int"),
    ({"impl": "hopper"}, ValueError, f"{ENTMAX_IMPL}, got 'hopper'"),
]  # fmt: skip
ENTMAX += [row for row in OPTIONS if set(row[0]) <= {"causal", "sm_scale"}]


def mask(*shape, **options):
    """A block mask of (B, H, S_q, S_k) where all is seen."""
    B, H, *lengths = shape
    return BlockMask.from_function(lambda b, h, q, k: q >= 0, *lengths, B=B, H=H, **options)


THEIR_MASK = create_block_mask(lambda b, h, q, k: q >= k, None, None, 9, 8, device="cpu")
MASKS = [
    ({"block_mask": torch.ones(8, 8, dtype=torch.bool)}, TypeError,
     "block_mask: expected an attnlib.BlockMask or None, got torch.Tensor"),
    ({"block_mask": THEIR_MASK}, ValueError,
     "block_mask: expected 8 queries and 8 keys as q and k have, got 9 and 8"),
    ({"block_mask": mask(1, 1, 9, 8)}, ValueError,
     "block_mask: expected 8 queries and 8 keys as q and k have, got 9 and 8"),
    ({"block_mask": mask(1, 1, 8, 7)}, ValueError,
     "block_mask: expected 8 queries and 8 keys as q and k have, got 8 and 7"),
    ({"block_mask": mask(3, 1, 8, 8)}, ValueError,
     "block_mask: expected a batch size of 1 or 2 as q has, got 3"),
    ({"block_mask": mask(1, 2, 8, 8)}, ValueError,
     "block_mask: expected a number of heads of 1 or 4 as q has, got 2"),
    ({"block_mask": mask(1, 1, 8, 8), **{x: GOOD[x].to("meta") for x in "qkv"}}, ValueError,
     "block_mask: expected device meta as q has, got cpu"),
]  # fmt: skip



@triton.jit
def jitted(s, i, j, h, b):
    return s


@triton.jit
def of_three(s, i, j):
    return s


class Unhashed:
    __hash__ = None

    def __call__(self, s, i, j, h, b):
        return s


SCORES = [
    ({"score": 30.0}, TypeError, "score: expected an attnlib.Score or None, got float"),
    ({"score": Score(alibi=torch.ones(3))}, ValueError,
     "score.alibi: expected 4 values, one for each head of q, got 3"),
    ({"score": Score(sinks=torch.ones(2))}, ValueError,
     "score.sinks: expected 4 values, one for each head of q, got 2"),
    ({"score": Score(bias=torch.ones(7, 8))}, ValueError,
     "score.bias: expected a shape that broadcasts to (B, H, Sq, Sk) = (2, 4, 8, 8), got (7, 8)"),
    ({"score": Score(bias=torch.ones(1, 1, 1, 8, 8))}, ValueError,
     "score.bias: expected a shape that broadcasts to (B, H, Sq, Sk) = (2, 4, 8, 8), got (1, 1, 1, 8, 8)"),
    ({"score": Score(sinks=torch.ones(4, device="meta"))}, ValueError,
     "score.sinks: expected device cpu as q has, got meta"),
    ({"score": Score(relative=torch.ones(2, 3))}, ValueError,
     "score.relative: expected 4 rows, one for each head of q, got 2"),
    ({"score": Score(function=jitted), "impl": "reference"}, ValueError,
     "score.reference: expected a function of tensors, as this call runs in PyTorch, got None"),
    ({"score": Score(function=jitted), "q": zeros(2, 4, 8, 16).requires_grad_()}, ValueError,
     "score.derivative: expected a @triton.jit function, which the gradients need, got None"),
]  # fmt: skip
PARTS = [
    ({}, ValueError,
     "score: expected at least one of soft_cap, alibi, sinks, bias, relative and function, got none"),
    ({"soft_cap": "30"}, TypeError, "score.soft_cap: expected a number or None, got str"),
    ({"soft_cap": True}, TypeError, "score.soft_cap: expected a number or None, got bool"),
    *(({"soft_cap": x}, ValueError, f"score.soft_cap: expected a number from 1e-6 to 1e6, got {x}")
      for x in (0.0, -3, float("nan"), float("inf"))),
    ({"alibi": [0.5]}, TypeError, "score.alibi: expected a torch.Tensor or None, got list"),
    ({"alibi": torch.ones(4, dtype=torch.int32)}, TypeError,
     "score.alibi: expected dtype float16, bfloat16 or float32, got torch.int32"),
    ({"alibi": torch.ones(1, 4)}, ValueError, "score.alibi: expected shape (H), got (1, 4)"),
    ({"alibi": torch.ones(4, requires_grad=True)}, ValueError,
     "score.alibi: expected slopes that do not require grad, got some that do: attnlib has no gradient of "
     "them"),
    ({"sinks": torch.ones(4, dtype=torch.float64)}, TypeError,
     "score.sinks: expected dtype float16, bfloat16 or float32, got torch.float64"),
    ({"sinks": torch.ones(())}, ValueError, "score.sinks: expected shape (H), got ()"),
    ({"bias": torch.ones(2, 2).to_sparse()}, TypeError,
     "score.bias: expected a dense tensor (layout torch.strided), got torch.sparse_coo"),
    ({"relative": torch.ones(4)}, ValueError, "score.relative: expected shape (H, 2L + 1), got (4,)"),
    ({"relative": torch.ones(4, 2)}, ValueError, "score.relative: expected shape (H, 2L + 1), got (4, 2)"),
    ({"relative": torch.ones(4, 3), "bias": torch.ones(1)}, ValueError,
     "score: expected bias or relative, got both; add the one to the other"),
    ({"function": lambda s, i, j, h, b: s}, TypeError,
     "score.function: expected a @triton.jit function or None, got function"),
    ({"function": of_three}, ValueError,
     "score.function: expected a function of (s, i, j, h, b), got one of (s, i, j)"),
    ({"function": jitted, "derivative": of_three}, ValueError,
     "score.derivative: expected a function of (s, i, j, h, b), got one of (s, i, j)"),
    ({"derivative": jitted}, ValueError,
     "score.derivative: expected None without score.function, got a function"),
    ({"function": jitted, "reference": 3}, TypeError,
     "score.reference: expected a function of tensors or None, got int"),
    ({"function": jitted, "reference": Unhashed()}, TypeError,
     "score.reference: expected a function that has a hash, as its number goes by that, got an object of "
     "test_arguments.Unhashed, which has none"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "error", "message"), PARTS)
def test_wrong_parts_of_a_score_are_named(parts, error, message):
    with pytest.raises(error) as raised:
        Score(**parts)
    assert str(raised.value) == message


COMMON = [row for row in OPTIONS if not {"deterministic", "impl"} & set(row[0])]
TABLE = {
    attention_decode: (GOOD_DECODE, [*DECODE, *COMMON]),
    attention_entmax_varlen: (
        GOOD_VARLEN,
        [*TENSORS, *PACKED_TENSORS, *SEQUENCES, ({"v": zeros(8, 2, 8)}, *ONE_WIDTH[1:]), *ENTMAX],
    ),
    attention_entmax: (GOOD, [*TENSORS, *DENSE_TENSORS, ONE_WIDTH, *ENTMAX]),
    attention: (GOOD, [*TENSORS, *DENSE_TENSORS, *OWN_VALUES, *OPTIONS, *MASKS, *SCORES]),
    attention_varlen: (GOOD_VARLEN, [*TENSORS, *PACKED_TENSORS, *SEQUENCES, *OPTIONS]),
}


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


ROWS = [
    pytest.param(function, good, *row, id=f"{function.__name__}-{number}-{row[-1][:50]}")
    for function, (good, wrongs) in TABLE.items()
    for number, row in enumerate(wrongs)
]


@pytest.mark.parametrize(("function", "good", "wrong", "error", "message"), ROWS)
def test_wrong_arguments_are_named(function, good, wrong, error, message):
    impls = (None,)
    if "impl" in parameters(function):
        own = () if function in (attention_entmax, attention_entmax_varlen) else ("decode", "hopper")
        impls = (*own, "triton", "reference", None)
    for options in ({} if impl is None else {"impl": impl} for impl in impls):
        with pytest.raises(error) as raised:
            function(**{**good, **options, **wrong})
        assert str(raised.value) == message
    if function is attention:
        with pytest.raises(error) as raised:
            explain(**good | wrong)
        assert str(raised.value) == message


@pytest.mark.parametrize("function", TABLE)
def test_the_table_has_every_argument(function):
    good, wrongs = TABLE[function]
    named = {message.split(":")[0].split(".")[0] for _, _, message in wrongs}
    assert named == parameters(function)
    told = ("meta as q has", "k_cache: expected batch size 2")  # another argument than the one changed
    for wrong, _, message in wrongs:
        assert message.split(":")[0].split(".")[0] in wrong or any(text in message for text in told)
    # What the table changes is all that is wrong.
    out = function(**good)
    assert out.shape == good["q"].shape and not out.any()


def test_explain_takes_what_attention_takes():
    assert list(inspect.signature(explain).parameters) == list(inspect.signature(attention).parameters)


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        attention(*GOOD.values(), True)
    with pytest.raises(TypeError, match="takes 7 positional arguments but 8 were given"):
        attention_varlen(*GOOD_VARLEN.values(), True)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 5 were given"):
        attention_decode(*GOOD_DECODE.values())
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        attention_entmax(*GOOD.values(), 1.5)
    with pytest.raises(TypeError, match="takes 7 positional arguments but 8 were given"):
        attention_entmax_varlen(*GOOD_VARLEN.values(), 1.5)


@pytest.mark.parametrize("window", [(0, 0), [3, 2], (-1, -1), (10**30, -1), (2**31, 2**40)])
def test_windows_that_are_right(window):
    assert attention(**GOOD, window=window).shape == GOOD["q"].shape
    assert attention_varlen(**GOOD_VARLEN, window=window, causal=True).shape == GOOD_VARLEN["q"].shape


# ---------------------------------------------------------------- reading offsets from a GPU once


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU, and counts how often it was read."""

    reads = 0
    is_cuda = property(lambda self: True)

    def tolist(self):
        OnGpu.reads += 1
        return self.as_subclass(torch.Tensor).tolist()


@pytest.fixture
def reads(monkeypatch):
    """A function that gives the number of reads since its last call; no CUDA graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(offset_checks, "_known", {})

    def since():
        count, OnGpu.reads = OnGpu.reads, 0
        return count

    since()
    return since


def check(cu_seqlens, tokens=8, longest=5):
    q = torch.zeros(tokens, 1, 8)
    offset_checks.check_offsets(q, q, Varlen(cu_seqlens, cu_seqlens, longest, longest))


def on_gpu(*values):
    return offsets(*values).as_subclass(OnGpu)


def test_right_offsets_are_read_once(reads):
    cu_seqlens = on_gpu(0, 3, 8)
    for _ in range(3):
        check(cu_seqlens)
    assert reads() == 1
    with pytest.raises(ValueError, match="max_seqlen_q: expected at least 5, .*, got 4"):
        check(cu_seqlens, longest=4)
    assert reads() == 0


def test_offsets_are_read_again_once_they_have_changed(reads):
    cu_seqlens = on_gpu(0, 3, 8)
    check(cu_seqlens)
    cu_seqlens[1] = 9
    reads()
    for _ in range(2):  # a wrong tensor is never taken for a right one
        with pytest.raises(ValueError, match="never go down, got 8 after 9"):
            check(cu_seqlens)
    assert reads() == 2
    cu_seqlens[1] = 4
    check(cu_seqlens)
    with pytest.raises(ValueError, match="to end at q's number of tokens, 9, got 8"):
        check(cu_seqlens, tokens=9)
    assert reads() == 2


def test_another_tensor_in_the_same_memory_is_another(reads):
    """A batch's offsets often lie where those of the batch before lay, and no write was counted."""
    memory = offsets(0, 3, 8)
    first = memory.as_subclass(OnGpu)
    check(first)
    del first
    gc.collect()
    assert not offset_checks._known
    memory.data[1] = 9  # not counted either
    with pytest.raises(ValueError, match="never go down"):
        check(memory.as_subclass(OnGpu))


def test_inference_tensors_are_read_every_time(reads):
    with torch.inference_mode():
        cu_seqlens = on_gpu(0, 3, 8)
        for _ in range(2):
            check(cu_seqlens)
        assert reads() == 2 and not offset_checks._known


def test_nothing_is_read_during_capture(reads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check(on_gpu(0, 9, 8))
    assert reads() == 0 and not offset_checks._known
