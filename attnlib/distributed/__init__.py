"""One sequence on several GPUs: context parallel attention on torch.distributed. Chapter 42 builds it
and shows what two H200s gave; more GPUs were not measured."""

from attnlib.distributed.api import attention, positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
