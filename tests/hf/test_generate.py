"""generate() with attn_implementation="attnlib": the tokens of "sdpa", whatever cache there is, with batches
padded on the left or on the right, by greedy and by beam search."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import FAMILIES, build, tokens  # noqa: E402

import attnlib.hf  # noqa: E402
from attnlib.hf import forward, static  # noqa: E402
from attnlib.hf.mask import Mask, settled  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore")]
CACHES = (None, "static", "offloaded", "offloaded_static") if torch.cuda.is_available() else (None, "static")
"""The offloaded ones move to a CPU and back."""
MODELS = [name for name in FAMILIES if name not in ("one key head for each", "a window beyond the text")]
assert {"llama", "qwen2", "sliding window", "gemma", "gemma3", "latent attention"} == set(MODELS)


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()


@pytest.fixture
def roads(monkeypatch):
    """How often each way of a layer's call was taken."""
    counts = dict.fromkeys(("attention", "attention_decode", "attend"), 0)

    def counted(module, name):
        function = getattr(module, name)

        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, call)

    for name in counts:
        counted(forward, name)
    counted(static, "attention_decode")
    return counts


def batch(device, padding=(5, 2, 0), length=12):
    ids = tokens(len(padding), length, device)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return ids, mask


def generated(name, device, new=5, padding=(5, 2, 0), **options):
    """Of both implementations."""
    ids, mask = batch(device, padding)
    found = []
    for implementation in ("attnlib", "sdpa"):
        model = build(name, implementation, device)
        model.generation_config.eos_token_id = None
        found.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options
            )
        )
    return found


@pytest.mark.parametrize(("name", "cache"), in_turn(MODELS, CACHES))
def test_greedy_search(name, cache, device, roads):
    ours, theirs = generated(name, device, cache_implementation=cache)
    assert torch.equal(ours, theirs) and len(ours.unique()) > 15
    # Four steps after the prompt, two layers. A window of 7 keys has passed the padding by and by, and rows
    # have nothing left out then.
    assert roads["attention_decode"] >= (1 if name in ("sliding window", "gemma3") else 8), roads


@pytest.mark.parametrize(
    ("case", "padding"), in_turn(product(["llama", "gemma3"], [None, "static"]), [(0, 0), (11, 0)]), ids=str
)
def test_padding(case, padding, device):
    name, cache = case
    ours, theirs = generated(name, device, padding=padding, cache_implementation=cache)
    assert torch.equal(ours, theirs)


BEHIND = {
    "on the right": [range(7, 12), range(10, 12), ()],
    "on both sides": [(0, 1, *range(8, 12)), (0,), range(9, 12)],
    "on the right, and a hole": [(3, 10, 11), (5, 6), (4, 11)],
    "all but one": [range(1, 12), (), range(11)],
}
"""What of each of three rows is padding."""


@pytest.mark.parametrize("side", BEHIND)
@pytest.mark.parametrize(
    ("name", "cache"),
    [(x, True) for x in ("llama", "sliding window", "latent attention", "qwen2")]
    + [("llama", False), ("sliding window", False)],
)
def test_padding_behind_the_text(name, cache, side, device):
    """transformers warns of it, and goes on from the padding, where positions begin anew: so do we, in the
    same way. Without a cache each step has the padding in the middle of its rows."""
    ids = tokens(3, 12, device)
    mask = torch.ones_like(ids)
    for row, places in enumerate(BEHIND[side]):
        mask[row, list(places)] = 0
    found = []
    for implementation in ("attnlib", "sdpa"):
        model = build(name, implementation, device)
        model.generation_config.eos_token_id = None
        found.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=cache
            )
        )
    assert torch.equal(*found) and len(found[0][:, 12:].unique()) > 4


def test_padding_behind_the_text_is_refused_with_a_static_cache(device):
    ids = tokens(3, 12, device)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    model = build("llama", "attnlib", device)
    with pytest.raises(ValueError, match="^attention_mask: expected padding on the left only beside a cache"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static")


def test_where_gradients_are_recorded_padding_behind_the_text_is_not_computed(device):
    """A batch to train on has one sequence for each row, as before."""
    kept = torch.ones(2, 9, dtype=torch.bool, device=device)
    kept[0, 5:] = False
    asked = Mask(9, 9, 0, causal=True, kept=kept)
    assert settled(asked).layout.cu_seqlens_q.tolist() == [0, 5, 14]
    with torch.no_grad():
        layout = settled(asked).layout
    assert layout.cu_seqlens_q.tolist() == [0, 5, 14, 15, 15]
    assert layout.cu_seqlens_k.tolist() == [0, 5, 14, 19, 19] and layout.index_q[-1] == 8


@pytest.mark.parametrize(
    ("name", "cache"), in_turn(["llama", "qwen2", "sliding window", "gemma", "gemma3"], [None, "static"])
)
def test_beam_search(name, cache, device):
    """All beams, not the best one alone: their keys are moved in the cache when one takes another's place."""
    ours, theirs = generated(
        name, device, new=4, num_beams=4, num_return_sequences=4, cache_implementation=cache
    )
    assert ours.shape == (12, 16) and torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_a_draft_is_checked_with_several_queries(name, device, roads):
    """Prompt lookup proposes tokens, of which a step looks at several."""
    ids = tokens(1, 6, device).repeat(1, 4)
    found = []
    for implementation in ("attnlib", "sdpa"):
        model = build(name, implementation, device)
        model.generation_config.eos_token_id = None
        found.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0,
                prompt_lookup_num_tokens=4,
            )
        )  # fmt: skip
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "sliding window", "gemma3"])
def test_a_static_cache_filled_in_parts(name, device):
    """Prompts in parts, then tokens; logits are those of a pass without a cache."""
    ids = tokens(2, 20, device)
    model = build(name, "attnlib", device).eval()
    with torch.no_grad():
        whole = model(ids).logits
        cache, parts = transformers.StaticCache(config=model.config, max_cache_len=32), []
        for part in ids.split((9, 6, 1, 4), 1):
            parts.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_a_compiled_step(name, device):
    """As generate() does on a GPU: the step is one graph, which is made once for all lengths. Tracing takes
    most of the time, and layers are alike."""
    torch.compiler.reset()
    ids, mask = batch(device)
    found = []
    for implementation in ("attnlib", "sdpa"):
        model = build(name, implementation, device, layers=1).eval()
        step = torch.compile(model.forward, backend="eager", fullgraph=True)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        kept, token, new = mask, ids, []
        with torch.no_grad():
            for count in range(6):
                inputs = model.prepare_inputs_for_generation(
                    token if count else ids, attention_mask=kept, past_key_values=cache, use_cache=True,
                    is_first_iteration=not count,
                )  # fmt: skip
                logits = (step if count else model)(**inputs).logits[:, -1]
                token = logits.argmax(-1, keepdim=True)
                new.append(token)
                kept = torch.nn.functional.pad(kept, (0, 1), value=1)
        found.append(torch.cat(new, 1))
    torch.compiler.reset()
    assert torch.equal(*found)


def test_what_a_static_cache_cannot_have(device):
    ids, mask = batch(device)
    model = build("llama", "attnlib", device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    mask[0, 7] = 0
    with pytest.raises(ValueError, match="^attention_mask: expected padding on the left only beside a cache"):
        model(ids, attention_mask=mask, past_key_values=cache)


def test_gradients_through_few_queries_that_are_padded(device):
    """attention_decode has none, so these go without it."""
    ids, mask = batch(device)
    found = []
    for implementation in ("attnlib", "sdpa"):
        model = build("llama", implementation, device)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    largest = found[1].abs().max().item()  # hundreds: sums in float32, whose order depends on the processor
    torch.testing.assert_close(*found, rtol=1e-3, atol=3e-6 * largest)
