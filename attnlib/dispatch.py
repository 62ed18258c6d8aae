"""Which kernel runs a call, and the call: forward and backward, on arguments that were checked."""

import math

import torch
from torch.autograd import forward_ad

from attnlib import launch, launch_backward, launch_hopper, launch_hopper_backward
from attnlib.arguments import Implementation, check_tangents
from attnlib.band import Band, Packed
from attnlib.configs import tile_width


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    sm_scale: float,
    return_lse: bool,
    packed: Packed | None = None,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out, like q; and the LSE, (B, H, Sq) or (H, Tq) float32, which may be None unless asked for."""
    if forward_ad._current_level >= 0:  # no function of PyTorch says so in as little time
        check_tangents(q, k, v)
    if q.is_neg() or k.is_neg() or v.is_neg():  # a sign that is not in memory, where kernels read
        q, k, v = (x.resolve_neg() for x in (q, k, v))
    kernel, _ = choose(q, k, v, impl, packed)
    if band.left is not None or band.right:
        band = tight(band, q, k, packed)
    if nothing_to_do(q, k):  # no row, or none with anything to attend to
        out = torch.zeros_like(q)
        lse = torch.full(lse_shape(q), -math.inf, dtype=torch.float32, device=q.device)
        return out, lse
    if kernel == "hopper":
        return launch_hopper.forward(q, k, v, band, sm_scale, return_lse, packed)
    if kernel == "triton":
        return launch.forward(q, k, v, band, sm_scale, return_lse, packed)
    from attnlib.reference import attention_fp64, attention_varlen_fp64

    if packed is None:
        out, lse = attention_fp64(q, k, v, sm_scale=sm_scale, **_as_options(band))
    else:
        out, lse = attention_varlen_fp64(q, k, v, *packed[:2], sm_scale=sm_scale, **_as_options(band))
    return torch.empty_like(q).copy_(out), lse.float()


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    band: Band,
    sm_scale: float,
    packed: Packed | None = None,
    deterministic: bool = False,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their dtype, from what `forward` gave and the gradient of `out`."""
    if forward_ad._current_level >= 0:
        check_tangents(d_out, q, k, v)
    d_out, q, k, v, out = (x.resolve_neg() for x in (d_out, q, k, v, out))
    if nothing_to_do(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if d_out.dtype != q.dtype:
        d_out = d_out.to(q.dtype)
    if band.left is not None or band.right:
        band = tight(band, q, k, packed)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    kernel, _ = choose_backward(q, k, v, impl, packed, deterministic)
    if kernel == "reference":
        return _reference_gradients(d_out, q, k, v, band, sm_scale, packed)
    launcher = launch_hopper_backward if kernel == "hopper" else launch_backward
    return launcher.backward(d_out, q, k, v, out, lse, band, sm_scale, packed, deterministic)


def tight(band: Band, q: torch.Tensor, k: torch.Tensor, packed: Packed | None) -> Band:
    """The band without bounds that no row reaches: no mask for them, and no sum with them beyond an int32."""
    left, right = band
    rows, keys = (q.shape[2], k.shape[2]) if packed is None else packed[2:]
    return Band(
        None if left is None or left >= keys - 1 else left,
        None if right is None or right >= rows - 1 else right,
    )


def nothing_to_do(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether there is no query, or no key for any."""
    return q.numel() == 0 or k.numel() == 0


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """(B, H, Sq), or (H, Tq) of packed sequences."""
    return q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])


# ---------------------------------------------------------------- the choice


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    impl: Implementation | None,
    packed: Packed | None = None,
) -> tuple[Implementation, str]:
    """(what runs a call with valid arguments, why). ValueError if that is asked for and can't."""
    if impl not in (None, "hopper"):
        return _without_hopper(q, impl, None)
    lacks = launch_hopper.unsupported(q, k, v)
    if impl == "hopper":
        if lacks is not None:
            raise ValueError(f"impl: 'hopper' {lacks}")
        return impl, "asked for"
    lacks = lacks or _short(q, k, packed, SHORT_FORWARD)
    return ("hopper", _HOPPER_FITS) if lacks is None else _without_hopper(q, impl, lacks)


SHORT_FORWARD, SHORT_BACKWARD = {64: 64, 128: 64}, {64: 256, 128: 128}
"""Width of a tile -> sequences of up to so many rows and keys run in the portable kernels: a program of the
Hopper kernels has an SM for itself, and little to do between its beginning and its end. The times are in
docs/lab/hopper.md and docs/lab/hopper-backward.md."""


def _short(q: torch.Tensor, k: torch.Tensor, packed: Packed | None, limits: dict[int, int]) -> str | None:
    """Why the Hopper kernels are not the faster ones for sequences as short as these; None if they are."""
    rows, keys = (q.shape[2], k.shape[2]) if packed is None else packed[2:]
    width = tile_width(q.shape[-1])
    if width not in limits or max(rows, keys) > limits[width]:
        return None
    return f"is slower for sequences of at most {limits[width]} rows and keys, with D at most {width}"


def _without_hopper(q, impl: Implementation | None, lacks: str | None) -> tuple[Implementation, str]:
    """The choice where the Hopper kernels are not asked for, or lack something."""
    if impl == "reference":
        return impl, "asked for"
    if q.is_cuda or launch.interpreted():
        return "triton", "asked for" if impl == "triton" else f"hopper {lacks}"
    if impl == "triton":
        raise ValueError(f"impl: 'triton' {_TRITON_NEEDS}; q is on {q.device}")
    return "reference", f"triton {_TRITON_NEEDS}; q is on {q.device}"


def choose_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    impl: Implementation | None,
    packed: Packed | None = None,
    deterministic: bool = False,
) -> tuple[Implementation, str]:
    """The same for the backward pass of such a call."""
    if impl not in (None, "hopper"):
        return _without_hopper(q, impl, None)
    lacks = launch_hopper_backward.unsupported(q, deterministic)
    if impl == "hopper":
        choose(q, k, v, impl)  # which the forward can't run either
        if lacks is not None:
            raise ValueError(f"impl: 'hopper' {lacks}; leave impl out, or call it without grad")
        return impl, "asked for"
    lacks = lacks or _short(q, k, packed, SHORT_BACKWARD)
    return ("hopper", _HOPPER_FITS) if lacks is None else _without_hopper(q, impl, lacks)


_HOPPER_FITS = "compute capability 9.x, a half precision, layouts that TMA can read"
_TRITON_NEEDS = "needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"


# ---------------------------------------------------------------- the reference


def _as_options(band: Band) -> dict:
    """`causal` and `window` of the reference for a band."""
    bounds = tuple(-1 if bound is None else bound for bound in band)
    return {"causal": band.right == 0, "window": None if band in _WITHOUT_WINDOW else bounds}


_WITHOUT_WINDOW = (Band(None, None), Band(None, 0))


def _reference_gradients(d_out, q, k, v, band, sm_scale, packed) -> tuple[torch.Tensor, ...]:
    from attnlib.reference_gradients import gradient_fp64

    options = {"sm_scale": sm_scale, **_as_options(band)}
    if packed is None:
        gradients = gradient_fp64(d_out, q, k, v, **options)
        return tuple(torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), gradients, strict=True))
    results = [torch.zeros_like(x) for x in (q, k, v)]
    ends_q, ends_k = (offsets.tolist() for offsets in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        # One sequence as a batch of one: (1, H, tokens, D).
        one = [x[part].transpose(0, 1)[None] for x, part in ((d_out, rows), (q, rows), (k, keys), (v, keys))]
        if nothing_to_do(one[1], one[2]):
            continue
        for result, part, dx in zip(results, (rows, keys, keys), gradient_fp64(*one, **options), strict=True):
            result[part] = dx[0].transpose(0, 1)
    return tuple(results)
