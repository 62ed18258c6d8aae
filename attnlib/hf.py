"""attnlib as an attention implementation of Hugging Face transformers (an optional extra: attnlib[hf]).

    import attnlib.hf

    attnlib.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")

Causal, full and causal sliding-window attention; grouped heads; training; a cache that grows (prefill,
decoding a token or several at a time); batches padded on the left or the right, which run without their
padding. Whatever else a model may ask of its attention (masks of its own, chunked attention, packed position
ids, biases, sinks, soft caps, dropout, static or paged caches) raises an error: nothing is left out silently.
"""

from __future__ import annotations

import torch

from attnlib.api import attention, attention_varlen

NAME = "attnlib"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache", "head_mask", "output_attentions")
"""Arguments of an attention function that say what attnlib does not compute, unless None or False."""


def register() -> None:
    """Make attn_implementation="attnlib" known to transformers. Again is no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """What a model's attention layer calls.

    query is (B, H, Sq, D), key and value are (B, Hkv, Sk, D); attention_mask is what `attention_mask` made:
    None or a bool (B, Sk), True for tokens that are no padding. Returns ((B, Sq, H, D), None).
    """
    for name in _UNSUPPORTED:
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name}: expected None, attnlib does not support it, got {others[name]!r:.80}")
    if dropout:
        raise ValueError(f"dropout: expected 0, attnlib has no dropout in attention, got {dropout}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if sliding_window is not None:
        if not causal:
            raise ValueError(f"sliding_window: expected None without a causal mask, got {sliding_window}")
        window = (sliding_window - 1, 0)  # transformers counts the query's own key
    options = {"causal": causal, "window": window, "sm_scale": scaling}
    if attention_mask is None:
        out = attention(query, key, value, **options).transpose(1, 2)
    elif attention_mask.dim() == 2 and attention_mask.dtype == torch.bool:
        out = _without_padding(query, key, value, attention_mask, **options)
    else:
        form = f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        raise ValueError(
            "attention_mask: expected None or the padding of tokens, (B, S), which attnlib can leave out; "
            f"got {form}"
        )
    return out.contiguous(), None


def _without_padding(query, key, value, kept, **options) -> torch.Tensor:
    """Attention among the tokens that `kept`, bool (B, Sk), keeps; 0 at the others. (B, Sq, H, D)."""
    rows = kept[:, kept.shape[1] - query.shape[2] :]  # queries are the last tokens
    packed = (x.transpose(1, 2)[mask] for x, mask in ((query, rows), (key, kept), (value, kept)))
    lengths = [mask.sum(1, dtype=torch.int32) for mask in (rows, kept)]
    offsets = [torch.nn.functional.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in lengths]
    out = attention_varlen(*packed, *offsets, *(int(n.max()) for n in lengths), **options)
    padded = out.new_zeros(*rows.shape, *out.shape[1:])
    padded[rows] = out
    return padded


# ---------------------------------------------------------------- masks


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> torch.Tensor | None:
    """What transformers calls once for a forward pass of the model to make its mask.

    attnlib needs none but the padding: None, or a bool (B, Sk). ValueError if the model asks for a mask that
    `causal` and `window` of `attention` do not give.
    """
    from transformers import masking_utils

    known = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    if mask_function not in known and not _is_sliding(mask_function, q_length, q_offset, local_size, device):
        got = getattr(mask_function, "__qualname__", mask_function)
        raise ValueError(
            f"mask_function: expected a causal, full or causal sliding-window mask, got {got}. Packed "
            "position_ids, chunked attention and a model's own masks need attn_implementation='sdpa'"
        )
    if mask_function is not known[1] and int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(
            f"past_key_values: expected a cache that ends with the newest token, got {kv_length} keys from "
            f"{kv_offset} on for {q_length} queries from {int(q_offset)} on; static caches need "
            "attn_implementation='sdpa'"
        )
    if attention_mask is None:
        return None
    kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if kept.shape[1] != kv_length:
        got = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask: expected {kv_length} tokens from {kv_offset} on, got shape {got}")
    return None if bool(kept.all()) else kept


def _is_sliding(mask_function, q_length: int, q_offset, window: int | None, device) -> bool:
    """Whether a function of positions is a causal sliding window. It is asked about all keys of three rows: a
    chunk, which is also said to be local, ends between two rows that follow each other."""
    if window is None or mask_function is None:
        return False
    end = int(q_offset) + q_length
    first, zero = torch.tensor(0, device=device), torch.tensor(0, device=device)
    keys = torch.arange(end, device=device)
    for row in {int(q_offset), max(end - 2, int(q_offset)), end - 1}:
        query = first + row
        try:
            seen = mask_function(zero, zero, query, keys)
        except (RuntimeError, IndexError):  # one that takes no vectors
            return False
        if not torch.equal(seen, (keys <= query) & (keys > query - window)):
            return False
    return True
