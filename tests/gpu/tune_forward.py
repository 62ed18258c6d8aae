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

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tune_backward  # noqa: E402
from time_plane import Sample, apart  # noqa: E402
from tune_backward import FA3, KINDS, cell_of, default_of, side_by_side  # noqa: E402
from tuned_forms import add_option, forms_of, table_of, tell, tell_refused, varied  # noqa: E402

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
    try:
        calls_of(small, {name: form}, *make_inputs(small.shape, device=tune_backward.DEVICE))[name]()
        torch.cuda.synchronize()
    except Exception as error:  # it comes again where it is timed
        return f"{name} {form}: {peers.brief(error)}"
    return ""


def judge(name: str, calls: Calls, sample: Sample, first: Tensor) -> list[str]:
    """What is wrong; the calls that are go."""
    bad = []
    for form in list(calls):
        try:
            out = calls[form]()
            found = sample.judge(out)
            reason = found.reason if not found.ok else apart(out, first, found.budget.rms)
        except RuntimeError as error:
            reason = peers.brief(error)
        if reason:
            bad.append(f"WRONG {name} {form}: {reason}")
            del calls[form]
    return bad


def report(name: str, forms: Forms, rounds: int) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell = cell_of(name)
    kind, tensors = KINDS[cell.kind], make_inputs(cell.shape, device=tune_backward.DEVICE)
    calls, sample = calls_of(cell, forms, *tensors), Sample(kind, None, *tensors)
    first = next(iter(calls.values()))()
    bad = judge(name, calls, sample, first)
    own, peer = dict(calls), peers.fa3(kind.window)
    if not peer.available():
        calls[FA3] = peer.make(*tensors, cell.shape.causal, cell.shape.head_dim**-0.5)
    found = tune_backward.times(calls, rounds)
    bad += judge(name, own, sample, first)  # after hundreds of launches
    base = found.get(FA3) or next(iter(found.values()))
    return table_of(name, found, base, cell.flops("forward"), FA3), bad


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time forms of the forward pass beside each other.")
    parser.add_argument("cells", nargs="+", metavar="D-KIND-LENGTH")
    add_option(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="begin no cell after so many")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    try:
        fields = varied(args.vary)
        if varlen := [name for name in args.cells if KINDS[cell_of(name).kind].varlen]:
            raise ValueError(f"cells: expected none of varlen sequences, got {varlen[0]}")
        configs = {name: default_of(cell_of(name), False, tune_backward.DEVICE) for name in args.cells}
        found = {name: forms_of(config, fields) for name, config in configs.items()}
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    tell_refused({name: refused for name, (_, refused) in found.items()})
    failed = side_by_side(compile_one, [(name, form) for name in found for form in found[name][0].values()])
    print(f"compiled after {time.monotonic() - begin:.0f} s", *failed, sep="\n", flush=True)
    reports = {name: partial(report, name, forms, args.rounds) for name, (forms, _) in found.items()}
    return tell(reports, begin + args.seconds)


if __name__ == "__main__":
    sys.exit(main())
