"""What a model's attention layer calls: `attention` or `attention_varlen`, as the mask says."""

from __future__ import annotations

import weakref

import torch

from attnlib import attention, attention_decode
from attnlib.api.exact import autocast
from attnlib.arguments.decode import MOST_QUERIES
from attnlib.hf import caches, capturing, given, static
from attnlib.hf import mask as masks
from attnlib.hf.layout import Layout, attend, numbered, packed, require, values_known
from attnlib.hf.mask import Mask
from attnlib.hf.score import Asked, scored

NAME = "attnlib"

_SAY_NOTHING = frozenset(
    (
        *("cache_position", "use_cache", "past_key_values", "position_embeddings", "num_items_in_batch"),
        *("output_hidden_states", "output_router_logits", "return_dict", "labels", "logits_to_keep"),
    )
)
"""Arguments that models hand on to attention, and that change nothing of what it computes."""


def check_unknown(others: dict) -> None:
    """ValueError for an argument that may ask for what attnlib does not compute."""
    for name, value in others.items():
        if name not in _SAY_NOTHING and value is not None and value is not False:
            kind = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
            raise ValueError(f"{name}: expected None, attnlib does not support it, got {kind}")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    deterministic: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        query: (B, H, Sq, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv).
        attention_mask: the `Mask` that the model got from attnlib; or bool (B, Sk), False for keys that are
            padding; or a tensor that broadcasts to (B, H, Sq, Sk), bool or numbers that are added to the
            scores, which says all; or None, which leaves it to `is_causal`, or else to the module's attribute
            of that name.
        dropout: 0.
        scaling: factor on the scores, default 1/sqrt(D).
        sliding_window: how many keys a query sees, its own too; looked at if `attention_mask` is padding or
            None.
        position_ids: (B, Sq) or (1, Sq), looked at if there is no padding mask: packed sequences begin anew.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences in a batch of one, as
            `attention_varlen` has them; all four or none.
        deterministic: as in `attention`.
        softcap: the soft cap of the scores, as in Gemma 2.
        s_aux: (H) attention sinks, as in GPT-OSS.
        position_bias: added to the scores, of a shape that broadcasts to (B, H, Sq, Sk), as in T5.
        indices: (B, Sq, n), the keys that a query may see of those of a bool `attention_mask`, as in
            DeepSeek V3.2.

    Returns:
        ((B, Sq, H, Dv), None).

    Raises:
        ValueError: by the name of an argument that asks for something else.
        TypeError, ValueError: as `attnlib.attention`, where `scaling` is called sm_scale and `query` q.
    """
    check_unknown(others)
    capturing.check_outputs()
    if dropout:
        raise ValueError(f"dropout: expected 0, attnlib has no dropout in attention, got {dropout}")
    value_dim = value.shape[-1]
    if value_dim != query.shape[-1] and scaling is None:  # not that of what is filled up
        scaling = query.shape[-1] ** -0.5
    if indices is not None:
        attention_mask = given.among(attention_mask, indices)
    lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    told = any(x is not None for x in lengths)
    fixed = static.is_made(attention_mask, query.shape[0])
    if fixed and told:
        raise ValueError(f"cu_seq_lens_q: {_ONE_SEQUENCE}")
    if fixed:
        if position_ids is not None and query.shape[2] > 1 and not values_known(attention_mask):
            _check_in_graph(position_ids, query, attention_mask)
        plain = not Asked(softcap, s_aux, None, position_bias).anything
        if plain and static.fits_decode(query, attention_mask) and not _differentiated(query, key, value):
            out = static.decode(*_for_decode(query, key, value), attention_mask, scaling)
            return out.transpose(1, 2)[..., :value_dim].contiguous(), None
        if values_known(attention_mask):
            attention_mask = static.read(module, attention_mask, query.shape[2])
            key, value = (x[:, :, : attention_mask.kv_length] for x in (key, value))
            if position_bias is not None:
                position_bias = position_bias[..., : attention_mask.kv_length]
        else:
            attention_mask = static.bias(query, attention_mask, key.shape[2])
    sizes = query.shape[2], key.shape[2]
    if isinstance(attention_mask, Mask):
        mask = _fitting(attention_mask, query.shape[0], sizes, is_causal)
    elif given.is_given(attention_mask):
        mask = given.mask_of(module, attention_mask, query, key)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _from_arguments(attention_mask, query.shape[0], sizes, bool(causal), sliding_window)
    if told:
        layout = _told(lengths, query, mask)
    else:
        layout = mask.layout
        if position_ids is not None and mask.causal:
            layout = _with_positions(position_ids, query.shape[0], mask)
    if layout is not mask.layout:
        _check_cache(mask, told, fixed, layout)
    options = {"causal": mask.causal, "window": mask.window, "deterministic": bool(deterministic)}
    asked = Asked(softcap, s_aux, mask.bias, position_bias)
    if asked.anything or mask.block_mask is not None:
        query, key, value = _same_head_dim(query, key, value)
        score, seen = scored(asked, mask, layout, query)
        out = attention(query, key, value, sm_scale=scaling, score=score, block_mask=seen, **options)
        out = out.transpose(1, 2)
    elif layout is None and mask.spans:
        if _differentiated(query, key, value):
            out = attend(query, key, value, masks.padded(mask), sm_scale=scaling, **options)
            return out.contiguous(), None
        del options["deterministic"]
        query, key, value = _for_decode(query, key, value)
        spans = {"starts": mask.starts, "lengths": mask.lengths}
        out = attention_decode(query, key, value, **spans, sm_scale=scaling, **options).transpose(1, 2)
    elif layout is None:
        if query.shape[-1] != value_dim and _few(query, key, value):
            query, key, value = _same_head_dim(query, key, value)
        out = attention(query, key, value, sm_scale=scaling, **options).transpose(1, 2)
    else:
        out = attend(query, key, value, layout, sm_scale=scaling, **options)
    return out[..., :value_dim].contiguous(), None


def _for_decode(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `attention_decode` takes them: of one head dimension, and cast, which `attention` does by itself."""
    return _same_head_dim(*autocast(*tensors))


def _differentiated(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _few(query, key, value) -> bool:
    """Whether decoding kernels, which split the keys over the GPU and take one head dimension, may pay."""
    return query.shape[2] <= MOST_QUERIES and not _differentiated(query, key, value)


def _same_head_dim(query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values filled up with zeros to one head dimension, for what takes no other."""
    if query.shape[-1] == value.shape[-1]:
        return query, key, value
    width = max(query.shape[-1], value.shape[-1])
    return tuple(torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))


# ---------------------------------------------------------------- the mask


def _fitting(mask: Mask, batch: int, sizes: tuple[int, int], is_causal: bool | None) -> Mask:
    """The mask, if it was made for so many rows and for these sizes, and says what the layer says."""
    if mask.rows not in (None, batch) and (mask.layout is not None or mask.spans):
        raise ValueError(
            f"attention_mask: expected one for a batch of {batch}, got what the model ({mask.config}) made "
            f"for {mask.rows}: attnlib's mask of padded or packed rows is not repeated for others"
        )
    if sizes != (mask.q_length, mask.kv_length):
        raise ValueError(
            f"attention_mask: expected one for {sizes[0]} queries and {sizes[1]} keys, got what the model "
            f"({mask.config}) made for {mask.q_length} and {mask.kv_length}. Use 'sdpa'"
        )
    # Some models say is_causal=False where they hand on a causal mask: the mask says it then.
    says_all = mask.block_mask is not None and mask.window is None
    if is_causal and sizes[0] > 1 and not mask.causal and not says_all:
        raise ValueError(
            f"is_causal: expected False, as the mask of the model ({mask.config}) has it, got {is_causal}"
        )
    return mask


def _from_arguments(
    attention_mask: torch.Tensor | None,
    batch: int,
    sizes: tuple[int, int],
    causal: bool,
    sliding_window: int | None,
) -> Mask:
    """The mask of a layer that got none from attnlib."""
    if attention_mask is not None:
        is_tensor = isinstance(attention_mask, torch.Tensor)
        form = type(attention_mask).__name__
        if is_tensor:
            form = f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        if not is_tensor or attention_mask.dtype != torch.bool or attention_mask.shape != (batch, sizes[1]):
            raise ValueError(
                "attention_mask: expected None, four dimensions, or the padding of tokens, bool (B, S) = "
                f"{(batch, sizes[1])}, got {form}"
            )
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int | torch.SymInt | None):
        raise ValueError(f"sliding_window: expected an int or None, got a {type(sliding_window).__name__}")
    if sliding_window is not None and not causal:
        raise ValueError(f"sliding_window: expected None without a causal mask, got {sliding_window}")
    if sliding_window is not None and sliding_window < 1:  # transformers' own kernels do not agree on 0
        raise ValueError(f"sliding_window: expected None, or 1 or more keys, got {sliding_window}")
    rows, keys = sizes
    if causal and (rows > keys or (attention_mask is None and 1 < rows < keys)):
        raise ValueError(
            "attention_mask: expected the model's own for causal attention of different lengths, got none "
            f"for {rows} queries and {keys} keys; is_causal=False for cross-attention"
        )
    window = None if sliding_window is None else (sliding_window - 1, 0)  # transformers counts the own key
    return masks.settled(Mask(rows, keys, keys - rows, causal, window, attention_mask))


# ---------------------------------------------------------------- packed sequences


_ONE_SEQUENCE = (
    "expected one sequence in each row beside a cache of a fixed size, got packed sequences. Leave out the "
    "cache, or use one that grows"
)
"""The mask of such a cache does not say if there was an attention_mask, and no later step would know what is
packed."""


def _check_cache(mask: Mask, told: bool, fixed: bool, layout: Layout) -> None:
    """ValueError for packed sequences beside a cache of a fixed size; another one is known to hold them from
    now on. told: by cu_seq_lens_q and its kin, else by positions."""
    if fixed or caches.is_fixed(mask.cache):
        raise ValueError(f"{'cu_seq_lens_q' if told else 'position_ids'}: {_ONE_SEQUENCE}")
    if layout.cu_seqlens_q.numel() > 2 and (told or values_known(layout.cu_seqlens_q)):
        caches.remember_packed(mask.cache)


def _check_in_graph(position_ids: torch.Tensor, query: torch.Tensor, spans: torch.Tensor) -> None:
    """The same for the tensor of a cache of a fixed size, when a graph runs."""
    rows, queries = query.shape[0], query.shape[2]
    if position_ids.shape in ((rows, queries), (1, queries)):
        up = _go_up(position_ids.expand(rows, -1), static.kept(spans, queries))
        require(up, f"position_ids: {_ONE_SEQUENCE}")


def _told(lengths: tuple, query: torch.Tensor, mask: Mask) -> Layout:
    """The sequences that cu_seq_lens_q and its kin say."""
    names = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
    for name, value in zip(names, lengths, strict=True):
        if value is None:
            raise ValueError(f"{name}: expected all of {', '.join(names)} or none, got None")
        if name.startswith("cu_") and not isinstance(value, torch.Tensor):
            raise ValueError(f"{name}: expected a torch.Tensor, got a {type(value).__name__}")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q: expected a batch of one beside it, got {query.shape[0]}")
    hides = mask.layout is not None or mask.spans
    if mask.block_mask is not None or mask.bias is not None or (mask.kept is not None and hides):
        raise ValueError("attention_mask: expected nothing hidden beside cu_seq_lens_q, got some")
    offsets = (x.to(query.device, torch.int32) for x in lengths[:2])
    longest = (int(x) if isinstance(x, torch.Tensor) else x for x in lengths[2:])
    return Layout(None, None, *offsets, *longest)


_seen: weakref.WeakKeyDictionary[Mask, tuple] = weakref.WeakKeyDictionary()
"""Mask -> (a reference to position_ids, their version, the layout): all layers of a model get the same
tensor, and to read it waits for a GPU."""


def _with_positions(position_ids: torch.Tensor, batch: int, mask: Mask) -> Layout | None:
    """The mask's layout, or that of packed sequences which only the positions tell of."""
    fits = position_ids.dim() == 2 and position_ids.shape[1] == mask.q_length
    if not fits or position_ids.shape[0] not in (1, batch) or (mask.layout is not None and mask.kept is None):
        return mask.layout
    if not values_known(position_ids):
        position_ids = position_ids.expand(batch, -1)
        if caches.is_fixed(mask.cache) and mask.kept is None:
            require(_go_up(position_ids, None), f"position_ids: {_ONE_SEQUENCE}")
            return mask.layout
        return _looked_at(position_ids, mask)
    version = None if position_ids.is_inference() else position_ids._version
    reference, *known = _seen.get(mask, (lambda: None, None, None))
    if reference() is position_ids and known[0] == version:
        return known[1]
    layout = _looked_at(position_ids.expand(batch, -1), mask)
    _seen[mask] = weakref.ref(position_ids), version, layout
    return layout


def _go_up(position_ids: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Whether no row begins anew, of (B, S) positions and bool (B, S), False for padding; a bool tensor of
    one element. Behind padding in the middle of a row a sequence begins at 0, and any other position goes on:
    `generate()` counts from the padding on where a text ends with some."""
    up = position_ids.diff(dim=1) > 0
    if kept is None:
        return up.all()
    before = kept.cumsum(1)[:, :-1] > 0
    goes_on = torch.where(kept[:, :-1], up, ~before | (position_ids[:, 1:] > 0))
    return (~kept[:, 1:] | goes_on).all()


def _looked_at(position_ids: torch.Tensor, mask: Mask) -> Layout | None:
    if mask.kept is not None:
        kept = mask.kept[:, mask.kv_length - mask.q_length :]
        require(
            _go_up(position_ids, kept),
            "position_ids: expected positions that go up in each row beside an attention_mask, got packed "
            "sequences; leave attention_mask out, or position_ids",
        )
        return mask.layout
    sequences = numbered(position_ids)
    if mask.q_offset:
        require(
            (sequences[:, -1:] == 0).all() & (position_ids[:, :1] >= mask.q_offset).all(),
            # Without their number, which a compiled graph may not know.
            "position_ids: expected positions that go on behind the tokens in the cache, got packed "
            "sequences; attnlib can't know which of them the cache holds",
        )
        return None
    begins = sequences.diff(dim=1, prepend=sequences[:, :1]) > 0
    require(
        (~begins | (position_ids == 0)).all(),
        "position_ids: expected packed sequences that begin at 0, got one that begins elsewhere; "
        "cu_seq_lens_q and its kin can tell what is meant",
    )
    if not values_known(sequences):
        caches.remember_packed(mask.cache, (sequences[:, -1] > 0).any())
    return packed(sequences)
