"""Judge and time forms of the Hopper backward pass beside each other and FlashAttention-3 on this GPU.

    python tests/gpu/tune_backward.py 256-window-4096 --vary pause_every=0,1,2
    python tests/gpu/tune_backward.py 192-causal-4096 192/128-varlen-1024 --vary pause_every=2,4 \
        --vary early_mask=0,1 --rounds 4
    python tests/gpu/tune_backward.py 256-gqa4-512 --vary visited=1,2,4 --vary l2_bytes=8M,40M
    python tests/gpu/tune_backward.py 128-dense-16384 --vary persistent=0,1 --in-turn --flush --rounds 60

A cell is D-kind-length, or D/Dv-kind-length, -float16 behind it or nothing for bfloat16; kinds and sizes are
those of the plane (`bench.plane`); of varlen sequences the average is about that long. Forms: "default", what
a call gets, and that with each combination of the values of `--vary`, for fields of its configuration
(`kernels.hopper.configs_backward`); combinations that the configuration refuses are told and left out.
FlashAttention-3 takes part where ATTNLIB_FA3 names its library, but not beside varlen sequences.

First, processes side by side compile. The gradients of each form are judged: of the last key head (of the
last sequence) against fp64, all heads against the default's. Nothing wrong is timed. Then shuffled rounds
with cold L2. Tables on the screen as they come and again at the end, no record: each form's time, and that of
FlashAttention-3 over it, without FlashAttention-3 that of the default. Status 0 when all were right, 1
otherwise, 2 without a Hopper GPU. docs/lab/hopper-backward.md has what came of such runs.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tuned_forms  # noqa: E402
from time_plane import GradientSample, apart  # noqa: E402
from tuned_forms import Rounds, failure, judge, table_of  # noqa: E402

from attnlib.bench import peers, plane  # noqa: E402
from attnlib.bench.backward import GRADIENTS, make_gradient  # noqa: E402
from attnlib.bench.oracle import Judgement, make_inputs  # noqa: E402
from attnlib.bench.plane import ALL as KINDS  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.common.signature import Signature, signature  # noqa: E402
from attnlib.kernels.hopper import sharing  # noqa: E402
from attnlib.kernels.hopper.configs import HopperConfig  # noqa: E402
from attnlib.kernels.hopper.configs_backward import HopperBackwardConfig  # noqa: E402
from attnlib.params import Params, Varlen, mask_window  # noqa: E402

FA3 = "fa3"

Tensor = torch.Tensor
Forms = dict[str, HopperBackwardConfig]

# ---------------------------------------------------------------- forms


def cell_of(name: str) -> Cell:
    columns, kind, length, *dtype = name.split("-")
    head_dim, *values = map(int, columns.split("/"))
    cell = plane.cell(kind, head_dim, int(length), *dtype)
    return cell._replace(shape=replace(cell.shape, head_dim_v=values[0])) if values else cell


def asked_of(cell: Cell, device: str = "meta") -> tuple[Tensor, Tensor, Tensor, Params]:
    """Queries, keys and values of a call without numbers, and what it asks for."""
    shape, varlen = cell.shape, None
    before, after = (shape.batch,), (shape.seqlen,)  # around the heads
    if KINDS[cell.kind].varlen:
        before, after = (sum(cell.lengths),), ()
        ends = torch.tensor([0, *cell.lengths]).cumsum(0).int()
        varlen = Varlen(ends, ends, max(cell.lengths), max(cell.lengths))
    heads = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
    dtype = getattr(torch, shape.dtype)
    q, k, v = (torch.empty(*before, n, *after, columns, dtype=dtype, device=device) for n, columns in heads)
    return q, k, v, Params(mask_window(shape.causal, KINDS[cell.kind].window), 1.0, varlen)


def default_of(
    cell: Cell, backward: bool = True, device: str = "meta"
) -> HopperBackwardConfig | HopperConfig:
    """What calls get; forward it depends on the device."""
    return hopper.configuration(*asked_of(cell, device), backward)


def call_of(cell: Cell, form: HopperBackwardConfig) -> Signature:
    """As the launcher sees a backward pass; its GPU has an H200's memory."""
    q, k, v, params = asked_of(cell)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return signature(params._replace(config=form), q, k, out, q, k, v, out)


# ---------------------------------------------------------------- calls


def inputs(cell: Cell) -> tuple[Tensor, ...]:
    """d_out, q, k, v; of varlen sequences (1, H, T, D), one after the other."""
    if KINDS[cell.kind].varlen:
        cell = cell._replace(shape=replace(cell.shape, batch=1, seqlen=sum(cell.lengths)))
    device = tuned_forms.DEVICE
    return make_gradient(cell.shape, device=device), *make_inputs(cell.shape, device=device)


def calls_of(cell: Cell, forms: Forms, *tensors: Tensor) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    d_out, q, k, v = tensors
    window, varlen = mask_window(cell.shape.causal, KINDS[cell.kind].window), None
    if KINDS[cell.kind].varlen:
        d_out, q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors)
        ends = torch.tensor([0, *cell.lengths], device=q.device).cumsum(0).int()
        varlen = Varlen(ends, ends, max(cell.lengths), max(cell.lengths))
    params = Params(window, cell.shape.head_dim**-0.5, varlen, return_lse=True)
    forward = params._replace(config=hopper.configuration(q, k, v, params))
    out, lse = hopper.forward(q, k, v, forward)

    def one(config: HopperBackwardConfig) -> Callable[[], tuple[Tensor, ...]]:
        asked = params._replace(config=config)
        if varlen is None:
            return lambda: hopper.backward(d_out, q, k, v, out, lse, asked)
        made = d_out, q, k, v, out, lse, asked
        return lambda: tuple(x.transpose(0, 1)[None] for x in hopper.backward(*made))

    return {name: one(config) for name, config in forms.items()}


def add_peer(calls: dict[str, Callable], cell: Cell, *tensors: Tensor) -> None:
    """FlashAttention-3 beside them, where it is there and takes such values; not beside varlen sequences."""
    kind = KINDS[cell.kind]
    peer = peers.fa3(kind.window)
    if kind.varlen or peer.available():
        return
    with contextlib.suppress(RuntimeError):  # it refuses 128 columns beside values of 64
        calls[FA3] = peer.make_backward(*tensors, cell.shape.causal, cell.shape.head_dim**-0.5)


def compile_one(name: str, form: HopperBackwardConfig) -> str:
    """In a child: what it compiles stays in Triton's cache."""
    cell = cell_of(name)
    tokens = cell.shape.seqlen
    # Beyond a window of the plane, and as many keys in the last block as in the call that is timed.
    length = min(tokens, 1152 + tokens % 384)
    small = cell._replace(shape=replace(cell.shape, batch=1, seqlen=length))  # varlen of one sequence
    if not (form.deterministic and form.added):  # where programs visit whole groups
        form = replace(form, visited=sharing.query_heads(call_of(cell, form)))
    return failure(name, form, lambda: calls_of(small, {name: form}, *inputs(small))[name]())


def kernels_of(forms: Mapping[str, Forms]) -> list[tuple[str, HopperBackwardConfig]]:
    """Each kernel that the forms of cells have to be compiled to: the name of a cell, and a form."""
    found = {}
    for name, of_cell in forms.items():
        cell = cell_of(name)
        for form in of_cell.values():
            kind, shape = KINDS[cell.kind], cell.shape
            whole = sharing.query_heads(call_of(cell, form)) == kind.group, shape.seqlen % form.block_n == 0
            # What these fields decide is decided when a kernel is launched.
            made = replace(form, visited=None, l2_bytes=0, crowding=form.crowding and 1.0)
            key = shape.head_dim, shape.head_dim_v, shape.dtype, kind._replace(label=""), whole, made
            found.setdefault(key, (name, form))
    return list(found.values())


def compile_all(forms: Mapping[str, Forms]) -> list[str]:
    """In processes side by side; what failed."""
    return tuned_forms.side_by_side(compile_one, kernels_of(forms))


# ---------------------------------------------------------------- judging and timing


class SequenceSample:
    """`GradientSample` of the last varlen sequence."""

    def __init__(self, cell: Cell, *tensors: Tensor) -> None:
        self.rows = cell.lengths[-1]
        self.sample = GradientSample(KINDS[cell.kind], None, *(x[:, :, -self.rows :] for x in tensors))

    def judge(self, *gradients: Tensor) -> dict[str, Judgement]:
        return self.sample.judge(*(x[:, :, -self.rows :] for x in gradients))


Sample = GradientSample | SequenceSample


def wrong(sample: Sample, first: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> str:
    """Why gradients are wrong; empty when they are right."""
    found = sample.judge(*gradients)
    for name, mine, other in zip(GRADIENTS, gradients, first, strict=True):
        if not found[name].ok:
            return f"{name}: {found[name].reason}"
        if reason := apart(mine, other, found[name].budget.rms, "the first form's"):
            return f"{name}: {reason}"
    return ""


def measured(
    cell: Cell, name: str, forms: Forms, rounds: Rounds
) -> tuple[dict[str, list[float]], list[str]]:
    """Milliseconds of the right forms of a call and of FlashAttention-3, and what is wrong."""
    tensors = inputs(cell)
    calls = calls_of(cell, forms, *tensors)
    first = next(iter(calls.values()))()
    kind = KINDS[cell.kind]
    sample = SequenceSample(cell, *tensors) if kind.varlen else GradientSample(kind, None, *tensors)
    bad = judge(name, calls, partial(wrong, sample, first))
    own = dict(calls)
    add_peer(calls, cell, *tensors)
    found = tuned_forms.times(calls, rounds)
    bad += judge(name, own, partial(wrong, sample, first))  # after hundreds of launches
    return found, bad


def flops_of(cell: Cell) -> float:
    """Three of the five products have the columns of queries and keys, two those of values."""
    D, values = cell.shape.head_dim, cell.shape.value_dim
    return cell.flops("backward") * (3 * D + 2 * values) / (5 * D)


def row_of(cell: Cell, form: str, ms: list[float]) -> dict[str, Any]:
    """Of a record."""
    taken = statistics.median(ms)
    return {
        "kind": cell.kind, "form": form, **cell.shape.to_dict(), "ms": taken, "round_ms": ms,
        "tflops": flops_of(cell) / taken * 1e-9,
    }  # fmt: skip


def rows(cell: Cell, forms: Forms, rounds: Rounds) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a record for one call, all forms beside FlashAttention-3, and what is wrong."""
    found, bad = measured(cell, cell.label, forms, rounds)
    return [row_of(cell, form, ms) for form, ms in found.items()], bad


def report(name: str, forms: Forms, rounds: Rounds) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell = cell_of(name)
    kind = KINDS[cell.kind]
    found, bad = measured(cell, name, forms, rounds)
    text = table_of(name, found, flops_of(cell), FA3)
    if kind.group > 1 and not kind.varlen:
        text += f"\n  model: {visited_by_model(cell)}"
    return text, bad


def visited_by_model(cell: Cell) -> str:
    """Time of one program for a group over that of programs that visit fewer query heads, predicted."""
    call, group = call_of(cell, default_of(cell)), KINDS[cell.kind].group
    launched = sharing.Launched.of(call)
    ratios = (f"{n} {launched.clocks(group) / launched.clocks(n):.2f}" for n in sharing.divisors(group))
    chosen, taken = sharing.chosen(launched), sharing.query_heads(call)
    return f"{', '.join(ratios)}; the model's {chosen}, calls get {taken}"


def main(argv: Sequence[str] | None = None) -> int:
    return tuned_forms.run(
        argv, "Time forms of the backward pass beside each other.",
        lambda name: default_of(cell_of(name)), compile_all, report,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
