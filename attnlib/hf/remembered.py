"""What was made of a tensor, for the layers of one forward pass: they all get the same tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class _Found(NamedTuple):
    """memory: of the tensor that it was made of. version: the tensor's then. copy: its values, where it has
    no version. modules: the layers that asked, by id."""

    memory: weakref.ref[torch.UntypedStorage]
    version: int | None
    copy: torch.Tensor | None
    modules: set[int]
    made: Any


class Remembered:
    """Makes something of a tensor once for each forward pass.

    Views of the same elements count as one tensor: some layers take one each. It is made anew if the tensor
    has changed, and when a layer comes for the second time: then a new pass has begun, and between two passes
    values may change in ways that PyTorch does not count, as by `.data`."""

    def __init__(self) -> None:
        self._found: dict[tuple, _Found] = {}

    def of(self, module, tensor: torch.Tensor, sizes: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """What `make` gives of the tensor, which the layer `module` got, for the `sizes` of its queries and
        keys. It must not hold the tensor."""
        memory = tensor.untyped_storage()  # PyTorch keeps this object for as long as the memory
        key = id(memory), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, sizes
        version = None if tensor.is_inference() else tensor._version
        found = self._found.get(key)
        if found is not None and id(module) not in found.modules and found.memory() is memory:
            if found.version == version if found.copy is None else torch.equal(found.copy, tensor):
                found.modules.add(id(module))
                return found.made
        copy = tensor.detach().clone() if version is None else None
        forget = weakref.ref(memory, partial(self._forget, key))
        self._found[key] = _Found(forget, version, copy, {id(module)}, make())
        return self._found[key].made

    def _forget(self, key: tuple, reference: weakref.ref) -> None:
        found = self._found.get(key)
        if found is not None and found.memory is reference:
            del self._found[key]
