"""The implementations that ours is measured against, behind one interface.

    peer = PEERS["cudnn"]
    reason = peer.available()                      # None, or why it can't be used here
    call = peer.make(q, k, v, causal, sm_scale)    # q, k, v: (B, H, S, D), contiguous
    out = call()                                   # (B, H, S, D)

Every peer gets its inputs in the layout it was written for. FA3 reads (B, S, H, D): `make` copies q, k and v
into it, so that no copy is timed, and the output is returned as a (B, H, S, D) view. The others read (B, H,
S, D) as it is.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib.bench import names
from attnlib.params import Varlen

Tensor = torch.Tensor
Call = Callable[[], Tensor]
GradientCall = Callable[[], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Peer:
    """One implementation: `name` in records, `about` for readers, `available()` and `make(q, k, v, causal,
    sm_scale)`.

    `available` returns None, or the reason why the peer can't be used on this machine. `make` may compile and
    copy; what it returns is what is timed. It raises ValueError for a shape that the peer does not support.
    """

    name: str
    about: str
    available: Callable[[], str | None]
    make: Callable[[Tensor, Tensor, Tensor, bool, float], Call]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, bool, float], GradientCall] | None = None

    @property
    def label(self) -> str:
        """Short name in tables and charts."""
        return names.PEERS[self.name]

    def make_backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float
    ) -> GradientCall:
        """What computes (dq, dk, dv) once the forward has run, as `make` for the forward: through PyTorch's
        autograd, unless the peer has a function of its own for it."""
        if self.gradient is not None:
            return self.gradient(d_out, q, k, v, causal, sm_scale)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return through_autograd(self.make(q, k, v, causal, sm_scale)(), d_out, q, k, v)


def through_autograd(out: Tensor, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> GradientCall:
    """The backward of `out`, which autograd knows how to differentiate; it may be called again and again."""
    return lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA GPU"


def _no_cudnn() -> str | None:
    return _no_gpu() or (None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN")


# SDPA: one backend named, because the default choice depends on the PyTorch version and is FA2 even on
# Hopper.


def _sdpa(backend: SDPBackend) -> Callable[..., Call]:
    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Call:
        if causal and q.shape[2] != k.shape[2]:
            raise ValueError("SDPA's is_causal is top-left: expected Sq == Sk when causal")
        grouped = q.shape[1] != k.shape[1]

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, scale=sm_scale, enable_gqa=grouped
                )

        return call

    return make


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Call:
    """FlexAttention, compiled for this shape, with a block mask when causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shift = k.shape[2] - q.shape[2]

    def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row + shift >= key

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], q.device) if causal else None
    # After 8 shapes torch.compile stops compiling a function and runs it eagerly, without a warning that a
    # benchmark would notice. A reset makes every shape the first one.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    grouped = q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, block_mask=mask, scale=sm_scale, enable_gqa=grouped)


# FA3: $ATTNLIB_FA3 when it is set, else the flash_attn_interface package, else the build inside xformers.


class _FA3Operators:
    """FA3's operators in a library, for tensors (B, S, H, D), or (T, H, D) of varlen sequences."""

    window, deterministic = (-1, -1), False
    offsets: tuple[Any, ...] = (None, None)
    longest: tuple[Any, ...] = (None, None)

    def __init__(self, library: Path) -> None:
        for runtime in sorted(library.parent.glob("libcudart.so.12*")):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)  # builds link to CUDA 12, PyTorch may bring 13
        torch.ops.load_library(str(library))
        self.operators = torch.ops.flash_attn_3

    def asked(self, window: tuple[int, int], deterministic: bool, varlen: Varlen | None) -> _FA3Operators:
        """The same for queries that see (left, right) keys beside their own, -1: all; of these sequences."""
        other = copy.copy(self)
        other.window, other.deterministic = window, deterministic
        if varlen is not None:
            other.offsets, other.longest = varlen[:2], varlen[2:]
        return other

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> list[Tensor]:
        """[out, LSE]."""
        # Positional, because builds differ in which arguments have defaults. Empty are: new keys and values,
        # q_v, an output buffer; offsets of new keys and used lengths; paging, rotary embedding, FP8 scales.
        # After the mask: window (left, right), attention chunk, softcap, interleaved rotary, scheduler
        # metadata, number of splits, packed GQA, SMs left free.
        return self.operators.fwd(
            q, k, v, *[None] * 4, *self.offsets, *[None] * 3, *self.longest, *[None] * 9, sm_scale, causal,
            *self.window, 0, 0.0, True, None, 1, None, 0,
        )[:2]  # fmt: skip

    def decode(self, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, lengths: Tensor | None) -> Tensor:
        """One query for each sequence, to a cache of which `lengths` keys are used (None: all), split as FA3
        chooses."""
        # As above, without offsets; `lengths` are the used ones, and 0 splits is FA3's own choice.
        return self.operators.fwd(
            q, k, v, *[None] * 8, lengths, *[None] * 11, sm_scale, False, -1, -1, 0, 0.0, True,
            None, 0, None, 0,
        )[0]  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
        return self.forward(q, k, v, causal, sm_scale)[0]

    def backward(
        self, d_out: Tensor, saved: tuple[Tensor, ...], causal: bool, sm_scale: float
    ) -> GradientCall:
        """Runs the forward of saved, q, k and v; what it returns runs the backward alone."""
        q, k, v = saved
        out, lse = self.forward(q, k, v, causal, sm_scale)

        def call() -> tuple[Tensor, Tensor, Tensor]:
            gradients = tuple(torch.empty_like(x) for x in (q, k, v))
            # Empty are used lengths. After the mask: window, softcap, deterministic, SMs left free.
            self.operators.bwd(
                d_out, q, k, v, out, lse, *gradients, *self.offsets, None, None, *self.longest, sm_scale,
                causal, *self.window, 0.0, self.deterministic, 0,
            )  # fmt: skip
            return gradients

        return call


@functools.cache
def _fa3_forward() -> Callable[..., Tensor]:
    """FA3 as f(q, k, v, causal, sm_scale) on (B, S, H, D); ImportError says why it is not there."""
    named = os.environ.get("ATTNLIB_FA3")
    if named:
        path = Path(named)
        library = path if path.is_file() else path / "_C.so"
        if not library.is_file():
            raise ImportError(f"ATTNLIB_FA3={named}: expected a folder with _C.so, or the path of a .so")
        return _FA3Operators(library)
    if importlib.util.find_spec("flash_attn_interface"):
        from flash_attn_interface import flash_attn_func

        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, **options) -> Tensor:
            out = flash_attn_func(q, k, v, softmax_scale=sm_scale, causal=causal, **options)
            return out[0] if isinstance(out, tuple) else out

        return forward
    xformers = importlib.util.find_spec("xformers")
    for folder in (xformers.submodule_search_locations or []) if xformers else []:
        for library in sorted(Path(folder, "flash_attn_3").glob("_C*.so")):
            return _FA3Operators(library)
    raise ImportError("no flash_attn_interface package, no xformers build, and ATTNLIB_FA3 is not set")


def fa3_decode() -> Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]:
    """FA3 for decoding, as f(q, k_cache, v_cache, sm_scale, lengths) on (B, S, H, D); ImportError says why it
    is not there."""
    forward = _fa3_forward()
    if isinstance(forward, _FA3Operators):
        return forward.decode
    from flash_attn_interface import flash_attn_with_kvcache

    def decode(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, lengths: Tensor | None) -> Tensor:
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, softmax_scale=sm_scale)
        return out[0] if isinstance(out, tuple) else out

    return decode


def _no_fa3() -> str | None:
    try:
        _fa3_forward()
    except Exception as error:  # a library for another PyTorch or CUDA fails in ways of its own
        return brief(error)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    return _no_gpu()


def _no_varlen_fa3() -> str | None:
    reason = _no_fa3()
    if reason is None and not isinstance(_fa3_forward(), _FA3Operators):
        reason = "takes varlen sequences by its library (ATTNLIB_FA3), not by its package"
    return reason


def _fa3_asked(
    window: tuple[int, int] | None, deterministic: bool, varlen: Varlen | None
) -> Callable[..., Tensor]:
    """`_fa3_forward`, with what `fa3` was asked for."""
    forward = _fa3_forward()
    if isinstance(forward, _FA3Operators):
        return forward.asked(window or (-1, -1), deterministic, varlen)
    if varlen is not None:
        raise ValueError("varlen: expected None without the library (ATTNLIB_FA3), got sequences")
    options = {"window_size": window} if window else {}
    return functools.partial(forward, **options | ({"deterministic": True} if deterministic else {}))


def fa3(
    window: tuple[int, int] | None = None, deterministic: bool = False, varlen: Varlen | None = None
) -> Peer:
    """FlashAttention-3, for calls with this window (left, right) when one is given. `deterministic`: its
    gradients have the same bits in every run. `varlen`: tensors are (T, H, D), of these sequences."""

    def turned(x: Tensor) -> Tensor:  # to FA3's order of dimensions and back
        return x.transpose(1, 2) if varlen is None else x

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Call:
        forward = _fa3_asked(window, deterministic, varlen)
        q, k, v = (turned(x).contiguous() for x in (q, k, v))
        return lambda: turned(forward(q, k, v, causal, sm_scale))

    def gradient(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float
    ) -> GradientCall:
        forward = _fa3_asked(window, deterministic, varlen)
        d_out, q, k, v = (turned(x).contiguous() for x in (d_out, q, k, v))
        if isinstance(forward, _FA3Operators):
            backward = forward.backward(d_out, (q, k, v), causal, sm_scale)
        else:  # the package knows autograd
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            backward = through_autograd(forward(q, k, v, causal, sm_scale), d_out, q, k, v)
        return lambda: tuple(map(turned, backward()))

    missing = _no_fa3 if varlen is None else _no_varlen_fa3
    return Peer("fa3", "FlashAttention-3, its own CUDA build", missing, make, gradient)


# Triton's own tutorial 06: $ATTNLIB_TUTORIAL is its file. No copy of it is kept here.


@functools.cache
def _tutorial_module() -> ModuleType:
    """The tutorial as a module; ImportError with the reason when it is not there."""
    named = os.environ.get("ATTNLIB_TUTORIAL")
    if not named:
        raise ImportError("ATTNLIB_TUTORIAL is not set (the path of Triton's 06-fused-attention.py)")
    if not Path(named).is_file():
        raise ImportError(f"ATTNLIB_TUTORIAL={named}: no such file")
    spec = importlib.util.spec_from_file_location("attnlib_peer_tutorial", named)
    if spec is None or spec.loader is None:
        raise ImportError(f"ATTNLIB_TUTORIAL={named}: expected a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # triton looks a kernel's module up by name
    spec.loader.exec_module(module)
    return module


def _no_tutorial() -> str | None:
    if not os.environ.get("ATTNLIB_TUTORIAL"):
        return "ATTNLIB_TUTORIAL is not set (the path of Triton's 06-fused-attention.py)"
    if reason := _no_gpu():  # its import already asks for a driver
        return reason
    try:
        _tutorial_module()
    except Exception as error:
        return brief(error)
    return None


def _tutorial(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Call:
    """The tutorial's forward pass, autotuned in the first call, without warp specialization."""
    module = _tutorial_module()
    if q.shape != k.shape:
        raise ValueError(f"k: the tutorial expects the shape of q {tuple(q.shape)}, got {tuple(k.shape)}")
    return lambda: module.attention(q, k, v, causal, sm_scale, False)


def brief(error: BaseException) -> str:
    """An exception's message on one line, files without their folders; of a long one the beginning and the
    end, which has the point."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(?<![\w:/])/(?:[\w.+-]+/)+", "", text)
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-155:]}"


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "math",
            "PyTorch SDPA, math backend: the whole score matrix in memory",
            _no_gpu,
            _sdpa(SDPBackend.MATH),
        ),
        Peer(
            "flash",
            "PyTorch SDPA, flash backend: FlashAttention-2",
            _no_gpu,
            _sdpa(SDPBackend.FLASH_ATTENTION),
        ),
        Peer("cudnn", "PyTorch SDPA, cuDNN backend", _no_cudnn, _sdpa(SDPBackend.CUDNN_ATTENTION)),
        Peer("flex", "PyTorch FlexAttention, compiled for each shape", _no_gpu, _flex),
            fa3(),
        Peer("tutorial", "Triton's tutorial 06, autotuned", _no_tutorial, _tutorial),
    )
}
