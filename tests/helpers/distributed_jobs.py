"""What ranks do in tests of `attnlib.distributed`: jobs for `ranks.Ranks`, importable by its processes."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnlib import attention, attention_varlen, dispatch
from attnlib import distributed as cp
from attnlib.arguments.common import type_name


class Case(NamedTuple):
    """A call over ranks; `rows` are the positions of the whole sequence."""

    causal: bool = False
    window: tuple[int, int] | None = None
    method: str = "auto"
    heads: int = 4
    kv_heads: int = 2
    rows: int = 64
    impl: str | None = "reference"
    mesh: tuple[int, int] | None = None
    scale: float | None = None
    head_dim: int = 16
    dtype: str = "float32"


def inputs(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence, stored as (B, S, H, D)."""
    generator = torch.Generator(device).manual_seed(1)
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    return [
        torch.randn(2 if device == "cpu" else 1, case.rows, h, case.head_dim, generator=generator,
                    device=device, dtype=getattr(torch, case.dtype)).transpose(1, 2)
        for h in heads
    ]  # fmt: skip


def one_process(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    """out, LSE, dq, dk, dv of one process."""
    *tensors, d_out = inputs(case, device)
    tensors = [x.requires_grad_() for x in tensors]
    impl = "reference" if device == "cpu" else case.impl
    out, lse = attention(*tensors, causal=case.causal, window=case.window, sm_scale=case.scale,
                         return_lse=True, impl=impl)  # fmt: skip
    out.backward(d_out)
    return [out.detach(), lse, *(x.grad for x in tensors)]


def over_ranks(case: Case, device: str = "cpu", timeout: float = 200) -> list[torch.Tensor]:
    """The same of all ranks, joined."""
    mask = {"causal": case.causal, "window": case.window}
    mask["group"] = None if case.mesh is None else init_device_mesh(device.split(":")[0], case.mesh)
    *tensors, d_out = (cp.shard(x, **mask) for x in inputs(case, device))
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, lse = cp.attention(*tensors, sm_scale=case.scale, return_lse=True, method=case.method,
                            impl=case.impl, timeout=timeout, **mask)  # fmt: skip
    assert out.stride()[-1] == 1 and not lse.requires_grad
    out.backward(d_out)
    return [cp.unshard(x, **mask) for x in (out.detach(), lse, *(x.grad for x in tensors))]


def errors(case: Case, device: str = "cpu", timeout: float = 200) -> list[float]:
    """The largest difference of each from one process, as a part of its largest number or of 1."""
    pairs = zip(over_ranks(case, device, timeout), one_process(case, device), strict=True)
    return [((x - y).abs().max() / y.abs().max().clamp_min(1)).item() for x, y in pairs]


def many_errors(cases: list[Case]) -> list[list[float]]:
    return [errors(case) for case in cases]


def errors_and_roads(case: Case) -> tuple[list[float], dict[bool, int]]:
    """The errors; and how many calls of a kernel merged into an existing result, and how many did not."""
    own, counts = dispatch.forward, {True: 0, False: 0}

    def counted(q, k, v, params):
        counts[params.into is not None] += 1
        return own(q, k, v, params)

    dispatch.forward = counted
    try:
        found = over_ranks(case)
    finally:
        dispatch.forward = own
    pairs = zip(found, one_process(case), strict=True)
    return [((x - y).abs().max() / y.abs().max().clamp_min(1)).item() for x, y in pairs], counts


def told(call) -> str:
    """The error of a call, as "TypeError: text"."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def unlike(what: str) -> tuple[str, str]:
    """Rank 1 calls with something else than the others: its error, and that of an equal call afterwards."""
    rows, dtype, options = 8, torch.float32, {"causal": True, "impl": "reference", "timeout": 200}
    options |= {"method": "ulysses"} if what == "gradients" else {}
    if dist.get_rank() == 1:
        rows = 16 if what == "shape" else rows
        dtype = torch.float16 if what == "dtype" else dtype
        options |= {"causal": False} if what == "mask" else {"sm_scale": "a"} if what == "argument" else {}
    tensors = [torch.randn(1, 2, rows, 8).to(dtype) for _ in range(3)]
    tensors[dist.get_rank() % 2].requires_grad_(what == "gradients")
    first = told(lambda: cp.attention(*tensors, **options))
    tensors = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    return first, told(lambda: cp.attention(*tensors, causal=True, impl="reference", timeout=200))


def bad(what: str) -> str:
    """All ranks call with the same mistake."""
    tensors = [torch.randn(1, 3, 9 if what == "rows" else 8, 8) for _ in range(3)]
    options = {
        "method": {"method": "best"}, "kind": {"method": 3}, "heads": {"method": "ulysses"},
        "rows": {"causal": True}, "timeout": {"timeout": 0}, "group": {"group": 7},
    }[what]  # fmt: skip
    return told(lambda: cp.attention(*tensors, **options))


def as_dtensor(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Whose part on this rank is x."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])


def refused() -> tuple[str, list[float]]:
    """An error while keys are on their way; and a call afterwards."""
    case = Case(causal=True)
    tensors = [cp.shard(x, causal=True) for x in inputs(case)[:3]]
    error = told(lambda: cp.attention(*tensors, causal=True, impl="hopper", timeout=200))
    return error, errors(case)


def second_derivative(method: str) -> str:
    """The error of a gradient penalty. The gradient of the output is a constant."""
    q, k, v = (cp.shard(x, causal=True).detach().requires_grad_() for x in inputs(Case())[:3])
    if method == "output":
        weight = torch.randn(8, 64)
        out = cp.row_parallel_output(q, k, v, weight, causal=True, impl="reference", timeout=200)
    else:
        out = cp.attention(q, k, v, causal=True, method=method, impl="reference", timeout=200)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return told(lambda: (gradient.square().sum() + q.sum()).backward())


def way(method: str) -> dict:
    return {"method": "ring", "in_order": True} if method == "in order" else {"method": method}


def crossed(method: str) -> str:
    """Two calls, of which each rank goes backward through another one: the error."""
    q, k, v = (cp.shard(x, causal=True).detach().requires_grad_() for x in inputs(Case())[:3])
    options = {"causal": True, **way(method), "impl": "reference", "timeout": 200}
    found = [cp.attention(q * factor, k, v, **options) for factor in (1, 2)]
    return told(lambda: found[dist.get_rank()].sum().backward())


def bad_sequence(what: str) -> str:
    """The error of a function that spreads or joins a sequence."""
    x = torch.zeros(3 if what == "odd part" else 4)
    calls = {
        "rows": lambda: cp.positions(9, causal=True), "negative": lambda: cp.positions(-2),
        "kind": lambda: cp.positions(2.0), "odd part": lambda: cp.unshard(x, dim=0, causal=True),
        "mask": lambda: cp.unshard(x, dim=0, causal=dist.get_rank() == 0),
    }  # fmt: skip
    return told(calls[what])


def on_another_default_device() -> list[str]:
    """Where positions and outputs are."""
    tensors = [cp.shard(x, causal=True) for x in inputs(Case())[:3]]
    with torch.device("meta"):
        out = cp.attention(*tensors, causal=True, impl="reference", timeout=200)
        return [str(x.device) for x in (cp.positions(4), out, cp.unshard(out, causal=True))]


def dtypes_in_autocast() -> set[str]:
    """Of all outputs. Some of the inputs were cast before."""
    q, k, v = (cp.shard(x) for x in inputs(Case())[:3])
    options = {"impl": "reference", "timeout": 200}
    with torch.autocast("cpu", torch.bfloat16):
        found = [cp.attention(q, k, v.bfloat16(), method=method, **options) for method in ("ring", "ulysses")]
        found.append(cp.row_parallel_output(q.bfloat16(), k, v, torch.randn(8, 64), **options))
        packed = (x[0].transpose(0, 1) for x in (q, k.bfloat16(), v))
        found.append(cp.attention_varlen(*packed, torch.tensor([0, 64], dtype=torch.int32), 64, **options))
    return {str(x.dtype) for x in found}


def without_elements() -> list[tuple[int, ...]]:
    """The shapes of outputs of no batch, no rows, no heads."""
    found = []
    for shape in ((0, 4, 8, 16), (1, 4, 0, 16), (1, 0, 8, 16)):
        tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        found.append(cp.attention(*tensors, causal=True, impl="reference", timeout=200))
        if shape[2]:
            weight = torch.randn(5, shape[1] * 16, requires_grad=True)
            found.append(cp.row_parallel_output(*tensors, weight, impl="reference", timeout=200))
    sum(x.sum() for x in found).backward()
    return [tuple(x.shape) for x in found]


def in_groups_that_overlap() -> list[float]:
    """Two of three ranks call in a group of their own, then all: the errors."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        cp.attention(*(torch.randn(1, 2, 8, 8) for _ in range(3)), group=pair, impl="reference", timeout=20)
    return errors(Case(causal=True, rows=48), timeout=20)


def one_rank_of_a_mesh(what: str) -> tuple[str, str]:
    """The last of four ranks calls with a mistake: the error, and that of a right call afterwards."""
    mesh, last = init_device_mesh("cpu", (2, 2)), dist.get_rank() == 3
    q = torch.randn(1, 4, 8, 16)
    options = {"group": mesh, "impl": "reference", "timeout": 60}
    if what == "unshard":
        rows = q[:, :, :6] if last else q
        first = told(lambda: cp.unshard(rows, group=mesh, timeout=60))
    else:
        first = told(lambda: cp.attention(q, q, q, sm_scale="a" if last else None, **options))
    return first, told(lambda: cp.attention(q, q, q, **options))


def timeouts_that_differ() -> list[str]:
    """Calls whose time limits differ between ranks, and between calls."""
    group, x = dist.new_group(), torch.randn(1, 2, 8, 8)
    options = {"group": group, "impl": "reference"}
    mine = [seconds[dist.get_rank()] for seconds in ((3, 4), (4, 4), (4, 3), (200, 4))]
    return [told(partial(cp.attention, x, x, x, **options, timeout=seconds)) for seconds in mine]


def late(which: str, seconds: float, device: str = "cpu") -> tuple[str, float]:
    """Rank 1 does not come to the forward or the backward pass of a call, whose time limit is not that of the
    call before: the error of the others, and how long it took."""
    tensors = [torch.randn(1, 2, 8, 8, device=device, requires_grad=True) for _ in range(3)]
    options = {"group": dist.new_group(), "impl": "reference"}
    out = cp.attention(*tensors, **options, timeout=seconds)
    cp.unshard(out, group=options["group"], timeout=200)
    if dist.get_rank() == 1:
        time.sleep(1.5 * seconds)
        return "late", 0.0
    begin = time.monotonic()
    calls = {"forward": lambda: cp.attention(*tensors, **options, timeout=seconds),
             "backward": lambda: out.sum().backward()}  # fmt: skip
    return told(calls[which]), time.monotonic() - begin


def wrong_group(what: str, seconds: float) -> tuple[str, str, float]:
    """Rank 1 gives no group, or another one of the same ranks: the error of each, what the same group says
    at a next call, and how long the first took."""
    x, groups = torch.ones(1, 2, 8, 8), [dist.new_group() for _ in range(2)]
    mine = {"no group": 7, "another group": groups[1]}[what] if dist.get_rank() == 1 else groups[0]
    begin = time.monotonic()
    first = told(lambda: cp.attention(x, x, x, group=mine, impl="reference", timeout=seconds))
    took = time.monotonic() - begin
    return first, told(lambda: cp.unshard(x, group=mine, timeout=seconds)), took


def died(seconds: float, device: str = "cpu") -> tuple[str, str, float]:
    """Rank 1 dies between the forward and the backward pass: the others' errors, there and at a next call."""
    tensors = [torch.randn(1, 2, 8, 8, device=device, requires_grad=True) for _ in range(3)]
    options = {"impl": "reference", "timeout": seconds}
    out = cp.attention(*tensors, **options)
    if device == "cuda":
        torch.cuda.synchronize()  # nothing of it is in flight
    if dist.get_rank() == 1:
        os._exit(3)
    begin = time.monotonic()
    first = told(lambda: out.sum().backward())
    return first, told(lambda: cp.attention(*tensors, **options)), time.monotonic() - begin


def dtensors() -> float:
    """DTensors in and out: the largest difference from plain tensors, forward and backward."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = [cp.shard(x, causal=True).detach().requires_grad_() for x in inputs(Case())[:3]]
    given = [DTensor.from_local(x.detach().clone(), mesh, [Shard(2)]).requires_grad_() for x in plain]
    found = cp.attention(*given, causal=True, in_order=False, impl="reference", timeout=200)
    out = cp.attention(*plain, causal=True, impl="reference", timeout=200)
    assert type_name(found).endswith("DTensor") and found.shape[2] == 64
    other = init_device_mesh("cpu", (1, dist.get_world_size()))
    elsewhere = DTensor.from_local(plain[1].detach(), other, [Shard(2)] * 2)
    for tensors, group, name in (
        (given, dist.group.WORLD, "group"), ((given[0], elsewhere, given[2]), None, "k"),
        ((plain[0], *given[1:]), None, "q"),
    ):  # fmt: skip
        assert f"Error: {name}: expected" in told(lambda t=tensors, g=group: cp.attention(*t, group=g))
    assert told(lambda: cp.shard(given[0])).startswith("TypeError: x: expected a torch.Tensor of this rank")
    (out * out).sum().backward()
    local = found.to_local()
    (local * local).sum().backward()
    pairs = [(local, out), *((x.grad.to_local(), y.grad) for x, y in zip(given, plain, strict=True))]
    return max((x - y).abs().max().item() for x, y in pairs)


def rows_in_order(method: str, window: tuple[int, int] | None, spread: bool, rows: int = 64) -> float:
    """Rows in order, of plain tensors or of DTensors as distribute_tensor makes them: the largest difference
    of output, LSE and gradients from one process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    case = Case(True, window, method, rows=rows)
    *whole, d_out = inputs(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if spread:
        given = [distribute_tensor(x.contiguous(), mesh, [Shard(2)]).requires_grad_() for x in whole]
    else:
        given = [x.chunk(ranks, 2)[rank].clone().requires_grad_() for x in whole]
    out, lse = cp.attention(*given, causal=True, window=window, method=method, in_order=True, return_lse=True,
                            impl="reference", timeout=200)  # fmt: skip
    found = [out, lse]
    if spread:
        found = [x.to_local() for x in found]
    found[0].backward(d_out.chunk(ranks, 2)[rank])
    found += [x.grad.to_local() if spread else x.grad for x in given]
    pairs = zip(found, one_process(case), strict=True)
    return max((x - y.chunk(ranks, 2)[rank]).abs().max().item() for x, y in pairs)


def order_said_wrong() -> list[str]:
    """What calls say whose ranks, mesh or tensors do not fit `in_order`."""
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks, x = dist.get_world_size(), torch.ones(1, 2, 8, 8)
    options = {"causal": True, "impl": "reference", "timeout": 20}
    spread = distribute_tensor(torch.ones(1, 2, 16, 8), init_device_mesh("cpu", (ranks,)), [Shard(2)])
    wide = init_device_mesh("cpu", (1, ranks))
    return [
        told(lambda: cp.attention(x, x, x, in_order=dist.get_rank() == 1, **options)),
        told(lambda: cp.attention(x, x, x, in_order=True, group=wide, **options)),
        told(lambda: cp.attention(x, x, x, in_order=1, **options)),
        told(lambda: cp.attention(spread, spread, spread, **options)),
        told(lambda: cp.attention(spread, spread, spread, impl="reference", timeout=20)),
    ]


def compiled(backend: str) -> tuple[float, list[str]]:
    """A compiled function with each call in it: the largest difference of the output and the gradients from
    the same without a compiler; and the first lines of the errors where it has to be one graph."""
    *tensors, d_out = (cp.shard(x, causal=True) for x in inputs(Case()))
    options = {"causal": True, "impl": "reference", "timeout": 200}
    offsets, weight = torch.tensor([0, 64], dtype=torch.int32), torch.randn(8, 64)
    off, errors = 0.0, []
    for call in (
        lambda q, k, v: cp.attention(q * 2, k, v, **options) + 1,
        lambda *x: cp.attention_varlen(*(y[0].transpose(0, 1) * 2 for y in x), offsets, 64, **options) + 1,
        lambda q, k, v: cp.row_parallel_output(q * 2, k, v, weight, **options) + 1,
    ):
        found = []
        for layer in (call, torch.compile(call, backend=backend)):
            given = [x.detach().requires_grad_() for x in tensors]
            out = layer(*given)
            out.backward(d_out.flatten()[: out.numel()].view(out.shape))
            found.append([out.detach(), *(x.grad for x in given)])
        off = max(off, *((x - y).abs().max().item() for x, y in zip(*found, strict=True)))
        torch._dynamo.reset()
        errors.append(told(lambda call=call: torch.compile(call, backend=backend, fullgraph=True)(*tensors)))
    return off, [error.partition("\n")[0] for error in errors]


class Between(torch.nn.Module):
    """A call with work before and after it, as in a layer of a model."""

    def __init__(self, call, width: int) -> None:
        super().__init__()
        self.call = call
        self.before, self.after = torch.nn.Linear(16, 48), torch.nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.nn.functional.silu(self.before(x) * 2).chunk(3, -1)
        return self.after(torch.nn.functional.gelu(self.call(q, k, v)) + 1)


def compiled_by_inductor(name: str) -> tuple[float, int]:
    """A module around the function of this name, compiled by PyTorch's own compiler: how far the output and
    all gradients are from those without a compiler, as a part of the largest number; and how many graphs were
    compiled."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    torch.manual_seed(2)
    options = {"causal": True, "impl": "reference", "timeout": 200}
    offsets, weight = torch.tensor([0, 24, 64], dtype=torch.int32), torch.randn(24, 64)
    x = torch.randn(2, 4, 32, 16)
    if name == "attention":
        module = Between(lambda *qkv: cp.attention(*qkv, **options), 16)
    elif name == "attention_varlen":
        x = x[0].transpose(0, 1)
        module = Between(lambda *qkv: cp.attention_varlen(*qkv, offsets, 40, **options), 16)
    else:
        module = Between(lambda *qkv: cp.row_parallel_output(*qkv, weight, chunks=3, **options), 24)
    torch._dynamo.reset()
    counters.clear()
    found = []
    # Processes that import PyTorch, to compile in and to find out which vectors run here, take half a minute.
    quick = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with config.patch(quick):
        for layer in (module, torch.compile(module)):
            given = x.clone().requires_grad_()
            module.zero_grad()
            out = layer(given)
            out.square().sum().backward()
            found.append([out.detach(), given.grad, *(p.grad.clone() for p in module.parameters())])
    off = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True))
    return off, counters["stats"]["unique_graphs"]


def readme(code: str) -> list[float]:
    """README's example, paragraph by paragraph: how far from one process the joined output is, this rank's
    varlen tokens, and the projected output, as a part of the largest number."""
    found: dict = {}
    *attends, packed, projected = code.split("\n\n")
    for paragraph in attends:
        exec(paragraph, found)
    q, k, v = (found[name] for name in "qkv")
    assert found["at"].tolist() == cp.shard(torch.arange(q.shape[2]), dim=0, causal=True).tolist()
    whole = attention(q, k, v, causal=True, impl="reference")
    pairs = [(found["out"], whole)]
    exec(packed, found)
    ends, longest = found["ends"], int(found["ends"].diff().max())
    tokens = (x[0].transpose(0, 1) for x in (q, k, v))
    lengths = attention_varlen(*tokens, ends, ends, longest, longest, causal=True, impl="reference")
    pairs.append((found["out"], cp.shard(lengths, dim=0)))
    exec(projected, found)
    columns = torch.cat([found["weight"]] * dist.get_world_size(), 1)  # drawn alike on all ranks
    pairs.append((found["y"], whole.transpose(1, 2).flatten(2) @ columns.t()))
    return [((x - y).abs().max() / y.abs().max()).item() for x, y in pairs]


def ring_of_pytorch() -> float:
    """PyTorch's context_parallel with attnlib as its kernels: the largest difference of the output and the
    gradients from attnlib's own, forward and backward. Its rows lie as those of `shard`."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _attention

    from attnlib import sdpa

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    *whole, d_out = inputs(Case(heads=2, kv_heads=2, rows=16))
    plain = [cp.shard(x, causal=True).detach().requires_grad_() for x in whole]
    expected = cp.attention(*plain, causal=True, timeout=200)
    expected.backward(cp.shard(d_out, causal=True))
    buffers = [x.detach().contiguous().clone() for x in whole]
    active = sdpa._Active("CPU")
    _attention._cp_options.enable_load_balance = True
    with _attention.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3,
                                     no_restore_buffers=set(buffers)):  # fmt: skip
        given = [x.requires_grad_() for x in buffers]
        spread = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in given)
        out = torch.ops.aten._scaled_dot_product_flash_attention(*spread, is_causal=True)[0].to_local()
        out.backward(cp.shard(d_out, causal=True).contiguous())
    active.remove()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(given, plain, strict=True))]
    return max((x - y).abs().max().item() for x, y in pairs)


LENGTHS = [0, 7, 7, 20, 21, 40]
"""Sequences of varlen calls, one of them empty: where each begins, and the number of tokens."""


def varlen(causal: bool, window: tuple[int, int] | None, placed: bool = False) -> list[float]:
    """Packed sequences over ranks: the largest difference of output, LSE and gradients from one process.
    placed: as DTensors that `distribute_tensor` makes."""
    from torch.distributed.tensor import Shard, distribute_tensor

    generator = torch.Generator().manual_seed(3)
    offsets = torch.tensor(LENGTHS, dtype=torch.int32)
    whole = [torch.randn(LENGTHS[-1], h, 16, generator=generator) for h in (4, 2, 2, 4)]
    options = {"causal": causal, "window": window, "return_lse": True, "impl": "reference", "sm_scale": 0.4}
    *same, d_out = [x.clone().requires_grad_() for x in whole]
    out, lse = attention_varlen(*same, offsets, offsets, 20, 20, **options)
    out.backward(d_out)
    *given, d_out = [cp.shard(x, dim=0).clone().requires_grad_() for x in whole]
    if placed:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        given = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in whole[:3]]
    found, found_lse = cp.attention_varlen(*given, offsets, 20, timeout=200, **options)
    if placed:
        assert found.placements == (Shard(0),) and found_lse.placements == (Shard(1),)
        assert found.shape == out.shape and found_lse.shape == lse.shape
        found, found_lse = found.to_local(), found_lse.to_local()
    found.backward(d_out)
    gradients = [x.grad.to_local() if placed else x.grad for x in given]
    pairs = [(found, cp.shard(out, dim=0)), (found_lse, cp.shard(lse, dim=1))]
    pairs += [(x, cp.shard(y.grad, dim=0)) for x, y in zip(gradients, same, strict=True)]
    return [(x - y).abs().max().item() for x, y in pairs]


def bad_varlen(what: str) -> str:
    """All ranks make the same mistake, or rank 1 has something else than the others."""
    second = dist.get_rank() == 1
    longest = 30 if what == "unlike" and second else 20
    q, k, v = (torch.randn(20, 3 if what == "heads" else 4, 16) for _ in range(3))
    if what == "gradients":
        (k if second else q).requires_grad_()
    if what == "value dimension" and second:
        v = torch.randn(20, 4, 24)
    offsets = [0, 30, 20, 40] if what == "values" else [0, 20, 40]
    offsets = torch.tensor([0, 20, 39] if what == "wrong offsets" and second else offsets, dtype=torch.int32)
    if what == "offsets":
        longest, offsets = 30, torch.tensor([0, 10 + 5 * second, 40], dtype=torch.int32)
    if what == "DTensor of heads":
        q, k, v = (as_dtensor(x, 1) for x in (q, k, v))
    if what == "a DTensor among others":
        k = as_dtensor(k)
    if what == "an uneven DTensor":
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        q, k, v = (distribute_tensor(torch.randn(39, 4, 16), mesh, [Shard(0)]) for _ in range(3))
    keys = k[:10] if what == "keys" else k
    given, method = (q, keys, v[: len(keys)]), "ulysses" if what == "heads" else "auto"
    return told(lambda: cp.attention_varlen(*given, offsets, longest, method=method, impl="reference"))


def where() -> tuple[list[int], list[int]]:
    """A causal sequence's positions on this rank, by `positions` and by `shard`."""
    by_shard = cp.shard(torch.arange(8 * dist.get_world_size()), dim=0, causal=True)
    return cp.positions(8, causal=True).tolist(), by_shard.tolist()


def one_rank_has_no_gradient() -> list[float]:
    """The loss is of rank 0's rows alone: gradients of all, and the largest difference from one process."""
    case = Case(causal=True)
    *tensors, d_out = (cp.shard(x, causal=True) for x in inputs(case))
    d_out = d_out * (dist.get_rank() == 0)
    tensors = [x.detach().requires_grad_() for x in tensors]
    cp.attention(*tensors, causal=True, impl="reference", timeout=200).backward(d_out)
    whole = [x.requires_grad_() for x in inputs(case)[:3]]
    attention(*whole, causal=True, impl="reference").backward(cp.unshard(d_out, causal=True))
    return [
        (cp.unshard(x.grad, causal=True) - y.grad).abs().max().item()
        for x, y in zip(tensors, whole, strict=True)
    ]


def mistaken(what: str) -> tuple[str, str]:
    """What a call says that rank 1 makes wrongly, and one after it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    wrong = dist.get_rank() == 1
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"impl": "reference", "timeout": 20}
    x = torch.ones(1, 2, 8, 8)
    if what == "a list":
        call = partial(cp.unshard, x.tolist() if wrong else x, timeout=20)
    elif what == "a replica":
        place = Replicate() if wrong else Shard(2)
        call = partial(cp.attention, *[DTensor.from_local(x, mesh, [place], run_check=False)] * 3, **options)
    elif what == "offsets":
        ends = torch.tensor([0, 16], dtype=torch.int32)
        ends = DTensor.from_local(ends, mesh, [Replicate()], run_check=False) if wrong else ends
        call = partial(cp.attention_varlen, *[x[0].transpose(0, 1)] * 3, ends, 16, **options)
    elif what == "a replica of tokens":
        place, ends = Replicate() if wrong else Shard(0), torch.tensor([0, 16], dtype=torch.int32)
        tokens = DTensor.from_local(x[0].transpose(0, 1), mesh, [place], run_check=False)
        call = partial(cp.attention_varlen, *[tokens] * 3, ends, 16, **options)
    elif what == "a weight":
        call = partial(cp.row_parallel_output, x, x, x, None if wrong else torch.ones(4, 16), **options)
    else:
        given = x.to("meta") if wrong and what == "meta" else x
        options["timeout"] = "20" if wrong and what == "time" else 20
        call = partial(cp.attention, given, given, given, **options)
    first = told(call)
    return first, told(partial(cp.unshard, x, timeout=20))


def of_different_inputs(kind: str) -> str:
    """Rank 0 asks for the gradient of q, rank 1 for that of k."""
    q, k, v = (torch.randn(1, 2, 8, 8).requires_grad_() for _ in range(3))
    if kind == "varlen":
        q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v))
        ends = torch.tensor([0, 16], dtype=torch.int32)
        out = cp.attention_varlen(q, k, v, ends, 16, impl="reference", timeout=20)
    else:
        out = cp.attention(q, k, v, causal=True, **way(kind), impl="reference", timeout=20)
    return told(lambda: torch.autograd.grad(out.sum(), (q, k)[dist.get_rank()]))


def conjugated() -> list[complex]:
    part = torch.full((2,), 1 + 2j).conj()
    return cp.unshard(part, dim=0, timeout=20).tolist()
