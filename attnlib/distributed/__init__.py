"""One sequence on several GPUs: context parallel attention on torch.distributed. Chapter 42 builds it."""

from attnlib.distributed.api import attention, positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
