"""Models and arguments that attnlib does not know are errors that name them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import build, tokens  # noqa: E402

import attnlib.hf  # noqa: E402
from attnlib.hf import models  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WITHOUT_SDPA = [
    "BloomForCausalLM", "CodeGenForCausalLM", "GPTNeoXJapaneseForCausalLM", "XGLMForCausalLM",
    "TrOCRForCausalLM", "RoFormerForCausalLM", "RemBertForCausalLM",
    "MegatronBertForCausalLM", "BlipTextLMHeadModel", "LEDModel",
    "MvpModel", "SplinterModel", "NllbMoeModel", "PegasusXModel", "BigBirdPegasusModel",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()


def model_class(name: str) -> type:
    if name == "BlipTextLMHeadModel":
        from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

        return BlipTextLMHeadModel
    return getattr(transformers, name)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_models_that_do_not_support_sdpa(name):
    """Whether or not they would ever call attnlib."""
    chosen = model_class(name)
    config = chosen.config_class()
    config._attn_implementation = attnlib.hf.NAME
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=f"^attn_implementation: expected .* got {name}"),
    ):
        chosen(config)


def test_models_that_compute_attention_themselves():
    config = transformers.FalconConfig(attn_implementation=attnlib.hf.NAME)
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match="^attn_implementation: .* got FalconForCausalLM"),
    ):
        transformers.FalconForCausalLM(config)


def test_switching_a_model_that_does_not_support_sdpa(monkeypatch):
    """By the method for it, and behind the model's back: Gemma 2, if its soft cap were not known."""
    monkeypatch.setattr(models, "WITH_SCORES", set())
    models.check_config.cache_clear()
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config)
    with pytest.raises(ValueError, match="^attn_implementation: expected .* got Gemma2ForCausalLM"):
        model.set_attn_implementation(attnlib.hf.NAME)
    model.config._attn_implementation = attnlib.hf.NAME
    with pytest.raises(ValueError, match="^attn_implementation: expected .* got Gemma2"):
        model(tokens(1, 5, "cpu"))


def test_a_class_of_ones_own(device):
    """A model that inherits its attention from one of transformers' is taken."""

    class Mine(transformers.LlamaForCausalLM):
        pass

    config = build("llama", attnlib.hf.NAME, device).config
    assert Mine(config).config._attn_implementation == attnlib.hf.NAME


def test_other_implementations_are_chosen_as_before(device):
    assert build("llama", "sdpa", device).config._attn_implementation == "sdpa"
    falcon = transformers.FalconConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=64
    )
    model = transformers.FalconForCausalLM(falcon)
    assert model.config._attn_implementation != attnlib.hf.NAME


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "name",
    [
        *("sinks", "cache", "head_mask", "output_attentions"),
        *("block_indices", "block_table", "anything"),
    ],
)
def test_what_a_kernel_would_have_to_know(name):
    q = torch.zeros(1, 1, 4, 16)
    layer = SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match=f"^{name}: expected None, attnlib does not support it, got 3"):
        attnlib.hf.attention_forward(layer, q, q, q, None, **{name: 3})
    with pytest.raises(
        ValueError, match=f"^{name}: expected None, attnlib does not support it, got a Tensor"
    ):
        attnlib.hf.attention_forward(layer, q, q, q, None, **{name: q})
    for nothing in (None, False):
        attnlib.hf.attention_forward(layer, q, q, q, None, **{name: nothing})


def test_what_changes_nothing():
    q = torch.randn(1, 1, 4, 16)
    layer = SimpleNamespace(is_causal=True)
    said = {"use_cache": True, "cache_position": torch.arange(4), "output_hidden_states": True}
    plain, _ = attnlib.hf.attention_forward(layer, q, q, q, None)
    assert torch.equal(
        plain, attnlib.hf.attention_forward(layer, q, q, q, None, deterministic=True, **said)[0]
    )


def test_dropout(device):
    model = build("llama", "attnlib", device)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.eval()(tokens(1, 7, device))  # none outside of training
    with pytest.raises(ValueError, match="^dropout: expected 0, attnlib has no dropout .*, got 0.1$"):
        model.train()(tokens(1, 7, device))


def test_attention_weights(device):
    with pytest.raises(ValueError, match="^output_attentions: expected None, attnlib does not support it"):
        build("llama", "attnlib", device)(tokens(1, 7, device), output_attentions=True)


def test_attention_weights_of_a_model_that_does_not_tell_its_layers():
    config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
                                     eos_token_id=0, attn_implementation="attnlib")  # fmt: skip
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(3, 12)[None]
    with pytest.raises(ValueError, match="^output_attentions: expected None, attnlib does not support it"):
        model(ids, output_attentions=True)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3  # and what it can give


def test_a_model_that_looks_up_its_attention_in_a_table():
    config = transformers.SamVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8,
        output_channels=16, global_attn_indexes=[0], attn_implementation="attnlib",
    )  # fmt: skip
    with pytest.raises(ValueError, match="^attn_implementation: expected a model that calls transformers'"):
        transformers.SamVisionModel(config)
