"""attn_implementation="attnlib" in Hugging Face transformers: small models with random weights compute what
they compute with "sdpa", as far as their dtype goes; and what can't be computed is an error."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "one key head for each": ("Llama", {"num_key_value_heads": 4}),
    "sliding window": ("Mistral", {"sliding_window": 7}),
    "a window beyond the text": ("Mistral", {"sliding_window": 64}),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()
    attnlib.hf.register()  # no harm


def build(name, implementation, device, dtype=torch.float32):
    """The same weights, whatever computes attention."""
    family, config = FAMILIES[name]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**SMALL | config, attn_implementation=implementation)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).to(device, dtype)
    assert model.config._attn_implementation == implementation
    return model


def tokens(batch, length, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SMALL["vocab_size"], (batch, length), generator=generator).to(device)


def within_budget(found, like, truth, name):
    """The rule of attnlib.bench.oracle: twice PyTorch's error and a rounding of the result."""
    rounding = torch.finfo(found.dtype).eps * truth.abs().max()
    budget = 2 * ((like.double() - truth).abs().max() + rounding)
    error = (found.double() - truth).abs().max()
    assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in FAMILIES), ("llama", torch.bfloat16)]
)
def test_logits_and_a_training_step(name, dtype, device):
    ids = tokens(2, 17, device)
    results = []
    for implementation, precision in (("attnlib", dtype), ("sdpa", dtype), ("sdpa", torch.float64)):
        model = build(name, implementation, device, dtype).to(precision)  # weights rounded alike
        output = model(ids, labels=ids)
        output.loss.backward()
        gradients = {name: x.grad for name, x in model.named_parameters()}
        results.append({"logits": output.logits.detach(), **gradients})
    found, like, truth = results
    assert found["logits"].std() > 0.1  # attention has something to say
    for part, exact in truth.items():
        within_budget(found[part], like[part], exact, part)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_generated_tokens(name, device):
    """Prefill, then one token after the other from a cache: a window's cache drops what is out of sight."""
    ids = tokens(1, 12, device)
    generated = [
        build(name, implementation, device).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, use_cache=cache
        )
        for implementation, cache in (("attnlib", True), ("sdpa", True), ("attnlib", False))
    ]
    assert all(torch.equal(generated[0], other) for other in generated[1:])
    assert len(generated[0][0].unique()) > 5


@pytest.mark.parametrize("name", ["llama", "sliding window"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_with_padding(side, name, device):
    ids = tokens(3, 15, device)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 9)):
        mask[row, :padding] = 0
    if side == "right":
        mask = mask.flip(1)
    models = [build(name, implementation, device) for implementation in ("attnlib", "sdpa")]
    results = []
    for model in models:
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        results.append((output.logits[mask.bool()], model.model.layers[0].self_attn.q_proj.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    if side == "left":
        generated = [
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False) for model in models
        ]
        assert torch.equal(*generated)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_a_cache_filled_in_parts(name, device):
    ids = tokens(1, 20, device)
    model = build(name, "attnlib", device)
    with torch.no_grad():
        whole = model(ids).logits
        cache, parts = transformers.DynamicCache(config=model.config), []
        for part in ids.split((9, 6, 1, 4), 1):
            parts.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_checkpointed_layers(device):
    ids = tokens(2, 20, device)
    models = [build("llama", "attnlib", device).train() for _ in range(2)]
    models[1].gradient_checkpointing_enable()
    for model in models:
        model(ids, labels=ids, use_cache=False).loss.backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_model_can_be_switched(device):
    model = build("llama", "sdpa", device)
    ids = tokens(1, 10, device)
    with torch.no_grad():
        before = model(ids).logits
        model.set_attn_implementation("attnlib")
        after = model(ids).logits
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)
    assert not torch.equal(before, after)  # it did switch


# ---------------------------------------------------------------- what is refused


def test_packed_position_ids(device):
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)
    with pytest.raises(ValueError, match="^mask_function: expected a causal, .*Packed position_ids"):
        build("llama", "attnlib", device)(tokens(1, 7, device), position_ids=position_ids, use_cache=False)


def test_a_mask_of_ones_own(device):
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=r"^attention_mask: expected None or the padding .* \(1, 1, 7, 7\)"):
        build("llama", "attnlib", device)(tokens(1, 7, device), attention_mask=mask)


def test_a_static_cache(device):
    model = build("llama", "attnlib", device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="^past_key_values: expected a cache that ends with the newest"):
        model(tokens(1, 7, device), past_key_values=cache)


def test_dropout(device):
    model = build("llama", "attnlib", device)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.eval()(tokens(1, 7, device))  # none outside of training
    with pytest.raises(ValueError, match="^dropout: expected 0, attnlib has no dropout .*, got 0.1$"):
        model.train()(tokens(1, 7, device))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "cache"])
def test_what_a_kernel_would_have_to_know(name):
    q = torch.zeros(1, 1, 4, 16)
    layer = SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match=f"^{name}: expected None, attnlib does not support it, got 3"):
        attnlib.hf.attention_forward(layer, q, q, q, None, **{name: 3})
    attnlib.hf.attention_forward(layer, q, q, q, None, **{name: None})


def test_chunks_are_not_taken_for_a_window():
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    padding = torch.zeros(1, dtype=torch.long)
    for length in range(1, 30):
        for offset in (0, 1, 5, 8, 13):
            form = {"q_length": length, "kv_length": length + offset, "q_offset": offset, "local_size": 8}
            sliding = sliding_window_causal_mask_function(8)
            assert attnlib.hf.attention_mask(**form, mask_function=sliding) is None
            chunked = chunked_causal_mask_function(8, padding)
            rows = torch.arange(offset, offset + length)[:, None]
            keys = torch.arange(length + offset)
            zero = torch.tensor(0)
            if not torch.equal(chunked(zero, zero, rows, keys), sliding(zero, zero, rows, keys)):
                with pytest.raises(ValueError, match="^mask_function: .*chunked"):
                    attnlib.hf.attention_mask(**form, mask_function=chunked)


def test_a_window_that_looks_both_ways():
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="^sliding_window: expected None without a causal mask, got 2"):
        attnlib.hf.attention_forward(SimpleNamespace(is_causal=False), q, q, q, None, sliding_window=2)


def test_layers_are_asked_whether_they_are_causal():
    q, k, v = torch.randn(3, 1, 2, 6, 16)
    encoder, decoder = SimpleNamespace(is_causal=False), SimpleNamespace()
    for layer, override, causal in ((encoder, None, False), (decoder, None, True), (decoder, False, False)):
        found, weights = attnlib.hf.attention_forward(layer, q, k, v, None, scaling=0.3, is_causal=override)
        assert weights is None
        expected = attnlib.attention(q, k, v, causal=causal, sm_scale=0.3)
        assert torch.equal(found, expected.transpose(1, 2)) and found.is_contiguous()


def test_importing_attnlib_needs_no_transformers():
    """hf.py imports it when it registers, not before."""
    code = "import sys, attnlib, attnlib.hf; print('transformers' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout == "False\n"
