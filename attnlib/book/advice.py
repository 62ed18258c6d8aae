"""Which setting for which model and card, by the formulas of `training` and `training_time`, as
they were mended after the measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnlib.book.training import HALF, SHAPES, WORKSPACE, LlamaShape, Training, held, memory
from attnlib.book.training_time import H200, Machine, offloaded, phased_ms

MODELS = {
    "0.1B": SHAPES["0.1B"],
    "1B": SHAPES["1B"],
    "3B": LlamaShape(28, 3072, 24, 8, 128, 8192, 128256, True),
    "8B": SHAPES["8B"],
    "70B": LlamaShape(80, 8192, 64, 8, 128, 28672, 128256),
}


@dataclass(frozen=True)
class Card:
    """What there is: bytes of one GPU's memory that tensors may take, how many such GPUs, bytes of host
    memory for each; and their rates. Those are an H200's as measured (`training_time.H200`) unless they are
    given; `training_time.machine_of` has an H100's, by the GPU's name."""

    room: float
    gpus: int = 1
    host: float = 0.0
    machine: Machine = H200

    def __post_init__(self) -> None:
        for name in ("room", "host"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: expected a number of bytes, got {value!r}")
        if not self.room > 0:
            raise ValueError(f"room: expected bytes above 0, got {self.room}")
        if not self.host >= 0:
            raise ValueError(f"host: expected bytes from 0 on, got {self.host}")
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 1:
            raise ValueError(f"gpus: expected an int from 1 on, got {self.gpus!r}")


@dataclass(frozen=True)
class Way:
    """A setting, its bytes at the peak of one GPU, and its step in ms."""

    how: Training
    peak: int
    ms: float

    @property
    def name(self) -> str:
        how = self.how
        parts = [{"none": "no checkpoints", "selective": "selective", "layer": "layers"}[how.checkpointing]]
        parts += [f"ZeRO {how.zero}"] if how.zero else []
        return ", ".join(parts + ["Adam on the host"] * how.offload)


def ways(context: int, card: Card, lora: int | None = None, attention: str = "attnlib") -> Iterator[Training]:
    """Every setting that this card could run, one sequence for each GPU."""
    for offload in (False, True)[: 1 + (card.host > 0)]:
        for zero in (0, 1, 2, 3) if card.gpus > 1 else (0,):
            for checkpointing in ("none", "selective", "layer"):
                yield Training(context, 1, attention, checkpointing, lora, zero, card.gpus, offload)


def advise(shape: LlamaShape, context: int, card: Card, lora: int | None = None) -> list[Way]:
    """The settings that fit, the fastest first; of equally fast ones the one that needs less. Times are in
    ms, by the formula and by the rates of `card.machine`, none of them measured in the setting itself.
    TypeError for a model or a card that is none."""
    if not isinstance(shape, LlamaShape):
        raise TypeError(f"shape: expected a LlamaShape, such as MODELS['8B'], got {shape!r}")
    if not isinstance(card, Card):
        raise TypeError(f"card: expected a Card, got {card!r}")
    found = []
    for how in ways(context, card, lora):
        peak = memory(shape, how).peak
        if peak <= card.room and offloaded(shape, how) <= card.host:
            found.append(Way(how, peak, phased_ms(shape, how, card.machine)))
    return sorted(found, key=lambda way: (round(way.ms, 1), way.how.offload, way.peak))


def shares(shape: LlamaShape, how: Training, moment: str | None = None) -> dict[str, int]:
    """What is there at one of the `training.MOMENTS`, by default that of the peak, in parts that add up to
    it: what is there all the time; what layers keep; gradients of parameters, from the first layer's backward
    pass on; and the rest, which is at work then (logits, the layer that goes back, what FSDP2 has
    gathered, cuBLAS's workspace)."""
    found = memory(shape, how)
    moment = found.moment if moment is None else moment
    if moment not in found.beside:
        raise ValueError(f"moment: expected one of {tuple(found.beside)}, got {moment!r}")
    parts = {"parameters": found.parameters, "Adam": found.states, "gradients": 0, "kept": 0}
    if moment in ("loss", "last layer"):
        parts["kept"] = shape.layers * sum(held(shape, how).values())
    elif moment != "begin":
        # An embedding of its own gets its gradient after the first layer.
        later = moment == "first layer" and how.lora is None and not shape.tied
        there = how.trained(shape) - (shape.vocab * shape.width if later else 0)
        parts["gradients"] = HALF * there // (how.gpus if how.sharded else 1)
    whole = found.parameters + found.states + found.beside[moment] + WORKSPACE
    assert whole - sum(parts.values()) >= WORKSPACE
    return parts | {"at work": whole - sum(parts.values())}
