"""Tensors that say they are on a GPU, and a machine that has one as far as the choice can tell."""

from __future__ import annotations

import pytest
import torch
from families import forget_launches

from attnlib.kernels.common import device, hopper_gpu


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def get_device(self) -> int:
        return 0


def tensor(*shape, dtype=torch.float16, strides=None):
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return torch.zeros(80000, dtype=dtype).as_strided(shape, strides).as_subclass(OnGpu)


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU, as far as the choice can tell; a call of `gpu` makes it another one."""

    def is_a(major, minor=0):
        forget_launches()
        monkeypatch.setattr(device, "capability", lambda index: (major, minor))

    monkeypatch.setattr(device, "interpreted", lambda: False)
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    monkeypatch.setattr(device, "memory_gb_per_s", lambda index: 4917.0)
    monkeypatch.setattr(hopper_gpu, "_gluon_amiss", lambda: None)
    is_a(9)
    yield is_a
    forget_launches()
