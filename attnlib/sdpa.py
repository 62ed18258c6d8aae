"""attnlib as the FlashAttention of PyTorch: what `scaled_dot_product_attention` runs by its flash backend,
and what `torch.distributed.tensor.experimental.context_parallel` calls in each round of its ring::

    import attnlib.sdpa
    attnlib.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("attnlib")

PyTorch chooses the backend as before, and `torch.nn.attention.restore_flash_attention_impl()` undoes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attnlib import dispatch
from attnlib.arguments.exact import Options, check
from attnlib.params import Params, mask_window

__all__ = ["NAME", "register"]
NAME = "attnlib"
"""In PyTorch's list of implementations."""


def register() -> None:
    """Make attnlib known to PyTorch. Nothing changes until it is activated. RuntimeError before PyTorch 2.11,
    which has no place for it."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise RuntimeError(
            f"attnlib.sdpa: expected PyTorch 2.11 or later, got {torch.__version__}"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_Active)


class _Active:
    """The operators, for as long as it is kept. `key`: for tensors on which device."""

    def __init__(self, key: str = "CUDA") -> None:
        self.library = torch.library.Library("aten", "IMPL", key)
        impl = partial(self.library.impl, dispatch_key=key, allow_override=True)
        impl("_scaled_dot_product_flash_attention", _forward)
        impl("_scaled_dot_product_flash_attention_backward", _backward)

    def remove(self) -> None:
        self.library._destroy()


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if return_debug_mask:
        raise RuntimeError("attnlib.sdpa: return_debug_mask: expected False, got True")
    params = _params(query, key, value, dropout_p, is_causal, scale)
    out, lse = dispatch.forward(query, key, value, params)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of no dropout
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    params = _params(query, key, value, dropout_p, is_causal, scale)
    saved = dispatch.Saved(query, key, value, out, logsumexp.contiguous())
    if 0 in grad_out.stride() or grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    return dispatch.backward(grad_out, saved, params)[:3]


def _params(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Params:  # fmt: skip
    # Context parallelism calls the operators itself, without the checks of `scaled_dot_product_attention`.
    check(query, key, value, Options(is_causal, sm_scale=scale), own_values=True)
    if dropout_p:
        raise RuntimeError(f"attnlib.sdpa: dropout_p: expected 0, got {dropout_p}")
    if is_causal and query.shape[2] != key.shape[2]:
        raise RuntimeError(
            f"attnlib.sdpa: is_causal: expected as many queries as keys, got {query.shape[2]} and "
            f"{key.shape[2]}"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Params(mask_window(is_causal, None), scale, None, True, deterministic)
