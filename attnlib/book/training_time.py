"""How long a training step takes: FLOPs and bytes over rates, by formula. Chapter 41 holds it against
measurements; of the rates those of `H200` are measured. `training` has the memory.

There are three formulas. `step_ms` predicted the first measurement and stays as it was. `mended_ms` was
written after it, and predicted the next ones: it counts the bytes of each elementwise kernel, those of the
loss and of Adam, and the operators that the host calls. `phased_ms` was written after those: GPU and host
wait for each other twice in a step, and FSDP2's transfers are not hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from attnlib.book.training import FULL, HALF, STATES, LlamaShape, Training, kept


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU: TFLOP/s of products and of causal attention; GB/s of its memory, of its link to other
    GPUs, of its bus to the host, and at which the host updates Adam's states; ms that the host needs for a
    layer's launches, forward, backward and Adam, without a compiler or a graph. Attention's are (forward,
    backward) by kind and head dimension."""

    products: float
    attention: Mapping[str, Mapping[int, tuple[float, float]]]
    memory: float
    link: float
    bus: float
    cpu: float
    host: float

    def attends(self, kind: str, head_dim: int) -> tuple[float, float]:
        """Of the nearest head dimension there is."""
        rates = self.attention[kind]
        return rates[min(rates, key=lambda known: abs(known - head_dim))]


H200_BEFORE = Machine(
    products=620.0, memory=4000.0, link=150.0, bus=50.0, cpu=40.0, host=1.7,
    attention=MappingProxyType({
        "math": {64: (6.6, 6.6), 128: (10.0, 10.0)},
        "sdpa": {64: (430.0, 390.0), 128: (600.0, 500.0)},
        "attnlib": {64: (550.0, 500.0), 128: (740.0, 580.0)},
    }),
)  # fmt: skip
"""Round numbers for an H200, written before chapter 41's measurement, which refuted those of the host, of
Adam there and of the math path. What was predicted by them stays as it was; nothing new should be."""

H200 = Machine(
    products=651.0, memory=4234.0, link=276.0, bus=54.0, cpu=73.6, host=2.915,
    attention=MappingProxyType({
        "math": {64: (6.33, 17.4), 128: (10.4, 23.8)},
        "sdpa": {64: (464.0, 446.0), 128: (646.0, 549.0)},
        "attnlib": {64: (659.0, 608.0), 128: (828.0, 629.0)},
    }),
)  # fmt: skip
"""An H200's as measured on 2026-11-30: products under sustained load (chapter 00); the bus by chapter 40's
run; the others by chapter 41's, the link of two H200s. `cpu` is one process's on 32 cores; on 16 each of two
has three quarters of it. `mended_ms` in the record of that day is by the rates of the first run, 2026-11-23
(docs/lab/training.md)."""


def machine_of(gpu: str | None) -> Machine:
    """Rates that predict for a GPU of this name: an H200's as measured, also for GPUs that are not known
    here. Those of an H100 were written before one was measured: the products of chapter 00 under sustained
    load, since both chips compute alike; bytes as its memory is to an H200's, 3.35 to 4.8 TB/s; an AllGather
    as two H200s had it; the host as in the run on one; attention and the bus as in `H200_BEFORE`. Adam on the
    host came later, from each of two processes beside two H200s: what an H100's host gave in its record was
    of processes that had more threads than cores, see docs/lab/training.md."""
    if gpu and "H100" in gpu:
        return replace(H200_BEFORE, products=650.0, memory=2800.0, link=250.0, cpu=57.0, host=3.1)
    return H200


def again(shape: LlamaShape, how: Training) -> int:
    """Parameters of a layer whose products the backward pass computes once more. It stops when it has what
    was not kept, so the last product of what is computed again is left out."""
    q, k, v, o, gate, up, down = (a * b for a, b in shape.linears)
    if how.checkpointing == "none":
        return 0
    if how.lora is not None:  # the last product that is left out is the adapter's
        return q + k + v + o + gate + up + down
    return q + k + o + gate + up + (v if how.checkpointing == "layer" else 0)


def product_flops(shape: LlamaShape, how: Training) -> int:
    """FLOPs of a step's products of tokens with matrices: each forward, for its input's gradient, and for its
    weight's unless that is frozen; those that are computed again; the head's rows twice forward."""
    full = how.lora is None
    layer = sum(a * b for a, b in shape.linears) * (3 if full else 2) + again(shape, how)
    head = shape.vocab * shape.width * (4 if full else 3)
    found = 2 * how.tokens * (shape.layers * layer) + 2 * how.batch * (how.context - 1) * head
    if how.lora is not None:
        left_out = shape.width + (shape.kv_heads * shape.head_dim if how.checkpointing == "selective" else 0)
        repeated = shape.adapters(how.lora) - shape.layers * how.lora * left_out
        found += 2 * how.tokens * shape.adapters(how.lora) * 3
        found += 2 * how.tokens * repeated * (how.checkpointing != "none")
    return found


def attention_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """Of a step, causal; with checkpointing of layers it runs forward twice."""
    forward = 2 * how.tokens * how.context * shape.heads * shape.head_dim * shape.layers
    ahead, back = machine.attends(how.attention, shape.head_dim)
    return forward * ((1 + (how.checkpointing == "layer")) / ahead + 2.5 / back) / 1e9


def adam_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """Adam's reads and writes: eleven times a float32 and three times a bfloat16 of each parameter. On the
    host, gradients come down the bus and parameters go up."""
    mine = how.trained(shape) / (how.gpus if how.zero else 1)
    moved = mine * (HALF * 3 + 11 * FULL)
    if how.offload:
        return mine * 2 * HALF / machine.bus / 1e6 + moved / machine.cpu / 1e6
    return moved / machine.memory / 1e6


def exchange_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of all that GPUs send, if nothing hides it: gradients are reduced and scattered; parameters are
    gathered once, or, with ZeRO 3, before each pass."""
    if how.gpus == 1:
        return 0.0
    share = HALF * (how.gpus - 1) / how.gpus
    trained = how.trained(shape)
    if not how.sharded:
        return share * 2 * trained / machine.link / 1e6
    passes = 2 if how.zero == 3 else 1
    return share * (trained + passes * (shape.parameters + (trained if how.lora else 0))) / machine.link / 1e6


def step_parts(shape: LlamaShape, how: Training, machine: Machine) -> dict[str, float]:
    """ms of the parts of a step on the GPU. Elementwise work is counted by its bytes: what is kept is written
    and read, and its gradients are."""
    times = 2 + (how.checkpointing != "none")
    elementwise = times * 1.5 * sum(kept(shape, how).values()) * shape.layers
    if how.attention == "math":
        elementwise -= times * 1.5 * kept(shape, how)["weights"] * shape.layers  # its rate has them
    return {
        "products": product_flops(shape, how) / machine.products / 1e9,
        "attention": attention_ms(shape, how, machine),
        "elementwise": elementwise / machine.memory / 1e6,
        "Adam": adam_ms(shape, how, machine),
        "exchange": exchange_ms(shape, how, machine),
    }


def hidden(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of the exchange that run under the backward pass: FSDP2's may, for as long as the layers' work
    takes; what ZeRO 1 and whole gradients send comes after it."""
    if not how.sharded:
        return 0.0
    parts = step_parts(shape, how, machine)
    return min(parts["exchange"], parts["products"] + parts["attention"] + parts["elementwise"])


def step_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of forward pass, backward pass and Adam: the GPU's, or the host's where it can't keep up."""
    on_gpu = sum(step_parts(shape, how, machine).values()) - hidden(shape, how, machine)
    return max(on_gpu, machine.host * shape.layers * (1 if how.checkpointing == "none" else 4 / 3))


# ---------------------------------------------------------------- mended after the measurement

ADAM_BYTES = 25 * FULL
"""What `adam.MasterAdamW` reads and writes of a parameter: eleven operators, one after the other."""
OPERATORS: Mapping[tuple[str, bool], int] = MappingProxyType({
    ("none", False): 264, ("layer", False): 368, ("selective", False): 339,
    ("none", True): 492, ("layer", True): 688, ("selective", True): 657,
})  # fmt: skip
"""(checkpointing, LoRA by peft) -> PyTorch's operators for a layer of `llama` in a step, views and Adam's
among them. The tests count them."""
RATED_OPERATORS = 1142 / 4
"""For each layer of the step by which `Machine.host` is measured: four layers, all parameters."""


def forward_bytes(shape: LlamaShape) -> int:
    """Bytes that the elementwise kernels of a layer's forward pass read and write for a token: two norms 4 W
    each; two residual additions 6 W each; rotary embedding in seven kernels 18 for each column of q and k;
    silu 4 F, the product 6 F."""
    turned = (shape.heads + shape.kv_heads) * shape.head_dim
    return 20 * shape.width + 18 * turned + 10 * shape.hidden


def layer_bytes(shape: LlamaShape, how: Training) -> int:
    """Bytes that elementwise kernels of a layer read and write for a token in a step: forward, again, and
    backward. There five sums of gradients have 6 W each, the norms' gradients 6 W each and 4 W more for their
    weights, rotary embedding 20 a column, and those of the MLP three times 6 F."""
    W, turned, full = shape.width, (shape.heads + shape.kv_heads) * shape.head_dim, how.lora is None
    ahead = forward_bytes(shape)
    # Computed again: all but the last residual addition; without attention, not the rotary embedding either.
    again = {"none": 0, "layer": ahead - 6 * W, "selective": 14 * W + 10 * shape.hidden}[how.checkpointing]
    back = (50 if full else 42) * W + 20 * turned + 18 * shape.hidden
    if full:
        return ahead + again + back
    # An adapter: thin products read and write n outputs and i inputs; scaling 4 n, its sum 6 n; backward 6 i
    # for the sum of the inputs' gradients.
    forth = sum(2 * i + 12 * n for i, n in shape.linears)
    again += forth - 12 * W if again else 0
    return ahead + again + back + forth + sum(10 * i + 8 * n for i, n in shape.linears)


def end_bytes(shape: LlamaShape, how: Training) -> int:
    """Bytes of the loss for all tokens, and of the sums that make the head's gradient. A token's V logits are
    made float32 (6 V) and normalised (8 V), and both once more in the backward pass, which writes a gradient
    (4 V), takes it through the logarithm of softmax (12 V) and makes it bfloat16 (6 V)."""
    found = 50 * shape.vocab * how.tokens
    if how.lora is None:
        head = shape.vocab * shape.width
        pieces = -(-how.tokens // how.loss_rows)
        found += 6 * head * (pieces - 1) + (10 * head if shape.tied else 0)
    return found


def mended_adam_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """As `adam_ms`, with the bytes that its operators move."""
    mine = how.trained(shape) / (how.gpus if how.zero else 1)
    if how.offload:
        return mine * (2 * HALF / machine.bus + ADAM_BYTES / machine.cpu) / 1e6
    return mine * ADAM_BYTES / machine.memory / 1e6


def mended_parts(shape: LlamaShape, how: Training, machine: Machine) -> dict[str, float]:
    """ms of the parts of a step on the GPU, as `step_parts`."""
    return {
        "products": product_flops(shape, how) / machine.products / 1e9,
        "attention": attention_ms(shape, how, machine),
        "elementwise": layer_bytes(shape, how) * how.tokens * shape.layers / machine.memory / 1e6,
        "loss": end_bytes(shape, how) / machine.memory / 1e6,
        "Adam": mended_adam_ms(shape, how, machine),
        "exchange": exchange_ms(shape, how, machine),
    }


def host_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms that the host needs to call a step's operators, by `Machine.host`; at the ends a piece of the loss
    has 29 of them, 20 where the head is frozen."""
    pieces = -(-how.tokens // how.loss_rows)
    ends = 57 + 29 * pieces if how.lora is None else 34 + 20 * pieces
    called = shape.layers * OPERATORS[how.checkpointing, how.lora is not None] + ends
    return machine.host * called / RATED_OPERATORS


def mended_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of a step, as `step_ms`, by the terms that were written after the measurement."""
    parts = mended_parts(shape, how, machine)
    work = parts["products"] + parts["attention"] + parts["elementwise"] + parts["loss"]
    covered = min(parts["exchange"], work) if how.sharded else 0.0
    return max(sum(parts.values()) - covered, host_ms(shape, how, machine))


# ---------------------------------------------------------------- mended once more, after two GPUs

ADAM_OPERATORS = 11
"""Of `adam.MasterAdamW` for a tensor. They are among those of OPERATORS."""
MATH_OPERATORS: Mapping[str, int] = MappingProxyType({"none": 49, "layer": 78, "selective": 50})
"""checkpointing -> how many more a layer has with PyTorch's math path."""
FSDP_OPERATORS: Mapping[tuple[int, bool], int] = MappingProxyType({
    (2, False): 44, (3, False): 61, (2, True): 63, (3, True): 94,
})  # fmt: skip
"""(ZeRO, LoRA by peft) -> how many more a layer has under FSDP2."""
SPREAD_OPERATORS: Mapping[int, int] = MappingProxyType({0: 2, 1: 8})
"""ZeRO -> how many more a tensor has where `adam.MasterAdamW` sums the gradients of several GPUs."""
TRANSFER_MS = 0.62
"""ms of the host for each transfer of FSDP2, beside its operators: the only number here that was fitted, to
two rows (0.1B, all parameters, ZeRO 2 and 3 on two H200s)."""


def sent_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of all transfers, as `exchange_ms`, and of the copies around them. FSDP2 gathers embedding, head and
    last norm once in a step, with ZeRO 3, too."""
    if how.gpus == 1:
        return 0.0
    trained, share = how.trained(shape), HALF * (how.gpus - 1) / how.gpus
    if not how.sharded:  # the mean; with ZeRO 1 also a padded gradient and the gathered parameter
        sent, copied = 2 * trained, (10 if how.zero else 4) * trained
    else:  # into one piece and out of it; gradients into one
        adapters = trained if how.lora is not None else 0
        gathered = shape.parameters + adapters
        if how.zero == 3:
            gathered += shape.layers * shape.layer_parameters + adapters
        sent, copied = gathered + trained, 2 * HALF * ((1 + 1 / how.gpus) * gathered + trained)
    return share * sent / machine.link / 1e6 + copied / machine.memory / 1e6


def phases(shape: LlamaShape, how: Training, machine: Machine) -> dict[str, tuple[float, float]]:
    """(ms of the GPU, ms of the host) of a step's two phases: the passes forward and backward, and the
    update. FSDP2's transfers are among the passes, the others in the update."""
    parts, lora = mended_parts(shape, how, machine), how.lora is not None
    work = parts["products"] + parts["attention"] + parts["elementwise"] + parts["loss"]
    sent = sent_ms(shape, how, machine)
    tensors = shape.layers * (2 * len(shape.linears) if lora else len(shape.linears) + 2)
    tensors += 0 if lora else 2  # embedding and head as one, last norm
    update = ADAM_OPERATORS * tensors
    passes = host_ms(shape, how, machine) * RATED_OPERATORS / machine.host - update
    if how.attention == "math":
        passes += shape.layers * MATH_OPERATORS[how.checkpointing]
    transfers = 0
    if how.sharded:  # of each layer, and of the ends: one or two gathers, and the sum of the gradients
        passes += (shape.layers + 1) * FSDP_OPERATORS[how.zero, lora]
        transfers = (shape.layers + 1) * how.zero
    elif how.gpus > 1:
        update += SPREAD_OPERATORS[how.zero] * tensors
    call = machine.host / RATED_OPERATORS
    return {
        "passes": (work + sent * how.sharded, call * passes + TRANSFER_MS * transfers),
        "update": (parts["Adam"] + sent * (not how.sharded), call * update),
    }


def phased_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of a step, as `mended_ms`, where each phase takes as long as the GPU or as the host needs for it."""
    return sum(max(pair) for pair in phases(shape, how, machine).values())


def offloaded(shape: LlamaShape, how: Training) -> int:
    """Bytes of Adam's states in host memory, for each GPU."""
    return STATES * how.trained(shape) // (how.gpus if how.zero else 1) if how.offload else 0
