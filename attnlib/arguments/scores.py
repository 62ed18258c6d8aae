"""What an `attnlib.Score` is made of, and a score as an argument of `attention`, checked."""

from __future__ import annotations

import inspect
import math

import torch

from attnlib.arguments.common import DTYPES, check_dense, type_name

NO_REFERENCE = "score.reference: expected a function of tensors, as this call runs in PyTorch, got None"


def check_parts(score) -> None:
    """The parts of an `attnlib.Score`, as far as they do not depend on queries and keys."""
    soft_cap, alibi, sinks, bias, relative = tensors_and_cap = (
        score.soft_cap, score.alibi, score.sinks, score.bias, score.relative
    )  # fmt: skip
    if all(part is None for part in (*tensors_and_cap, score.function, score.derivative, score.reference)):
        raise ValueError(
            "score: expected at least one of soft_cap, alibi, sinks, bias, relative and function, got none"
        )
    _check_own(score)
    if bias is not None and relative is not None:
        raise ValueError("score: expected bias or relative, got both; add the one to the other")
    if soft_cap is not None:
        if isinstance(soft_cap, bool) or not isinstance(soft_cap, int | float):
            raise TypeError(f"score.soft_cap: expected a number or None, got {type_name(soft_cap)}")
        if not 1e-6 <= soft_cap <= 1e6:
            raise ValueError(f"score.soft_cap: expected a number from 1e-6 to 1e6, got {soft_cap}")
    tensors = {"alibi": alibi, "sinks": sinks, "bias": bias, "relative": relative}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"score.{name}: expected a torch.Tensor or None, got {type_name(tensor)}")
        check_dense(f"score.{name}", tensor)
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"score.{name}: expected dtype float16, bfloat16 or float32, got {tensor.dtype}"
            )
        if name in ("alibi", "sinks") and tensor.dim() != 1:
            raise ValueError(f"score.{name}: expected shape (H), got {tuple(tensor.shape)}")
        if name == "relative" and (tensor.dim() != 2 or tensor.shape[1] % 2 == 0):
            raise ValueError(f"score.relative: expected shape (H, 2L + 1), got {tuple(tensor.shape)}")
    _check_slopes(alibi)


def _check_slopes(alibi) -> None:
    if alibi is not None and alibi.requires_grad:
        raise ValueError(
            "score.alibi: expected slopes that do not require grad, got some that do: attnlib has no "
            "gradient of them"
        )


def _check_own(score) -> None:
    from triton.runtime.jit import KernelInterface

    for name in ("function", "derivative"):
        own = getattr(score, name)
        if own is None:
            continue
        if not isinstance(own, KernelInterface):
            raise TypeError(f"score.{name}: expected a @triton.jit function or None, got {type_name(own)}")
        parameters = inspect.signature(own.fn).parameters
        if len(parameters) != 5:
            raise ValueError(
                f"score.{name}: expected a function of (s, i, j, h, b), got one of ({', '.join(parameters)})"
            )
    if score.reference is not None and not callable(score.reference):
        raise TypeError(
            f"score.reference: expected a function of tensors or None, got {type_name(score.reference)}"
        )
    if score.reference is not None and type(score.reference).__hash__ is None:
        raise TypeError(
            "score.reference: expected a function that has a hash, as its number goes by that, got an object "
            f"of {type_name(score.reference)}, which has none"
        )
    for name in ("derivative", "reference"):
        if score.function is None and getattr(score, name) is not None:
            raise ValueError(f"score.{name}: expected None without score.function, got a function")


def _check_globals(score) -> None:
    """ValueError where a global variable that a function reads is not what it was when the score was made:
    kernels have the old value. Triton tells that of a kernel's own variables, and not of these."""
    for name in ("function", "derivative"):
        # Triton's interpreter keeps none: it reads them anew.
        read = getattr(getattr(score, name), "used_global_vals", {})
        for (variable, _), (value, variables) in read.items():
            if variables.get(variable) != value:
                raise ValueError(
                    f"score.{name}: expected the global variable {variable} to stay {value}, got "
                    f"{variables.get(variable)}; define the function again, and the score"
                )


def check_functions(score, gradients: bool, impl: str | None) -> None:
    """ValueError where gradients, or an `impl`, need a function that the score does not have."""
    if score.function is None:
        return
    if score.derivative is None and gradients:
        raise ValueError(
            "score.derivative: expected a @triton.jit function, which the gradients need, got None"
        )
    if score.reference is None and impl == "reference":
        raise ValueError(NO_REFERENCE)


def check_score(score, q: torch.Tensor, k: torch.Tensor) -> None:
    """A score for these queries and keys."""
    if type_name(score) != "attnlib.scores.Score":  # which imports this file
        raise TypeError(f"score: expected an attnlib.Score or None, got {type_name(score)}")
    for name in ("alibi", "sinks", "bias", "relative"):
        tensor = getattr(score, name)
        if tensor is None:
            continue
        if tensor.device != q.device:
            raise ValueError(f"score.{name}: expected device {q.device} as q has, got {tensor.device}")
        what = "rows" if name == "relative" else "values"
        if name != "bias" and tensor.shape[0] != q.shape[1]:
            raise ValueError(
                f"score.{name}: expected {q.shape[1]} {what}, one for each head of q, got {tensor.shape[0]}"
            )
    _check_slopes(score.alibi)  # they may have changed since the score was made
    if not torch.compiler.is_compiling():
        _check_globals(score)
    if score.bias is not None:
        full, own = (*q.shape[:3], k.shape[2]), tuple(score.bias.shape)
        fits = len(own) <= 4 and all(
            x in (1, y) for x, y in zip(reversed(own), reversed(full), strict=False)
        )
        if not fits or (math.prod(own) == 0 != math.prod(full)):
            raise ValueError(
                f"score.bias: expected a shape that broadcasts to (B, H, Sq, Sk) = {full}, got {own}"
            )
