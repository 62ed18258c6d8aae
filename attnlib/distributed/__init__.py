"""Attention on several GPUs, on torch.distributed. Context parallel: one sequence over ranks, measured on two
GPUs in chapter 42. Tensor parallel: heads over ranks, in chapter 40."""

from attnlib.distributed.api import attention, positions, shard, unshard
from attnlib.distributed.output import row_parallel_output
from attnlib.distributed.varlen import attention_varlen

__all__ = ["attention", "attention_varlen", "positions", "row_parallel_output", "shard", "unshard"]
