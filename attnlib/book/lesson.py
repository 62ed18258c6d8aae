"""What the notebooks share: kernels kept in cells, diffs between steps, verification, tables, exercises.

Import it before Triton: on a machine with no CUDA GPU it switches Triton's interpreter on, which has to
happen first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from attnlib.bench import ladder as _ladder
from attnlib.bench import sources, tables
from attnlib.bench import verdict as _verdict
from attnlib.bench.oracle import INPUTS, Judgement, Oracle, make_inputs
from attnlib.bench.setting import BOOK, SWEEP, WINDOW, warming
from attnlib.bench.shapes import TASK, Shape
from attnlib.bench.sources import notebooks_dir
from attnlib.book.answers import checks, exercises, solutions
from attnlib.book.chapters import CHAPTERS, STEPS, label

if TYPE_CHECKING:
    from attnlib.bench.records import Table
    from attnlib.book.exercises import Contest

__all__ = [
    "BOOK",
    "CHAPTERS",
    "STEPS",
    "SWEEP",
    "WINDOW",
    "beat",
    "beat_contest",
    "begin",
    "check",
    "checks",
    "counted_intensities",
    "counters",
    "current",
    "device",
    "exercises",
    "kernel_source",
    "ladder",
    "load_kernel",
    "measure",
    "measure_backward",
    "measure_sustained",
    "notebooks_dir",
    "profile",
    "profile_card",
    "road_chart",
    "say",
    "show_diff",
    "show_table",
    "solutions",
    "table",
    "verdict",
    "verify",
    "verify_gradients",
]

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "no CUDA GPU: kernels need Triton's interpreter, but triton was imported before it could be "
            "switched on; import attnlib.book.lesson first, or set TRITON_INTERPRET=1 before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"

_current: str | None = None


def begin(notebook: str) -> None:
    """Start a notebook: remember its name for the records, set the style of charts, say what runs and what
    is replayed."""
    global _current
    if notebook not in dict(CHAPTERS):
        raise ValueError(f"begin: notebook: expected one of {', '.join(dict(CHAPTERS))}, got {notebook!r}")
    from attnlib.bench import records
    from attnlib.book import palette

    _current = notebook
    palette.style()
    if torch.cuda.is_available() and (processes := warming()):
        torch.cuda.set_per_process_memory_fraction(0.9 / processes)  # a large call of one starves no other
    versions = f"torch {torch.__version__.split('+')[0]}, triton {_triton_version()}"
    if torch.cuda.is_available():
        where = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}"
        if not records.can_measure():
            where += f"; ATTNLIB_REPLAY is set: measurements are replayed from {_recorded(notebook)}"
        print(where)
    else:
        from attnlib.emulator.interpreter import save_work

        save_work()
        print(
            f"no CUDA GPU ({versions}): kernels run in Triton's interpreter, measurements are replayed "
            f"from {_recorded(notebook)}"
        )


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"


def _recorded(notebook: str) -> str:
    """ "NVIDIA H200, 2026-11-21" of the notebook's record; without one, that tables name theirs: what they
    show is a script's."""
    from attnlib.bench import records

    gpu = records.REFERENCE_GPU
    path = records.data_dir() / gpu / f"{notebook}.json"
    if not path.exists():
        return f"records of {gpu} that tables and charts name, where there are any"
    record = records.read(path)
    return f"{record['gpu']['name']}, {record['date']}"


def current() -> str:
    """The notebook that called `begin`; RuntimeError if none did."""
    if _current is None:
        raise RuntimeError(
            "lesson: no notebook has begun: call lesson.begin(notebook) in the first code cell"
        )
    return _current


def device() -> str:
    """Where tensors of the lesson live: "cuda" with a GPU, else "cpu" (kernels are interpreted)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# Kernels: the notebook cell is the only place where a step's kernel is written.


def kernel_source(step: str) -> str:
    """The source of the one cell tagged `kernel` in notebook `step`."""
    return sources.kernel_source(notebooks_dir() / f"{step}.ipynb")


def load_kernel(step: str) -> ModuleType:
    """The kernel cell of notebook `step` as a module; its `attention(q, k, v, causal=True, sm_scale=None)`
    is the step."""
    return sources.load_source(step, kernel_source(step))


def show_diff(old_step: str, new_step: str) -> None:
    """Show what changed from one step's kernel to the next, as a unified diff."""
    show_texts(kernel_source(old_step), kernel_source(new_step), label(old_step), label(new_step))


def show_texts(old: str, new: str, old_name: str, new_name: str) -> None:
    """Show what changed from one text to another, as a unified diff."""
    _display(sources.diff_bundle(old, new, old_name, new_name))


# What a notebook shows


def _display(bundle: dict[str, str]) -> None:
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:  # a script: no page to show it on
        print(bundle["text/plain"])
    else:
        display(bundle, raw=True)


def say(text: str) -> None:
    """Show Markdown, for sentences whose numbers come from a record."""
    _display({"text/markdown": text, "text/plain": text})


def show_table(
    rows: Sequence[dict] | Table,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    mark: tables.Mark = None,
    formats: Mapping[str, str] | None = None,
) -> None:
    """Show rows as a table. columns: key -> header, or keys, in order; mark: a predicate or {key: value} of
    the bold rows; formats: key -> format specification (default: three significant digits)."""
    source = getattr(rows, "label", "")
    text = tables.markdown(getattr(rows, "rows", rows), columns, mark, formats)
    say(f"{text}\n\n*{source}*" if source else text)


def ladder(
    table: Table | Sequence[dict],
    mark: str | None = None,
    head_dims: Sequence[int] = (64, 128, 256),
    causal: bool = True,
) -> None:
    """Show the ladder so far, the row of step `mark` (default: this notebook's) in bold."""
    rows, columns = _ladder.ladder_rows(getattr(table, "rows", table), head_dims, causal, label)
    source = getattr(table, "label", "")
    text = tables.markdown(rows, columns, {"impl": mark or _current})
    say(f"{text}\n\n*{source}*" if source else text)


def verdict(
    measured: Table | Iterable[Table], impl: str, *others: str, shapes: Iterable[Shape] | None = None
) -> None:
    """Show whether `impl` is faster than each of `others`, and the noise of the run that says so, as one
    small table: a row for each of `others`, a column for each shape.

    measured: what `measure` and its kin return, or several such tables, one a head dimension. shapes: default
    the task's shapes, causal, that are there.
    """
    found = [measured] if hasattr(measured, "rows") else list(measured)
    there = {Shape.of_row(row) for one in found for row in one.rows}
    asked = list(shapes) if shapes is not None else [shape for shape in TASK.values() if shape in there]
    if not asked or not others:
        raise ValueError(
            f"verdict: expected shapes of the task in the table and implementations to compare with, got "
            f"{len(asked)} shapes and {len(others)} implementations"
        )
    rows, columns = _verdict.table_rows(found, impl, others, asked, label)
    say(f"{tables.markdown(rows, columns)}\n\n*{found[-1].label}*")


# Measurements


def measure(
    name: str, implementations: Mapping[str, Callable | None], shapes: Iterable, **options: object
) -> Table:
    """`bench.measure` into this notebook's record: times on a GPU, replays without one. `options`: setting
    (`BOOK`, or `SWEEP` for many shapes), control, gate and kind."""
    from attnlib.bench import harness

    return harness.measure(name, dict(implementations), list(shapes), notebook=current(), **options)


def measure_backward(
    name: str, implementations: Mapping[str, Callable | None], shapes: Iterable, **options: object
) -> Table:
    """`bench_backward.measure` into this notebook's record: times on a GPU, replays without one."""
    from attnlib.bench import backward as bench_backward

    return bench_backward.measure(name, dict(implementations), list(shapes), notebook=current(), **options)


def measure_sustained(name: str, implementations: Mapping[str, Callable | None], shapes: Iterable) -> Table:
    """`sustained.measure` into this notebook's record: runs back to back on a GPU, replays without one."""
    from attnlib.bench import sustained

    return sustained.measure(name, dict(implementations), list(shapes), notebook=current())


def awaited(measured: Callable[[], Table]) -> Table | None:
    """`measured()`, or None where a replay finds no record: says that it has not been measured yet."""
    from attnlib.bench.records import RecordError, can_measure

    try:
        return measured()
    except RecordError as why:
        if can_measure():
            raise
        say(f"*Not measured yet: {str(why).split('/')[-1]}*")
        return None


def table(name: str, produce: Callable[[], list[dict]], **options: object) -> Table:
    """`records.table` of this notebook: rows of `produce()` on a GPU, the recorded rows without one."""
    from attnlib.bench import records

    return records.table(current(), name, produce, **options)


def recorded(record: str, name: str) -> Table | None:
    """A table that a script of tests/gpu wrote, on this machine's GPU, the reference GPU or another one, see
    `records.load_anywhere`; None where it has not been run yet."""
    from attnlib.bench import records

    try:
        return records.load_anywhere(record, name)
    except records.RecordError:
        return None


def profile(direction: str = "forward") -> Table:
    """The counters of every step, the package and the peers, one record for the whole book, made by
    `python -m attnlib.bench --profile --book`; of the passes "fp8", "values" and "decode" those of FP8 and
    decoding, or, where they have not been recorded with the chapters' kernels, the package's. RecordError
    where there are none."""
    from attnlib.bench import profiling, records

    if direction not in profiling.BEYOND:
        return records.load(profiling.RECORD, profiling.TABLE)
    try:
        return records.load(profiling.RECORD, profiling.BEYOND_TABLE)
    except records.RecordError:
        return records.load(profiling.RECORD, profiling.PACKAGE_TABLE)


def counters(step: str, head_dim: int, direction: str = "forward") -> dict:
    """The counters of an implementation at the task's shape of `head_dim`, as `profiling.profile` names them:
    tensor_pct, xu_pct, issue_pct, l2_bytes, instructions_per_score, stalls and more. RecordError, with the
    reason, if they were not read."""
    from attnlib.bench.records import RecordError

    row = profile(direction).one(impl=step, head_dim=head_dim, **{"pass": direction})
    if row["status"] != "ok" or row.get("issue_pct") is None:
        reason = row.get("reason") or row.get("note") or row["status"]
        raise RecordError(f"counters of {step!r}, D = {head_dim}, {direction}: not read: {reason}")
    return row


def counted_intensities(
    step: str, head_dim: int, direction: str = "forward", l2: bool = False
) -> dict[str, float]:
    """What a point of `plotting.roofline_chart` needs to show the FLOP per byte of DRAM that were counted
    beside the model's; with `l2` also per byte of L2, to which the chart's roof does not apply."""
    row = counters(step, head_dim, direction)
    found = {"counted_intensity": row["flops_per_dram_byte"]}
    return found | ({"l2_intensity": row["flops_per_l2_byte"]} if l2 else {})


def profile_card(
    step: str, before: str | None = None, filename: str | None = None, direction: str = "forward"
) -> None:
    """Publish the profile card of an implementation, with thin marks of the one `before`. `filename`: the
    figure's name, card_<chapter>_<step> unless it is given."""
    from attnlib.book import card, plotting

    table = profile(direction)
    figure = card.profile_card(table, step, before, direction)
    name = filename or f"card_{current()[:2]}_{step.replace('-', '_')}"
    rows = [row for row in table.select(**{"pass": direction}) if row["impl"] in (step, before)]
    plotting.publish(figure, name, card.alt_text(table, step, before, direction), rows, card.DATA)


def road_chart(filename: str = "road") -> None:
    """Publish the counters of all steps and peers, by step: the whole road in one chart."""
    from attnlib.book import plotting, road_chart

    table = profile()
    figure = road_chart.road_chart(table)
    plotting.publish(figure, filename, road_chart.alt_text(table), table.select(**{"pass": "forward"}),
                     ["impl", "head_dim", *road_chart.PANELS])  # fmt: skip


LENGTHS = (1, 17, 63, 128, 129)
"""Sequence lengths of `verify`: one row, less than a tile, one below, exactly two, and one beyond the tile
sizes."""


def verify(
    attention: Callable[..., torch.Tensor],
    *,
    head_dims: Sequence[int] = (64,),
    causal: Sequence[bool] = (True, False),
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = INPUTS,
    dtype: str = "float16",
    name: str = "attention",
    recorded: str | None = None,
) -> None:
    """Check a kernel against the fp64 oracle, show one table, raise AssertionError if anything is wrong.

    attention(q, k, v, causal, sm_scale) -> out. N(0, 1) inputs run at every length, the other kinds of
    `reference.make_inputs` at the last one, with two heads; on a GPU the shapes of the task for `head_dims`
    come on top. A row of the table shows the worst of its cases.

    `recorded` is for kernels in Gluon, which Triton's interpreter can't run: the table of this name keeps
    what a GPU found, and is shown, as a replay, where there is none. There the emulator runs a few cases.
    """
    if warming():
        for kind, shape in _cases(head_dims, causal, lengths, kinds, dtype):
            attention(*make_inputs(shape, kind, device=device()), shape.causal, shape.head_dim**-0.5)
        return
    if recorded is None:
        rows, bad = _judge(attention, head_dims, causal, lengths, kinds, dtype)
        source = ""
    else:
        bad = []

        def produce() -> list[dict]:
            rows, found = _judge(attention, head_dims, causal, lengths, kinds, dtype)
            bad.extend(found)
            return rows

        found = table(recorded, produce)
        rows, source = found.rows, found.label
    errors = dict.fromkeys(("max error", "budget", "RMS error", "RMS budget"), ".1e")
    columns = ("inputs", "D", "S", "worst case", *errors, "ok")  # a record has them in another order
    show_table(rows, columns, mark=lambda row: row["ok"] != "✔", formats=errors)
    if source:
        say(f"*Checked on {source.removeprefix('replayed from ')}.*")
    if source.startswith("replayed") and device() == "cpu":
        bad += _judge_in_the_emulator(attention, head_dims, causal, dtype)
    if bad:
        raise AssertionError(f"{name} is wrong in {len(bad)} cases:\n" + "\n".join(bad))
    if any(row["ok"] != "✔" for row in rows):
        raise AssertionError(f"{name}: the record {recorded!r} holds a kernel that was wrong")


def _judge_in_the_emulator(attention: Callable[..., torch.Tensor], head_dims, causal, dtype) -> list[str]:
    """What is wrong with a Gluon kernel at a length of two tiles and a row; says what was run."""
    from attnlib.emulator import emulated

    length, function = 129, getattr(attention, "func", attention)  # of a functools.partial
    with emulated(function.__globals__) as kernels:
        if not kernels:  # not launched from there: the package's, which have tests of their own
            return []
        rows, bad = _judge(attention, head_dims, causal, (length,), ("normal",), dtype)
    share = max(row["max error"] / row["budget"] for row in rows)
    say(
        f"*Run here: the same source in the emulator, on a CPU, S = {length}, "
        f"D = {', '.join(map(str, head_dims))}. The largest error is {share:.2f} of its budget.*"
    )
    return bad


def verify_gradients(
    attention: Callable[..., torch.Tensor],
    *,
    head_dims: Sequence[int] = (64,),
    causal: Sequence[bool] = (True, False),
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = INPUTS,
    dtype: str = "float16",
    name: str = "attention",
) -> None:
    """Check dq, dk and dv of a differentiable kernel against dense gradients in fp64, as `verify` checks an
    output: same inputs and lengths (on a GPU the shapes of the task come on top), one table, AssertionError
    if anything is wrong."""
    from attnlib.bench.backward import Judge, make_gradient

    groups: dict[tuple, list[tuple[Shape, str, Judgement]]] = {}
    for kind, shape in _cases(head_dims, causal, lengths, kinds, dtype):
        tensors = [x.requires_grad_() for x in make_inputs(shape, kind, device=device())]
        d_out = make_gradient(shape, device=device())
        out = attention(*tensors, shape.causal, shape.head_dim**-0.5)
        gradients = torch.autograd.grad(out, tensors, d_out)
        if warming():
            continue
        verdicts = Judge(d_out, *tensors, shape.causal).judge(*gradients)
        group = groups.setdefault((kind, shape.head_dim, shape.batch * shape.heads), [])
        group += [(shape, gradient, verdict) for gradient, verdict in verdicts.items()]
    if not groups:  # the caches are warmed: compiled, and not judged
        return
    rows = []
    for (kind, head_dim, _), found in groups.items():
        row = {"inputs": kind, "D": head_dim}
        row["S"] = ", ".join(str(n) for n in sorted({shape.seqlen for shape, _, _ in found}))
        for gradient in ("dq", "dk", "dv"):
            verdicts = [verdict for _, which, verdict in found if which == gradient]
            for figure, error, budget in (("max", "max_error", "max"), ("RMS", "rms_error", "rms")):
                shares = [getattr(v, error) / (getattr(v.budget, budget) or 1.0) for v in verdicts]
                row[f"{gradient} {figure}"] = max(shares, key=lambda x: (x != x, x))  # NaN before all others
        rows.append(row | {"ok": "✔" if all(verdict.ok for _, _, verdict in found) else "✘"})
    shares = dict.fromkeys((key for key in rows[0] if key[:2] in ("dq", "dk", "dv")), ".2f")
    show_table(rows, mark=lambda row: row["ok"] != "✔", formats=shares)
    say("*Largest and RMS error as shares of their budgets; the worst of each group.*")
    bad = [
        f"{kind} inputs, {shape.label}: {verdict.reason}"
        for (kind, _, _), found in groups.items()
        for shape, _, verdict in found
        if not verdict.ok
    ]
    if bad:
        raise AssertionError(f"{name}: gradients are wrong in {len(bad)} cases:\n" + "\n".join(bad))


def _judge(
    attention: Callable[..., torch.Tensor],
    head_dims: Sequence[int],
    causal: Sequence[bool],
    lengths: Sequence[int],
    kinds: Sequence[str],
    dtype: str,
) -> tuple[list[dict], list[str]]:
    """(rows of the table of `verify`, what is wrong)."""
    groups: dict[tuple, list[tuple[Shape, Judgement]]] = {}
    for kind, shape in _cases(head_dims, causal, lengths, kinds, dtype):
        q, k, v = make_inputs(shape, kind, device=device())
        verdict = Oracle(q, k, v, causal=shape.causal).judge(
            attention(q, k, v, shape.causal, shape.head_dim**-0.5)
        )
        group = (kind, shape.head_dim, shape.batch * shape.heads)
        groups.setdefault(group, []).append((shape, verdict))
    rows, bad = [], []
    for (kind, head_dim, _), found in groups.items():
        # a failed case before all others (its error may be NaN), then the one nearest to its budget
        shape, worst = max(found, key=lambda f: (not f[1].ok, f[1].max_error / f[1].budget.max))
        row = {
            "inputs": kind,
            "D": head_dim,
            "S": ", ".join(str(n) for n in sorted({s.seqlen for s, _ in found})),
        }
        row["worst case"] = f"S = {shape.seqlen}, {'causal' if shape.causal else 'dense'}"
        row |= {"max error": worst.max_error, "budget": worst.budget.max}
        row |= {"RMS error": worst.rms_error, "RMS budget": worst.budget.rms, "ok": "✔" if worst.ok else "✘"}
        rows.append(row)
        bad += [f"{kind} inputs, {s.label}: {verdict.reason}" for s, verdict in found if not verdict.ok]
    return rows, bad


def _cases(
    head_dims: Sequence[int],
    causal: Sequence[bool],
    lengths: Sequence[int],
    kinds: Sequence[str],
    dtype: str,
) -> list[tuple[str, Shape]]:
    """(kind of input, shape) of everything that `verify` runs."""
    cases = []
    for d, c in product(head_dims, causal):
        cases += [("normal", Shape(1, 2, s, d, c, dtype)) for s in lengths if "normal" in kinds]
        cases += [(kind, Shape(1, 2, lengths[-1], d, c, dtype)) for kind in kinds if kind != "normal"]
        if torch.cuda.is_available():
            cases += [("normal", replace(s, causal=c, dtype=dtype)) for s in TASK.values() if s.head_dim == d]
    return cases


# Exercises


def check(check_fn: Callable[[object], object], answer: object) -> None:
    """Print whether an answer is right, with the check's hint if it is not. Never raises, so that the book
    runs on."""
    try:
        check_fn(answer)
    except NotImplementedError:
        print("✘ not yet: still to be written")
    except AssertionError as problem:
        print(f"✘ not yet: {problem or 'the check failed'}")
    except Exception as problem:
        print(f"✘ not yet: {type(problem).__name__}: {problem}")
    else:
        print("✔ right")


def beat(answer: Callable, step: str, head_dim: int, **where: str) -> None:
    """`beat_contest` of a step at the task's shape of `head_dim`; `where` as in `exercises.contest`."""
    from attnlib.book.exercises import contest

    beat_contest(answer, contest(step, head_dim, **where))


def beat_contest(answer: Callable, contest: Contest) -> None:
    """Print whether an answer is right and beats a kernel of the book. Small calls, if the contest has any,
    are judged everywhere. Where nothing can be timed it is not counted as passed, and the line says what is
    to be beaten. Never raises for an answer, as `check`."""
    from attnlib.bench.records import can_measure
    from attnlib.book.exercises import race

    if warming():
        return
    verdicts = []

    def judge(answer: Callable) -> None:
        small = ""
        if contest.small is not None:
            try:
                contest.small(answer)
            except AssertionError as problem:
                raise AssertionError(f"{problem}. To beat: {contest}") from None
            small = "; small calls are right"
        assert can_measure(), f"only a GPU can tell, and none measures here{small}. To beat: {contest}"
        verdicts.append(race(answer, contest))

    check(judge, answer)
    for verdict in verdicts:
        print(f"{verdict.sentence()}. On record: {contest}")
