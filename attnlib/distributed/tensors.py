"""DTensors in the place of each rank's tensors: what they have to be, and calls on their local parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from attnlib.distributed.groups import Group, ranks_of
from attnlib.distributed.links import agree_on_all, linked

Placed = Mapping[str, tuple[Any, int]]
"""By name a tensor, and the dimension in which it has to be sharded if it is a DTensor."""


class Local(NamedTuple):
    """What a call has to do on this rank. mesh: that of the DTensors, None if there were none."""

    tensors: list[Any]
    group: Group
    mesh: DeviceMesh | None = None

    def joined(self, x: torch.Tensor, placement) -> torch.Tensor:
        """A result as a DTensor, if there were any."""
        return x if self.mesh is None else DTensor.from_local(x, self.mesh, [placement] * self.mesh.ndim)


def local_parts(placed: Placed, group: Group, timeout, caller: str) -> Local:
    """The tensors of this rank. All of them, or none, have to be DTensors."""
    given = [x for x, _ in placed.values()]
    first = next((x for x in given if isinstance(x, DTensor)), None)
    if first is None:
        return Local(given, group)
    check_for_all(lambda: check_placed(placed, group), first, timeout, caller)
    return Local([x.to_local() for x in given], first.device_mesh, first.device_mesh)


def check_for_all(check: Callable[[], Any], x: DTensor, timeout, caller: str) -> None:
    """What `check` has against a call is told to the other ranks of the mesh of `x`, too, which wait."""
    try:
        check()
    except (TypeError, ValueError) as error:
        outer, inner, _ = linked(x.to_local(), ranks_of(x.device_mesh), timeout, caller)
        agree_on_all(filter(None, (inner, outer)), dict, error)


def check_placed(placed: Placed, group: Group) -> None:
    named, mesh = next((name, x.device_mesh) for name, (x, _) in placed.items() if isinstance(x, DTensor))
    for name, (x, dim) in placed.items():
        if not isinstance(x, DTensor) or any(place != Shard(dim) for place in x.placements):
            raise TypeError(f"{name}: expected a DTensor with Shard({dim}) in every dimension of its mesh")
        if x.device_mesh != mesh:
            raise ValueError(f"{name}: expected the mesh of {named}, {mesh}, got {x.device_mesh}")
        if x.shape[dim] % mesh.size():
            raise ValueError(
                f"{name}: expected dimension {dim} to be a multiple of {mesh.size()}, so that all ranks have "
                f"as much, got {x.shape[dim]}"
            )
    if group not in (None, mesh):
        raise ValueError(f"group: expected None or the mesh of the DTensors, got {group}")
