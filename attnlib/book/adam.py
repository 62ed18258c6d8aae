"""AdamW for bfloat16 parameters, with float32 copies of them: 12 bytes a trained parameter beside 2 for
itself and 2 for its gradient. Its state may be whole, spread over ranks, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


def own(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP2 has spread, a DTensor; else the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


@dataclass(frozen=True)
class Home:
    """Where the state is. shared: ranks that have the same whole parameter sum up their gradients. spread:
    each of them has the state of its share of the elements alone (ZeRO 1). host: in host memory, where the
    update is computed."""

    shared: bool = False
    spread: bool = False
    host: bool = False


class MasterAdamW:
    """One parameter at a time, so that nothing else of their size is needed."""

    def __init__(self, parameters: list[nn.Parameter], rate: float = 1e-4, home: Home | None = None) -> None:
        self.parameters, self.rate, self.steps = [p for p in parameters if p.requires_grad], rate, 0
        self.home = home or Home()
        self.state = [self._fresh(p) for p in self.parameters]

    @torch.no_grad()
    def _fresh(self, p: nn.Parameter) -> tuple[torch.Tensor, ...]:
        part = self._part(own(p))
        if not self.home.host:
            return part.float(), *(torch.zeros_like(part, dtype=torch.float32) for _ in range(2))
        pinned = {"device": "cpu", "pin_memory": part.is_cuda}
        found = [torch.zeros(part.shape, dtype=torch.float32, **pinned) for _ in range(3)]
        found[0].copy_(part)
        return *found, torch.empty(part.shape, dtype=part.dtype, **pinned)  # the last: what goes over the bus

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """All elements in a row, and zeros, so that all ranks have as many."""
        return nn.functional.pad(x.flatten(), (0, -x.numel() % dist.get_world_size()))

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """What of a parameter this rank updates."""
        return self._flat(x).chunk(dist.get_world_size())[dist.get_rank()] if self.home.spread else x

    def _gradient(self, p: nn.Parameter) -> torch.Tensor:
        """Of what this rank updates, the mean over ranks. FSDP2's gradients are that already."""
        grad = own(p.grad)
        if self.home.spread:
            whole = self._flat(grad)
            grad = whole.new_empty(whole.numel() // dist.get_world_size())
            dist.reduce_scatter_tensor(grad, whole)
        elif self.home.shared:
            dist.all_reduce(grad)
        return grad.div_(dist.get_world_size()) if self.home.shared else grad

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for p, state in zip(self.parameters, self.state, strict=True):
            grad = self._gradient(p)
            if self.home.host:
                *state, staging = state
                new = staging.copy_(self._updated(staging.copy_(grad).float(), *state))
            else:
                new = self._updated(grad.float(), *state)
            if self.home.spread:
                whole = grad.new_empty(grad.numel() * dist.get_world_size())
                dist.all_gather_into_tensor(whole, new.to(grad))
                new = whole[: p.numel()].view_as(p)
            own(p).copy_(new)
            p.grad = None

    def _updated(
        self, grad: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor
    ) -> torch.Tensor:
        """The new float32 copy. `grad` is float32, and its memory is used."""
        one, two = 1 - 0.9**self.steps, 1 - 0.95**self.steps
        mean.lerp_(grad, 0.1)
        square.mul_(0.95).addcmul_(grad, grad, value=0.05)
        master.mul_(1 - 0.01 * self.rate)
        scale = grad.copy_(square).div_(two).sqrt_().add_(1e-8)
        return master.addcdiv_(mean, scale, value=-self.rate / one)
