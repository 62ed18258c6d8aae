"""The formulas of memory and time of a training step (attnlib/book/training.py, training_time.py) against
what PyTorch does on a CPU: bytes alive, FLOPs, losses."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chosen import in_turn, with_more
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from attnlib.bench import records
from attnlib.book.adam import Home, MasterAdamW
from attnlib.book.advice import MODELS, Card, advise, shares
from attnlib.book.live_bytes import INSIDE, LiveBytes, _FusedNorm, counted, pretended
from attnlib.book.llama import Llama, LoraLinear
from attnlib.book.trainer import Trainer
from attnlib.book.training import SHAPES, WORKSPACE, LlamaShape, Training, memory
from attnlib.book.training_time import (
    ADAM_BYTES,
    ADAM_OPERATORS,
    FSDP_OPERATORS,
    H200,
    H200_BEFORE,
    MATH_OPERATORS,
    OPERATORS,
    SPREAD_OPERATORS,
    end_bytes,
    exchange_ms,
    host_ms,
    layer_bytes,
    machine_of,
    mended_adam_ms,
    mended_ms,
    offloaded,
    phased_ms,
    phases,
    product_flops,
    sent_ms,
    step_ms,
)  # fmt: skip

TINY = LlamaShape(2, 32, 4, 4, 8, 96, 64)
WIDE = LlamaShape(2, 512, 8, 2, 64, 1792, 900)
"""Few layers, and widths at which small tensors do not matter."""
MANY = replace(WIDE, vocab=30000, tied=True)
"""A vocabulary that does."""
WAYS = [
    *(Training(1500, 1, "attnlib", checkpointing) for checkpointing in ("none", "selective", "layer")),
    Training(1500, 1, "sdpa", "selective", 16), Training(1500, 1, "math", "none", 16),
    Training(1500, 1, "math", "selective"), Training(1500, 1, "math", "layer", 16),
]  # fmt: skip


def count(model: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize("shape", [TINY, LlamaShape(3, 24, 6, 2, 8, 40, 50, True)])
@pytest.mark.parametrize("rank", [None, 16])
def test_parameters(shape, rank):
    model = Llama(shape, Training(8, attention="sdpa"))
    assert count(model) == shape.parameters
    if rank:
        model.adapt(rank)
    assert count(model, trained=True) == Training(1, lora=rank).trained(shape)


def test_published_sizes():
    """Llama 3.1 8B and 3.2 1B have 8.03 and 1.24 billion parameters."""
    assert SHAPES["8B"].parameters == 8_030_261_248
    assert SHAPES["1B"].parameters == 1_235_814_400


def test_live_bytes():
    """A storage counts once, from its making to its end, views or not."""
    with LiveBytes() as live:
        x = torch.zeros(1000)
        y = x.view(10, 100)[1:]
        assert live.now == 4000
        del x
        assert live.now == 4000
        z = y + 1
        assert live.now == 4000 + 3600 == live.peak
        del y, z
        assert (live.now, live.peak) == (0, 7600)
        live.restart()
        w = torch.zeros(8, dtype=torch.bfloat16)
        w.untyped_storage().resize_(64)
        assert live.now == live.peak == 64
    assert live.parts() == {"bfloat16 [8]": 64}


@pytest.mark.parametrize("how", with_more([*WAYS[:4], WAYS[-1]], WAYS),
                         ids=lambda how: f"{how.attention}-{how.checkpointing}-{how.lora}")  # fmt: skip
def test_memory_is_what_is_counted(how):
    """The peak of a step within 1% of the bytes that are alive in it, without cuBLAS's workspace and without
    what softmax's backward operator allocates inside of itself, which the count does not see."""
    for shape in (WIDE, MANY)[: 1 + (how == WAYS[0])]:
        found, expected = counted(shape, how).peak, memory(shape, how, inside=False)
        assert found == pytest.approx(expected.peak - WORKSPACE, rel=0.012), expected


@pytest.mark.parametrize("how", [how for how in WAYS if how.attention == "math"],
                         ids=lambda how: f"{how.checkpointing}-{how.lora}")  # fmt: skip
def test_memory_with_what_softmax_allocates(how, monkeypatch):
    """On a GPU softmax's backward operator keeps grad * output while it runs: the count is told of it."""
    monkeypatch.setitem(INSIDE, "aten::_softmax_backward_data", lambda grad, *_: 4 * grad.numel())
    found, expected = counted(WIDE, how).peak, memory(WIDE, how)
    assert found == pytest.approx(expected.peak - WORKSPACE, rel=0.012), expected
    assert expected.peak - memory(WIDE, how, inside=False).peak == 4 * WIDE.heads * 1500**2


def test_inside_changes_the_math_path_alone():
    for how in (Training(4096), Training(4096, attention="sdpa", checkpointing="layer", lora=16)):
        assert memory(SHAPES["1B"], how) == memory(SHAPES["1B"], how, inside=False)


@pytest.fixture
def four_ranks():
    """A group of four ranks of which there is one, whose transfers do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("zero, lora, shape, checkpointing", [
    (1, None, WIDE, "layer"), (2, None, MANY, "none"), (3, None, replace(WIDE, layers=4), "layer"),
    (3, 16, MANY, "none")])  # fmt: skip
def test_memory_of_a_rank(four_ranks, zero, lora, shape, checkpointing):
    """Under FSDP2, whose pieces of memory come and go at more moments than the formula has."""
    how = Training(1500, 1, "sdpa", checkpointing, lora, zero, 4)
    found = counted(shape, how, four_ranks).peak
    assert found == pytest.approx(memory(shape, how).peak - WORKSPACE, rel=0.05), memory(shape, how)


@pytest.mark.parametrize(("checkpointing", "lora"), in_turn(("none", "selective", "layer"), (None, 8)))
def test_flops_are_what_is_counted(checkpointing, lora):
    shape = LlamaShape(2, 64, 4, 2, 16, 160, 100)
    how = Training(32, 1, "sdpa", checkpointing, lora, loss_rows=9)
    with pretended():
        trainer, tokens = Trainer(shape, how), torch.zeros(1, 32, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            trainer.step(tokens)
    products = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    assert products["aten.mm"] == product_flops(shape, how)


def test_a_step_learns():
    """All checkpointing gives the same gradients, LoRA trains its adapters alone, and the loss falls."""
    tokens = torch.randint(0, TINY.vocab, (2, 20), generator=torch.Generator().manual_seed(0))
    losses, gradients = {}, {}
    for checkpointing in ("none", "selective", "layer"):
        torch.manual_seed(0)
        model = Llama(TINY, Training(20, 2, "sdpa", checkpointing, loss_rows=7))
        loss = model(tokens)
        loss.backward()
        losses[checkpointing] = loss.item()
        gradients[checkpointing] = [p.grad.clone() for p in model.parameters()]
    whole = F.cross_entropy(model.head(trunk(model, tokens))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    for checkpointing, loss in losses.items():
        assert loss == pytest.approx(whole.item(), rel=1e-5), checkpointing
        for found, expected in zip(gradients[checkpointing], gradients["none"], strict=True):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    model.zero_grad(set_to_none=True)
    model.adapt(4)
    frozen = model.layers[0].q.base.weight.clone()
    adam, seen = MasterAdamW(list(model.parameters()), 1e-2), []
    for _ in range(8):
        loss = model(tokens)
        loss.backward()
        adam.step()
        seen.append(loss.item())
    assert isinstance(model.layers[0].q, LoraLinear) and torch.equal(frozen, model.layers[0].q.base.weight)
    assert seen[-1] < seen[0] - 0.1


def as_transformers(shape: LlamaShape, model: Llama) -> nn.Module:
    """transformers' model of this shape: the book's weights, epsilon of norms and rotary base."""
    transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied,
        rms_norm_eps=torch.finfo(torch.float32).eps, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            theirs.get_parameter(their_name(name)).copy_(p)
    return theirs


def their_name(name: str) -> str:
    """Of a parameter of `Llama` in transformers' LlamaForCausalLM."""
    if name == "head.weight":
        return "lm_head.weight"
    parts = {"tokens": "embed_tokens", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
             **{part: f"self_attn.{part}_proj" for part in "qkvo"},
             **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}}  # fmt: skip
    return "model." + ".".join(parts.get(part, part) for part in name.split("."))


@pytest.mark.parametrize("shape", [TINY, LlamaShape(3, 24, 6, 2, 8, 40, 50, True)], ids=["own head", "tied"])
@pytest.mark.parametrize(("attention", "checkpointing"),
                         in_turn(("sdpa", "attnlib"), ("none", "selective", "layer")))  # fmt: skip
def test_the_model_is_transformers_llama(shape, attention, checkpointing):
    """Loss and gradients of all parameters, with the same weights; attnlib's attention rounds elsewhere."""
    torch.manual_seed(1)
    model = Llama(shape, Training(20, 2, attention, checkpointing, loss_rows=7))
    with torch.no_grad():
        for p in model.parameters():  # norms that are not ones, and weights that matter to the loss
            p.copy_(0.5 * torch.randn_like(p) + (1.0 if p.dim() == 1 else 0.0))
    theirs = as_transformers(shape, model)
    tokens = torch.randint(0, shape.vocab, (2, 20))
    loss, expected = model(tokens), theirs(tokens, labels=tokens).loss
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    ours = dict(model.named_parameters())
    assert {their_name(name) for name in ours} == {name for name, _ in theirs.named_parameters()}
    for name, p in ours.items():
        right = theirs.get_parameter(their_name(name)).grad
        assert (p.grad - right).norm() <= 1e-4 * right.norm(), name


def trunk(model, tokens):
    x = model.tokens(tokens)
    for layer in model.layers:
        x = layer(x, model.angles(None, x))
    return model.norm(x)


@pytest.mark.parametrize("home", [Home(), Home(host=True)])
def test_adam_is_pytorchs(home):
    p, q = (nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2))
    ours = MasterAdamW([p], 1e-3, home)
    theirs = torch.optim.AdamW([q], 1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for i in range(5):
        p.grad, q.grad = (torch.sin(torch.arange(12.0) + i) for _ in range(2))
        ours.step()
        theirs.step()
    assert torch.allclose(p, q, atol=1e-6)


def test_memory_orders_what_it_should():
    shape, base = SHAPES["1B"], Training(4096)
    assert memory(shape, base).parameters + memory(shape, base).states == 14 * shape.parameters
    peaks = [memory(shape, replace(base, **change)).peak for change in (
        {"attention": "math"}, {}, {"checkpointing": "layer"}, {"checkpointing": "layer", "lora": 16})]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    on_host = replace(base, offload=True)
    assert memory(shape, base).peak - memory(shape, on_host).peak == 12 * shape.parameters
    assert offloaded(shape, on_host) == 12 * shape.parameters and not offloaded(shape, base)
    spread = [memory(SHAPES["8B"], Training(1024, checkpointing="layer", zero=zero, gpus=8)).peak
              for zero in (0, 1, 3)]  # fmt: skip
    assert spread == sorted(spread, reverse=True) and len(set(spread)) == 3


def test_time_orders_what_it_should():
    shape, machine, base = SHAPES["1B"], H200_BEFORE, Training(8192)
    ms = [step_ms(shape, replace(base, **change), machine) for change in (
        {"attention": "math"}, {"checkpointing": "layer"}, {"checkpointing": "selective"}, {}, {"lora": 16})]
    assert ms == sorted(ms, reverse=True)
    ideal = 6 * shape.multiplied * base.tokens / machine.products / 1e9
    assert ideal < step_ms(shape, base, machine) < 2 * ideal
    assert exchange_ms(shape, base, machine) == 0
    sent = [exchange_ms(shape, Training(8192, zero=zero, gpus=2), machine) for zero in (1, 2, 3)]
    assert sent[0] == sent[1] < sent[2] == pytest.approx(1.5 * sent[0])
    assert step_ms(shape, replace(base, offload=True), machine) > step_ms(shape, base, machine)


class Calls(TorchDispatchMode):
    """Counts operators, and the bytes that those which move data read and write, products and attention left
    out. A tensor that is read twice by one operator counts once, one that was broadcast by its own size."""

    VIEWS = {"t", "transpose", "expand", "slice", "split", "view", "unsqueeze", "_unsafe_view", "select",
             "squeeze", "alias", "permute", "detach", "as_strided"}  # fmt: skip
    ELSEWHERE = {"mm", "attention_forward", "attention_backward"}

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        space, name = func.name().split(".")[0].split("::")
        if space == "prim" or "empty" in name or name == "fill_":  # conftest fills what is empty
            return out
        self.operators += 1
        if name in self.VIEWS | self.ELSEWHERE:
            return out
        read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if name == "copy_":  # what is written over is not read
            read.pop(id(args[0]))
        if name.startswith(("nll_loss", "embedding")):  # of what they read, a number a row
            read = {}
        if name.startswith("nll_loss_forward"):
            return out
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for x in (*read.values(), *written):
            there = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
            self.moved += x.element_size() * math.prod(there)
        return out


def calls(shape, how):
    """Of forward and backward pass, and of Adam."""
    with pretended():
        trainer, tokens = Trainer(shape, how), torch.zeros(1, how.context, dtype=torch.long)
        with Calls() as step:
            trainer.model(tokens).backward()
        with Calls() as adam:
            trainer.adam.step()
    return step, adam


@pytest.mark.parametrize("checkpointing", ["none", "selective", "layer"])
def test_bytes_of_elementwise_kernels_are_what_is_counted(checkpointing):
    """Of one layer, from two and three of them; the norms are one kernel each on a GPU, which the count does
    not see: 8 W forward, 20 W backward, and forward again."""
    how = Training(1500, 1, "attnlib", checkpointing)
    (two, adam), (three, _) = (calls(replace(WIDE, layers=n), how) for n in (2, 3))
    norms = WIDE.width * (28 if checkpointing == "none" else 36)
    assert (three.moved - two.moved) / 1500 == pytest.approx(layer_bytes(WIDE, how) - norms, rel=0.015)
    assert adam.moved == ADAM_BYTES * WIDE.parameters


def test_bytes_of_the_loss_are_what_is_counted():
    how = Training(3000, 1, "attnlib", loss_rows=500)
    moved = calls(MANY, how)[0].moved - 2 * 3000 * (layer_bytes(MANY, how) - 28 * MANY.width)
    assert moved == pytest.approx(end_bytes(MANY, how), rel=0.02)


@pytest.mark.parametrize("checkpointing, lora", list(OPERATORS))
def test_operators_are_what_is_counted(checkpointing, lora, monkeypatch):
    how = Training(32, 1, "sdpa", checkpointing, 4 if lora else None)
    passes, update = operators_of_a_layer(how, monkeypatch)
    assert passes + update == OPERATORS[checkpointing, lora]
    assert update == ADAM_OPERATORS * (14 if lora else 9)
    with_math, _ = operators_of_a_layer(replace(how, attention="math"), monkeypatch)
    assert with_math - passes == MATH_OPERATORS[checkpointing]


@pytest.mark.parametrize("checkpointing, zero, lora", with_more(
    [("none", 0, False), ("none", 1, False), ("layer", 2, False), ("none", 3, True)],
    [(kind, zero, lora) for kind in ("none", "layer") for zero in range(4) for lora in (False, True)],
))  # fmt: skip
def test_operators_of_the_spread_are_what_is_counted(four_ranks, checkpointing, zero, lora, monkeypatch):
    """A norm's weight under ZeRO 1 has one less, since it is flat already."""
    how = Training(32, 1, "sdpa", checkpointing, 4 if lora else None)
    alone = operators_of_a_layer(how, monkeypatch)
    several = operators_of_a_layer(replace(how, zero=zero, gpus=4), monkeypatch)
    passes, update = (b - a for a, b in zip(alone, several, strict=True))
    assert passes == FSDP_OPERATORS.get((zero, lora), 0)
    assert update == SPREAD_OPERATORS.get(zero, 0) * (14 if lora else 9) - 2 * (zero == 1 and not lora)


def operators_of_a_layer(how, monkeypatch):
    """Forward and backward, and of Adam, from two and three layers, in the second step. LoRA by peft, which
    fake tensors can't have. A norm is one operator forward and one backward on a GPU."""
    if how.lora:
        pytest.importorskip("peft")
    found, norms = [], []

    def norm(x, _, weight=None, eps=None):
        norms.append(x)
        return _FusedNorm.apply(x, weight)

    monkeypatch.setattr(F, "rms_norm", norm)
    tokens = torch.zeros(1, how.context, dtype=torch.long)
    for layers in (2, 3):
        trainer = Trainer(replace(TINY, layers=layers), how, peft=how.lora is not None)
        trainer.step(tokens)
        norms.clear()
        with Calls() as passes:
            trainer.model(tokens).backward()
        with Calls() as update:
            trainer.adam.step()
        found.append((passes.operators + len(norms) + 2 * layers + 1, update.operators))
    return [b - a for a, b in zip(*found, strict=True)]


def test_mended_time_orders_what_it_should():
    shape, machine, base = SHAPES["1B"], H200_BEFORE, Training(16384)
    ms = [mended_ms(shape, replace(base, **change), machine) for change in (
        {"attention": "math"}, {"checkpointing": "layer"}, {"checkpointing": "selective"}, {}, {"lora": 16})]
    assert ms == sorted(ms, reverse=True)
    for how in (base, replace(base, lora=16), Training(4096, checkpointing="layer")):
        assert mended_ms(shape, how, machine) > step_ms(shape, how, machine)
    short, slow = Training(64, loss_rows=64), replace(machine, host=50.0)
    assert mended_ms(shape, short, slow) == host_ms(shape, short, slow)
    assert host_ms(replace(shape, layers=4), short, machine) == pytest.approx(4 * machine.host)


def test_phases_of_a_step():
    """Each takes as long as the slower of GPU and host, what is sent is in one of them and hidden in none."""
    shape, base = SHAPES["1B"], Training(16384)
    fast, slow = (replace(H200, host=host) for host in (1e-6, 50.0))
    alone = phases(shape, base, H200)
    assert phased_ms(shape, base, fast) == pytest.approx(sum(gpu for gpu, _ in alone.values()))
    assert phased_ms(shape, base, slow) == pytest.approx(host_ms(shape, base, slow), rel=0.01)
    for how in (Training(1024), Training(4096, lora=16), base):  # never less than the longer one of all
        assert phased_ms(shape, how, H200) >= mended_ms(shape, how, H200) * 0.995
    assert sent_ms(shape, base, H200) == 0
    for zero in (0, 1, 2, 3):
        how = replace(base, zero=zero, gpus=2)
        longer = {name: gpu - alone[name][0] for name, (gpu, _) in phases(shape, how, H200).items()}
        saved = mended_adam_ms(shape, base, H200) - mended_adam_ms(shape, how, H200)
        assert sum(longer.values()) + saved == pytest.approx(sent_ms(shape, how, H200))
        assert (longer["passes"] > 0) is (zero >= 2)
    sent = [sent_ms(shape, Training(4096, zero=zero, gpus=2), H200) for zero in (0, 2, 3)]
    assert sent == sorted(sent) and sent[0] > exchange_ms(shape, Training(4096, gpus=2), H200)


def test_rates_of_an_h200_are_those_of_its_records():
    gpu = "nvidia-h200"
    rates = {row["rate"]: row["measured"] for row in records.load("training_memory", "rates_1", gpu).rows}
    gemm = records.load("00_how_we_measure", "gemm", gpu).one(inputs="random", mode="sustained")
    about = partial(pytest.approx, rel=0.005)
    assert (gemm["tflops"], rates["memory"], rates["host"]) == about((H200.products, H200.memory, H200.host))
    pair = {row["rate"]: row["measured"] for row in records.load("training_memory", "rates_2", gpu).rows}
    assert (rates["cpu"], pair["link"]) == about((H200.cpu, H200.link))
    assert pair["cpu"] == about(machine_of("NVIDIA H100").cpu)
    for kind, by_dim in H200.attention.items():
        for dim, pair in by_dim.items():
            found = [rates[f"{kind}, D = {dim}, {name}"] for name in ("forward", "backward")]
            assert found == about(list(pair)), (kind, dim)
    calls = records.load("fastattention", "cooperative", gpu).rows
    bus = [row["gb_per_s"] for row in calls if row["impl"] == "bus" and row["bytes"] > 1e8]
    assert min(bus) <= H200.bus <= max(bus)


def test_advice_goes_by_measured_rates():
    """What was written before a measurement refuted it is nobody's default."""
    assert Card(1e9).machine is H200 is machine_of("NVIDIA H200") is machine_of(None)
    h100 = machine_of("NVIDIA H100 80GB HBM3")
    assert (h100.host, h100.cpu) != (H200_BEFORE.host, H200_BEFORE.cpu) and h100.memory < H200.memory
    by_default, as_before = (advise(MODELS["1B"], 4096, card)[0] for card in (
        Card(135e9), Card(135e9, machine=H200_BEFORE)))  # fmt: skip
    assert by_default.ms == phased_ms(MODELS["1B"], by_default.how, H200) != as_before.ms


def test_advice():
    """What is advised fits, the fastest is first, and more room never makes the best one slower."""
    best = []
    for room in (20e9, 30e9, 76e9, 135e9):
        found = advise(MODELS["3B"], 8192, Card(room, 1, 128e9))
        assert all(way.peak <= room for way in found)
        assert [round(way.ms, 1) for way in found] == sorted(round(way.ms, 1) for way in found)
        best.append(found[0].ms)
    assert best == sorted(best, reverse=True) and found[0].name == "no checkpoints"
    assert advise(MODELS["70B"], 8192, Card(135e9)) == []
    assert "ZeRO 3" in advise(MODELS["8B"], 8192, Card(76e9, 2))[0].name
    for how in WAYS + [Training(1000, 1, zero=3, gpus=4), Training(9000, checkpointing="layer")]:
        found = shares(MODELS["1B"], how)
        assert sum(found.values()) == memory(MODELS["1B"], how).peak and min(found.values()) >= 0
    for model, how in ((model, how) for model in ("1B", "8B") for how in WAYS):
        needed = memory(MODELS[model], how)
        for moment, beside in needed.beside.items():
            found = shares(MODELS[model], how, moment)
            assert sum(found.values()) == needed.parameters + needed.states + beside + WORKSPACE
            assert min(found.values()) >= 0 and (found["kept"] > 0) == (moment in ("loss", "last layer"))
    with pytest.raises(ValueError, match="moment: expected one of .*'loss'.*, got 'middle'"):
        shares(MODELS["1B"], WAYS[0], "middle")
    with pytest.raises(ValueError, match="room: expected bytes above 0, got 0"):
        Card(0)
    with pytest.raises(ValueError, match="gpus: expected an int from 1 on, got 1.5"):
        Card(1e9, 1.5)
    with pytest.raises(ValueError, match="host: expected bytes from 0 on, got nan"):
        Card(1e9, host=math.nan)
    with pytest.raises(TypeError, match="room: expected a number of bytes, got '80e9'"):
        Card("80e9")
    with pytest.raises(TypeError, match="shape: expected a LlamaShape, such as .*, got '8B'"):
        advise("8B", 1024, Card(1e9))
    with pytest.raises(TypeError, match="card: expected a Card, got 8"):
        advise(MODELS["8B"], 1024, 8)


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"context": 0}, ValueError, "context: expected at least 1, got 0"),
        ({"context": 8, "lora": 0}, ValueError, "lora: expected at least 1, got 0"),
        ({"context": 8, "batch": 1.5}, TypeError, "batch: expected an int, got float"),
        ({"context": 8, "zero": 4}, ValueError, r"zero: expected one of \(0, 1, 2, 3\), got 4"),
        ({"context": 8, "attention": "flash"}, ValueError, "attention: expected one of"),
        ({"context": 8, "checkpointing": "all"}, ValueError, "checkpointing: expected one of"),
        ({"context": 8, "offload": 1}, TypeError, "offload: expected a bool, got int"),
    ],
)
def test_mistakes_are_named(given, error, text):
    with pytest.raises(error, match=text):
        Training(**given)
