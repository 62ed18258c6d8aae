"""Masks with four dimensions and mask functions of one's own: what "eager" computes, or a named error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import build, tokens  # noqa: E402
from transformers import masking_utils  # noqa: E402

import attnlib.hf  # noqa: E402
from attnlib.hf import given  # noqa: E402
from attnlib.hf.remembered import Remembered  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LAYER, S = SimpleNamespace(is_causal=True), 9
SHAPES = [(2, 2, S, S), (1, 1, S, S), (2, 1, 1, S), (1, 2, 1, S), (1, 1, 1, S)]


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()


@pytest.fixture
def models(device):
    """attnlib's and the one that computes as transformers does, of the same weights."""
    return [build("llama", implementation, device) for implementation in ("attnlib", "eager")]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def prefix(device) -> torch.Tensor:
    """Bool (2, 1, S, S): causal but for the first tokens, which all see each other; 4 in one row, 6 in the
    other."""
    i = torch.arange(S, device=device)
    long = torch.tensor([4, 6], device=device)[:, None, None]
    return ((i[:, None] >= i) | (i < long)).unsqueeze(1)


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("kind", ["bool", "additive", "bias"])
def test_a_tensor_given_to_a_model(kind, models, device):
    """Of a bias, which has values besides 0 and the least number, gradients too."""
    seen = prefix(device)
    mask = additive(seen)
    if kind == "bias":
        distance = torch.arange(S, device=device)[:, None] - torch.arange(S, device=device)
        mask = mask - 0.5 * distance.abs()
    ids, found = tokens(2, S, device), []
    for model, own in zip(models, (seen if kind == "bool" else mask, mask), strict=True):
        with torch.set_grad_enabled(kind == "bias"):
            logits = model(ids, attention_mask=own).logits
        found.append([logits])
        if kind == "bias":
            logits.square().mean().backward()
            found[-1].append(model.model.layers[0].self_attn.k_proj.weight.grad)
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
    with torch.no_grad():
        plain = models[1](ids).logits
    assert (plain - found[0][0]).abs().max() > 0.1


@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, torch.bool) for shape in SHAPES), *((shape, torch.float32) for shape in SHAPES),
    (SHAPES[0], torch.bfloat16),
])  # fmt: skip
def test_a_tensor_given_to_a_layer(shape, dtype, device):
    """Of each shape that broadcasts; with numbers it has a gradient too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, S, 16, generator=generator).to(device)
    mask = (torch.rand(shape, generator=generator) > 0.4).to(device)
    mask[..., 0] = True
    if dtype != torch.bool:
        mask = torch.randn(shape, generator=generator).to(device, dtype).masked_fill(~mask, -torch.inf)
        mask.requires_grad_()
    found, _ = attnlib.hf.attention_forward(LAYER, q, k, v, mask)
    exact = mask if dtype == torch.bool else mask.float()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=exact).transpose(1, 2)
    close(found, expected)
    if mask.requires_grad:
        weights = torch.randn(found.shape, generator=generator).to(device)
        ours, theirs = (torch.autograd.grad((x * weights).sum(), mask)[0] for x in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, S, S), (2, 1, 1, S)])
def test_numbers_that_are_learned_may_begin_with_zeros(shape, device):
    """As the relative biases of Swin do."""
    q, k, v, weights = torch.randn(4, 2, 2, S, 16, device=device)
    mask = torch.zeros(shape, device=device)
    mask[..., 4] = torch.finfo(mask.dtype).min
    mask.requires_grad_()
    found = attnlib.hf.attention_forward(LAYER, q, k, v, mask)[0].transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    close(*(torch.autograd.grad((x * weights).sum(), mask)[0] for x in (found, expected)))


def test_one_tensor_for_layers_of_several_lengths(device):
    """An encoder's padding is handed to its decoder's cross-attention, too."""
    kept = torch.ones(2, 1, 1, S, dtype=torch.bool, device=device)
    kept[0, ..., :3] = kept[1, ..., 5] = False
    k, v = torch.randn(2, 2, 2, S, 16, device=device)
    for queries in (S, S + 11, 3):
        q, layer = torch.randn(2, 2, queries, 16, device=device), SimpleNamespace(is_causal=False)
        found, _ = attnlib.hf.attention_forward(layer, q, k, v, kept)
        close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, kept).transpose(1, 2))


def test_a_query_that_sees_nothing(device):
    q = torch.randn(1, 2, S, 16, device=device)
    seen = prefix(device)[:1].clone()
    seen[:, :, 3] = False
    for mask in (seen, additive(seen)):
        found, _ = attnlib.hf.attention_forward(LAYER, q, q, q, mask)
        assert not found[:, 3].any() and found[:, 4].all()


def test_keys_that_a_layer_chooses(device):
    """indices, as in DeepSeek V3.2, count where the mask allows it."""
    q, k, v = torch.randn(3, 2, 2, S, 16, device=device)
    seen, indices = prefix(device), torch.randint(0, S, (2, S, 4), device=device)
    indices[..., 0] = 0
    found, _ = attnlib.hf.attention_forward(LAYER, q, k, v, seen, indices=indices)
    chosen = torch.zeros(2, S, S, dtype=torch.bool, device=device).scatter(2, indices, True)
    both = seen & chosen[:, None]
    close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=both).transpose(1, 2))


def test_a_relative_bias_of_the_layer(device):
    """position_bias, as in T5: under a causal mask, beside a mask with numbers, and with a gradient."""
    q, k, v, weights = torch.randn(4, 1, 2, S, 16, device=device)
    i = torch.arange(S, device=device)
    bias = torch.randn(1, 2, S, S, device=device, requires_grad=True)
    causal = additive((i[:, None] >= i)[None, None])
    added = torch.randn(1, 1, S, S, device=device)
    for mask, dense in ((None, causal), (added, added)):
        found, _ = attnlib.hf.attention_forward(LAYER, q, k, v, mask, position_bias=bias)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense + bias)
        close(found, expected.transpose(1, 2))
        ours, theirs = (
            torch.autograd.grad((x * weights).sum(), bias)[0] for x in (found.transpose(1, 2), expected)
        )
        close(ours, theirs)


@pytest.mark.parametrize(("wrong", "told"), [
    (torch.ones(1, 1, 4, 3, dtype=torch.bool), r"bool, float16, .* = \(1, 2, 4, 4\), got torch.bool of"),
    (torch.ones(1, 2, 1, 4).long(), "bool, float16, .* got torch.int64 of shape"),
    (torch.ones(3, 1, 1, 4).int(), "bool, float16, .* got torch.int32 of shape"),
    (torch.ones(1, 1, 4, 4, dtype=torch.float64), "bool, float16, .* got torch.float64 of shape"),
    (torch.ones(1, 4, 4, dtype=torch.bool), r"None, four dimensions, or the padding .* shape \(1, 4, 4\)"),
    (torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta"), "device cpu of the queries, got meta"),
])  # fmt: skip
def test_tensors_that_fit_nothing(wrong, told):
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match=f"^attention_mask: expected {told}"):
        attnlib.hf.attention_forward(LAYER, q, q, q, wrong)


def test_a_tensor_beside_other_words_for_a_mask():
    q, seen = torch.zeros(1, 1, 4, 16), torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    ends = torch.tensor([0, 4], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    with pytest.raises(ValueError, match="^attention_mask: expected nothing hidden beside cu_seq_lens_q"):
        attnlib.hf.attention_forward(LAYER, q, q, q, seen, **told)
    with pytest.raises(ValueError, match="^indices: expected None, or integers .* a Tensor"):
        attnlib.hf.attention_forward(LAYER, q, q, q, seen, indices=q)


# ---------------------------------------------------------------- once for a forward pass


def test_a_tensor_is_looked_at_once_for_all_layers(models, device, monkeypatch):
    """And again after a change in place, even one that PyTorch does not count."""
    looks = []
    read = given._read
    monkeypatch.setattr(given, "_read", lambda *args: looks.append(1) or read(*args))
    ids, seen = tokens(2, S, device), prefix(device)
    changes = {
        "not at all": lambda: None,
        "in place": lambda: seen[:, :, 5].logical_and_(seen[:, :, 2]),
        "behind autograd's back": lambda: seen.data[:, :, 7, 3:6].fill_(False),
    }
    with torch.no_grad():
        for number, change in enumerate(changes.values(), 1):
            change()
            masks = seen, additive(seen)
            pairs = zip(models, masks, strict=True)
            close(*(model(ids, attention_mask=mask).logits for model, mask in pairs))
            assert len(looks) == number and len(models[0].model.layers) == 2


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_remembered(inference):
    """Of a view by its base, not past its life, and of inference tensors, which have no version, by value."""
    memory, layers = Remembered(), [SimpleNamespace() for _ in range(9)]
    with torch.inference_mode(inference):
        base = torch.zeros(2, 4)
        made = [memory.of(layer, base[:, :3], (4,), object) for layer in layers[:3]]
        assert made[0] is made[1] is made[2]
        assert memory.of(layers[3], base[:, :2], (4,), object) is not made[0]
        assert memory.of(layers[3], base[:, :3], (5,), object) is not made[0]
        assert memory.of(layers[0], base[:, :3], (4,), object) is not made[0]  # a pass begins
        before = memory.of(layers[4], base[:, :3], (4,), object)
        base.add_(1)
        assert memory.of(layers[5], base[:, :3], (4,), object) is not before
    assert memory._found
    del base
    assert not memory._found


# ---------------------------------------------------------------- functions


def asked(function, **inputs):
    """What attnlib answers when transformers asks for a mask."""
    from attnlib.hf.mask_functions import attention_mask

    form = {"q_length": S, "kv_length": S, "mask_function": function, "batch_size": 2}
    return attention_mask(**form | inputs)


def is_dense(mask, **inputs) -> bool:
    """Whether a block mask is what transformers makes for "sdpa"."""
    form = {"q_length": S, "kv_length": S, "batch_size": 2, "allow_is_causal_skip": False, "use_vmap": True}
    dense = masking_utils.sdpa_mask(**form | inputs)
    return torch.equal(mask.block_mask.to_dense().expand_as(dense), dense)


CAUSAL = masking_utils.causal_mask_function
GROUPS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1], [0, 0, -1, -1, -1, -1, -1, 1, 1]])
FUNCTIONS = {
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "images": masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(GROUPS)),
    "prefix": masking_utils.or_masks(CAUSAL, lambda b, h, q, k: k < 3),
    "of one's own": lambda b, h, q, k: (q + k) % 3 != 1,
    "a window in groups": masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.packed_sequence_mask_function(GROUPS),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_become_block_masks(name):
    padding = torch.ones(2, S, dtype=torch.bool)
    padding[1, :2] = False
    for extra in ({}, {"attention_mask": padding}, {"q_length": 3, "q_offset": torch.tensor(5)}):
        assert is_dense(asked(FUNCTIONS[name], **extra), mask_function=FUNCTIONS[name], **extra)


def test_a_function_that_can_not_be_evaluated():
    def wild(b, h, q, k):
        return bool(q > k)

    with pytest.raises(ValueError, match="^mask_function: expected a function of .* got .*wild from a model"):
        asked(wild)


@pytest.mark.parametrize("padded", [False, True])
def test_image_tokens_in_a_model(padded, models, device):
    """As Gemma 3 and PaliGemma ask for them, through transformers' own function, which the model calls."""
    ids, mask = tokens(2, S, device), torch.ones(2, S, dtype=torch.long, device=device)
    if padded:
        mask[1, :2] = 0
    found = []
    with torch.no_grad():
        for model in models:
            embeds = model.get_input_embeddings()(ids)
            own = masking_utils.create_causal_mask(
                model.config, embeds, mask if padded else None, None, block_sequence_ids=GROUPS.to(device),
                or_mask_function=lambda b, h, q, k: k == 3,
            )  # fmt: skip
            found.append(model(inputs_embeds=embeds, attention_mask=own))
    ours, theirs = (output.logits[mask.bool()] for output in found)
    close(ours, theirs)


def test_chunks_and_a_cache(device):
    """Llama 4, whose chunks end within the text: prefill in parts, then token by token, in caches that grow
    and of a fixed size."""
    config = transformers.Llama4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_attention_heads=2,
        num_hidden_layers=2, num_key_value_heads=1, head_dim=16, num_local_experts=2, attention_chunk_size=4,
        layer_types=["chunked_attention", "full_attention"], initializer_range=0.2,
    )  # fmt: skip
    ids, mask = tokens(2, S, device), torch.ones(2, S, dtype=torch.long, device=device)
    mask[1, :2] = 0
    found = []
    for implementation in ("attnlib", "eager"):
        torch.manual_seed(0)
        config._attn_implementation = implementation
        model = transformers.Llama4ForCausalLM(config).to(device).eval()
        model.generation_config.eos_token_id = None
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        found.append([model(ids, attention_mask=mask).logits.detach()[mask.bool()]])
        for cache in ("dynamic", "static"):
            found[-1].append(model.generate(ids, **options, cache_implementation=cache))
    close(found[0][0], found[1][0])
    assert all(torch.equal(*tokens) for tokens in zip(found[0][1:], found[1][1:], strict=True))


# ---------------------------------------------------------------- in a graph


@torch.no_grad()
def test_tensors_and_functions_in_one_graph(device):
    """A tensor's values are not looked at there, and a function becomes a tensor, as for "sdpa"."""
    attnlib_model, plain = (build("llama", name, device, layers=1) for name in ("attnlib", "eager"))
    ids, seen, groups = tokens(2, S, device), prefix(device), GROUPS.to(device)
    masks = torch.ones(2, S, dtype=torch.long, device=device)
    masks[1, :2] = 0

    def images(model, ids, mask):
        embeds = model.get_input_embeddings()(ids)
        own = masking_utils.create_causal_mask(model.config, embeds, mask, None, block_sequence_ids=groups)
        return model(inputs_embeds=embeds, attention_mask=own, use_cache=False).logits

    torch.compiler.reset()
    compiled = torch.compile(images, backend="eager", fullgraph=True)
    real = masks.bool()
    close(compiled(attnlib_model, ids, masks)[real], images(plain, ids, masks)[real])
    torch.compiler.reset()
    compiled = torch.compile(attnlib_model, backend="eager", fullgraph=True)
    expected = plain(ids, attention_mask=additive(seen), use_cache=False).logits
    for mask in (seen, additive(seen)):
        close(compiled(ids, attention_mask=mask, use_cache=False).logits, expected)
    torch.compiler.reset()
