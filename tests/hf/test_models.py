"""attn_implementation="attnlib" in Hugging Face transformers: small models with random weights compute what
they compute with "sdpa", as far as their dtype goes."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import FAMILIES, build, tokens  # noqa: E402

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()
    attnlib.hf.register()  # no harm


def within_budget(found, like, truth, name):
    """The rule of attnlib.reference: twice PyTorch's error and a rounding of the result."""
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


@pytest.mark.parametrize(("name", "side"), in_turn(["llama", "sliding window"], ["left", "right"]))
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
