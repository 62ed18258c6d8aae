"""Time entmax attention on this GPU beside softmax attention and AdaSplash.

    python tests/gpu/time_entmax.py           about a minute; figures/data/<gpu>/entmax.json
    python tests/gpu/time_entmax.py --tune    configurations of attnlib beside each other; no record

Tables, all of B1 H16 D64, bfloat16, causal, alpha 1.5. `calls`: lengths, inputs N(0, 1), forward and
backward of attnlib's entmax and softmax and of AdaSplash 1 and 2 (the package adasplash, in the folder that
ATTNLIB_PEERS names; what is missing is "not installed"). `blocks`: 16384 tokens whose blocks of 64 x 64
scores have weight only where queries and keys share one of so many codes. `kernels`: each kernel alone.
`lists`: what of the keys that a block of queries sees is on its list, and what of its blocks has weight.
All that is compared is timed in the same shuffled rounds, cold L2, with a control row. Outputs and dQ are
judged against fp64 at the last 256 queries of one head; of AdaSplash the errors are kept and nothing else.
Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, attention_entmax  # noqa: E402
from attnlib.bench import harness, peers, records, timing  # noqa: E402
from attnlib.bench.decode_peers import package  # noqa: E402
from attnlib.bench.entmax_oracle import EntmaxOracle  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.oracle import Oracle, Verdict, make_inputs  # noqa: E402
from attnlib.bench.setting import BOOK, SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels.common.launcher import Launches  # noqa: E402
from attnlib.kernels.entmax import launch, launch_backward  # noqa: E402
from attnlib.kernels.entmax.call import LIST, call_of  # noqa: E402
from attnlib.kernels.entmax.configs import EntmaxTile, entmax_backward_config, entmax_config  # noqa: E402
from attnlib.params import EntmaxParams  # noqa: E402

DEVICE, OURS = "cuda", "attnlib"
LENGTHS = 1024, 4096, 16384, 65536
CODES = 1, 2, 4, 10, 20, 50
ALONE = 4096, 16384  # lengths at which each kernel is timed alone
JUDGED = 256  # queries
SCALE = 0.125
PARAMS = EntmaxParams(1.5, True, SCALE, True)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor


def shape_of(length: int) -> Shape:
    return Shape(1, 16, length, 64, True, "bfloat16")


def inputs_of(length: int, codes: int | None = None) -> Inputs:
    """N(0, 1); or with codes: scores of query and key blocks of 64 that share one are 8 above the others."""
    shape = shape_of(length)
    q, k, v = make_inputs(shape, device=DEVICE)
    d_out = make_inputs(shape, seed=1, device=DEVICE)[0]
    if codes is not None:
        block = torch.arange(shape.seqlen, device=DEVICE) // LIST
        # A block of queries is its own key block's, too: so no row is without one.
        code = 8 * torch.nn.functional.one_hot(block % codes, 64)
        q, k = ((0.25 * x + code).to(x.dtype) for x in (q, k))
    return Inputs(*(x.requires_grad_() for x in (q, k, v)), d_out)


class Judge:
    """fp64 for the last queries of the first head: of outputs, and of (dq, dk, dv) the first."""

    def __init__(self, inputs: Inputs, entmax: bool) -> None:
        q, k, v, d_out = (x.detach()[:, :1] for x in inputs)
        q, d_out = (x[:, :, -JUDGED:] for x in (q, d_out))
        if entmax:
            oracle = EntmaxOracle(q, k, v, PARAMS, d_out)
            self.out, self.dq = (lambda x, name=name: oracle.judge(name, x) for name in ("out", "dq"))
        else:
            self.out = Oracle(q, k, v, True).judge
            gradients = GradientOracle(d_out, q, k, v, True)
            self.dq = lambda x: gradients._judge("dq", x)

    def judge(self, found: Any) -> Verdict:
        judge, result = (self.dq, found[0]) if isinstance(found, tuple) else (self.out, found)
        return judge(result.detach()[:, :1, -JUDGED:])


# ---------------------------------------------------------------- who is timed

Function = Callable[[], Any]
Makers = dict[str, Callable[[], Function]]


Attend = Callable[..., torch.Tensor]


def passes(name: str, make: Callable[[], Attend], inputs: Inputs) -> Makers:
    """The forward pass alone, and the backward pass of one that was run. `make` may raise."""
    q, k, v, d_out = inputs

    def forward() -> Function:
        attend = make()

        def call():
            with torch.no_grad():
                return attend(q, k, v)

        return call

    def backward() -> Function:
        out = make()(q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    return {f"{name}, forward": forward, f"{name}, backward": backward}


def ours() -> Attend:
    return lambda q, k, v: attention_entmax(q, k, v, causal=True)


def softmax() -> Attend:
    return lambda q, k, v: attention(q, k, v, causal=True)


def adasplash_1() -> Attend:
    attend = package("adasplash").adasplash_v1
    return lambda q, k, v: attend(q, k, v, alpha=1.5, is_causal=True)


def adasplash_2() -> Attend:
    return package("adasplash").adasplash_v2


def everybody(inputs: Inputs) -> Makers:
    found = passes(OURS, ours, inputs) | passes("attnlib, softmax", softmax, inputs)
    found |= passes("adasplash 2", adasplash_2, inputs)
    if inputs.q.shape[2] == 4096:
        found |= passes("adasplash 1", adasplash_1, inputs)
    return found


# ---------------------------------------------------------------- timing


class Run(harness.Run):
    """One implementation of a call."""

    def __init__(self, impl: str, length: int, codes: int | None, control: bool = False) -> None:
        super().__init__(impl, shape_of(length), control)
        self.row |= {"codes": codes}
        self.is_peer = not impl.startswith(OURS)

    def prepare(self, make: Callable[[], Function]) -> None:
        try:
            self.call = make()
        except ImportError as error:
            self.stop("not installed", peers.brief(error))

    def gate(self, oracle: dict[bool, Judge]) -> None:
        chosen = oracle["softmax" not in self.impl]
        if not self.is_peer:
            return super().gate(chosen)
        verdict = chosen.judge(self.call())  # of a peer the errors are told, and that is all
        self.row.update(max_error=verdict.max_error, rms_error=verdict.rms_error)
        self.row.update(budget_max=verdict.budget.max, budget_rms=verdict.budget.rms)

    @property
    def flops(self) -> float:
        return super().flops * (2.5 if self.impl.endswith("backward") else 1.0)


def rows(length: int, codes: int | None, make: Callable, setting: Setting) -> Iterator[dict[str, Any]]:
    """Times of all implementations of a call, in the same rounds, and its lists."""
    inputs = inputs_of(length, codes)
    judges = {entmax: Judge(inputs, entmax) for entmax in (True, False)}
    runs: list[Run] = []
    made = make(inputs)
    for name, second in [*((name, False) for name in made), (next(iter(made)), True)]:
        run = Run(name, length, codes, second)
        run.attempt(lambda run=run, name=name: run.prepare(made[name]))
        if run.ok:
            run.attempt(lambda run=run: run.gate(judges))
        runs.append(run)
    harness.time_rounds(runs, judges, setting, lambda text: None)
    yield from (run.row for run in runs)


@torch.no_grad()
def listed(length: int, codes: int | None) -> dict[str, Any]:
    """Densities, all of what a block of queries sees: keys on its list, blocks of 64 keys that have one."""
    q, k, v, _ = (x.detach() for x in inputs_of(length, codes))
    call = call_of(PARAMS, q, k, q, k, v)
    flags = launch.forward(q, k, v, PARAMS)[2][: call.key_flags].view(call.heads, call.query_blocks, -1)
    bits = (flags[..., None] >> torch.arange(32, device=DEVICE, dtype=torch.int32)) & 1
    keys = bits.flatten(2).unflatten(2, (-1, LIST)).sum(3)  # (heads, blocks, blocks of keys)
    seen = call.heads * call.query_blocks * (call.query_blocks + 1) // 2
    most = int(keys.sum(2).max())
    return {
        "seqlen": length, "codes": codes, "keys": keys.sum().item() / (seen * LIST),
        "blocks": (keys > 0).sum().item() / seen, "longest": most,
    }  # fmt: skip


@torch.no_grad()
def kernels(length: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Each launch of a call alone, on what those before it left."""
    q, k, v, d_out = (x.detach() for x in inputs_of(length))
    blocks = {"dtype": torch.int32, "device": DEVICE}
    tau = torch.empty(q.shape[:3], device=DEVICE)
    plan = launch.prepare(call_of(PARAMS, q, k, q, k, v))
    flags, rows = torch.zeros(plan.flags, **blocks), torch.empty(2, *tau.shape, device=DEVICE)
    lists, records_ = torch.empty(plan.lists, **blocks), torch.empty(4 * plan.blocks, **blocks)
    given = q, k, v, torch.empty_like(q), tau, rows, flags, lists, records_, None
    back = launch_backward.prepare(call_of(PARAMS, q, k, d_out, q, k, v))
    lists_, others = torch.empty(back.lists, **blocks), torch.empty(4 * back.blocks, **blocks)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    after = d_out, q, k, v, tau, flags, torch.empty_like(tau), lists_, others, *gradients
    for names, chosen, tensors in (
        (launch.TENSORS, plan.launches, given), (launch_backward.TENSORS, back.launches, after)
    ):  # fmt: skip
        for one in chosen.launches:
            alone = Launches([one], q.get_device(), tuple(names))
            call = lambda alone=alone, tensors=tensors: alone(*tensors)  # noqa: E731
            estimate = timing.estimate_ms(call, cold=True)
            samples = [timing.samples_ms(call, estimate, setting, cold=True) for _ in range(setting.rounds)]
            ms, low, high = timing.summarize([x for part in samples for x in part])
            name = one.kernel.rpartition(".")[2] + (" of queries" if one.constants.get("COLUMNS") is True
                                                    and "lists" in one.kernel else "")  # fmt: skip
            yield {"seqlen": length, "kernel": name, "ms": ms, "ms_p20": low, "ms_p80": high}


# ---------------------------------------------------------------- tuning

T = EntmaxTile
FORWARD_TILES = {
    "bound": [T(64, 128, 8, 3), T(64, 128, 4, 3), T(64, 64, 4, 4)],
    "flags": [T(64, 128, 8, 3), T(64, 128, 4, 2), T(64, 64, 4, 2)],
    "walk": [T(64, 32, 4, 3), T(64, 64, 4, 2), T(64, 128, 8, 2)],
}
BACKWARD_TILES = {
    "queries": [T(64, 32, 4, 3), T(64, 64, 4, 2)],
    "keys": [T(32, 64, 4, 3), T(64, 64, 4, 2), T(64, 64, 8, 3)],
}


def tuned(inputs: Inputs) -> Makers:
    """The usual configuration and its neighbors, each in one tile."""
    q, k, v, d_out = (x.detach() for x in inputs)
    found: Makers = {}

    def forward(name: str, config) -> None:
        params = PARAMS._replace(config=config)
        found[f"{OURS}, forward, {name}"] = lambda: lambda: launch.forward(q, k, v, params)[0]

    def backward(name: str, config) -> None:
        params = PARAMS._replace(config=config)

        def make() -> Function:
            _, tau, flags = launch.forward(q, k, v, PARAMS)
            return lambda: launch_backward.backward(d_out, q, k, v, tau, flags, params)

        found[f"{OURS}, backward, {name}"] = make

    plans = ((forward, entmax_config, FORWARD_TILES), (backward, entmax_backward_config, BACKWARD_TILES))
    for add, choose, tiles in plans:
        own = choose(64, "bfloat16")
        add("as it is", own)
        for field, others in tiles.items():
            for tile in others:
                size = f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
                add(f"{field} {size}", replace(own, **{field: tile}))
    return found


# ---------------------------------------------------------------- the report


def show(row: dict[str, Any]) -> str:
    where = f"S{row['seqlen']}" + (f", {row['codes']} codes" if row.get("codes") else "")
    if "kernel" in row:
        return f"{where:20} {row['kernel']:50} {row['ms']:9.4f} ms"
    if "blocks" in row:
        return f"{where:20} keys {row['keys']:.3f} blocks {row['blocks']:.3f} longest list {row['longest']}"
    if "ms" not in row:
        return f"{where:20} {row['impl']:50} {row['status']} {row.get('reason', '')}"
    error = f"error {row['max_error']:.1e} of {row['budget_max']:.1e}" if "max_error" in row else ""
    times = f"{row['ms']:9.4f} ms ({row['ms_p20']:.4f} to {row['ms_p80']:.4f})"
    return f"{where:20} {row['impl']:50} {times} {error}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time entmax attention on this GPU.")
    parser.add_argument("--tune", action="store_true", help="time configurations of attnlib; write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/entmax.json)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    plan = [("calls", length, None, everybody, BOOK if length <= 16384 else SWEEP) for length in LENGTHS]
    plan += [("blocks", 16384, codes, everybody, SWEEP) for codes in CODES]
    plan.sort(key=lambda call: call[1] > 16384)  # the longest last
    if args.tune:
        plan = [("tune", length, None, tuned, SWEEP) for length in (4096, 16384)]
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
    counted = {"flops": "as softmax attention's; backward 2.5 times", "judged": f"{JUDGED} queries, dQ"}
    header = records.provenance(harness.method(BOOK, f"{OURS}, forward") | counted)
    path = records.report_path("entmax", header, args.out)

    def keep(table: str, found: list[dict[str, Any]]) -> None:
        """Also in the record, so that a run that is cut off leaves what it has measured."""
        print(*map(show, found), "", sep="\n", flush=True)
        tables.setdefault(table, {"rows": []})["rows"] += found
        if not args.tune:
            records.write_report(path, {"notebook": "entmax", **header}, tables)
        gc.collect()
        torch.cuda.empty_cache()

    for table, length, codes, make, setting in plan:
        found = list(rows(length, codes, make, setting))
        keep(table, sorted(found, key=lambda row: row.get("ms", 1e9)) if args.tune else found)
        if not args.tune:
            keep("lists", [listed(length, codes)])
    for length in ALONE:
        keep("kernels", list(kernels(length, SWEEP)))
    judged = [row for name in tables for row in tables[name]["rows"] if row.get("impl", "").startswith(OURS)]
    wrong = [row for row in judged if row["status"] != "ok"]
    if args.tune:
        return int(bool(wrong))
    print(path)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
