"""attnlib as an attention implementation of Hugging Face transformers (an optional extra: attnlib[hf]).

    import attnlib.hf

    attnlib.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")

Computed: causal, full and sliding-window attention, one-sided or two-sided; cross-attention; grouped heads;
values with a head dimension of their own (filled up with zeros under a block mask or a score, and where
decoding kernels may run); training; caches that grow, and those of a fixed size, with `generate()` by any
search; batches padded on the left, on the right, or with holes (not in a cache of a fixed size), of which
only the tokens are computed, a new one from a cache where it lies; packed sequences, told by `position_ids`
that begin anew inside a row, or by `cu_seq_lens_q` and its kin; soft caps (Gemma 2), attention sinks
(GPT-OSS) and relative biases (T5); layers that share keys (Gemma 3n); `torch.compile` in one graph, and
`torch.export`.

Any other mask: chunks (Llama 4), image tokens that see each other (Gemma 3, PaliGemma), functions given to
transformers' masking_utils, and tensors with four dimensions given as attention_mask, bool or added to the
scores. They become an `attnlib.BlockMask`, made once in a forward pass, and cost what is seen of them;
numbers besides 0 and the least one of the dtype become a bias. A query that sees nothing gives 0; with
"eager" it gives the mean of all values. What a model says at a padded token is not what "eager" says there,
but for the last token of a row where no gradients are recorded: `generate()` goes on from it, and says behind
padding on the right what it says with "eager" or "sdpa", unless a window holds padding alone: that is 0, as
most models have it with "sdpa" (not Doge and Inkling). Nor does "sdpa". So where a batch is padded on
the left and a loss is taken, the label of the first token behind the padding has to be -100, too: it is
predicted from a padded one.

An attention_mask, where there is one, decides what is attended to. `position_ids` say it where there is none,
with a cache that is still empty and can grow, too, if the model hands them to its attention (its "sdpa"
ignores them then). A later step without an attention_mask does not go on from such a cache.

Inside of a compiled graph the values of a mask can't be read, so padding is computed too, and up to 64 packed
sequences per row; more, or holes under a window, fail when the graph runs. Any other mask becomes a bias
there, with a number for each query and key.

ValueError, which names the argument or the model's class, for everything else: dropout, attention weights as
a result, paged caches, models that don't support "sdpa", and every argument that attnlib does not know.
"""

from __future__ import annotations

from attnlib.hf.forward import NAME, attention_forward

__all__ = ["NAME", "attention_forward", "register"]


def register() -> None:
    """Make attn_implementation="attnlib" known to transformers. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from attnlib.hf import caches, capturing
    from attnlib.hf.mask import Mask
    from attnlib.hf.mask_functions import attention_mask
    from attnlib.hf.models import check_when_chosen

    # An old name, whose prefix transformers takes off for attention, but not for masks.
    old_name = f"paged|{NAME}"
    caches.prepare(Mask, NAME, old_name)
    capturing.prepare()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionMaskInterface.register(old_name, attention_mask)
    check_when_chosen()
