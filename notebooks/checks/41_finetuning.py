"""Checks of the exercises of chapter 41."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from attnlib.book.training import SHAPES, LlamaShape, Training, held, memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_selective_bytes(answer: Callable) -> None:
    for shape in (SHAPES["1B"], SHAPES["8B"], LlamaShape(2, 96, 3, 3, 48, 200, 50)):
        for tokens in (1, 4096):
            want = sum(held(shape, Training(tokens, checkpointing="selective")).values())
            got = answer(tokens, shape.width, shape.heads, shape.kv_heads, shape.head_dim)
            case = f"{tokens} tokens, width {shape.width}, {shape.heads} and {shape.kv_heads} heads"
            assert got == want, f"{case} of {shape.head_dim}: {want} bytes, not {got}"


def check_LeanMLP(function: type) -> None:
    generator = torch.Generator().manual_seed(41)
    for tokens, width, hidden in ((7, 12, 20), (33, 8, 24)):
        sizes = (tokens, width), (hidden, width), (hidden, width), (width, hidden)
        given = [torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE) for size in sizes]
        d_out = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(DEVICE)
        inputs = [x.clone().requires_grad_() for x in given]
        x, gate, up, down = (x.clone().requires_grad_() for x in given)
        right = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        right.backward(d_out)
        out = function.apply(*inputs)
        assert torch.allclose(out, right), f"the output is off by {(out - right).abs().max():.2g}"
        own = {x.untyped_storage().data_ptr() for x in inputs}
        assert out.grad_fn is not None, "the output has no backward pass"
        more = [list(x.shape) for x in out.grad_fn.saved_tensors if x.untyped_storage().data_ptr() not in own]
        more += [list(x.shape) for x in vars(out.grad_fn).values() if isinstance(x, torch.Tensor)
                 and x.untyped_storage().data_ptr() not in own]  # fmt: skip
        assert not more, f"kept besides the four inputs: {more}"
        out.backward(d_out)
        names, right = ("x", "gate", "up", "down"), (x, gate, up, down)
        for name, found, expected in zip(names, inputs, right, strict=True):
            assert found.grad is not None, f"{name} has no gradient"
            off = (found.grad - expected.grad).abs().max().item()
            assert off <= 1e-9, f"the gradient of {name} is off by {off:.2g}"


def check_longest(answer: Callable) -> None:
    for name, how, room in (
        ("1B", Training(1), 40e9), ("8B", Training(1, checkpointing="layer", lora=16), 135e9),
        ("8B", Training(1, checkpointing="selective", lora=16), 135e9), ("8B", Training(1), 100e9),
        ("1B", Training(1, attention="math"), 76e9), ("0.1B", Training(1, checkpointing="layer"), 22e9),
    ):  # fmt: skip

        def fits(length: int, name: str = name, how: Training = how, room: float = room) -> bool:
            return memory(SHAPES[name], replace(how, context=length)).peak <= room

        got = answer(SHAPES[name], how, room)
        trained = "LoRA" if how.lora else "all"
        case = f"{name}, {how.attention}, {how.checkpointing}, {trained}, {room / 1e9:.0f} GB"
        assert isinstance(got, int), f"{case}: expected an int, got {type(got).__name__}"
        assert got % 1024 == 0 and got >= 0, f"{case}: expected a multiple of 1024, got {got}"
        assert not got or fits(got), f"{case}: {got} tokens do not fit"
        assert not fits(got + 1024), f"{case}: more than {got} tokens fit"


def operators(
    grad: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int,
    rate: float = 1e-4,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A step of `attnlib/book/adam.py`, operator by operator; what it is given stays."""
    one, two, grad = 1 - 0.9**step, 1 - 0.95**step, grad.to(master.dtype)
    mean, square = torch.lerp(mean, grad, 0.1), (square * 0.95).addcmul_(grad, grad, value=0.05)
    scale = grad.copy_(square).div_(two).sqrt_().add_(1e-8)
    master = (master * (1 - 0.01 * rate)).addcdiv_(mean, scale, value=-rate / one)
    return master.bfloat16(), master, mean, square


def judge_adam(found: tuple, *given: torch.Tensor | float) -> None:
    """Against the operators in float64, a part of the elements at a time."""
    assert isinstance(found, list | tuple) and len(found) == 4, "expected the parameter and its state"
    size, names = 1 << 24, ("parameter", "float32 copy", "mean", "mean of squares")
    tensors, rest = given[:4], given[4:]
    for begin in range(0, tensors[0].numel(), size):
        part = slice(begin, begin + size)
        _, *exact = operators(tensors[0][part], *(x[part].double() for x in tensors[1:]), *rest)
        exact = exact[0], *exact
        for name, mine, true in zip(names, found, exact, strict=True):
            assert mine.shape == tensors[0].shape, f"{name}: expected the shape of the gradient"
            kind = torch.bfloat16 if name == "parameter" else torch.float32
            assert mine.dtype == kind, f"{name}: expected {kind}, got {mine.dtype}"
            bound = 2.0**-7 if name == "parameter" else 1e-6  # the interpreter cuts where a GPU rounds
            off = ((mine[part].double() - true.double()).abs() - bound * true.double().abs()).max().item()
            assert off <= 1e-7, f"{name}: off by {off:.1e} beyond its rounding"


def check_adam(answer: Callable) -> None:
    generator = torch.Generator().manual_seed(6)
    for numbers, step, rate in ((16, 1, 1e-4), (1000, 3, 0.1), (3000, 200, 1e-3)):
        grad, master, mean, square = (torch.randn(numbers, generator=generator).to(DEVICE) for _ in range(4))
        given = grad.bfloat16(), master, 0.1 * mean, 0.01 * square**2
        found = answer(*(x.clone() for x in given), step, rate)
        try:
            judge_adam(found, *given, step, rate)
        except AssertionError as problem:
            raise AssertionError(f"{numbers} numbers, step {step}, rate {rate}: {problem}") from None
