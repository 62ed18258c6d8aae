"""Masks as models of transformers ask for them: cross-attention, packed rows, holes, windows. What is
computed is what "sdpa" computes; the rest is an error that names the argument."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import SMALL, build, tokens  # noqa: E402

import attnlib.hf  # noqa: E402
from attnlib import BlockMask, attention  # noqa: E402
from attnlib.hf import forward  # noqa: E402
from attnlib.hf.mask import Mask  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ENCODER, DECODER = SimpleNamespace(is_causal=False), SimpleNamespace(is_causal=True)


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnlib.hf.register()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logits(name, implementation, device, ids, **inputs):
    return build(name, implementation, device)(ids, **inputs).logits


def asked(mask_function, length, **inputs):
    """What attnlib answers when transformers asks for a mask."""
    from attnlib.hf.mask_functions import attention_mask

    form = {"q_length": length, "kv_length": length, "mask_function": mask_function}
    return attention_mask(**form | inputs)


# ---------------------------------------------------------------- cross-attention


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_cross_attention_of_padded_keys(rows, device):
    """Queries are not taken for the keys' last tokens: each of them sees all keys that are kept."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, rows, 16, generator=generator).to(device)
    k, v = torch.randn(2, 3, 2, 5, 16, generator=generator).to(device)
    kept = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 1, 0]], dtype=torch.bool, device=device)
    found, _ = attnlib.hf.attention_forward(ENCODER, q, k, v, kept)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None])
    close(found, expected.transpose(1, 2))


def test_queries_without_any_key(device):
    q, k = torch.randn(2, 2, 3, 16, device=device), torch.randn(2, 2, 5, 16, device=device)
    kept = torch.tensor([[True] * 5, [False] * 5], device=device)
    found, _ = attnlib.hf.attention_forward(ENCODER, q, k, k, kept)
    assert found.isfinite().all() and not found[1].any()


def test_an_encoder_with_padding_and_its_decoder(device):
    ids, mask = tokens(2, 11, device), torch.ones(2, 11, dtype=torch.long, device=device)
    mask[1, 6:] = 0
    config = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    config |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config |= {"vocab_size": 97, "init_std": 0.3, "max_position_embeddings": 32, "forced_eos_token_id": None}
    models = []
    for name in ("attnlib", "sdpa"):
        torch.manual_seed(0)
        settings = transformers.BartConfig(**config, attn_implementation=name)
        models.append(transformers.BartForConditionalGeneration(settings).to(device).eval())
    for length in (4, 14):
        inputs = {"attention_mask": mask, "decoder_input_ids": tokens(2, length, device, seed=1)}
        with torch.no_grad():
            close(*(model(ids, **inputs).logits for model in models))


def test_a_decoder_made_of_an_encoder(device):
    """Its encoder's padding is not that of its own text."""
    small = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 32, "initializer_range": 0.3}
    ids, mask = tokens(2, 11, device), torch.ones(2, 11, dtype=torch.long, device=device)
    mask[1, 6:] = 0
    models = []
    for name in ("attnlib", "sdpa"):
        torch.manual_seed(0)
        decoder = transformers.BertConfig(**small, is_decoder=True, add_cross_attention=True)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.BertConfig(**small), decoder, decoder_start_token_id=1, pad_token_id=0
        )
        config._attn_implementation = name
        models.append(transformers.EncoderDecoderModel(config).to(device).eval())
    assert models[0].decoder.config._attn_implementation == "attnlib"
    for length in (4, 14):
        inputs = {"attention_mask": mask, "decoder_input_ids": tokens(2, length, device, seed=1)}
        with torch.no_grad():
            close(*(model(ids, **inputs).logits for model in models))


# ---------------------------------------------------------------- packed rows


@pytest.mark.parametrize("cache", [False, True], ids=["", "with an empty cache"])
@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_packed_position_ids(name, cache, device):
    """A row's second sequence may begin anywhere, in any row; "sdpa" knows of it only without a cache."""
    ids = tokens(3, 17, device)
    rows = [torch.cat([torch.arange(n), torch.arange(17 - n)]) for n in (0, 7, 15)]
    position_ids = torch.stack(rows).to(device)
    found = logits(name, "attnlib", device, ids, position_ids=position_ids, use_cache=cache)
    close(found, logits(name, "sdpa", device, ids, position_ids=position_ids, use_cache=False))
    whole = logits(name, "sdpa", device, ids)
    close(found[0], whole[0])
    assert (found[1:, -1] - whole[1:, -1]).abs().max() > 0.1


def test_one_row_of_positions_for_all(device):
    ids, row = tokens(2, 9, device), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]], device=device)
    found = logits("llama", "attnlib", device, ids, position_ids=row)
    close(found, logits("llama", "sdpa", device, ids, position_ids=row, use_cache=False))


def test_gradients_of_packed_rows(device):
    ids = tokens(2, 9, device)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]], device=device)
    grads = []
    for implementation in ("attnlib", "sdpa"):
        model = build("llama", implementation, device)
        model(ids, position_ids=position_ids, use_cache=False).logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    close(*grads)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
@pytest.mark.parametrize("told", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_a_cache_of_packed_rows_is_not_continued(told, name, device):
    """Which of its sequences a token goes on with can't be known, whatever position it is said to have."""
    model = build(name, "attnlib", device)
    packed = torch.tensor([[0, 1, 2, *range(9)]], device=device)
    inputs, next_token = {"position_ids": packed}, tokens(1, 1, device)
    if told:
        offsets = torch.tensor([0, 3, 12], dtype=torch.int32, device=device)
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad():
        cache = model(tokens(1, 12, device), **inputs).past_key_values
        for held in (cache, copy.deepcopy(cache)):
            for position in (torch.tensor([[9]], device=device), torch.tensor([[12]], device=device), None):
                with pytest.raises(ValueError, match="^past_key_values: expected a cache of one sequence in"):
                    model(next_token, position_ids=position, past_key_values=held)
        ones = torch.ones(1, 13, dtype=torch.long, device=device)
        model(next_token, attention_mask=ones, past_key_values=copy.deepcopy(cache))  # which decides


def test_a_cache_that_held_packed_rows_can_be_used_again(device):
    model, ids = build("llama", "attnlib", device), tokens(1, 7, device)
    with torch.no_grad():
        cache = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)).past_key_values
        cache.crop(-7)
        model(ids, past_key_values=cache)
        found = model(tokens(1, 1, device), past_key_values=cache).logits
        close(found[:, -1], model(torch.cat([ids, tokens(1, 1, device)], 1)).logits[:, -1])


def test_positions_that_go_back_in_a_cache_of_one_sequence(device):
    model = build("llama", "attnlib", device)
    with torch.no_grad():
        cache = model(tokens(1, 7, device)).past_key_values
        with pytest.raises(
            ValueError, match="^position_ids: expected positions that go on behind the tokens"
        ):
            position = torch.tensor([[4]], device=device)
            model(tokens(1, 1, device), position_ids=position, past_key_values=cache)


@pytest.mark.parametrize("ones", [False, True], ids=["", "beside an attention_mask"])
def test_packed_rows_and_a_cache_of_a_fixed_size(ones, device):
    """Its mask is the same with an attention_mask of ones, which decides; later steps would see it all."""
    mask = torch.ones(1, 12, dtype=torch.long, device=device) if ones else None
    refused_with_a_fixed_size(build("llama", "attnlib", device), mask)


def test_packed_rows_longer_than_the_window_and_a_cache_of_a_fixed_size(device):
    """Where all layers are sliding no mask of this pass tells of the size: it has a key for each query."""
    refused_with_a_fixed_size(build("sliding window", "attnlib", device), None)


def refused_with_a_fixed_size(model, mask):
    device = model.device
    ids, position_ids = tokens(1, 12, device), torch.tensor([[0, 1, 2, *range(9)]], device=device)
    offsets = torch.tensor([0, 3, 12], dtype=torch.int32, device=device)
    said = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    for name, inputs in (("position_ids", {"position_ids": position_ids}), ("cu_seq_lens_q", said)):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad(), pytest.raises(ValueError, match=f"^{name}: expected one sequence in each row"):
            model(ids, attention_mask=mask, past_key_values=cache, **inputs)


@pytest.mark.parametrize("cache", [False, True])
def test_positions_that_do_not_begin_at_0(cache, device):
    position_ids = torch.tensor([[0, 1, 2, 5, 6, 7, 8]], device=device)
    with pytest.raises(ValueError, match="^position_ids: expected packed sequences that begin at 0"):
        logits("llama", "attnlib", device, tokens(1, 7, device), position_ids=position_ids)


@pytest.mark.parametrize("ones", [True, False])
def test_packed_rows_beside_an_attention_mask(ones, device):
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)
    mask = torch.ones_like(position_ids)
    mask[0, -1] = int(ones)
    with pytest.raises(
        ValueError, match="^position_ids: expected positions that go up in each row beside an att"
    ):
        logits(
            "llama", "attnlib", device, tokens(1, 7, device), position_ids=position_ids, attention_mask=mask
        )


def test_a_sequence_that_begins_behind_a_hole(device):
    """Other positions go on there, see test_generate."""
    ids, mask = tokens(1, 8, device), torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]], device=device)
    with pytest.raises(ValueError, match="^position_ids: expected positions that go up in each row beside"):
        positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]], device=device)
        logits("llama", "attnlib", device, ids, position_ids=positions, attention_mask=mask)
    with pytest.raises(ValueError, match="^position_ids: expected positions that go up in each row beside"):
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 1, 2]], device=device)
        logits("llama", "attnlib", device, ids, position_ids=positions, attention_mask=mask)


def test_cu_seq_lens(device):
    """Three sequences in a batch of one, as their offsets tell."""
    ends = torch.tensor([0, 4, 5, 12], device=device)
    q, k, v = torch.randn(3, 1, 2, 12, 16, device=device)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": torch.tensor(7)}
    for layer in (DECODER, ENCODER):
        found, _ = attnlib.hf.attention_forward(layer, q, k, v, None, **told)
        for begin, end in zip(ends, ends[1:], strict=False):
            one = (x[:, :, begin:end] for x in (q, k, v))
            expected = attnlib.attention(*one, causal=layer.is_causal)
            close(found[:, begin:end], expected.transpose(1, 2))


def test_cu_seq_lens_through_a_model(device):
    ids, ends = tokens(1, 9, device), torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=device)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    found = logits("llama", "attnlib", device, ids, position_ids=position_ids, **told)
    close(found, logits("llama", "sdpa", device, ids, position_ids=position_ids, use_cache=False))


def test_cu_seq_lens_that_lack_something():
    q, ends = torch.zeros(2, 1, 4, 16), torch.tensor([0, 4], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    with pytest.raises(ValueError, match="^cu_seq_lens_q: expected a batch of one beside it, got 2"):
        attnlib.hf.attention_forward(DECODER, q, q, q, None, **told)
    for name in told:
        with pytest.raises(ValueError, match=f"^{name}: expected all of cu_seq_lens_q, .* or none, got None"):
            attnlib.hf.attention_forward(DECODER, q[:1], q[:1], q[:1], None, **told | {name: None})
    with pytest.raises(ValueError, match="^cu_seq_lens_k: expected a torch.Tensor, got a list"):
        attnlib.hf.attention_forward(DECODER, q[:1], q[:1], q[:1], None, **told | {"cu_seq_lens_k": [0, 4]})
    with pytest.raises(ValueError, match="^sliding_window: expected an int or None, got a float"):
        attnlib.hf.attention_forward(DECODER, q, q, q, None, sliding_window=3.0)


def test_all_of_a_mask_goes_to_another_device():
    seen = torch.ones(5, 5, dtype=torch.bool)
    mask = Mask(5, 5, kept=seen[:1], block_mask=BlockMask.from_mask(seen), bias=torch.zeros(1, 1, 5, 5))
    there = mask.to("meta")
    assert {x.device.type for x in (there.kept, there.block_mask, there.bias)} == {"meta"}
    assert mask.to(torch.float16) is mask and mask.to("cpu", torch.float16).kept.dtype == torch.bool
    named = Mask(5, 5, last=lambda number: seen[None, None, -number:]).to("meta")
    assert named[:, :, -2:, :].device.type == "meta" and named[:, :, -2:, :].shape == (1, 1, 2, 5)


# ---------------------------------------------------------------- holes and windows


@pytest.mark.parametrize("name", ["llama", "a window beyond the text"])
def test_holes(name, device):
    ids, mask = tokens(2, 17, device), torch.ones(2, 17, dtype=torch.long, device=device)
    mask[0, 6:9] = mask[1, :3] = mask[1, 10] = 0
    found, expected = (logits(name, x, device, ids, attention_mask=mask) for x in ("attnlib", "sdpa"))
    close(found[mask.bool()], expected[mask.bool()])


def test_holes_under_a_window(device):
    """Without its hole a row's tokens would come closer to each other."""
    ids, mask = tokens(2, 17, device), torch.ones(2, 17, dtype=torch.long, device=device)
    mask[0, 6:9] = mask[1, :3] = 0
    found, expected = (
        logits("sliding window", x, device, ids, attention_mask=mask) for x in ("attnlib", "sdpa")
    )
    close(found[mask.bool()], expected[mask.bool()])


def test_two_sided_windows(device):
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 12, 16, generator=generator).to(device)
    kept = torch.ones(2, 12, dtype=torch.bool, device=device)
    kept[1, 8:] = False
    mask = asked(sliding_window_bidirectional_mask_function(3), 12, attention_mask=kept)
    found, _ = attnlib.hf.attention_forward(DECODER, q, k, v, mask)  # the mask counts, not the layer
    near = (torch.arange(12)[:, None] - torch.arange(12)).abs() <= 3
    allowed = near.to(device) & kept[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)
    close(found[kept], expected[kept])


@pytest.mark.parametrize(("queries", "offset"), [(6, 0), (15, 0), (6, 3), (1, torch.tensor(4))], ids=str)
def test_two_sided_windows_that_do_not_end_with_the_keys(queries, offset, device):
    """Of cross-attention, and of a cache of a fixed size."""
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    q = torch.randn(2, 2, queries, 16, device=device)
    k, v = torch.randn(2, 2, 2, 12, 16, device=device)
    window = sliding_window_bidirectional_mask_function(3)
    sizes = {"q_length": queries, "kv_length": 12, "q_offset": offset, "batch_size": 2, "device": device}
    found, _ = attnlib.hf.attention_forward(DECODER, q, k, v, asked(window, 12, **sizes))
    near = ((torch.arange(queries)[:, None] + offset - torch.arange(12)).abs() <= 3).to(device)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, near)
    close(found, expected.transpose(1, 2))


def test_a_window_without_any_key():
    from transformers.masking_utils import sliding_window_causal_mask_function

    assert not asked(sliding_window_causal_mask_function(0), 6).block_mask.to_dense().any()


def test_chunks_of_packed_positions_that_do_not_begin_at_0():
    """Positions 6 to 9 lie in two chunks of 8."""
    from transformers import masking_utils

    chunked = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))
    for begin, cut in ((6, True), (2, False)):
        positions = torch.cat([torch.arange(4) + begin, torch.arange(4)])[None]
        sequences = masking_utils.find_packed_sequence_indices(positions)
        function = masking_utils.packed_sequence_compatibility_function(chunked, positions, sequences)
        mask = asked(function, 8, local_size=8, allow_is_causal_skip=False)
        assert (mask.block_mask is not None) == cut
        if cut:
            dense = masking_utils.sdpa_mask(1, 8, 8, mask_function=function, allow_is_causal_skip=False)
            assert torch.equal(mask.block_mask.to_dense().expand_as(dense), dense)


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_of_another_batch(rows):
    ids, mask = tokens(2, 9, "cpu"), torch.ones(rows, 9, dtype=torch.long)
    with pytest.raises(
        ValueError, match="^attention_mask: expected a row for each of 2 sequences, got shape"
    ):
        logits("llama", "attnlib", "cpu", ids, attention_mask=mask)


def test_an_attention_mask_of_three_dimensions():
    mask = torch.ones(2, 9, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="^attention_mask: expected two or four dimensions, got shape"):
        logits("llama", "attnlib", "cpu", tokens(2, 9, "cpu"), attention_mask=mask)


def test_one_chunk():
    """It is no bound."""
    from transformers.masking_utils import chunked_causal_mask_function

    chunked = chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))
    assert asked(chunked, 8, local_size=8).causal
    assert not asked(chunked, 9, local_size=8).causal


def test_a_cache_without_the_newest_tokens():
    from transformers.masking_utils import causal_mask_function

    with pytest.raises(ValueError, match="^past_key_values: expected a cache with keys for all queries, got"):
        asked(causal_mask_function, 4, kv_length=9, q_offset=7)


def test_what_a_static_cache_is_told():
    """Rows of (start, length, left bound); with one query the window is in the start."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    kept = torch.ones(2, 9, dtype=torch.bool)
    kept[0, :3] = False
    inputs = {"kv_length": 16, "attention_mask": kept, "batch_size": 2}
    found = asked(causal_mask_function, 1, **inputs, q_offset=torch.tensor(8))
    assert found.shape == (3, 1, 1, 2) and found.dtype == torch.int32
    assert found[:, 0, 0].tolist() == [[3, 0], [9, 9], [-1, -1]]
    window = sliding_window_causal_mask_function(5)
    found = asked(window, 1, **inputs, q_offset=8)
    assert found[:, 0, 0].tolist() == [[4, 4], [9, 9], [-1, -1]]
    found = asked(window, 2, **inputs, q_offset=7)
    assert found[:, 0, 0].tolist() == [[3, 0], [9, 9], [4, 4]]
    found = asked(sliding_window_causal_mask_function(16), 2, **inputs, q_offset=7)  # hides nothing
    assert found[:, 0, 0].tolist() == [[3, 0], [9, 9], [-1, -1]]


# ---------------------------------------------------------------- what a layer is given


def test_layers_are_asked_whether_they_are_causal():
    q, k, v = torch.randn(3, 1, 2, 6, 16)
    for layer, override, causal in (
        (ENCODER, None, False),
        (SimpleNamespace(), None, True),
        (DECODER, False, False),
    ):
        found, weights = attnlib.hf.attention_forward(layer, q, k, v, None, scaling=0.3, is_causal=override)
        assert weights is None
        expected = attnlib.attention(q, k, v, causal=causal, sm_scale=0.3)
        assert torch.equal(found, expected.transpose(1, 2)) and found.is_contiguous()


def test_a_layer_that_contradicts_the_mask():
    from transformers.masking_utils import bidirectional_mask_function

    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="^is_causal: expected False, as the mask of the model"):
        attnlib.hf.attention_forward(DECODER, q, q, q, asked(bidirectional_mask_function, 4), is_causal=True)


def test_a_causal_mask_is_what_counts():
    """Moonshine and Aimv2 hand one on and say is_causal=False."""
    from transformers.masking_utils import causal_mask_function

    q = torch.randn(1, 1, 4, 16)
    mask = asked(causal_mask_function, 4)
    found, expected = (
        attnlib.hf.attention_forward(DECODER, q, q, q, mask, is_causal=said)[0] for said in (False, True)
    )
    assert torch.equal(found, expected)


def test_a_mask_made_for_other_lengths():
    from transformers.masking_utils import causal_mask_function

    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(
        ValueError, match="^attention_mask: expected one for 4 queries and 4 keys, got what .* 5"
    ):
        attnlib.hf.attention_forward(DECODER, q, q, q, asked(causal_mask_function, 5))
    with pytest.raises(
        ValueError, match="^attention_mask: expected the model's own for causal attention of diff"
    ):
        attnlib.hf.attention_forward(DECODER, q, q[:, :, :2], q[:, :, :2], None)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("length", [6, 20])
def test_a_mask_made_for_fewer_rows(length, grad):
    """Of one padded row for all, say: "sdpa" repeats it."""
    from transformers.masking_utils import causal_mask_function

    q = torch.zeros(3, 1, length, 16, requires_grad=grad)
    padding = torch.ones(1, length, dtype=torch.bool)
    mask = asked(causal_mask_function, length, attention_mask=padding, batch_size=1)
    attnlib.hf.attention_forward(DECODER, q, q, q, mask)  # which hides nothing
    padding[0, :2] = False
    mask = asked(causal_mask_function, length, attention_mask=padding, batch_size=1)
    with pytest.raises(ValueError, match="^attention_mask: expected one for a batch of 3, got .* for 1:"):
        attnlib.hf.attention_forward(DECODER, q, q, q, mask)


@pytest.mark.parametrize("cache", [False, True])
def test_packed_rows_of_another_batch(cache):
    from transformers import masking_utils

    ids, position_ids = tokens(2, 7, "cpu"), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    model = build("llama", "attnlib", "cpu")
    embeds = model.get_input_embeddings()(ids)
    mask = masking_utils.create_causal_mask(model.config, embeds[:1], None, None, position_ids=position_ids)
    with pytest.raises(ValueError, match="^attention_mask: expected"):
        model(inputs_embeds=embeds, attention_mask=mask, use_cache=cache)


def test_padding_under_the_old_name_of_an_implementation():
    """transformers takes "paged|" off where it looks for attention, and not where it looks for a mask."""
    ids, mask = tokens(2, 9, "cpu"), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    expected = logits("llama", "attnlib", "cpu", ids, attention_mask=mask)
    model = build("llama", "attnlib", "cpu")
    model.config._attn_implementation = "paged|attnlib"
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("offset", [5, torch.tensor(5)], ids=["int", "tensor"])
def test_the_last_queries_of_a_mask(offset):
    """A cache of a fixed size says by a tensor where queries begin."""
    from transformers.masking_utils import causal_mask_function, or_masks, sdpa_mask

    def to_seven(b, h, q, k):
        return k == 7

    what = {"mask_function": or_masks(causal_mask_function, to_seven), "batch_size": 1, "use_vmap": True}
    sizes = {"q_length": 4, "kv_length": 16}
    mask = asked(length=4, **what, **sizes, q_offset=offset, config=transformers.LlamaConfig(**SMALL))
    expected = sdpa_mask(**what, **sizes, q_offset=5)
    assert torch.equal(mask[:, :, -2:, :], expected[:, :, -2:])


def test_a_version_whose_function_has_other_arguments(monkeypatch):
    """transformers 5.0 to 5.3: nothing is wrapped, and no other argument is taken for the cache."""
    from transformers import masking_utils

    from attnlib.hf import caches
    from attnlib.hf.mask import Mask

    def look(config, inputs_embeds, attention_mask, cache_position, past_key_values, position_ids, layer_idx):
        pass

    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", look)
    caches.prepare(Mask, "attnlib")
    assert masking_utils._preprocess_mask_arguments is look


def test_a_model_that_computes_with_the_mask():
    from transformers.masking_utils import causal_mask_function

    mask = asked(causal_mask_function, 4, config=transformers.LlamaConfig(**SMALL), batch_size=1)
    assert mask[:, :, slice(0, None), :] is mask and mask[:, :, -2:, :].shape == (1, 1, 2, 4)
    for use in (
        lambda: mask[:, :, :4], lambda: mask[:, :, :2, :], lambda: mask[:, :, ::2, :],
        lambda: mask[:, :, :, :2], lambda: mask[0, :, -2:, :], lambda: mask[:, :, -1, :], lambda: mask[0],
        lambda: mask.shape, lambda: ~mask, lambda: mask + 1, lambda: 1 + mask,
        lambda: mask == 0, lambda: mask != 1.0, lambda: torch.where(mask, 0.0, 1.0),
        lambda: torch.ones(4) * mask,
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match="^attention_mask: expected a model that hands its mask on .*LlamaC"
        ):
            use()


@pytest.mark.parametrize("queries", [6, 17])
def test_values_with_a_head_dimension_of_their_own(queries, device, monkeypatch):
    """Filled up with zeros for few queries alone, which the decoding kernels may compute; and for a score."""
    given = []

    def watched(q, k, v, **options):
        given.append((q.shape[-1], v.shape[-1]))
        return attention(q, k, v, **options)

    monkeypatch.setattr(forward, "attention", watched)
    q, k = torch.randn(2, 1, 2, queries, 24, device=device)
    for width in (16, 32):
        v = torch.randn(1, 2, queries, width, device=device)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        wider = 2 * (max(24, width),)
        for options, filled in (({}, queries <= 16), ({"softcap": 1e6}, True)):
            found, _ = attnlib.hf.attention_forward(DECODER, q, k, v, None, **options)
            close(found, expected.transpose(1, 2))
            assert given.pop() == (wider if filled else (24, width))
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients = torch.autograd.grad(attnlib.hf.attention_forward(DECODER, *inputs, None)[0].sum(), inputs)
        assert given.pop() == (24, width)
        others = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*others, is_causal=True)
        for found, x in zip(gradients, torch.autograd.grad(expected.sum(), others), strict=True):
            close(found, x)


def test_a_window_that_looks_both_ways():
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="^sliding_window: expected None without a causal mask, got 2"):
        attnlib.hf.attention_forward(ENCODER, q, q, q, None, sliding_window=2)


def test_a_window_of_no_keys():
    """Not the -1 that means none."""
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="^sliding_window: expected None, or 1 or more keys, got 0$"):
        attnlib.hf.attention_forward(DECODER, q, q, q, None, sliding_window=0)


def test_padding_under_autocast_where_queries_and_keys_differ_in_dtype():
    """DeepSeek-V3: its queries come out of an addition in float32, its keys out of a product in bfloat16."""
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1,
    )  # fmt: skip
    ids = torch.randint(5, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    padding = torch.ones(2, 7, dtype=torch.long)
    padding[1, :4] = 0
    found = []
    for name in ("sdpa", "attnlib"):
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM._from_config(config, attn_implementation=name).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(model(input_ids=ids, attention_mask=padding).logits[padding.bool()])
    torch.testing.assert_close(*found, rtol=0.02, atol=0.01)
