"""What ranks do in tests of `attnlib.distributed.row_parallel_output`: jobs for `ranks.Ranks`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from distributed_jobs import as_dtensor, told
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attnlib import attention
from attnlib.distributed import row_parallel_output


class Layer(NamedTuple):
    """A layer over ranks; heads, key heads and columns of the weight are those of all ranks."""

    chunks: int | tuple[int, ...] | None = None
    causal: bool = True
    window: tuple[int, int] | None = None
    heads: int = 4
    kv_heads: int = 2
    rows: int = 40
    keys: int = 40
    outputs: int = 24
    batch: int = 1
    head_dim: int = 16
    dtype: str = "float32"
    impl: str | None = "reference"


def inputs(layer: Layer, device: str = "cpu") -> list[torch.Tensor]:
    """q, k, v stored as (B, S, H, D), the weight and the gradient of the result."""
    generator = torch.Generator(device).manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, layer.dtype))

    B, D = layer.batch, layer.head_dim
    q = drawn(B, layer.rows, layer.heads, D).transpose(1, 2)
    k, v = (drawn(B, layer.keys, layer.kv_heads, D).transpose(1, 2) for _ in range(2))
    weight = drawn(layer.outputs, layer.heads * D) * (layer.heads * D) ** -0.5
    return [q, k, v, weight, drawn(B, layer.rows, layer.outputs)]


def one_process(layer: Layer, device: str = "cpu") -> list[torch.Tensor]:
    """The result and the gradients of q, k, v and the weight, of all heads on one rank."""
    *tensors, d_y = inputs(layer, device)
    tensors = [x.requires_grad_() for x in tensors]
    q, k, v, weight = tensors
    out = attention(q, k, v, causal=layer.causal, window=layer.window, impl=layer.impl)
    y = out.transpose(1, 2).flatten(2) @ weight.t()
    y.backward(d_y)
    return [y.detach(), *(x.grad for x in tensors)]


def own(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's heads of q, k, v and columns of the weight."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [x.chunk(ranks, 1)[rank] for x in tensors]


def over_ranks(layer: Layer, device: str = "cpu") -> list[torch.Tensor]:
    """The result and this rank's gradients."""
    *tensors, d_y = inputs(layer, device)
    tensors = [x.detach().requires_grad_() for x in own(tensors)]
    options = {"causal": layer.causal, "window": layer.window, "impl": layer.impl, "chunks": layer.chunks}
    y = row_parallel_output(*tensors, **options, timeout=200)
    y.backward(d_y)
    return [y.detach(), *(x.grad for x in tensors)]


def errors(layers: list[Layer], device: str = "cpu") -> list[list[float]]:
    """Of each layer, the largest difference of each tensor from one process, as a part of its largest number
    or of 1."""
    found = []
    for layer in layers:
        y, *gradients = one_process(layer, device)
        pairs = zip(over_ranks(layer, device), [y, *own(gradients)], strict=True)
        found.append([((a - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in pairs])
    return found


def dtensors(which: str) -> list[float]:
    """q, k, v and the weight as DTensors, or the weight alone: the largest differences from one process."""
    y, *gradients = one_process(Layer())
    *tensors, d_y = inputs(Layer())
    given = own(tensors)
    first = 0 if which == "all" else 3
    given[first:] = [as_dtensor(x, 1) for x in given[first:]]
    given = [x.detach().requires_grad_() for x in given]
    found = row_parallel_output(*given, causal=True, impl="reference", timeout=200)
    if which == "all":
        assert found.placements == (Replicate(),)
        found = found.to_local()
    found.backward(d_y)
    here = [x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad for x in given]
    pairs = zip([found, *here], [y, *own(gradients)], strict=True)
    return [(a - b).abs().max().item() for a, b in pairs]


def without_gradients() -> float:
    """A call whose q alone has a gradient, and one without any: the largest difference between the two."""
    q, k, v, weight, _ = inputs(Layer())
    tensors = own([q, k, v, weight])
    with torch.no_grad():
        first = row_parallel_output(*tensors, causal=True, impl="reference", chunks=2, timeout=200)
    second = row_parallel_output(
        tensors[0].detach().requires_grad_(), *tensors[1:], causal=True, impl="reference", chunks=2,
        timeout=200,
    )  # fmt: skip
    second.sum().backward()
    return (first - second).abs().max().item()


def many_chunks() -> tuple[int, ...]:
    """The shape of a result that was made row by row."""
    q = torch.randn(1, 1, 1400, 8)
    options = {"causal": True, "window": (3, -1), "chunks": len(q[0, 0]), "timeout": 200}
    return tuple(row_parallel_output(q, q, q, torch.randn(4, 8), **options, impl="reference").shape)


def bad(what: str) -> str:
    """All ranks call with the same mistake."""
    q, k, v, weight, _ = inputs(Layer())
    q, k, v, weight = own([q, k, v, weight])
    options: dict = {
        "chunks": {"chunks": 41}, "sizes": {"chunks": [30, 5]}, "empty": {"chunks": [40, 0]},
        "kind": {"chunks": 2.0}, "size": {"chunks": [20, "20"]}, "timeout": {"timeout": -1},
        "mesh": {"group": init_device_mesh("cpu", (1, 2)) if what == "mesh" else None},
    }.get(what, {})  # fmt: skip
    weight = {
        "weight": weight[:, :-1], "dtype": weight.half(), "none": None, "flat": weight.flatten(),
        "DTensor of outputs": as_dtensor(weight), "sparse": weight.to_sparse(),
    }.get(what, weight)  # fmt: skip
    if what == "DTensor of a batch":
        q, k, v = (as_dtensor(x) for x in (q, k, v))
    if what == "DTensors of two meshes":
        q, k, v = (as_dtensor(x, 1) for x in (q, k, v))
        elsewhere = init_device_mesh("cpu", (1, dist.get_world_size()))
        weight = DTensor.from_local(weight, elsewhere, [Shard(1)] * 2)
    if what == "keys":
        k, v = k[:, :, :39], v[:, :, :39]
    if what == "rows":
        q = q[:, :, :0]
    return told(lambda: row_parallel_output(q, k, v, weight, **{"timeout": 200, **options}))


def unlike(what: str) -> str:
    """Rank 1 calls with something else than rank 0."""
    layer = Layer()
    if dist.get_rank() == 1:
        layer = {"chunks": layer._replace(chunks=2), "outputs": layer._replace(outputs=16),
                 "rows": layer._replace(rows=39)}[what]  # fmt: skip
    tensors = own(inputs(layer)[:4])
    return told(lambda: row_parallel_output(*tensors, chunks=layer.chunks, impl="reference", timeout=200))
