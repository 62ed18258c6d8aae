"""The calls that `attention_entmax` is judged on, and the judgement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from attnlib import attention_entmax, attention_entmax_varlen
from attnlib.bench.entmax_oracle import EntmaxOracle
from attnlib.bench.oracle import make_inputs, poisoned_empty
from attnlib.bench.shapes import Shape
from attnlib.kernels.entmax import call, launch, launch_backward
from attnlib.params import EntmaxParams


@dataclass(frozen=True)
class EntmaxCase:
    """One call. spread: what q is multiplied with. room: of a list, None for the usual one.
    lengths: queries and keys of each varlen sequence, in place of `queries` and `keys`."""

    name: str
    queries: int
    keys: int
    alpha: float = 1.5
    causal: bool = False
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 32
    dtype: str = "float16"
    batch: int = 1
    sm_scale: float | None = None
    kind: str = "normal"
    spread: float = 1.0
    room: int | None = None
    backward: bool = True
    lengths: tuple[tuple[int, int], ...] | None = None

    @property
    def params(self) -> EntmaxParams:
        scale = self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        return EntmaxParams(self.alpha, self.causal, scale, True)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor


def make(case: EntmaxCase, device: str, seed: int = 0) -> Inputs:
    shape = Shape(
        case.batch, case.heads, case.queries, case.head_dim, False, case.dtype, case.kv_heads, case.keys
    )
    q, k, v = make_inputs(shape, case.kind, seed, device)
    d_out = make_inputs(shape, "normal", seed + 1000, device)[0]
    return Inputs(q * case.spread, k, v, d_out)


def forget_launches() -> None:
    launch.prepare.cache_clear()
    launch_backward.prepare.cache_clear()


@contextmanager
def room(of: EntmaxCase) -> Iterator[None]:
    """Lists with the room that a case asks for."""
    if of.room is None:
        yield
        return
    usual, call.ROOM = call.ROOM, of.room
    forget_launches()
    try:
        yield
    finally:
        call.ROOM = usual
        forget_launches()


def check(case: EntmaxCase, device: str, seed: int = 0) -> None:
    """AssertionError unless out, tau and gradients are right; memory is NaN before."""
    if case.lengths is not None:
        return check_varlen(case, device, seed)
    inputs = make(case, device, seed)
    oracle = EntmaxOracle(*inputs[:3], case.params, inputs.d_out if case.backward else None)
    q, k, v = (x.requires_grad_(case.backward) for x in inputs[:3])
    with room(case), poisoned_empty():
        out, tau = attention_entmax(
            q, k, v, alpha=case.alpha, causal=case.causal, sm_scale=case.sm_scale, return_tau=True,
            impl="triton",
        )  # fmt: skip
        found = torch.autograd.grad(out, (q, k, v), inputs.d_out) if case.backward else ()
    oracle.judge("out", out).raise_if_bad(case.name)
    oracle.judge_tau(tau).raise_if_bad(case.name)
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=False):
        oracle.judge(name, gradient).raise_if_bad(case.name)


def offsets_of(lengths: Iterable[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def check_varlen(case: EntmaxCase, device: str, seed: int = 0) -> None:
    """Each sequence by itself, as `check` does; without queries or keys all of it is 0, and tau +inf."""
    parts = [
        make(replace(case, queries=max(rows, 1), keys=max(keys, 1)), device, seed + number)
        for number, (rows, keys) in enumerate(case.lengths)
    ]
    sizes = [(rows, keys, keys, rows) for rows, keys in case.lengths]
    together = zip(
        *([x[0, :, :n] for x, n in zip(*of, strict=True)] for of in zip(parts, sizes, strict=True)),
        strict=True,
    )
    q, k, v, d_out = (torch.cat(x, 1).transpose(0, 1).contiguous() for x in together)
    q, k, v = (x.requires_grad_(case.backward) for x in (q, k, v))
    lengths = list(zip(*case.lengths, strict=True))
    offsets = [offsets_of(of, device) for of in lengths]
    with room(case), poisoned_empty():
        out, tau = attention_entmax_varlen(
            q, k, v, *offsets, *map(max, lengths), alpha=case.alpha, causal=case.causal,
            sm_scale=case.sm_scale, return_tau=True, impl="triton",
        )  # fmt: skip
        found = torch.autograd.grad(out, (q, k, v), d_out) if case.backward else ()
    named = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), found, strict=False))
    first = [0, 0]
    for part, (rows, keys) in zip(parts, case.lengths, strict=True):
        of_q, of_k = slice(first[0], first[0] + rows), slice(first[1], first[1] + keys)
        first = [of_q.stop, of_k.stop]
        own = {name: x[of_k if name in ("dk", "dv") else of_q] for name, x in named.items()}
        if not rows or not keys:
            assert not any(x.any() for x in own.values()) and (tau[:, of_q] == math.inf).all()
            continue
        oracle = EntmaxOracle(
            *(x.detach() for x in part[:3]), case.params, part.d_out if case.backward else None
        )
        for name, x in own.items():
            oracle.judge(name, x.transpose(0, 1)[None]).raise_if_bad(case.name)
        oracle.judge_tau(tau[None, :, of_q]).raise_if_bad(case.name)


CASES = {
    case.name: case
    for case in (
        EntmaxCase("dense", 70, 70),
        EntmaxCase("causal", 70, 100, causal=True, spread=3.0, head_dim=16),
        EntmaxCase("more keys", 20, 70, causal=True, heads=2, dtype="bfloat16", head_dim=40),
        EntmaxCase("rows without keys", 70, 20, causal=True, head_dim=16),
        EntmaxCase("groups", 20, 70, heads=2, batch=2, head_dim=16, causal=True),
        EntmaxCase("one", 1, 1),
        EntmaxCase("one key", 70, 1),
        EntmaxCase("one query", 1, 130, causal=True),
        EntmaxCase("sparsemax", 20, 40, alpha=2.0, dtype="float32"),
        EntmaxCase("any alpha below", 20, 40, alpha=1.25, causal=True, dtype="float32"),
        EntmaxCase("any alpha above", 20, 40, alpha=1.75, causal=True, dtype="float32"),
        EntmaxCase("nearly softmax", 20, 70, alpha=1.01),
        EntmaxCase("least alpha", 20, 40, alpha=1 + 2.0**-10, dtype="float32"),
        EntmaxCase("float32", 20, 40, causal=True, dtype="float32"),
        EntmaxCase("negative scale", 20, 70, sm_scale=-0.3),
        EntmaxCase("scale 0", 20, 70, sm_scale=0.0),
        EntmaxCase("times 100", 20, 70, spread=100.0, causal=True),
        EntmaxCase("outliers", 20, 70, kind="outlier", causal=True),
        EntmaxCase("constant", 20, 70, kind="constant"),
        EntmaxCase("sink", 20, 70, kind="sink", causal=True),
        EntmaxCase("no room", 100, 130, causal=True, room=64, spread=0.3, head_dim=16),
        EntmaxCase("no room, dense", 70, 70, room=64, spread=0.3),
        EntmaxCase("long", 10, 2300, head_dim=16),  # a list takes two steps of its flags
        EntmaxCase(
            "varlen",
            0,
            0,
            head_dim=16,
            causal=True,
            heads=2,
            spread=3.0,
            lengths=((20, 30), (0, 5), (70, 100), (5, 0), (0, 0), (1, 1), (64, 64)),
        ),
        EntmaxCase("varlen, dense", 0, 0, head_dim=16, lengths=((130, 20), (3, 70), (0, 65), (65, 1))),
        EntmaxCase("varlen, rows without keys", 0, 0, head_dim=16, causal=True, lengths=((70, 20), (30, 70))),
        EntmaxCase(
            "varlen, float32",
            0,
            0,
            dtype="float32",
            alpha=1.25,
            causal=True,
            head_dim=16,
            lengths=((20, 40), (17, 3), (0, 20), (33, 33)),
        ),
        EntmaxCase(
            "varlen, no room",
            0,
            0,
            causal=True,
            room=64,
            spread=0.3,
            head_dim=16,
            lengths=((3, 3), (100, 130), (65, 66)),
        ),
        EntmaxCase(
            "varlen, padded columns",
            0,
            0,
            alpha=2.0,
            dtype="bfloat16",
            head_dim=40,
            sm_scale=-0.3,
            lengths=((40, 70), (10, 10)),
        ),
        EntmaxCase("one varlen sequence", 0, 0, head_dim=16, lengths=((70, 70),)),
    )
}
