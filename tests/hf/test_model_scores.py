"""Models with soft caps (Gemma 2) and attention sinks (GPT-OSS): attnlib beside "eager"."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5,
}  # fmt: skip


def model_of(name: str, device: str, implementation: str = "attnlib"):
    """A model whose layers differ in their windows, with random weights."""
    attnlib.hf.register()
    torch.manual_seed(0)
    if name == "gemma2":
        config = transformers.Gemma2Config(
            **SIZES, attn_logit_softcapping=2.0, query_pre_attn_scalar=4, attn_implementation=implementation
        )
        model = transformers.Gemma2ForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **SIZES, num_local_experts=2, num_experts_per_tok=1, attn_implementation=implementation,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(config)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.to(device).eval()


def tokens(*shape, device):
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
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


def test_in_a_graph_they_are_refused(device):
    model = model_of("gemma2", device)
    with pytest.raises(Exception, match="softcap: expected None under torch.compile"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens(1, 8, device=device))
