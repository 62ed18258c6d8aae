"""Triton's interpreter with less work in a call of a function; what it computes stays the same.

A kernel in the interpreter finds functions of the interpreter in the place of those of triton.language: a
launch puts them there, and takes them away in the end. A call of another jit function within the kernel puts
the same functions in the same place again, which is a third of the time of a small kernel. Another tenth goes
into a table of NumPy's types, made anew for each operation. Of what is left, a third is spent on sums,
differences and products of integers: whether they overflow is computed by ten more operations and then not
looked at, since the assertion counts in debug mode only, in which the interpreter never is. Every tensor, and
every type of one, makes an object of each of its lengths, and two operands of one shape are compared length
by length. Two of one type are cast to it, and so is a number of Python, which is made a tensor twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import numpy as np

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
    interpreter._patch_builtin = _found_once(interpreter._patch_attr)
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    if not interpreter.interpreter_builder.options.debug:
        unasked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = unasked
    _lengths_once_a_shape()
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _unless_of_one_type(semantic.binary_op_type_checking_impl)
    semantic.to_tensor = _unless_a_tensor(semantic.to_tensor)
    core = triton.language.core
    core._unwrap_if_constexpr = _at_once(core._unwrap_if_constexpr)
    interpreter.GridExecutor.__call__ = _in_one_piece(interpreter.GridExecutor.__call__)
    return True


def _in_one_piece(launch: Callable) -> Callable:
    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(over="ignore"):  # what is too large becomes inf, on a GPU without a word
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


def _found_once(patch_attr: Callable) -> Callable:
    """The function that puts the interpreter's functions into one module or class. Which functions these are
    is looked up once; each calls its member with one dictionary less, and without the question of the
    wrapper around it, whether there is a semantic."""
    from triton.language import core
    from triton.runtime import interpreter

    wrapper = core.builtin(lambda: None).__code__
    known: dict[object, list[tuple[str, Callable, Callable]]] = {}

    def ours(member: Callable, semantic: object) -> Callable:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    def patch_builtin(place: Any, builder: object, scope: Any) -> None:
        if place not in known:
            semantic = interpreter.TritonSemantic(builder)
            members = inspect.getmembers(place, core.is_builtin)
            known[place] = [(name, member, ours(member, semantic)) for name, member in members]
        for name, member, replacement in known[place]:
            found = getattr(place, name)
            if found is member:
                scope.set_attr(place, name, replacement)
            elif core.is_builtin(found):  # somebody else put it there
                patch_attr(place, name, found, builder, scope)

    return patch_builtin


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
            if tuple(self.shape) not in known:
                known[tuple(self.shape)] = self.shape, self.numel, str(self.shape)
                shared[id(self.shape)] = lengths_of(tuple(self.shape))

    @cache
    def lengths_of(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
        lengths = [core.constexpr(n) for n in shape]
        return core.tuple(lengths), core.constexpr(math.prod(shape))

    shared: dict[int, tuple[core.tuple, core.constexpr]] = {}  # by the identity of a shape in `known`
    make_tensor = core.tensor.__init__

    @wraps(make_tensor)
    def tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar
        elif (found := shared.get(id(type.shape))) is not None:
            self.shape, self.numel = found
        else:
            self.shape, self.numel = lengths_of(tuple(type.shape))

    scalar = lengths_of(())
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _unless_alike(broadcast: Callable) -> Callable:
    """The function that gives two operands one shape, for those that have not got one."""

    @wraps(broadcast)
    def one_shape(semantic: object, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        alike = lhs.shape is rhs.shape  # blocks of one shape share it
        return (lhs, rhs) if alike else broadcast(semantic, lhs, rhs)

    return one_shape


OF_ONE_TYPE = {"int1", "int8", "int32", "int64", "uint8", "uint32", "fp16", "bf16", "fp32", "fp64"}
HALVES = {"fp16", "bf16"}
NUMBERS = {"int32": "int32", "int64": "int64", "fp32": "float32"}
"""Types of which a number of Python is, in NumPy's words: an int32 is of each, a float of the last one."""


def _unless_of_one_type(check: Callable) -> Callable:
    """The function that gives two operands one type and shape, for those that have not got one type. Two of
    one type keep it, but a division of halves is one of float32. A number takes the type of a tensor."""
    import numpy as np
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    def number(value: int | float, like: core.tensor) -> core.tensor | None:
        """A number as a block of the other operand's type and shape, None where this is not for here."""
        name = like.dtype.name
        if name not in NUMBERS:
            return None
        if type(value) is int and -(2**31) <= value < 2**31 or type(value) is float and name == "fp32":
            lengths = [n.value for n in like.shape] or 1
            data = np.full(lengths, value or 0, NUMBERS[name])  # 0, not -0.0, as there
            return core.tensor(TensorHandle(data, like.dtype), like.type)
        return None

    @wraps(check)
    def operands(
        semantic: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            name, other = lhs.dtype.name, rhs.dtype.name
            if name == other and name in OF_ONE_TYPE and not (div_or_mod and name in HALVES):
                return semantic.broadcast_impl_value(lhs, rhs)
            if allow_lhs_ptr and type(lhs.dtype) is core.pointer_type and other in ("int32", "int64"):
                return semantic.broadcast_impl_value(lhs, rhs)  # an address and places
        elif arithmetic_check and type(lhs) is core.tensor:
            if (block := number(rhs, lhs)) is not None:
                return lhs, block
        elif arithmetic_check and type(rhs) is core.tensor and (block := number(lhs, rhs)) is not None:
            return block, rhs
        return check(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return operands


def _unless_a_tensor(to_tensor: Callable) -> Callable:
    from triton.language import core

    @wraps(to_tensor)
    def tensor(semantic: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else to_tensor(semantic, x, check_type)

    return tensor


def _at_once(unwrap: Callable) -> Callable:
    """The function that takes the value out of a constant, and out of those in lists and tuples."""
    from triton.language import core

    @wraps(unwrap)
    def value(x: Any) -> Any:
        kind = type(x)
        return x if kind is core.tensor or kind is int else x.value if kind is core.constexpr else unwrap(x)

    return value
