"""What training a Llama-shaped model needs at the peak: bytes, by formula. Chapter 41 holds it against a
count and against measurements; no rate or size here is measured. `training_time` has the time of a step.

One term was added after a measurement, see `memory`: `inside=False` is the formula as it was before.

Mixed precision: parameters, gradients and activations take two bytes; Adam keeps a float32 copy of each
trained parameter and two moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["math", "sdpa", "attnlib"]
Checkpointing = Literal["none", "layer", "selective"]

HALF, FULL = 2, 4
"""Bytes of a bfloat16 and of a float32."""
WORKSPACE = 32 << 20
"""Bytes that cuBLAS keeps on Hopper."""
STATES = 12
"""Bytes that Adam keeps of a trained parameter: a float32 copy and two moments."""


@dataclass(frozen=True)
class LlamaShape:
    """width: of the residual stream; hidden: of the MLP, which has a gate; tied: the output head is the
    embedding."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool = False

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's matrices: q, k, v, o, gate, up, down."""
        rows, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(self.width, rows), (self.width, keys), (self.width, keys), (rows, self.width),
                (self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width)]  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        return sum(a * b for a, b in self.linears) + 2 * self.width

    @property
    def parameters(self) -> int:
        ends = self.vocab * self.width * (1 if self.tied else 2) + self.width
        return self.layers * self.layer_parameters + ends

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied with: the matrices of the layers, and the head."""
        return self.layers * sum(a * b for a, b in self.linears) + self.vocab * self.width

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA beside every matrix of the layers."""
        return self.layers * sum(rank * (a + b) for a, b in self.linears)


SHAPES = {
    "0.1B": LlamaShape(12, 768, 12, 4, 64, 2048, 32000, True),
    "1B": LlamaShape(16, 2048, 32, 8, 64, 8192, 128256, True),
    "8B": LlamaShape(32, 4096, 32, 8, 128, 14336, 128256),
}


ALLOWED = {
    "attention": ("math", "sdpa", "attnlib"), "checkpointing": ("none", "selective", "layer"),
    "zero": (0, 1, 2, 3),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """How a model is trained. checkpointing: what the backward pass computes again, see `llama.Layer`. lora:
    the rank, None for all parameters. zero: what is spread over the GPUs: 1 Adam's states, 2 gradients, too,
    3 parameters, too; 0 nothing. offload: Adam's states are in host memory. Each GPU has `batch` sequences of
    `context` tokens."""

    context: int
    batch: int = 1
    attention: Attention = "attnlib"
    checkpointing: Checkpointing = "none"
    lora: int | None = None
    zero: int = 0
    gpus: int = 1
    offload: bool = False
    loss_rows: int = 1024

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        if not isinstance(self.offload, bool):
            raise TypeError(f"offload: expected a bool, got {type(self.offload).__name__}")
        for name in ("context", "batch", "gpus", "loss_rows", "lora"):
            value = getattr(self, name)
            if value is None and name == "lora":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 spreads the parameters."""
        return self.zero >= 2 and self.gpus > 1

    @property
    def tokens(self) -> int:
        """Of one GPU in one step."""
        return self.batch * self.context

    def trained(self, shape: LlamaShape) -> int:
        return shape.parameters if self.lora is None else shape.adapters(self.lora)


def kept(shape: LlamaShape, how: Training) -> dict[str, int]:
    """Bytes that one layer's forward pass leaves for its backward pass, by part, without checkpointing."""
    T, half = how.tokens, HALF * how.tokens
    found = {
        "norms": 2 * (half * shape.width + FULL * T),  # inputs, and a number a row
        "inputs": 2 * half * shape.width,  # of q, k, v and of gate, up
        **around_attention(shape, how),
        "mlp": 4 * half * shape.hidden,  # gate, its silu, up, the product of the two
    }
    if how.lora is not None:
        found["adapters"] = half * how.lora * len(shape.linears)
    return found


def around_attention(shape: LlamaShape, how: Training) -> dict[str, int]:
    """What attention keeps of a layer: its inputs, its output, and what lies between them."""
    T, rows, keys = how.tokens, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if how.attention == "math":  # in float32, with keys and values repeated for each query head
        return {"qkv": FULL * T * 3 * rows, "out": HALF * T * rows, "weights": scores(shape, how)}
    return {"qkv": HALF * T * (rows + 2 * keys), "out": HALF * T * rows, "lse": FULL * T * shape.heads}


def scores(shape: LlamaShape, how: Training) -> int:
    """Bytes of one tensor of S x S for each head, in float32."""
    return FULL * how.tokens * how.context * shape.heads


def held(shape: LlamaShape, how: Training) -> dict[str, int]:
    """Bytes that one layer leaves under `how.checkpointing`, by part."""
    if how.checkpointing == "none":
        return kept(shape, how)
    stream = {"input": HALF * how.tokens * shape.width}
    return stream | (around_attention(shape, how) if how.checkpointing == "selective" else {})


def backward(shape: LlamaShape, how: Training, inside: bool = True) -> int:
    """Bytes of a layer while it goes back: what it keeps without checkpointing, which by then has been
    computed again, and the gradients, those of its weights among them. The larger of two moments: when the
    MLP's product goes back, and, without what the MLP kept, attention. inside: see `memory`."""
    T, rows, keys = how.tokens, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    stream, full = HALF * T * shape.width, how.lora is None
    parts = kept(shape, how)
    whole = sum(parts.values()) - (parts["inputs"] // 2 if how.checkpointing == "selective" else 0)
    matrix = HALF * shape.width * shape.hidden if full else 0
    # Gradients of the product and of its factors, while the product itself is free.
    mlp = whole + stream + HALF * T * 2 * shape.hidden + matrix
    without = whole - parts["mlp"] - (parts["norms"] + parts["inputs"]) // 2
    if how.attention == "math":
        # Gradients of the weights and of the scores; softmax's kernel multiplies the former by the weights.
        attends = (3 if inside else 2) * scores(shape, how)
    else:  # of the output, q, k and v; that of q in float32, too; two numbers a row
        attends = stream + HALF * T * 2 * (rows + keys) + FULL * T * (rows + 2 * shape.heads)
    return max(mlp, without + attends + 3 * matrix + (HALF * rows * shape.width if full else 0))


MOMENTS = {
    "begin": "FSDP2 gathers what the first layer needs",
    "loss": "the loss goes back",
    "last layer": "the last layer goes back",
    "first layer": "the first layer goes back",
    "end": "all gradients are there, Adam runs",
}
"""Moments of a step at one of which memory is at its peak: between them it falls or rises steadily."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. parameters and states are there all the time; beside: what is needed beside them at
    each of the MOMENTS."""

    parameters: int
    states: int
    beside: dict[str, int]

    @property
    def moment(self) -> str:
        """When the peak is."""
        return max(self.beside, key=self.beside.__getitem__)

    @property
    def peak(self) -> int:
        return self.parameters + self.states + self.beside[self.moment] + WORKSPACE


def memory(shape: LlamaShape, how: Training, inside: bool = True) -> Memory:
    """Gradients are freed after each step; the loss takes `loss_rows` rows at a time, see `book.llama`.

    inside: with the tensor of S x S for each head that PyTorch's softmax allocates inside of its backward
    operator on a GPU. It matters to the math path alone, and it was found by a measurement: without it, the
    formula is the one that predicted that measurement, and what a count of operators sees."""
    trained, full = how.trained(shape), how.lora is None
    parameters = HALF * (shape.parameters + (0 if full else trained))
    states = 0 if how.offload else STATES * trained
    head = HALF * shape.vocab * shape.width
    one, stream = sum(held(shape, how).values()), HALF * how.tokens * shape.width
    left, layer = shape.layers * one, backward(shape, how, inside)
    # The logarithms of the rows' probabilities, and two gradients of that size; the head's gradient, which
    # other rows have begun; later what is added to that, and the sum.
    rows = min(how.loss_rows, how.tokens)
    begun = head if full and how.tokens > rows else 0
    beside = {
        "begin": 0,
        "loss": left + 3 * stream + max(3 * FULL * rows * shape.vocab + begun, 3 * begun),
        "last layer": left - one + layer + (head if full else 0),
    }
    weights = HALF * (shape.layer_parameters if full else trained // shape.layers)  # gradients of one layer's
    if how.sharded:
        return _sharded(shape, how, Memory(parameters, states, beside), weights, layer)
    ends = (head if full else 0) + stream
    beside["first layer"] = layer + (shape.layers - 1) * weights + ends
    # A tied embedding's own gradient is added to the head's; Adam has one gradient in float32.
    largest = max(head, HALF * shape.width * shape.hidden) if full else 0
    beside["end"] = HALF * trained + 2 * largest
    return Memory(parameters, states // (how.gpus if how.zero else 1), beside)


def _sharded(shape: LlamaShape, how: Training, alone: Memory, weights: int, back: int) -> Memory:
    """Of one of several GPUs under FSDP2, from what one GPU needs alone, the gradients of a layer's weights,
    and `backward`. Embedding, head and last norm are whole from the begin to the end of a step. Layers are
    whole, too (ZeRO 2), or one, and the next one, which is being gathered (ZeRO 3). Where gradients are
    summed, a layer's lie there twice."""
    full = how.lora is None
    head, layer = HALF * shape.vocab * shape.width, HALF * shape.layer_parameters
    layer += 0 if full else weights
    root = (1 if shape.tied else 2) * head
    if how.zero == 3:
        there, next_one = root, layer
    else:
        there, next_one = alone.parameters, 0
    sums = weights if full else 0
    done = (shape.layers - 1) * weights // how.gpus
    beside = {
        "begin": 2 * (root + layer),  # gathered in one piece, then copied
        "loss": alone.beside["loss"] + there + next_one,
        "last layer": alone.beside["last layer"] + there + 2 * next_one + sums // how.gpus,
        "first layer": back + root + 2 * layer + sums + done + (head if full else 0),
        "end": (4 * head if full else root) + sums + done,
    }
    return Memory(alone.parameters // how.gpus, alone.states // how.gpus, beside)
