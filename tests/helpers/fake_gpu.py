"""Tensors that say they are on a GPU, and a machine that has one as far as the choice can tell."""

from __future__ import annotations

import pytest
import torch

from attnlib.kernels.hopper import launch as launch_hopper
from attnlib.kernels.portable import launch


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


def tensor(*shape, dtype=torch.float16, strides=None):
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return torch.zeros(80000, dtype=dtype).as_strided(shape, strides).as_subclass(OnGpu)


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU, as far as the choice can tell; a call of `gpu` makes it another one."""

    def is_a(major, minor=0):
        monkeypatch.setattr(launch_hopper, "capability", lambda index: (major, minor))
        monkeypatch.setattr(launch, "capability", lambda index: (major, minor))

    for module in (launch, launch_hopper):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    monkeypatch.setattr(launch_hopper, "_gluon_amiss", lambda: None)
    monkeypatch.setattr(launch_hopper, "_num_sms", lambda index: 132)
    is_a(9)
    return is_a
