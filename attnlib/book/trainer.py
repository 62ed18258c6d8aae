"""A model of chapters 41 and 42 with its optimizer, as a `Training` describes it: on one device, or spread
over ranks of torch.distributed by FSDP2 (ZeRO 2 and 3) or by its optimizer (ZeRO 1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from attnlib.book.adam import Home, MasterAdamW
from attnlib.book.llama import Attend, Llama
from attnlib.book.training import LlamaShape, Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Trainer:
    """step(tokens) -> the loss of this rank. All ranks begin with the same parameters; with `how.gpus` 1 this
    rank is alone. peft: LoRA by that library instead of the book's few lines. mesh: of all ranks, made here
    unless it is given. attend: attention instead of that of `how`."""

    def __init__(
        self, shape: LlamaShape, how: Training, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
        peft: bool = False, mesh: DeviceMesh | None = None, attend: Attend | None = None,
    ) -> None:  # fmt: skip
        ranks = dist.get_world_size() if dist.is_initialized() and how.gpus > 1 else 1
        if ranks != how.gpus:
            raise ValueError(f"how.gpus: expected the number of ranks, {ranks}, got {how.gpus}")
        self.how = how
        torch.manual_seed(41)
        with default_dtype(dtype), torch.device(device):
            self.model = Llama(shape, how, attend)
            if how.lora is not None:
                adapt = self.model.adapt_by_peft if peft else self.model.adapt
                adapt(how.lora)
        if how.zero >= 2 and ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = mesh or init_device_mesh(device, (ranks,))
            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh, reshard_after_forward=how.zero == 3)
        whole = ranks > 1 and how.zero < 2
        home = Home(whole, whole and how.zero == 1, how.offload)
        self.adam = MasterAdamW(list(self.model.parameters()), home=home)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens)
        loss.backward()
        self.adam.step()
        return loss.detach()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
