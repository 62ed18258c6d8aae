"""Gemma 3n and Gemma 4, whose last layers take keys and values of layers before them; those of Gemma 4
compute only the queries that are asked for."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import SMALL, tokens  # noqa: E402

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore")]
SHARED = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97,
}  # fmt: skip
OWN = {
    "Gemma3n": {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": None},
    "Gemma4": {"global_head_dim": 32},
}
LENGTH = 12


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()


def build(family: str, implementation: str, device: str):
    torch.manual_seed(0)
    settings = SMALL | SHARED | OWN[family] | {"eos_token_id": None, "attn_implementation": implementation}
    config = getattr(transformers, f"{family}TextConfig")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(device).eval()
    assert any(layer.self_attn.is_kv_shared_layer for layer in model.model.layers)
    return model


def padding(device: str) -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long, device=device)
    mask[1, :4] = 0
    return mask


POSITIONS = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (7, 4)])


@pytest.mark.parametrize(
    ("case", "keep", "family"),
    [*product(["plain", "left", "without a cache", "packed"], [1, 3], ["Gemma4"]), ("left", 0, "Gemma4")]
    + [("left", 3, "Gemma3n"), ("packed", 0, "Gemma3n")],
)
def test_the_last_logits(case, keep, family, device):
    given = {"attention_mask": padding(device)} if case in ("left", "without a cache") else {}
    if case == "packed":
        given["position_ids"] = POSITIONS.to(device)
    found = []
    for implementation in ("attnlib", "eager"):
        model = build(family, implementation, device)
        with torch.no_grad():
            output = model(
                tokens(2, LENGTH, device), logits_to_keep=keep, use_cache=case in ("plain", "left"), **given
            )
        real = given.get("attention_mask", torch.ones(2, LENGTH, device=device))[:, -keep:].bool()
        found.append(output.logits[real])
    assert len(found[0]) and found[0].std() > 0.1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "cache"), [("Gemma4", None), ("Gemma4", "static"), *in_turn(["Gemma3n"], [None, "static"])]
)
@pytest.mark.parametrize("length", [3, LENGTH], ids=["shorter than the window", "longer"])
def test_generate(length, family, cache, device):
    found = []
    for implementation in ("attnlib", "eager"):
        model = build(family, implementation, device)
        mask = torch.ones(2, length, dtype=torch.long, device=device)
        mask[1, : length // 3] = 0
        found.append(
            model.generate(
                tokens(2, length, device), attention_mask=mask, max_new_tokens=5, do_sample=False,
                cache_implementation=cache,
            )
        )  # fmt: skip
    assert torch.equal(*found) and len(found[0].unique()) > 5


def test_gradients(device):
    found = []
    for implementation in ("attnlib", "eager"):
        model = build("Gemma4", implementation, device)
        output = model(tokens(2, LENGTH, device), attention_mask=padding(device), logits_to_keep=3)
        output.logits.square().mean().backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_packed_rows_of_which_the_last_logits_are_asked_for(device):
    """The first layers have packed them, since the cache was empty; the last ones would not."""
    model = build("Gemma4", "attnlib", device)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="^past_key_values: expected a cache of one"),
    ):
        model(tokens(2, LENGTH, device), position_ids=POSITIONS.to(device), logits_to_keep=1)


def test_heads_of_the_real_models(device):
    """Gemma 4's layers of full attention have a head dimension of 512."""
    config = transformers.Gemma4TextConfig(**SMALL | SHARED, attn_implementation="attnlib")
    model = transformers.Gemma4ForCausalLM(config).to(device)
    with pytest.raises(ValueError, match="^q: expected a head dimension that is .* from 8 to 256, got 512"):
        model(tokens(2, LENGTH, device))
