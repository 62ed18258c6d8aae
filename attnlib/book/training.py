"""What training a Llama-shaped model needs: bytes at the peak and ms of a step, by formula. Chapter 41 holds
it against measurements; nothing here is measured.

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
    "attention": ("math", "sdpa", "attnlib"), "checkpointing": ("none", "selective", "layer"), "zero": (0, 1, 2, 3),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """How a model is trained. lora: the rank, None for all parameters. zero: what is spread over the GPUs: 1
    Adam's states, 2 gradients, too, 3 parameters, too; 0 nothing. Each GPU has `batch` sequences of
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
        for name in ("context", "batch", "gpus", "loss_rows", "lora"):
            value = getattr(self, name)
            if value is None and name == "lora":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

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


def backward(shape: LlamaShape, how: Training) -> int:
    """Bytes of a layer while it goes back: what it keeps without checkpointing, which by then has been
    computed again, and the gradients, those of its weights among them. The larger of two moments: when the
    MLP's product goes back, and, without what the MLP kept, attention."""
    T, rows, keys = how.tokens, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    stream, full = HALF * T * shape.width, how.lora is None
    parts = kept(shape, how)
    whole = sum(parts.values()) - (parts["inputs"] // 2 if how.checkpointing == "selective" else 0)
    matrix = HALF * shape.width * shape.hidden if full else 0
    # Gradients of the product and of its factors, while the product itself is free.
    mlp = whole + stream + HALF * T * 2 * shape.hidden + matrix
    without = whole - parts["mlp"] - (parts["norms"] + parts["inputs"]) // 2
    if how.attention == "math":
        inside = 2 * scores(shape, how)
    else:  # of the output, q, k and v; that of q in float32, too; two numbers a row
        inside = stream + HALF * T * 2 * (rows + keys) + FULL * T * (rows + 2 * shape.heads)
    return max(mlp, without + inside + 3 * matrix + (HALF * rows * shape.width if full else 0))


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. parameters and states are there all the time; beside them is what is needed at five
    moments: while the loss goes back, while the last layer does, while the first one does, and when all
    gradients are there and Adam runs."""

    parameters: int
    states: int
    at_loss: int
    at_last_layer: int
    at_first_layer: int
    at_end: int

    @property
    def beside(self) -> int:
        return max(self.at_loss, self.at_last_layer, self.at_first_layer, self.at_end)

    @property
    def peak(self) -> int:
        return self.parameters + self.states + self.beside + WORKSPACE


def memory(shape: LlamaShape, how: Training) -> Memory:
    """Gradients are freed after each step; the loss takes `loss_rows` rows at a time, see `book.llama`."""
    trained, full = how.trained(shape), how.lora is None
    parameters = HALF * (shape.parameters + (0 if full else trained))
    one_layer, head = HALF * shape.layer_parameters, HALF * shape.vocab * shape.width
    gradients, states = HALF * trained, 0 if how.offload else STATES * trained
    one, stream = sum(held(shape, how).values()), HALF * how.tokens * shape.width
    left = shape.layers * one
    # The logarithms of the rows' probabilities, and two gradients of that size; the head's gradient, which
    # other rows have begun.
    rows = min(how.loss_rows, how.tokens)
    begun = head if full and how.tokens > rows else 0
    at_loss = left + 3 * stream + 3 * FULL * rows * shape.vocab + begun
    layer, ends = backward(shape, how), head if full else 0
    at_last = left - one + layer + ends
    at_first = layer + (gradients - one_layer - (0 if shape.tied else head) if full else gradients)
    largest = max(head, HALF * shape.width * shape.hidden) if full else 0
    at_end = gradients + FULL // HALF * largest
    return Memory(parameters, states, at_loss, at_last, at_first, at_end)


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU: TFLOP/s of products and of causal attention (forward, backward), GB/s of its memory
    and of its link to the others; ms that the host needs for a layer's launches, forward, backward and Adam,
    without a compiler or a graph. The defaults are round numbers for an H200; measure your own."""

    products: float = 600.0
    attention: dict[str, tuple[float, float]] | None = None
    memory: float = 4000.0
    link: float = 150.0
    host: float = 1.7

    def attends(self, how: Training) -> tuple[float, float]:
        rates = {"math": (20.0, 20.0), "sdpa": (430.0, 330.0), "attnlib": (620.0, 500.0)}
        return (self.attention or rates)[how.attention]


def step_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of forward pass, backward pass and Adam: the GPU's, or the host's where it can't keep up.
    Elementwise work is counted by its bytes."""
    T, again = how.tokens, how.checkpointing == "layer"
    # A product forward; the gradient of its input; that of its weight unless it is frozen; the head twice.
    passes = 2 * (1 + 1 + (how.lora is None) + again)
    layers = shape.layers * sum(a * b for a, b in shape.linears)
    head = 2 * (3 + (how.lora is None)) * shape.vocab * shape.width
    products = T * (passes * layers + head) / machine.products / 1e9
    if how.lora is not None:
        products += T * 2 * (3 + again) * shape.adapters(how.lora) / machine.products / 1e9
    forward = 2 * T * how.context * shape.heads * shape.head_dim * shape.layers
    ahead, back = machine.attends(how)
    attention = forward * ((1 + again) / ahead + 2.5 / back) / 1e9
    kept_bytes = sum(kept(shape, how).values()) * shape.layers
    elementwise = (2 + again) * 1.5 * kept_bytes / machine.memory / 1e6
    shard = how.gpus if how.zero else 1
    adam = how.trained(shape) * (HALF * 3 + 11 * FULL) / shard / machine.memory / 1e6
    on_gpu = products + attention + elementwise + adam + exchange_ms(shape, how, machine)
    return max(on_gpu, machine.host * shape.layers * (4 / 3 if again else 1))


def exchange_ms(shape: LlamaShape, how: Training, machine: Machine) -> float:
    """ms of all that ZeRO sends, if nothing hides it: gradients are reduced and scattered, parameters are
    gathered after Adam, or, with stage 3, before each pass."""
    if how.gpus == 1:
        return 0.0
    share = (how.gpus - 1) / how.gpus
    moved = HALF * share * 2 * how.trained(shape)
    if how.zero == 3:
        passes = 2 + (how.checkpointing == "layer")
        moved = HALF * share * (how.trained(shape) + passes * shape.parameters)
    return moved / machine.link / 1e6
