"""What was made of a tensor, for the layers of one forward pass: they all get the same tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class _Found(NamedTuple):
    """tensor: the one it was made of, or that this is a view of. version: its version then. copy: its values,
    where it has no version. modules: the layers that asked, by id."""

    tensor: weakref.ref
    version: int | None
    copy: torch.Tensor | None
    modules: set[int]
    made: Any


class Remembered:
    """Makes something of a tensor once for each forward pass.

    It is made anew if the tensor has changed, and when a layer comes for the second time: then a new pass has
    begun, and between two passes values may change in ways that PyTorch does not count, as by `.data`."""

    def __init__(self) -> None:
        self._found: dict[tuple, _Found] = {}

    def of(self, module, tensor: torch.Tensor, make: Callable[[], Any]) -> Any:
        """What `make` gives of the tensor, which the layer `module` got."""
        owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        key = id(owner), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        found = self._found.get(key)
        if found is not None and id(module) not in found.modules and _is_unchanged(found, owner, tensor):
            found.modules.add(id(module))
            return found.made
        version = None if owner.is_inference() else owner._version
        copy = tensor.detach().clone() if version is None else None
        forget = weakref.ref(owner, partial(self._forget, key))
        self._found[key] = _Found(forget, version, copy, {id(module)}, make())
        return self._found[key].made

    def _forget(self, key: tuple, reference: weakref.ref) -> None:
        found = self._found.get(key)
        if found is not None and found.tensor is reference:
            del self._found[key]


def _is_unchanged(found: _Found, owner: torch.Tensor, tensor: torch.Tensor) -> bool:
    if found.tensor() is not owner:
        return False
    if found.copy is not None:
        return owner.is_inference() and torch.equal(found.copy, tensor)
    return not owner.is_inference() and found.version == owner._version
