"""The ranks that share a sequence: a process group, or a mesh of two dimensions for the hybrid."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnlib.arguments.common import type_name
from attnlib.distributed.layout import Parts, divisor, local_rows, parts_of, rows_divisor
from attnlib.params import MaskWindow

Group = dist.ProcessGroup | DeviceMesh | None


class Ranks(NamedTuple):
    """outer: ranks between which keys and values move; inner: ranks that share out the heads, each of which
    holds an equal piece of what one rank of `outer` holds without them; None where there is one dimension."""

    outer: dist.ProcessGroup
    inner: dist.ProcessGroup | None = None

    @property
    def shares(self) -> int:
        return 1 if self.inner is None else dist.get_world_size(self.inner)

    def divisor(self, window: MaskWindow) -> int:
        """What the length of a sequence has to be a multiple of."""
        return divisor(dist.get_world_size(self.outer), window) * self.shares

    def rows_divisor(self, window: MaskWindow) -> int:
        """What the rows of each rank have to be a multiple of."""
        return rows_divisor(dist.get_world_size(self.outer), self.shares, window)

    def parts(self, rows: int, window: MaskWindow) -> Parts:
        """The positions of this rank, which holds so many rows."""
        outer, shares = self.outer, self.shares
        whole = parts_of(dist.get_rank(outer), dist.get_world_size(outer), rows * shares, window)
        if self.inner is None:
            return whole
        first = dist.get_rank(self.inner) * rows
        found = []
        for here, part in local_rows(whole):
            start, stop = max(first, here.start), min(first + rows, here.stop)
            if start < stop:
                found.append(part[start - here.start : stop - here.start])
        return tuple(found)


def ranks_of(group: Group) -> Ranks:
    """TypeError or ValueError if `group` is nothing that this process is in."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "attnlib.distributed: torch.distributed is not initialized; start with torchrun and call "
            "torch.distributed.init_process_group"
        )
    if group is None:
        return Ranks(dist.group.WORLD)
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise ValueError("group: expected a mesh that this rank is in")
        if group.ndim == 1:
            return Ranks(group.get_group())
        if group.ndim == 2:
            return Ranks(group.get_group(0), group.get_group(1))
        raise ValueError(f"group: expected a mesh of 1 or 2 dimensions, got {group.ndim}")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a process group that this rank is in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type_name(group)}")
    return Ranks(group)


def ranks_in_a_row(group: Group) -> Ranks:
    """`ranks_of` for what knows no hybrid."""
    ranks = ranks_of(group)
    if ranks.inner is not None:
        raise ValueError("group: expected a mesh of 1 dimension, got 2")
    return ranks


def device_of(x, group: dist.ProcessGroup) -> torch.device:
    """Of x; where other ranks' tensors lie, who need an answer too, if it is none."""
    if isinstance(x, torch.Tensor) and not x.is_meta:
        return x.device
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else (
        torch.device("cpu")
    )  # fmt: skip
