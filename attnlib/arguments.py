"""The arguments of `attention`, `attention_varlen` and `attention_decode`, checked: an error names the
argument, what was expected and what came."""

import weakref
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from attnlib.params import Varlen

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256

LARGEST_SCALE = 1e26
"""Of `sm_scale`: 256 products of largest float16 numbers, times this, times log2(e) are finite in float32."""

_NO_STRIDES = "expected a dense tensor (layout torch.strided), got"


class Options(NamedTuple):
    """The options of `attention` and `attention_varlen`, as they were given."""

    causal: Any = False
    window: Any = None
    sm_scale: Any = None
    return_lse: Any = False
    deterministic: Any = False
    impl: Any = None


def check(q, k, v, options: Options, symbols: bool = False) -> None:
    """Arguments of `attention`. TypeError or ValueError if one is wrong. symbols: sizes may be no numbers."""
    _check_tensors(q, k, v, "4 dimensions (B, H, S, D)", 4)
    (_check_shapes if symbols else _check_shapes_once)(q.shape, k.shape, v.shape)
    _check_options(options, symbols)


def check_varlen(q, k, v, varlen: Varlen, options: Options, symbols: bool = False) -> None:
    """Arguments of `attention_varlen`, except for the values in `cu_seqlens_*`: see `check_offsets`."""
    _check_tensors(q, k, v, "3 dimensions (T, H, D)", 3)
    (_check_shapes if symbols else _check_shapes_once)(q.shape, k.shape, v.shape)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = varlen
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_offsets_form(name, offsets, q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected {len(cu_seqlens_q)} entries as cu_seqlens_q has, got {len(cu_seqlens_k)}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, bool) or not isinstance(longest, int | torch.SymInt):
            raise TypeError(f"{name}: expected an int, got {_type(longest)}")
        check_longest(name, longest, symbols)
    _check_options(options, symbols)


def check_offsets(q, k, varlen: Varlen) -> None:
    """The values in `cu_seqlens_*`: from 0, never down, to the number of tokens, in steps of at most
    `max_seqlen_*`. ValueError if not.

    Reading them from a GPU waits for everything that the GPU has to do, so the first call with a tensor does
    that, and later calls know what it held until PyTorch says that it was written to. While a CUDA graph is
    captured nothing can be read: the values are then taken on trust, and so are those of a tensor changed
    behind PyTorch's back (by a kernel of one's own, through `.data`).
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = varlen
    found_q = _longest("cu_seqlens_q", cu_seqlens_q, "q", len(q))
    if cu_seqlens_k is cu_seqlens_q and len(k) == len(q):
        found_k = found_q
    else:
        found_k = _longest("cu_seqlens_k", cu_seqlens_k, "k", len(k))
    for side, found, longest in (("q", found_q, max_seqlen_q), ("k", found_k, max_seqlen_k)):
        if found is not None and found > longest:
            raise ValueError(
                f"max_seqlen_{side}: expected at least {found}, the longest sequence in cu_seqlens_{side}, "
                f"got {longest}"
            )


def check_longest(name: str, longest: int, symbols: bool = False) -> None:
    """The value of `max_seqlen_*`. ValueError if it is wrong. symbols: it may be no number yet; the operator
    looks at it again, when the graph runs."""
    wrong = longest < 0
    if _certain(wrong) if symbols else wrong:
        raise ValueError(f"{name}: expected 0 or more, got {longest}")


# ---------------------------------------------------------------- tensors


def _check_tensors(q, k, v, rank: str, dims: int, names: tuple[str, str] = ("k", "v")) -> None:
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
    """The same one by one, with an error for each. names: of k and v."""
    for name, tensor in zip(("q", *names), (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {_type(tensor)}")
        if tensor.is_nested:
            raise TypeError(f"{name}: {_NO_STRIDES} a nested tensor; attention_varlen takes packed sequences")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: {_NO_STRIDES} {tensor.layout}")
        if tensor.dim() != dims:
            raise ValueError(f"{name}: expected {rank}, got shape {tuple(tensor.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected dtype float16, bfloat16 or float32, got {q.dtype}")
    for name, tensor in zip(names, (k, v), strict=True):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q has, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {tensor.device}")


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    """(B, H, S, D) each, or (T, H, D)."""
    *batch, heads, _, head_dim = q if len(q) == 4 else (q[1], q[0], q[2])
    if isinstance(head_dim, torch.Tensor):  # as torch.jit.trace has it, and it alone
        raise NotImplementedError(
            "attention under torch.jit.trace: not supported; use torch.export or torch.compile"
        )
    kv_heads = k[1]
    for name, shape in (("k", k), ("v", v)):
        if batch and shape[0] != batch[0]:
            raise ValueError(f"{name}: expected batch size {batch[0]} as q has, got {shape[0]}")
        if shape[-1] != head_dim:
            raise ValueError(f"{name}: expected head dimension {head_dim} as q has, got {shape[-1]}")
    if v != k:
        raise ValueError(f"v: expected shape {tuple(k)} as k has, got {tuple(v)}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"q: expected a head dimension that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}"
        )
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {kv_heads}")


_check_shapes_once = lru_cache(1024)(_check_shapes)  # lengths may change from call to call without an end


def check_tangents(*tensors: torch.Tensor) -> None:
    """RuntimeError if forward-mode differentiation looks at one of the tensors: nobody would compute the
    result's tangent, and without one the result counts as a constant."""
    find = super(torch.autograd.Function, _Refusal).apply  # without the part that is for `torch.func`
    if not torch._C._are_functorch_transforms_active():
        find(*tensors)
        return
    with enable_single_level_autograd_function():
        find(*tensors)


class _Refusal(torch.autograd.Function):
    """Autograd finds tangents where `torch.autograd.forward_ad.unpack_dual` can't: inside of an operator."""

    @staticmethod
    def forward(ctx, *tensors) -> None:
        pass

    @staticmethod
    def jvp(ctx, *tangents):
        no_forward_derivative()


def no_forward_derivative() -> NoReturn:
    """What forward-mode differentiation gets."""
    raise RuntimeError(
        "attnlib.attention has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
        "torch.autograd.forward_ad); it has a backward pass (torch.func.grad, vjp, jacrev)"
    )


# ---------------------------------------------------------------- options


def _check_options(options: Options, symbols: bool) -> None:
    causal, window, sm_scale, return_lse, deterministic, impl = options
    _check_common(causal, window, sm_scale, return_lse, symbols)
    if deterministic is not True and deterministic is not False:
        raise TypeError(f"deterministic: expected a bool, got {_type(deterministic)}")
    if impl is not None:
        if not isinstance(impl, str):
            raise TypeError(f"impl: {_IMPLEMENTATIONS}, got {_type(impl)}")
        if impl not in ("hopper", "triton", "reference"):
            raise ValueError(f"impl: {_IMPLEMENTATIONS}, got {impl!r}")


def _check_common(causal, window, sm_scale, return_lse, symbols: bool) -> None:
    if causal is not True and causal is not False:
        raise TypeError(f"causal: expected a bool, got {_type(causal)}")
    if window is not None:
        _check_window(window, symbols)
    if sm_scale is not None:
        _check_scale(sm_scale, symbols)
    if return_lse is not True and return_lse is not False:
        raise TypeError(f"return_lse: expected a bool, got {_type(return_lse)}")


_IMPLEMENTATIONS = "expected 'hopper', 'triton', 'reference' or None"


def _check_scale(sm_scale, symbols: bool) -> None:
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float | torch.SymFloat):
        raise TypeError(f"sm_scale: expected a number or None, got {_type(sm_scale)}")
    right = abs(sm_scale) <= LARGEST_SCALE
    if not (_certain(right) if symbols else right):
        raise ValueError(f"sm_scale: expected a number from -1e26 to 1e26, got {sm_scale}")


def _check_window(window, symbols: bool) -> None:
    if not isinstance(window, tuple | list):
        raise TypeError(f"window: expected None or a pair of ints (left, right), got {_type(window)}")
    if len(window) != 2:
        raise ValueError(f"window: expected a pair (left, right), got {len(window)} values")
    for bound in window:
        if isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt):
            raise TypeError(f"window: expected a pair of ints (left, right), got {_type(bound)} in it")
        right = bound >= -1
        if not (_certain(right) if symbols else right):
            raise ValueError(f"window: expected ints from 0 on, or -1 for no bound, got {tuple(window)}")


# ---------------------------------------------------------------- what messages and compilers need


def _type(value) -> str:
    """A type as one writes it: "int", "numpy.bool", "torch.Tensor"."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _certain(condition) -> bool:
    """Whether a compiler knows that the condition holds. It does not where the graph itself computes a
    number, as by `item()`."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


# ---------------------------------------------------------------- offsets of packed sequences


def _check_offsets_form(name: str, offsets, device: torch.device) -> None:
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_type(offsets)}")
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype int32, got {offsets.dtype}")
    if offsets.layout is not torch.strided:
        raise TypeError(f"{name}: {_NO_STRIDES} {offsets.layout}")
    if offsets.dim() != 1 or len(offsets) < 2:
        raise ValueError(
            f"{name}: expected 1 dimension (B + 1) with B at least 1, got shape {tuple(offsets.shape)}"
        )
    if offsets.device != device:
        raise ValueError(f"{name}: expected device {device} as q has, got {offsets.device}")


_known: dict[int, tuple[weakref.ref, int, int, int]] = {}
"""id of a tensor -> (the tensor, its version, tokens, longest sequence) of offsets on a GPU that were right.
An address in memory would not do as a key: it may be that of the next batch's tensor."""


def _longest(name: str, offsets: torch.Tensor, side: str, tokens: int) -> int | None:
    """Tokens of the longest sequence; None if it can't be known. ValueError if the offsets are wrong."""
    if not offsets.is_cuda:
        return _read_offsets(name, offsets, side, tokens)
    if torch.cuda.is_current_stream_capturing():
        return None
    if offsets.is_inference():  # its writes are not counted
        return _read_offsets(name, offsets, side, tokens)
    known, key, version = None, id(offsets), offsets._version
    found = _known.get(key)
    if found is not None and found[0]() is offsets and found[1:3] == (version, tokens):
        known = found[3]
    if known is None:
        known = _read_offsets(name, offsets, side, tokens)
        _known[key] = weakref.ref(offsets, partial(_forget, key)), version, tokens, known
    return known


def _forget(key: int, reference: weakref.ref) -> None:
    found = _known.get(key)
    if found is not None and found[0] is reference:  # not that of a later tensor with the same id
        del _known[key]


def _read_offsets(name: str, offsets: torch.Tensor, side: str, tokens: int) -> int:
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    longest = 0
    for number, (begin, end) in enumerate(zip(values, values[1:], strict=False), 1):
        if end < begin:
            raise ValueError(
                f"{name}: expected values that never go down, got {end} after {begin} at index {number}"
            )
        longest = max(longest, end - begin)
    if values[-1] != tokens:
        raise ValueError(f"{name}: expected to end at {side}'s number of tokens, {tokens}, got {values[-1]}")
    return longest


# ---------------------------------------------------------------- decoding

MOST_QUERIES = 16
SMALLEST_PAGE = 16
SPLITS = "none", "fixed", "stream_k"


class DecodeOptions(NamedTuple):
    """The options of `attention_decode`, as they were given."""

    lengths: Any = None
    page_table: Any = None
    causal: Any = True
    window: Any = None
    sm_scale: Any = None
    return_lse: Any = False
    split: Any = None


def check_decode(q, k, v, options: DecodeOptions) -> None:
    """Arguments of `attention_decode`. TypeError or ValueError if one is wrong. The values of lengths and
    pages are looked at where that waits for nobody: on a CPU."""
    lengths, table, causal, window, sm_scale, return_lse, split = options
    _check_tensors(q, k, v, "4 dimensions (B, H, S, D)", 4, ("k_cache", "v_cache"))
    _check_decode_shapes(q.shape, k.shape, v.shape, table is not None)
    if table is not None:
        _check_integers("page_table", table, q, "2 dimensions (B, pages)", 2)
    if lengths is not None:
        _check_integers("lengths", lengths, q, "1 dimension (B)", 1)
    _check_common(causal, window, sm_scale, return_lse, False)
    _check_split(split)
    if q.device.type == "cpu":
        _check_decode_values(lengths, table, k.shape)


@lru_cache(1024)
def _check_decode_shapes(q: torch.Size, k: torch.Size, v: torch.Size, paged: bool) -> None:
    (batch, heads, queries, head_dim), (first, kv_heads, size, width) = q, k
    if not 1 <= queries <= MOST_QUERIES:
        raise ValueError(f"q: expected 1 to {MOST_QUERIES} queries of each sequence, got {queries}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"q: expected a head dimension that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}"
        )
    if not paged and first != batch:
        raise ValueError(f"k_cache: expected batch size {batch} as q has, got {first}")
    if width != head_dim:
        raise ValueError(f"k_cache: expected head dimension {head_dim} as q has, got {width}")
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"k_cache: expected a number of heads that divides q's {heads}, got {kv_heads}")
    if paged and (size < SMALLEST_PAGE or size & (size - 1)):
        raise ValueError(f"k_cache: expected pages of 16, 32, 64 ... keys (dimension 2), got {size}")
    if v != k:
        raise ValueError(f"v_cache: expected shape {tuple(k)} as k_cache has, got {tuple(v)}")


def _check_integers(name: str, given, q: torch.Tensor, rank: str, dims: int) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor or None, got {_type(given)}")
    if given.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype int32, got {given.dtype}")
    if given.layout is not torch.strided:
        raise TypeError(f"{name}: {_NO_STRIDES} {given.layout}")
    if given.dim() != dims:
        raise ValueError(f"{name}: expected {rank}, got shape {tuple(given.shape)}")
    if len(given) != len(q):
        raise ValueError(f"{name}: expected batch size {len(q)} as q has, got {len(given)}")
    if given.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q has, got {given.device}")


def _check_split(split) -> None:
    expected = "expected 'none', 'fixed', 'stream_k', a number of splits or None"
    if split is None:
        return
    if isinstance(split, bool) or not isinstance(split, str | int):
        raise TypeError(f"split: {expected}, got {_type(split)}")
    if split not in SPLITS and (isinstance(split, str) or split < 1):
        raise ValueError(f"split: {expected}, got {split!r}")


def _check_decode_values(lengths, table, cache: torch.Size) -> None:
    room = cache[2] if table is None else table.shape[1] * cache[2]
    counts = None if lengths is None else lengths.tolist()
    for count in counts or ():
        if not 0 <= count <= room:
            raise ValueError(f"lengths: expected 0 to {room}, which the cache has room for, got {count}")
    if table is None:
        return
    for row, pages in enumerate(table.tolist()):
        used = len(pages) if counts is None else -(-counts[row] // cache[2])
        for page in pages[:used]:
            if not 0 <= page < cache[0]:
                raise ValueError(f"page_table: expected pages from 0 to {cache[0] - 1}, got {page}")
