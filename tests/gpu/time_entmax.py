"""Time entmax attention on this GPU beside softmax attention and AdaSplash.

    python tests/gpu/time_entmax.py               two and a half minutes; figures/data/<gpu>/entmax.json
    python tests/gpu/time_entmax.py --seconds 40  begin nothing after so many, and say what is left out
    python tests/gpu/time_entmax.py --tune        configurations of attnlib beside each other; no record

Tables, all of B1 H16 D64, bfloat16, causal, alpha 1.5, in this order. `calls`: lengths up to 16384, inputs
N(0, 1), forward and backward of attnlib's entmax and softmax and of AdaSplash 1 and 2 (what is missing is
"not installed"). `kernels`: each kernel alone. `blocks`: 16384 tokens whose blocks of 64 x 64 scores have
weight only where queries and keys share one of so many codes. `calls` again: the longest. `lists`, with each
call: what of the keys that a block of queries sees is on its list, and what of its blocks has weight.

A call has many short kernels, and the host takes longer to launch them (`host_us`) than a GPU to run them at
1024 tokens. So calls are replayed from CUDA graphs, but for AdaSplash 1 forward, which waits for the GPU.
All that is compared is timed in the same shuffled rounds, cold L2, with a control row. Outputs and dQ are
judged against fp64 at the last 256 queries of one head; of AdaSplash the errors are kept and nothing else.
First, processes side by side compile. The record is written after each call.
Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, attention_entmax  # noqa: E402
from attnlib.bench import entmax_peers, harness, peers, records, timing  # noqa: E402
from attnlib.bench.entmax_oracle import EntmaxOracle  # noqa: E402
from attnlib.bench.entmax_peers import Attend, adasplash_1, adasplash_2  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.oracle import Judgement, Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import BOOK, SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels.common.launcher import Launches  # noqa: E402
from attnlib.kernels.entmax import launch, launch_backward  # noqa: E402
from attnlib.kernels.entmax.call import LIST, call_of  # noqa: E402
from attnlib.kernels.entmax.configs import EntmaxTile, entmax_backward_config, entmax_config  # noqa: E402
from attnlib.params import EntmaxParams  # noqa: E402

DEVICE, OURS = "cuda", "attnlib"
LENGTHS = 1024, 4096, 16384, 65536
CODES = 10, 1, 50, 4, 20, 2  # the first ones matter most
LENGTH_OF_BLOCKS = 16384
LONGEST_PADDED = 16384
"""Tokens that AdaSplash 1 is timed with at most: its mask has a byte for each block of 16 x 16 scores."""
SHORT = 4096
"""Tokens up to which the time of the host is measured."""
WAITS = "adasplash 1, forward"
"""It asks the GPU how many blocks have weight: no graph can hold that."""
SHARES = 13
"""Processes that compile AdaSplash 2."""
ALONE = 4096, 16384  # lengths at which each kernel is timed alone
TUNED = 4096, 16384, 1024
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
            self.dq = lambda x: gradients.judge_one("dq", x)

    def judge(self, found: Any) -> Judgement:
        judge, result = (self.dq, found[0]) if isinstance(found, tuple) else (self.out, found)
        return judge(result.detach()[:, :1, -JUDGED:])


# ---------------------------------------------------------------- who is timed

Function = Callable[[], Any]
Makers = dict[str, Callable[[], Function]]


def passes(name: str, make: Callable[[], Attend], inputs: Inputs) -> Makers:
    """The forward pass alone, and the backward pass of one that was run. `make` may raise."""
    *tensors, d_out = (x.detach() for x in inputs)

    def forward() -> Function:
        attend = make()
        return lambda: attend(*tensors)

    def backward() -> Function:
        # Leaves of its own, first used on the stream that a graph captures: autograd goes back to it.
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = make()(*leaves)
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return {f"{name}, forward": forward, f"{name}, backward": backward}


def ours() -> Attend:
    return lambda q, k, v: attention_entmax(q, k, v, causal=True)


def softmax() -> Attend:
    return lambda q, k, v: attention(q, k, v, causal=True)


def everybody(inputs: Inputs) -> Makers:
    found = passes(OURS, ours, inputs) | passes("attnlib, softmax", softmax, inputs)
    found |= passes("adasplash 2", adasplash_2, inputs)
    if inputs.q.shape[2] <= LONGEST_PADDED:
        found |= passes("adasplash 1", adasplash_1, inputs)
    return found


def without_adasplash_1(inputs: Inputs) -> Makers:
    return {name: make for name, make in everybody(inputs).items() if not name.startswith("adasplash 1")}


# ---------------------------------------------------------------- timing


@contextlib.contextmanager
def aside() -> Iterator[Any]:
    """On a stream of its own, which a graph can capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


def captured(call: Function, stream: torch.cuda.Stream) -> Function:
    """A call as a CUDA graph, whose replays return the same tensors. The call lives as long as its graph,
    which reads what the call holds: of a backward pass, what the forward pass saved for it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = call()
    kept = found, call

    def replay() -> Any:
        graph.replay()
        return kept[0]

    return replay


class Run(harness.Run):
    """One implementation of a call."""

    def __init__(self, impl: str, length: int, codes: int | None, control: bool = False) -> None:
        super().__init__(impl, shape_of(length), control)
        self.row |= {"codes": codes}
        self.is_peer = not impl.startswith(OURS)
        self.used: dict[str, Any] = {}

    def prepare(self, make: Callable[[], Function], judges: dict[bool, Judge]) -> None:
        """Call it once, judge it, and make a graph of it, which is judged in its place from then on."""
        try:
            with aside() as stream:
                self.call = make()
                self.gate(judges)
        except ImportError as error:
            self.stop("not installed", peers.brief(error))
        if not self.ok:
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with aside(), timing.launched_kernels() as kernels:
            self.call()
        self.used = timing.resources(kernels) | {"peak_bytes": torch.cuda.max_memory_allocated() - before}
        if self.shape.seqlen <= SHORT:
            with aside():
                self.used["host_us"] = timing.host_us(self.call, 20)
        if self.impl == WAITS:
            return
        self.call = captured(self.call, stream)
        self.gate(judges)

    def finish(self, oracle: dict[bool, Judge]) -> None:
        super().finish(oracle)
        self.row |= self.used  # a replay allocates nothing and shows no kernels

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
        run.attempt(lambda run=run, name=name: run.prepare(made[name], judges))
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
    keys = keys.tril()  # flags of blocks that are not seen are not written
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
    out = torch.empty_like(q)
    given = q, k, v, out, tau, rows, flags, lists, records_, None, None, None
    back = launch_backward.prepare(call_of(PARAMS, q, k, d_out, q, k, v, out))
    lists_, others = torch.empty(back.lists, **blocks), torch.empty(4 * back.blocks, **blocks)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    pairs = torch.empty(*tau.shape, 2, device=DEVICE)
    after = d_out, q, k, v, out, tau, flags, pairs, lists_, others, *gradients, None, None
    for names, chosen, tensors in (
        (launch.TENSORS, plan.launches, given), (launch_backward.TENSORS, back.launches, after)
    ):  # fmt: skip
        for one in chosen.launches:
            alone = Launches([one], q.get_device(), tuple(names))
            ms, low, high = timing.time_ms(lambda a=alone, t=tensors: a(*t), setting=setting)
            name = one.kernel.rpartition(".")[2] + (" of queries" if one.constants.get("COLUMNS") is True
                                                    and "lists" in one.kernel else "")  # fmt: skip
            yield {"seqlen": length, "kernel": name, "ms": ms, "ms_p20": low, "ms_p80": high}


# ---------------------------------------------------------------- tuning

T = EntmaxTile
FORWARD_TILES = {
    "walk": [T(64, 64, 4, 3), T(64, 64, 8, 5), T(64, 32, 4, 5), T(64, 64, 4, 7)],
    "bound": [T(64, 128, 4, 3), T(128, 64, 4, 3), T(128, 64, 8, 3), T(64, 64, 4, 4)],
    "flags": [T(64, 64, 8, 3), T(64, 64, 4, 4)],
}
BACKWARD_TILES = {
    "queries": [T(64, 64, 4, 3), T(64, 32, 4, 5), T(64, 64, 8, 5)],
    "keys": [T(64, 64, 4, 3), T(32, 64, 4, 5), T(64, 64, 8, 5)],
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
            out, tau, flags = launch.forward(q, k, v, PARAMS)
            return lambda: launch_backward.backward(d_out, q, k, v, out, tau, flags, params)

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


# ---------------------------------------------------------------- command


def jobs(tune: bool) -> list[Callable[[], Any]]:
    """What processes compile side by side, each a part."""
    if tune:
        return [lambda make=make: make()() for make in tuned(inputs_of(LENGTHS[0])).values()]

    def compile_one(name: str) -> None:
        for length in LENGTHS:
            made = everybody(inputs_of(length))
            if name in made:
                made[name]()()

    def compile_shared(share: int) -> None:
        with entmax_peers.compile_share(share, SHARES):
            compile_one("adasplash 2, backward")

    names = [name for name in everybody(inputs_of(LENGTHS[0])) if "adasplash 2" not in name]
    found = [lambda name=name: compile_one(name) for name in names]
    return found + [lambda share=share: compile_shared(share) for share in range(SHARES)]


def compile_all(tune: bool) -> None:
    command = [sys.executable, __file__, *["--tune"] * tune, "--compile"]
    for child in [subprocess.Popen([*command, str(number)]) for number in range(len(jobs(tune)))]:
        child.wait()


class Part(NamedTuple):
    """Rows that are measured together. what: in words."""

    table: str
    length: int
    codes: int | None
    rows: Callable[[], Iterable[dict[str, Any]]]

    @property
    def what(self) -> str:
        return f"{self.table}, S {self.length}" + (f", {self.codes} codes" if self.codes else "")


def parts(tune: bool) -> list[Part]:
    """Of a run, the most important first."""
    if tune:
        calls = [(n, None) for n in TUNED] + [(LENGTH_OF_BLOCKS, CODES[0])]
        return [Part("tune", *of, lambda of=of: rows(*of, tuned, SWEEP)) for of in calls]
    found = [Part("calls", n, None, lambda n=n: rows(n, None, everybody, BOOK)) for n in LENGTHS[:-1]]
    found += [Part("kernels", n, None, lambda n=n: kernels(n, SWEEP)) for n in ALONE]
    for codes in CODES:
        make = lambda codes=codes: rows(LENGTH_OF_BLOCKS, codes, without_adasplash_1, SWEEP)  # noqa: E731
        found.append(Part("blocks", LENGTH_OF_BLOCKS, codes, make))
    return [*found, Part("calls", LENGTHS[-1], None, lambda: rows(LENGTHS[-1], None, everybody, SWEEP))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time entmax attention on this GPU.")
    parser.add_argument("--tune", action="store_true", help="time configurations of attnlib; write no record")
    parser.add_argument("--seconds", type=float, default=140,
                        help="begin nothing after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/entmax.json)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if no_hopper():
        return 2
    if args.compile is not None:
        with contextlib.suppress(ImportError):  # of a peer; its rows say so
            jobs(args.tune)[args.compile]()
        return 0
    compile_all(args.tune)
    print(f"compiled after {time.monotonic() - begin:.0f} s\n", flush=True)
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
    counted = {"flops": "as softmax attention's; backward 2.5 times", "judged": f"{JUDGED} queries, dQ"}
    counted["calls"] = f"replayed from CUDA graphs, but for {WAITS}"
    header = records.provenance(harness.method(BOOK, f"{OURS}, forward") | counted)
    path = records.report_path("entmax", header, args.out)

    def write() -> None:
        if not args.tune:
            records.write_report(path, {"notebook": "entmax", **header}, tables)

    def keep(table: str, found: list[dict[str, Any]]) -> None:
        """Also in the record, so that a run that is cut off leaves what it has measured."""
        print(*map(show, found), "", sep="\n", flush=True)
        known = tables.setdefault(table, {"rows": []})["rows"]
        known += found
        known.sort(key=lambda row: (row["seqlen"], row.get("codes") or 0))
        write()
        gc.collect()
        torch.cuda.empty_cache()

    left_out = []
    for part in parts(args.tune):
        if time.monotonic() - begin > args.seconds:
            left_out.append(part.what)
            continue
        found = list(part.rows())
        keep(part.table, sorted(found, key=lambda row: row.get("ms", 1e9)) if args.tune else found)
        if part.table in ("calls", "blocks"):
            keep("lists", [listed(part.length, part.codes)])
        print(f"{part.what}: {time.monotonic() - begin:.0f} s after the start\n", flush=True)
    if left_out:
        print(f"left out, as {args.seconds:g} s were over:", *left_out, sep="\n  ")
        header["method"]["left out"] = left_out
        write()
    judged = [row for name in tables for row in tables[name]["rows"] if row.get("impl", "").startswith(OURS)]
    wrong = [row for row in judged if row["status"] != "ok"]
    if args.tune:
        return int(bool(wrong))
    print(path)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
