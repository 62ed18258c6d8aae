"""Models under torch.compile in one graph and torch.export: what "sdpa" computes there."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

from small_models import build, tokens  # noqa: E402

import attnlib.hf  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LENGTH, ROOM = 11, 4


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Fewer packed sequences than a graph has room for: the interpreter visits them all."""
    monkeypatch.setattr("attnlib.hf.layout.MAX_PACKED", ROOM)
    attnlib.hf.register()
    torch._dynamo.reset()


def inputs(kind: str, device: str) -> dict:
    ids = tokens(2, LENGTH, device)
    if kind == "packed":
        rows = [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (4, 9)]
        return {"input_ids": ids, "position_ids": torch.stack(rows).to(device), "use_cache": False}
    if kind == "no mask":
        return {"input_ids": ids}
    if kind == "no mask, no cache":
        return {"input_ids": ids, "use_cache": False}
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[1, :4] = 0
    elif kind == "right":
        mask[0, -3:] = 0
        mask[0, 0] = 0
    elif kind == "holes":
        mask[1, 5:7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def close(found, expected, given):
    if "attention_mask" in given:
        real = given["attention_mask"].bool()
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def compared(name: str, kinds: tuple[str, ...], device: str):
    """One graph for inputs of all kinds, beside "sdpa"; the compiled model."""
    plain = one_layer(name, "sdpa", device)
    compiled = torch.compile(one_layer(name, "attnlib", device), fullgraph=True, backend=graph_of([]))
    for kind in kinds:
        given = inputs(kind, device)
        found, expected = compiled(**given).logits, plain(**given).logits
        close(found, expected, given)
        torch.testing.assert_close(found[:, -1], expected[:, -1], rtol=1e-4, atol=1e-4)  # padding, too
    return compiled


def one_layer(name: str, implementation: str, device: str):
    """Tracing takes most of the time, and layers are alike."""
    return build(name, implementation, device, layers=1)


def graph_of(seen: list):
    """A backend that lets one graph be made, and no second one."""

    def backend(graph, inputs):
        assert not seen, "compiled anew"
        seen.append(graph)
        return graph

    return backend


@pytest.mark.parametrize(
    ("kind", "name"), in_turn(["no mask", "no mask, no cache", "packed"], ["llama", "sliding window"])
)
def test_one_graph(name, kind, device):
    compared(name, (kind,), device)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_all_padding_in_one_graph(name, device):
    """Holes under a window are an error when the graph meets them, and not before."""
    kinds = "ones", "left", "right", "holes"
    compiled = compared(name, kinds if name == "llama" else kinds[:3], device)
    if name != "llama" and device != "cuda":  # a failed assertion there ends the process
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="attention_mask: expected padding at the ends of a row only"),
        ):
            compiled(**inputs("holes", device))


def test_a_training_step_in_one_graph(device):
    given, steps = inputs("right", device), []
    for implementation in ("attnlib", "sdpa"):
        model = one_layer("llama", implementation, device)
        call = (
            torch.compile(model, fullgraph=True, backend="aot_eager")
            if implementation == "attnlib"
            else model
        )
        logits = call(**given).logits
        logits[given["attention_mask"].bool()].square().mean().backward()
        steps.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-5)


def test_lengths_that_change(device):
    model = one_layer("llama", "attnlib", device)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    plain = one_layer("llama", "sdpa", device)
    with torch.no_grad():
        for length in (7, 11):
            ids = tokens(2, length, device)
            mask = torch.ones_like(ids)
            mask[0, :2] = 0
            given = {"input_ids": ids, "attention_mask": mask}
            close(compiled(**given).logits, plain(**given).logits, given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed assertion on a GPU ends the process")
def test_more_packed_sequences_than_a_graph_has_room_for(device):
    ids = tokens(1, ROOM + 1, device)
    compiled = torch.compile(one_layer("llama", "attnlib", device), fullgraph=True, backend="eager")
    position_ids = torch.zeros_like(ids)
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"position_ids: expected at most {ROOM} packed"):
        compiled(ids, position_ids=position_ids, use_cache=False)


@pytest.mark.parametrize(("kind", "strict"), in_turn(["left", "no mask, no cache"], [True, False]))
def test_export(strict, kind, device):
    given = inputs(kind, device) | {"use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(one_layer("llama", "attnlib", device), (), given, strict=strict)
        expected = one_layer("llama", "sdpa", device)(**given).logits
        close(exported.module()(**given).logits, expected, given)
    assert "attnlib.attention_forward" in str(exported.graph)


@torch.no_grad()
def test_one_token_after_the_other_with_a_sliding_window(device):
    """The cache counts its tokens in Python, so a graph does not know their number."""
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=7, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids, found = tokens(1, 12, device), {}
    for implementation in ("sdpa", "attnlib"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        config._attn_implementation = implementation
        model = transformers.MistralForCausalLM(config).eval().to(device)
        step = torch.compile(model, fullgraph=True, backend="eager")
        cache = transformers.DynamicCache(config=config)
        logits = [model(ids[:, :9], past_key_values=cache).logits]
        logits += [step(ids[:, t : t + 1], past_key_values=cache).logits for t in range(9, 12)]
        found[implementation] = torch.cat(logits, 1)
    torch.testing.assert_close(found["attnlib"], found["sdpa"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_packed_rows_and_a_cache_of_a_fixed_size(name, device):
    """A prompt longer than the window of 7, whose positions are known when the graph runs."""
    model = one_layer(name, "attnlib", device)
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    ids = tokens(2, 20, device)
    row = torch.arange(20, device=device)[None]
    left = torch.ones_like(ids)
    left[0, :4] = 0
    shifted = (left.cumsum(1) - 1).masked_fill(left == 0, 0)
    with torch.no_grad():
        for given in ({"position_ids": row}, {"position_ids": shifted, "attention_mask": left}):
            found, expected = (
                call(ids, past_key_values=transformers.StaticCache(model.config, 32), **given).logits
                for call in (step, model)
            )
            close(found, expected, given)
        cache = transformers.StaticCache(model.config, 32)
        with pytest.raises(RuntimeError, match="^position_ids: expected one sequence in each row beside a"):
            step(ids, past_key_values=cache, position_ids=row % 9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed assertion on a GPU ends the process")
@pytest.mark.parametrize("name", ["llama", "sliding window"])
@pytest.mark.parametrize("told", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_a_cache_that_a_graph_filled_with_packed_rows_is_not_continued(told, name, device):
    """Whether it holds any is known when the graph has run. One of one sequence goes on."""
    model = one_layer(name, "attnlib", device)
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    ids, more = tokens(1, 12, device), tokens(1, 2, device)
    row = torch.arange(12, device=device)[None]
    packed = {"position_ids": torch.where(row < 3, row, row - 3)}
    if told:
        offsets = torch.tensor([0, 3, 12], dtype=torch.int32, device=device)
        packed |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad():
        expected = model(torch.cat([ids, more], 1)).logits[:, -2:]
        for last in (model, step):
            cache = step(ids, position_ids=row).past_key_values
            found = [step(more[:, :1], past_key_values=cache), last(more[:, 1:], past_key_values=cache)]
            close(torch.cat([x.logits for x in found], 1), expected, {})
            cache = step(ids, **packed).past_key_values
            raised = ValueError if last is model else RuntimeError  # of the graph, or of its compiler
            for held in (cache, copy.deepcopy(cache)):
                torch._dynamo.reset()
                with pytest.raises(raised, match="past_key_values: expected a cache of one sequence in"):
                    last(more[:, :1], past_key_values=held)
            if name != "llama":  # whose cache can't be emptied
                continue
            cache.crop(-12)
            close(last(ids, past_key_values=cache).logits, model(ids).logits, {})
