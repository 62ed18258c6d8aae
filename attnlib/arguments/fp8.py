"""The arguments of `quantize_fp8`, `attention_fp8` and `attention_fp8_varlen`, checked."""

from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import (
    DTYPES,
    check_bool,
    check_choice,
    check_common,
    check_dense,
    check_groups,
    check_head_dim,
    check_impl,
    type_name,
)  # fmt: skip
from attnlib.arguments.offsets import Found, check_longest, check_offsets_form, check_varlen_form
from attnlib.kernels.common.descriptors import describable
from attnlib.kernels.common.fp8 import Fp8, Recipe
from attnlib.params import Varlen

ROLES = "q", "k", "v"
SCALINGS = "block", "head", "tensor"
IMPLEMENTATIONS = "hopper", "reference"


class Options(NamedTuple):
    """The options of `attention_fp8`, as they were given."""

    causal: Any = False
    window: Any = None
    sm_scale: Any = None
    return_lse: Any = False
    scaling: Any = "block"
    rotate: Any = True
    center: Any = True
    out_dtype: Any = None
    impl: Any = None


def check_quantize(x, role, recipe: Recipe, cu_seqlens, max_seqlen) -> None:
    """Arguments of `quantize_fp8`, except for the values in `cu_seqlens`. TypeError or ValueError if one is
    wrong."""
    check_choice("role", role, ROLES)
    _check_recipe(*recipe)
    if cu_seqlens is None and max_seqlen is not None:
        raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {max_seqlen!r}")
    _check_tensor("x", x, cu_seqlens is not None)
    if cu_seqlens is not None:
        check_offsets_form("cu_seqlens", cu_seqlens, x.device, "x")
        check_longest("max_seqlen", max_seqlen)


def check_fp8(q, k, v, options: Options, varlen: Varlen | None = None) -> None:
    """Arguments of `attention_fp8`, with `varlen` of `attention_fp8_varlen`, except for the values in
    `cu_seqlens_*`. TypeError or ValueError if one is wrong."""
    varlen_call = varlen is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Fp8):
            _check_prepared(name, x, varlen_call)
        else:
            _check_tensor(name, x, varlen_call, "a torch.Tensor or an Fp8")
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {x.device}")
    _check_dtypes(q, k, v)
    if isinstance(q, Fp8) and isinstance(k, Fp8) and q.rotated != k.rotated:
        words = {True: "rotated", False: "not rotated"}
        raise ValueError(f"k: expected to be {words[q.rotated]} as q is, got it {words[k.rotated]}")
    _check_shapes(q.shape, k.shape, v.shape)
    if varlen_call:
        _check_varlen(q, k, v, varlen)
    _check_options(options)


def _check_prepared(name: str, x: Fp8, varlen_call: bool) -> None:
    if x.role != name:
        raise ValueError(f"{name}: expected an Fp8 of role {name!r}, got role {x.role!r}")
    if x.varlen != varlen_call:
        other = "attention_fp8 takes batches" if varlen_call else "attention_fp8_varlen takes them"
        kinds = {True: "varlen sequences", False: "a batch"}
        raise ValueError(f"{name}: expected an Fp8 of {kinds[varlen_call]}, got {kinds[x.varlen]}; {other}")
    _check_parts(name, x)
    _check_mean(name, x)


def _check_parts(name: str, x: Fp8) -> None:
    """The data and the scales of an `Fp8`, which its user may have replaced: kernels read as much of them as
    the other attributes say."""
    dims = 3 if x.varlen else 4
    parts = ("data", x.data, torch.float8_e4m3fn), ("scale", x.scale, torch.float32)
    for part, tensor, dtype in parts:
        _check_part(f"{name}.{part}", tensor, dtype, x)
    if x.data.dim() != dims:
        raise ValueError(f"{name}.data: expected {dims} dimensions, got shape {tuple(x.data.shape)}")
    for (part, tensor, _), shape in zip(parts, x.shapes, strict=True):
        _check_shape(f"{name}.{part}", tensor, shape)
    if x.data.numel() and not describable(x.data):
        raise ValueError(
            f"{name}.data: expected a contiguous last dimension, other strides and the address in multiples "
            f"of 16 bytes, got strides {x.data.stride()}"
        )


def _check_mean(name: str, x: Fp8) -> None:
    """The mean of an `Fp8`, which its user may have replaced."""
    mean, name = x.mean, f"{name}.mean"
    if mean is None:
        return
    if x.role != "v":
        raise ValueError(f"{name}: expected None, as only values are centered, got {type_name(mean)}")
    _check_part(name, mean, torch.float32, x, "None or a torch.Tensor")
    _check_shape(name, mean, (x.sequences, x.heads, x.width))
    if not mean.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {mean.stride()}")
    past = mean.data_ptr() % 16
    if past:
        raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got one {past} past")


def _check_part(name: str, tensor, dtype: torch.dtype, x: Fp8, expected: str = "a torch.Tensor") -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type_name(tensor)}")
    check_dense(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    if tensor.device != x.device:  # the data's, which is checked first
        raise ValueError(f"{name}: expected device {x.device} as the data has, got {tensor.device}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


def _check_tensor(name: str, x, varlen_call: bool, expected: str = "a torch.Tensor") -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type_name(x)}")
    check_dense(name, x)
    if x.dim() != (3 if varlen_call else 4):
        dims = "3 dimensions (T, H, D)" if varlen_call else "4 dimensions (B, H, S, D)"
        raise ValueError(f"{name}: expected {dims}, got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype float16, bfloat16 or float32, got {x.dtype}")
    check_head_dim(name, x.shape[-1])


def _check_dtypes(q, k, v) -> None:
    """The dtypes of tensors; a prepared operand may have been quantized from any."""
    tensors = [(name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, Fp8)]
    for name, x in tensors[1:]:
        first, other = tensors[0]
        if x.dtype != other.dtype:
            raise TypeError(f"{name}: expected dtype {other.dtype} as {first} has, got {x.dtype}")


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    for name, shape in (("k", k), ("v", v)):
        if len(q) == 4 and shape[0] != q[0]:
            raise ValueError(f"{name}: expected batch size {q[0]} as q has, got {shape[0]}")
        if shape[-1] != q[-1]:
            raise ValueError(f"{name}: expected head dimension {q[-1]} as q has, got {shape[-1]}")
    if tuple(v) != tuple(k):
        raise ValueError(f"v: expected shape {tuple(k)} as k has, got {tuple(v)}")
    check_groups("k", q[1], k[1])


def _check_varlen(q, k, v, varlen: Varlen) -> None:
    check_varlen_form(varlen, q.device)
    of_q, of_k = varlen.cu_seqlens_q, varlen.cu_seqlens_k
    sides = ("q", q, "q", of_q), ("k", k, "k", of_k), ("v", v, "k", of_k)
    for name, x, side, offsets in sides:
        # Equal values in another tensor would do, but comparing them would wait for the GPU.
        if isinstance(x, Fp8) and x.cu_seqlens is not offsets:
            raise ValueError(
                f"{name}: expected an Fp8 that was quantized with the tensor cu_seqlens_{side} itself, got "
                "one with another tensor"
            )


def check_offsets_since(q, k, v, found_q: Found | None, found_k: Found | None) -> None:
    """That `cu_seqlens_*` hold what they held when prepared operands were quantized. found_q, found_k: what
    they hold now; None if it can't be known."""
    for name, x, side, found in (("q", q, "q", found_q), ("k", k, "k", found_k), ("v", v, "k", found_k)):
        if found is None or not isinstance(x, Fp8) or x.fingerprint in (None, found.fingerprint):
            continue
        raise ValueError(
            f"{name}: expected an Fp8 that was quantized with the values that are in cu_seqlens_{side}, got "
            "one with others: the tensor was changed since"
        )


# ---------------------------------------------------------------- options


def _check_options(options: Options) -> None:
    causal, window, sm_scale, return_lse, scaling, rotate, center, out_dtype, impl = options
    check_common(causal, window, sm_scale, return_lse, False)
    _check_recipe(scaling, rotate, center)
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype: expected None, float16, bfloat16 or float32, got {_shown(out_dtype)}")
    check_impl(impl, IMPLEMENTATIONS)


def _check_recipe(scaling, rotate, center) -> None:
    check_choice("scaling", scaling, SCALINGS)
    check_bool("rotate", rotate)
    check_bool("center", center)


def _shown(value) -> str:
    return str(value) if isinstance(value, torch.dtype) else type_name(value)
