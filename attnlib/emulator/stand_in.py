"""Launchers as they are, on CPU tensors: for a while their kernels run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from triton.runtime import JITFunction

from attnlib.emulator.machine import Order
from attnlib.emulator.run import Emulated


@contextmanager
def emulated(
    namespace: dict[str, object], order: Order = "random", seed: int = 0, sms: int = 2
) -> Iterator[dict[str, Emulated]]:
    """Within it `kernel[grid](...)` of the Gluon kernels in `namespace`, the `vars` of a module, runs in the
    emulator, and PyTorch says of its GPU that it has `sms` SMs. Yields the kernels by name."""
    kernels = {name: Emulated(kernel, order, seed, sms) for name, kernel in _launched(namespace).items()}
    properties = SimpleNamespace(multi_processor_count=sms)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(namespace, kernels))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties))
        yield kernels


def _launched(namespace: dict[str, object]) -> dict[str, JITFunction]:
    """The Gluon functions that no other one calls."""
    functions = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, JITFunction) and value.is_gluon() and value.fn.__globals__ is namespace
    }
    called = {name for function in functions.values() for name in function.fn.__code__.co_names}
    return {name: function for name, function in functions.items() if name not in called}
