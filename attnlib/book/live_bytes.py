"""How many bytes of tensors are alive while a program runs, counted on a CPU without their memory.

    with pretended(), LiveBytes() as live:
        model, tokens = ...
        model(tokens).backward()
    live.peak

PyTorch's fake tensors have shapes and no values, so a model of 8 billion parameters is counted in
seconds. What is counted is what the caching allocator of a GPU would call allocated, but for what a kernel
needs inside of itself (`INSIDE` names what attention's backward pass needs), and for cuBLAS's workspace."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlib.book.adam import own
from attnlib.book.trainer import Trainer
from attnlib.book.training import LlamaShape, Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def of_backward(d_out: torch.Tensor, q: torch.Tensor, *_: Any, **__: Any) -> int:
    """Bytes of the float32 gradient of q, which blocks of keys add to, and of two numbers a row."""
    return 4 * (q.numel() + 2 * math.prod(q.shape[:3]))


INSIDE: dict[str, Callable[..., int]] = {
    "attnlib::attention_backward": of_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": of_backward,
}
"""Operators that allocate on a GPU what the fake tensors do not show -> bytes, from their arguments."""


class LiveBytes(TorchDispatchMode):
    """Follows each storage from the operator that makes it until it is freed.

    now, peak: bytes; trace: `now` after each operator; at_peak: the operator that ran at the peak; parts():
    what is alive now, bytes by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak, self.trace = "", []
        self._known: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._see(own(x))
        inside = INSIDE.get(func.name().split(".")[0])
        self._reach(self.now + (inside(*args) if inside else 0), func.name())
        self.trace.append(self.now)
        return out

    def restart(self) -> None:
        """Forget the peak and the trace."""
        self.peak, self.trace = self.now, []

    def parts(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for size, name in self._known.values():
            found[name] += size
        return dict(found.most_common())

    def _reach(self, size: int, name: str) -> None:
        if size > self.peak:
            self.peak, self.at_peak = size, name

    def _see(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = 0, f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            weakref.finalize(storage, self._gone, key)
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        before, name = self._known[key]
        self._known[key] = size, name
        self.now += size - before

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)[0]

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            found = resize(storage, size)
            if storage._cdata in self._known:
                self._resized(storage._cdata, size)
                self._reach(self.now, "resize")
            return found

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", followed)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *failure):
        self._patch.stop()
        return super().__exit__(*failure)


class _FusedNorm(torch.autograd.Function):
    """RMSNorm with what its kernel on a GPU keeps: the input and a number a row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Tensors without memory, on a CPU; RMSNorm as one kernel, which PyTorch's CPU does not have."""

    def norm(x, shape, weight=None, eps=None):
        return _FusedNorm.apply(x, weight)

    with mock.patch("torch.nn.functional.rms_norm", norm), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def counted(shape: LlamaShape, how: Training, mesh: DeviceMesh | None = None) -> LiveBytes:
    """A training step with Adam's states, see `trainer.Trainer`."""
    with pretended(), LiveBytes() as live:
        trainer = Trainer(shape, how, mesh=mesh)
        live.restart()
        trainer.step(torch.zeros(how.batch, how.context, dtype=torch.long))
    return live
