"""Triton's interpreter with less work in a call of a function; what it computes stays the same.

A kernel in the interpreter finds functions of the interpreter in the place of those of triton.language: a
launch puts them there, and takes them away in the end. A call of another jit function within the kernel puts
the same functions in the same place again, which is a third of the time of a small kernel. Another tenth goes
into a table of NumPy's types, made anew for each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

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
    return True


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
