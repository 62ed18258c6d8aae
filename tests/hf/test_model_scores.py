"""Models with soft caps (Gemma 2) and attention sinks (GPT-OSS): attnlib beside "eager"."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5,
}  # fmt: skip


LAYERS = "sliding_attention", "full_attention"


def model_of(name: str, device: str, implementation: str = "attnlib", layers: tuple[str, ...] = LAYERS):
    """A model whose layers differ in their windows, with random weights. For a graph one layer will do:
    tracing takes most of the time."""
    sizes = SIZES | {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    attnlib.hf.register()
    torch.manual_seed(0)
    if name == "gemma2":
        config = transformers.Gemma2Config(
            **sizes, attn_logit_softcapping=2.0, query_pre_attn_scalar=4, attn_implementation=implementation
        )
        model = transformers.Gemma2ForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **sizes, num_local_experts=2, num_experts_per_tok=1, attn_implementation=implementation
        )
        model = transformers.GptOssForCausalLM(config)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.to(device).eval()


def tokens(*shape, device):
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize(("padding", "name"), in_turn(["none", "left", "right"], ["gemma2", "gpt_oss"]))
def test_logits_and_gradients_are_those_of_eager(name, padding, device):
    x = tokens(2, 12, device=device)
    mask = torch.ones_like(x)
    if padding != "none":
        mask[1, slice(0, 4) if padding == "left" else slice(8, 12)] = 0
    found = []
    for implementation in ("attnlib", "eager"):
        model = model_of(name, device, implementation)
        assert model.config._attn_implementation == implementation
        logits = model(x, attention_mask=None if padding == "none" else mask).logits
        logits[mask.bool()].square().mean().backward()
        layer = model.model.layers[0].self_attn
        gradients = [layer.q_proj.weight.grad, layer.k_proj.weight.grad]
        gradients += [layer.sinks.grad] if name == "gpt_oss" else []
        found.append((logits[mask.bool()], *gradients))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_generated_text_is_that_of_eager(name, device):
    x, mask = tokens(2, 7, device=device), torch.ones(2, 7, dtype=torch.long, device=device)
    mask[0, :3] = 0
    texts = [
        model_of(name, device, implementation).generate(
            x, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        for implementation in ("attnlib", "eager")
    ]
    assert torch.equal(*texts)


def test_packed_sequences(device):
    """Told by positions; a batch of one row beside its sequences one by one."""
    model = model_of("gemma2", device)
    x = tokens(1, 11, device=device)
    positions = torch.cat([torch.arange(6), torch.arange(5)])[None].to(device)
    together = model(x, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(x[:, :6]).logits, model(x[:, 6:]).logits], 1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"softcap": "30"}, "^softcap: expected a number or None, got a str"),
    ({"softcap": -1.0}, "^score.soft_cap: expected a number from 1e-6 to 1e6, got -1.0"),
    ({"s_aux": 3}, "^s_aux: expected a tensor with a value for each of 1 heads, got int"),
    ({"position_bias": 3}, "^position_bias: expected a tensor or None, got a int"),
    ({"s_aux": torch.zeros(2)}, r"^s_aux: expected a tensor with a value for each of 1 heads, got \(2,\)"),
])  # fmt: skip
def test_wrong_scores_are_named(wrong, message):
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match=message):
        attnlib.hf.attention_forward(SimpleNamespace(is_causal=True), q, q, q, None, **wrong)


# ---------------------------------------------------------------- in a graph


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "kind"), in_turn(["gemma2", "gpt_oss"], LAYERS))
def test_a_training_step_in_one_graph(name, kind, fresh, device):
    x = tokens(2, 9, device=device)
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    found = []
    for implementation in ("attnlib", "eager"):
        model = model_of(name, device, implementation, (kind,))
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if not found else model
        logits = call(x, attention_mask=mask).logits[mask.bool()]
        logits.square().mean().backward()
        layer = model.model.layers[0].self_attn
        found.append((logits, layer.q_proj.weight.grad, *((layer.sinks.grad,) if name == "gpt_oss" else ())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packed_sequences_in_one_graph(fresh, device):
    model = model_of("gemma2", device, layers=LAYERS[:1])
    x = tokens(1, 9, device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]], device=device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(x, position_ids=positions, use_cache=False).logits
    expected = model(x, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - model(x).logits).abs().max() > 1e-3


@torch.no_grad()
def test_steps_with_a_cache_of_a_fixed_size_in_one_graph(fresh, device):
    """As generate() does on a GPU, with padding on the left, until the window has passed it by."""
    found = []
    for implementation in ("attnlib", "eager"):
        model = model_of("gpt_oss", device, implementation, LAYERS[:1])
        step = torch.compile(model.forward, backend="eager", fullgraph=True) if not found else model
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        token = tokens(2, 6, device=device)
        kept, logits = torch.ones_like(token), []
        kept[0, :3] = 0
        for count in range(4):
            inputs = model.prepare_inputs_for_generation(
                token, attention_mask=kept, past_key_values=cache, use_cache=True,
                is_first_iteration=not count,
            )  # fmt: skip
            logits.append((step if count else model)(**inputs).logits[:, -1])
            token = tokens(2, 1, device=device) + count
            kept = torch.nn.functional.pad(kept, (0, 1), value=1)
        found.append(torch.stack(logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
