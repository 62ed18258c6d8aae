"""What ranks do in tests of `attnlib.distributed`: jobs for `ranks.Ranks`, importable by its processes."""

from __future__ import annotations

import os
import time
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


def over_ranks(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    """The same of all ranks, joined."""
    mask = {"causal": case.causal, "window": case.window}
    mask["group"] = None if case.mesh is None else init_device_mesh(device.split(":")[0], case.mesh)
    *tensors, d_out = (cp.shard(x, **mask) for x in inputs(case, device))
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, lse = cp.attention(*tensors, sm_scale=case.scale, return_lse=True, method=case.method,
                            impl=case.impl, timeout=200, **mask)  # fmt: skip
    assert out.stride()[-1] == 1 and not lse.requires_grad
    out.backward(d_out)
    return [cp.unshard(x, **mask) for x in (out.detach(), lse, *(x.grad for x in tensors))]


def errors(case: Case, device: str = "cpu") -> list[float]:
    """The largest difference of each from one process, as a part of its largest number or of 1."""
    pairs = zip(over_ranks(case, device), one_process(case, device), strict=True)
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
    if dist.get_rank() == 1:
        rows = 16 if what == "shape" else rows
        dtype = torch.float16 if what == "dtype" else dtype
        options |= {"causal": False} if what == "mask" else {"sm_scale": "a"} if what == "argument" else {}
    tensors = [torch.randn(1, 2, rows, 8).to(dtype) for _ in range(3)]
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


def late(seconds: float) -> tuple[str, float]:
    """Rank 1 does not come: the error of the others, and how long it took."""
    begin = time.monotonic()
    tensors = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    options = {"impl": "reference", "timeout": seconds}
    cp.attention(*tensors, **options)
    if dist.get_rank() == 1:
        time.sleep(1.5 * seconds)
        return "late", 0.0
    begin = time.monotonic()
    return told(lambda: cp.attention(*tensors, **options)), time.monotonic() - begin


def died(seconds: float) -> tuple[str, str, float]:
    """Rank 1 dies between the forward and the backward pass: the others' errors, there and at a next call."""
    tensors = [torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3)]
    options = {"impl": "reference", "timeout": seconds}
    out = cp.attention(*tensors, **options)
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
    found = cp.attention(*given, causal=True, impl="reference", timeout=200)
    out = cp.attention(*plain, causal=True, impl="reference", timeout=200)
    assert type_name(found).endswith("DTensor") and found.shape[2] == 64
    (out * out).sum().backward()
    local = found.to_local()
    (local * local).sum().backward()
    pairs = [(local, out), *((x.grad.to_local(), y.grad) for x, y in zip(given, plain, strict=True))]
    return max((x - y).abs().max().item() for x, y in pairs)


def compiled() -> float:
    """A compiled function with the call in it: the largest difference from the same without a compiler."""
    q, k, v = (cp.shard(x, causal=True) for x in inputs(Case())[:3])

    def layer(q, k, v):
        return cp.attention(q * 2, k, v, causal=True, impl="reference", timeout=200) + 1

    return (torch.compile(layer, backend="eager")(q, k, v) - layer(q, k, v)).abs().max().item()


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


def varlen(causal: bool, window: tuple[int, int] | None) -> list[float]:
    """Packed sequences over ranks: the largest difference of output, LSE and gradients from one process."""
    generator = torch.Generator().manual_seed(3)
    offsets = torch.tensor(LENGTHS, dtype=torch.int32)
    whole = [torch.randn(LENGTHS[-1], h, 16, generator=generator) for h in (4, 2, 2, 4)]
    options = {"causal": causal, "window": window, "return_lse": True, "impl": "reference", "sm_scale": 0.4}
    *same, d_out = [x.clone().requires_grad_() for x in whole]
    out, lse = attention_varlen(*same, offsets, offsets, 20, 20, **options)
    out.backward(d_out)
    *given, d_out = [cp.shard(x, dim=0).clone().requires_grad_() for x in whole]
    found, found_lse = cp.attention_varlen(*given, offsets, 20, timeout=200, **options)
    found.backward(d_out)
    pairs = [(found, cp.shard(out, dim=0)), (found_lse, cp.shard(lse, dim=1))]
    pairs += [(x.grad, cp.shard(y.grad, dim=0)) for x, y in zip(given, same, strict=True)]
    return [(x - y).abs().max().item() for x, y in pairs]


def bad_varlen(what: str) -> str:
    """All ranks make the same mistake, or rank 1 has another length than the others."""
    longest = 20 if what != "unlike" or dist.get_rank() == 0 else 30
    q, k, v = (torch.randn(20, 3 if what == "heads" else 4, 16) for _ in range(3))
    offsets = torch.tensor([0, 30, 20, 40] if what == "values" else [0, 20, 40], dtype=torch.int32)
    keys = k[:10] if what == "keys" else k
    return told(lambda: cp.attention_varlen(q, keys, v[: len(keys)], offsets, longest, impl="reference"))


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
