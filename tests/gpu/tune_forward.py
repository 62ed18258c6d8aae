"""Judge and time forms of the Hopper forward pass beside each other and FlashAttention-3 on this GPU.

    python tests/gpu/tune_forward.py 96-causal-16384 --vary stages=2,3 --vary q_columns=0,64
    python tests/gpu/tune_forward.py 96-causal-4096 --vary block_n=64 --vary warpgroups=3 --vary stages=4 \\
        --vary named=0 --vary late_wait=0 --vary consumer_registers=160 --vary max_registers=128

Cells and `--vary` are those of `tune_backward.py`, for fields of `kernels.hopper.configs`; varlen sequences
are not among the cells. A form that does not compile is told. The output of each form is judged: the last
head against fp64, all heads against the default's. Nothing wrong is timed. Then shuffled rounds with cold L2;
tables as those of `tune_backward.py`. Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tuned_forms  # noqa: E402
from time_plane import Sample, apart  # noqa: E402
from tune_backward import FA3, KINDS, cell_of, default_of  # noqa: E402
from tuned_forms import Rounds, each_form, failure, judge, table_of  # noqa: E402

from attnlib.bench import peers  # noqa: E402
from attnlib.bench.oracle import make_inputs  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.hopper.configs import HopperConfig  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

Tensor = torch.Tensor
Forms = dict[str, HopperConfig]
Calls = dict[str, Callable[[], Tensor]]


def calls_of(cell: Cell, forms: Forms, *tensors: Tensor) -> Calls:
    params = Params(mask_window(cell.shape.causal, KINDS[cell.kind].window), cell.shape.head_dim**-0.5)

    def one(config: HopperConfig) -> Callable[[], Tensor]:
        return lambda: hopper.forward(*tensors, params._replace(config=config))[0]

    return {name: one(config) for name, config in forms.items()}


def compile_one(name: str, form: HopperConfig) -> str:
    """In a child: what it compiles stays in Triton's cache."""
    cell = cell_of(name)
    small = cell._replace(shape=replace(cell.shape, batch=1))

    def call() -> Tensor:
        tensors = make_inputs(small.shape, device=tuned_forms.DEVICE)
        return calls_of(small, {name: form}, *tensors)[name]()

    return failure(name, form, call)


def wrong(sample: Sample, first: Tensor, out: Tensor) -> str:
    """Why an output is wrong; empty when it is right."""
    found = sample.judge(out)
    return apart(out, first, found.budget.rms, "the first form's") if found.ok else found.reason


def report(name: str, forms: Forms, rounds: Rounds) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell = cell_of(name)
    kind, tensors = KINDS[cell.kind], make_inputs(cell.shape, device=tuned_forms.DEVICE)
    calls, sample = calls_of(cell, forms, *tensors), Sample(kind, None, *tensors)
    first = next(iter(calls.values()))()
    bad = judge(name, calls, partial(wrong, sample, first))
    own, peer = dict(calls), peers.fa3(kind.window)
    if not peer.available():
        theirs = peer.make(*tensors, cell.shape.causal, cell.shape.head_dim**-0.5)
        if refused := failure(name, FA3, theirs):
            print(refused)
        else:
            calls[FA3] = theirs
    found = tuned_forms.times(calls, rounds)
    bad += judge(name, own, partial(wrong, sample, first))  # after hundreds of launches
    return table_of(name, found, cell.flops("forward"), FA3), bad


def default_form(name: str) -> HopperConfig:
    """What calls get. ValueError for varlen sequences."""
    cell = cell_of(name)
    if KINDS[cell.kind].varlen:
        raise ValueError(f"cells: expected none of varlen sequences, got {name}")
    return default_of(cell, False, tuned_forms.DEVICE)


def main(argv: Sequence[str] | None = None) -> int:
    return tuned_forms.run(
        argv, "Time forms of the forward pass beside each other.", default_form,
        partial(each_form, compile_one), report, default_needs_gpu=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
