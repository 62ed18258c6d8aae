"""What the checks of all functions share: tensors, scale, window, and how an error names a type."""

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256

LARGEST_SCALE = 1e26
"""Of `sm_scale`: 256 products of largest float16 numbers, times this, times log2(e) are finite in float32."""

_DENSE = "expected a dense tensor (layout torch.strided), got"


# ---------------------------------------------------------------- tensors


def check_tensors(q, k, v, rank: str, dims: int, names: tuple[str, str] = ("k", "v")) -> None:
    tensor = torch.Tensor
    if type(q) is tensor and type(k) is tensor and type(v) is tensor:
        try:  # nearly every call ends here; a nested tensor has no shape
            dtype, device, strided = q.dtype, q.device, torch.strided
            if (
                len(q.shape) == len(k.shape) == len(v.shape) == dims
                and dtype in DTYPES
                and k.dtype is dtype
                and v.dtype is dtype
                and k.device == device == v.device
                and q.layout is strided
                and k.layout is strided
                and v.layout is strided
            ):
                return
        except RuntimeError:
            pass
    _find_what_is_wrong(q, k, v, rank, dims, names)


def _find_what_is_wrong(q, k, v, rank: str, dims: int, names: tuple[str, str]) -> None:
    """Check the same one by one, and raise the error of what is wrong. names: of k and v."""
    check_forms({"q": q, names[0]: k, names[1]: v}, rank, dims)
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected dtype float16, bfloat16 or float32, got {q.dtype}")
    for name, tensor in zip(names, (k, v), strict=True):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q has, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {tensor.device}")


def check_dense(name: str, tensor: torch.Tensor, more: str = "") -> None:
    """TypeError for a tensor without strides; more: what is said of a nested one besides."""
    if tensor.is_nested:
        raise TypeError(f"{name}: {_DENSE} a nested tensor{more}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: {_DENSE} {tensor.layout}")


def check_forms(tensors: dict, rank: str, dims: int) -> None:
    """Whether all are dense tensors with so many dimensions; by their names."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(tensor)}")
        check_dense(name, tensor, "; attention_varlen takes sequences of different lengths")
        if tensor.dim() != dims:
            raise ValueError(f"{name}: expected {rank}, got shape {tuple(tensor.shape)}")


def check_int32(name: str, given, expected: str = "a torch.Tensor") -> None:
    """Its type, dtype and layout. expected: what the argument may be."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type_name(given)}")
    if given.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype int32, got {given.dtype}")
    check_dense(name, given)


# ---------------------------------------------------------------- options


def check_common(causal, window, sm_scale, return_lse, symbols: bool) -> None:
    """The options that all functions have."""
    check_bool("causal", causal)
    if window is not None:
        check_window(window, symbols)
    if sm_scale is not None:
        check_scale(sm_scale, symbols)
    check_bool("return_lse", return_lse)


def check_scale(sm_scale, symbols: bool) -> None:
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float | torch.SymFloat):
        raise TypeError(f"sm_scale: expected a number or None, got {type_name(sm_scale)}")
    right = abs(sm_scale) <= LARGEST_SCALE
    if not (certain(right) if symbols else right):
        raise ValueError(f"sm_scale: expected a number from -1e26 to 1e26, got {sm_scale}")


def check_window(window, symbols: bool) -> None:
    if not isinstance(window, tuple | list):
        raise TypeError(f"window: expected None or a pair of ints (left, right), got {type_name(window)}")
    if len(window) != 2:
        raise ValueError(f"window: expected a pair (left, right), got {len(window)} values")
    for bound in window:
        if isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt):
            raise TypeError(f"window: expected a pair of ints (left, right), got {type_name(bound)} in it")
        right = bound >= -1
        if not (certain(right) if symbols else right):
            raise ValueError(f"window: expected ints from 0 on, or -1 for no bound, got {tuple(window)}")


def check_bool(name: str, value) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name}: expected a bool, got {type_name(value)}")


def check_int(name: str, value, least: int, most: int | None = None, expected: str | None = None) -> None:
    """That `value` is an int from `least` on, or to `most`. expected: what it is, where that says more."""
    if most is not None and expected is None:
        expected = f"an int from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected {expected or 'an int'}, got {type_name(value)}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}: expected {expected or f'{least} or more'}, got {value}")


def check_choice(name: str, value, choices: tuple[str, ...], more: str = "") -> None:
    """That `value` is one of some words. more: what else it may be, for the message."""
    words = [repr(choice) for choice in choices]
    expected = ", ".join(words) + more if more else ", ".join(words[:-1]) + " or " + words[-1]
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected {expected}, got {type_name(value)}")
    if value not in choices:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_impl(impl, families: tuple[str, ...]) -> None:
    """That `impl` names one of these, or is None: the library chooses."""
    if impl is not None:
        check_choice("impl", impl, families, " or None")


def check_head_dim(name: str, head_dim: int, most: int = MAX_HEAD_DIM) -> None:
    if not 8 <= head_dim <= most or head_dim % 8:
        raise ValueError(
            f"{name}: expected a head dimension that is a multiple of 8 from 8 to {most}, got {head_dim}"
        )


def check_groups(name: str, heads: int, kv_heads: int) -> None:
    """That each of the key heads, in the argument with this name, is shared by as many query heads."""
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"{name}: expected a number of heads that divides q's {heads}, got {kv_heads}")


# ---------------------------------------------------------------- what messages and compilers need


def refuse_trace(function: str, size) -> None:
    """NotImplementedError if a size of a tensor is a tensor, as `torch.jit.trace` has it, and it alone. It
    sees no launch, and takes for constants the numbers that a call reads from tensors."""
    if isinstance(size, torch.Tensor):
        raise NotImplementedError(
            f"{function} under torch.jit.trace: not supported; use torch.export or torch.compile"
        )


def type_name(value) -> str:
    """A type as one writes it: "int", "numpy.bool", "torch.Tensor"."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def certain(condition) -> bool:
    """Whether a compiler knows that the condition holds. It does not where the graph itself computes a
    number, as by `item()`."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)
