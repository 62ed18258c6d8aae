"""Tiny models of text and images, whose image tokens or prefix see each other: what "eager" computes."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import SMALL  # noqa: E402

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore")]
IMAGE, PATCHES, LENGTH, FIRST = 90, 4, 14, 3
"""The token that stands for a patch, patches of an image, tokens of a row, and where its image begins."""
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 64,
    "vision_use_head": False, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()


def build(family: str, implementation: str, device: str):
    text, own = SMALL | {"eos_token_id": None}, {"image_token_index": IMAGE}
    if family == "PaliGemma":
        text, own = text | {"model_type": "gemma"}, own | {"projection_dim": 64}
    else:
        text |= {
            "model_type": "gemma3_text", "sliding_window": 6, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        }  # fmt: skip
        own |= {"mm_tokens_per_image": PATCHES, "boi_token_index": 91, "eoi_token_index": 92}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=VISION, **own)
    config._attn_implementation = implementation
    return getattr(transformers, f"{family}ForConditionalGeneration")(config).to(device).eval()


def inputs(family: str, device: str, suffix: bool = False) -> dict[str, torch.Tensor]:
    """suffix: PaliGemma's last four tokens are what it learns to say, and causal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 80, (2, LENGTH), generator=generator)
    ids[:, FIRST : FIRST + PATCHES] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    kinds = (ids == IMAGE).long()
    if family == "PaliGemma":
        kinds = torch.zeros_like(ids)
        kinds[:, -4:] = int(suffix)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds, "pixel_values": pixels}
    return {name: x.to(device) for name, x in given.items()}


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("family", ["PaliGemma", "Gemma3"])
def test_a_training_step(family, cache, device):
    found = []
    for implementation in ("attnlib", "eager"):
        model = build(family, implementation, device).train()
        given = inputs(family, device, suffix=True)
        labels = given["input_ids"].clone()
        labels[:, :-4] = -100
        output = model(**given, labels=labels, use_cache=cache)
        output.loss.backward()
        query = model.model.language_model.layers[0].self_attn.q_proj.weight
        found.append((output.logits[given["attention_mask"].bool()], query.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"use_cache": False}, {}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("family", ["PaliGemma", "Gemma3"])
def test_generate(family, options, device):
    found = []
    for implementation in ("attnlib", "eager"):
        output = build(family, implementation, device).generate(
            **inputs(family, device), max_new_tokens=4, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        found.append(torch.stack(output.logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
