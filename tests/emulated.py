"""The Hopper kernels through their launchers, on the CPU: `attnlib.emulator` in place of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attnlib import launch_hopper
from attnlib.emulator import Emulated
from attnlib.kernels import hopper, hopper_backward, hopper_backward_wide

KERNELS = {
    "attention_forward_hopper": hopper,
    "attention_backward_hopper": hopper_backward,
    "attention_backward_hopper_wide": hopper_backward_wide,
}


@contextmanager
def on_the_cpu(order: str = "random", seed: int = 0, sms: int = 2) -> Iterator[list[Emulated]]:
    """Within it the launchers of the Hopper kernels take CPU tensors, and so does `impl="hopper"`."""
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        kernels = []
        for name, module in KERNELS.items():
            kernels.append(Emulated(getattr(module, name), order, seed))
            patch.setattr(module, name, kernels[-1])
        patch.setattr(launch_hopper, "unsupported_here", lambda q: None)
        patch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor says of itself
        patch.setattr(launch_hopper, "_num_sms", lambda device: sms)
        patch.setattr(launch_hopper, "_counter", lambda device: counter)
        yield kernels
    assert counter.item() == 0, "the counter of tiles is not set back"
