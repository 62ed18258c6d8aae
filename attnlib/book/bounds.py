"""A reader's kernel in Triton's interpreter stays within its tensors.

The interpreter takes any address: a kernel that reads or writes elsewhere may end the process, and with it
the notebook, or change memory that is not its own and fail somewhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


@contextmanager
def within_tensors() -> Iterator[None]:
    """Within it a load or a store outside of the memory of all tensors of the launch is an AssertionError.
    Kernels on a GPU are left alone."""
    from triton.runtime import interpreter

    spans: list[tuple[int, int]] = []  # addresses, from the first to behind the last
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def noted(self, args: tuple, kwargs: dict) -> tuple[list, dict]:
        found = prepare(self, args, kwargs)
        spans[:] = set(_spans((*found[0], *found[1].values())))
        return found

    def check(what: str, ptrs: Any, mask: Any) -> None:
        at = ptrs.data[mask.data]
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(at.shape, bool)
        for first, end in spans:
            inside |= (at >= first) & (at + size <= end)
        count = int((~inside).sum())
        assert not count, (
            f"the kernel {what} {count} elements outside of its tensors: look at addresses and mask"
        )

    def checked_load(self, ptrs, mask, *others, **more):
        check("reads", ptrs, mask)
        return load(self, ptrs, mask, *others, **more)

    def checked_store(self, ptrs, value, mask, *others, **more):
        check("writes", ptrs, mask)
        return store(self, ptrs, value, mask, *others, **more)

    with (
        mock.patch.object(executor, "_init_args_hst", noted),
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
    ):
        try:
            yield
        except interpreter.InterpreterError as error:  # one around what went wrong, for each function
            cause: BaseException | None = error
            while isinstance(cause, interpreter.InterpreterError):
                cause = cause.__cause__
            if isinstance(cause, AssertionError):
                raise cause from None
            raise


def _spans(arguments: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """The memory of the tensors among them, of those in tuples and descriptors, too."""
    for x in arguments:
        x = getattr(x, "base", x)
        if isinstance(x, tuple):
            yield from _spans(x)
        elif hasattr(x, "untyped_storage"):
            storage = x.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
