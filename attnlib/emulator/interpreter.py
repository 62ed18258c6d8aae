"""Triton's interpreter with less work in a call of a function; what it computes stays the same.

A kernel in the interpreter finds functions of the interpreter in the place of those of triton.language: a
launch puts them there, and takes them away in the end. A call of another jit function within the kernel puts
the same functions in the same place again, which is a third of the time of a small kernel. Another tenth goes
into a table of NumPy's types, made anew for each operation. Of what is left, a third is spent on sums,
differences and products of integers: whether they overflow is computed by ten more operations and then not
looked at, since the assertion counts in debug mode only, in which the interpreter never is. Every tensor, and
every type of one, makes an object of each of its lengths, and two operands of one shape are compared length
by length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

from attnlib.emulator.frames import in_one_piece

TRITON = "3.6."
"""The Triton whose interpreter this is; another one's is left as it is."""


@cache
def save_work() -> bool:
    """Make the interpreter of this process do such work once. False with another Triton.

    Triton is imported, so TRITON_INTERPRET has to be set before."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith(TRITON):
        return False
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    if not interpreter.interpreter_builder.options.debug:
        unasked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = unasked
    _lengths_once_a_shape()
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)
    interpreter.GridExecutor.__call__ = _in_one_piece(interpreter.GridExecutor.__call__)
    return True


def _in_one_piece(launch: Callable) -> Callable:
    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        return in_one_piece(launch, *args, **kwargs)

    return run


def _once_a_launch(patch_lang: Callable) -> Callable:
    """The function that puts the interpreter's functions into the modules which a jit function sees."""
    from triton import language

    done: set[int] = set()  # modules that the launch in progress has changed

    @cache
    def seen(fn: Callable) -> frozenset[int]:
        return frozenset(id(x) for x in fn.__globals__.values() if x is language or x is language.core)

    @wraps(patch_lang)
    def patch(fn: Callable) -> object:
        modules = seen(fn)
        if modules <= done:
            return None  # to a function within a kernel: for a launch, `done` is empty
        scope = patch_lang(fn)
        done.update(modules)
        restore = scope.restore

        def forget() -> None:
            done.clear()
            restore()

        scope.restore = forget
        return scope

    return patch


def _once_a_name(numpy_type: Callable) -> Callable:
    """The function that finds NumPy's type for one of Triton's, whose name says which it is."""
    known: dict[str, object] = {}

    @wraps(numpy_type)
    def find(kind: object) -> object:
        name = kind.scalar.name  # of a block, that of its elements
        if name not in known:
            known[name] = numpy_type(kind)
        return known[name]

    return find


def _lengths_once_a_shape() -> None:
    """Blocks of one shape share the objects that hold its lengths. The interpreter changes none of them."""
    from triton.language import core

    make_type = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[core.tuple, int, str]] = {}

    @wraps(make_type)
    def block_type(self: core.block_type, element_ty: core.dtype, shape: list | core.tuple) -> None:
        lengths = tuple([n.value if type(n) is core.constexpr else n for n in shape])
        usual = type(shape) in (list, core.tuple) and all(type(n) is int for n in lengths)
        if usual and lengths in known:
            self.element_ty = element_ty
            self.shape, self.numel, text = known[lengths]
            self.name = f"<{text}, {element_ty}>"
        else:
            make_type(self, element_ty, shape)
            known[tuple(self.shape)] = self.shape, self.numel, str(self.shape)

    @cache
    def lengths_of(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
        lengths = [core.constexpr(n) for n in shape]
        return core.tuple(lengths), core.constexpr(math.prod(shape))

    make_tensor = core.tensor.__init__

    @wraps(make_tensor)
    def tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = lengths_of(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _unless_alike(broadcast: Callable) -> Callable:
    """The function that gives two operands one shape, for those that have not got one."""

    @wraps(broadcast)
    def one_shape(semantic: object, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        alike = lhs.shape is rhs.shape  # blocks of one shape share it
        return (lhs, rhs) if alike else broadcast(semantic, lhs, rhs)

    return one_shape
