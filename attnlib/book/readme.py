"""The tables of README.md and of the book's page of results, between their markers, from the records."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

from attnlib.bench import ladder, modes, plane, records, shapes, tables, verdict
from attnlib.bench.paths import NOTEBOOKS, ROOT
from attnlib.bench.shapes import Shape
from attnlib.bench.verdict import FASTER, SLOWER, TIE
from attnlib.book import chapters as book_chapters
from attnlib.book import generation

LADDER, SUSTAINED = ("19_record", "ladder"), ("19_record", "sustained")
BACKWARD = ("20_backward", "backward")
TEACHING = ("15_teaching", "ladder")
HOST, STEP = ("host_time", "backward"), ("host_time", "step")
DECODE, FP8_CACHES = ("decode", "calls"), ("decode", "fp8")
FP8 = ("fp8", "attention")
HEAD_DIMS, HEAD_DIMS_BACKWARD = ("head_dims", "calls"), ("head_dims", "backward")
VALUES, VALUES_BACKWARD = ("head_dims", "values"), ("head_dims", "values_backward")
MONARCH, MONARCH_TOKENS = ("monarch", "sweep"), (1024, 4096, 16384, 65536)
ENTMAX, ENTMAX_CODES = "entmax", 10
DISTR, DISTR_TOKENS = ("distr", "attention"), (4096, 16384)
DISTRIBUTED, SPARSE, SPARSE_LONG, S2 = "distributed", "sparse", "sparse_65536", "s2"
KEPT_SHIFT, PLANE, VARLEN = "kept_shift", ("plane", "cells"), "varlen"
"""Records and tables that are shown."""


def ladder_table(record: tuple[str, str] = LADDER) -> str:
    """A ladder: a record's, causal fp16 at the task's shapes, with its provenance."""
    table = records.load(*record, gpu=records.REFERENCE_GPU)
    rows, columns = ladder.ladder_rows(table.measured().rows, label=book_chapters.label)
    return f"{tables.markdown(rows, columns)}\n\n*{table.gpu}, {table.date}*"


def modes_table() -> str:
    """Burst and sustained speeds at the task's shapes, with the clock, and both verdicts on FA3."""
    burst, sustained = (records.load(*where, gpu=records.REFERENCE_GPU) for where in (LADDER, SUSTAINED))
    label = book_chapters.label
    task = [shape for shape in shapes.TASK.values() if burst.select(shape) and sustained.select(shape)]
    rows, columns = modes.mode_rows(burst.measured(), sustained.measured(), task, label=label)
    dates = " and ".join(dict.fromkeys((burst.date, sustained.date)))
    return f"{tables.markdown(rows, columns)}\n\n*{burst.gpu}, {dates}*"


def backward_table() -> str:
    """Verdicts on attnlib's backward pass against each peer at the task's shapes, of chapter 20's record."""
    table = records.load(*BACKWARD, gpu=records.REFERENCE_GPU)
    task = [shape for shape in shapes.TASK.values() if table.select(shape)]
    peers = [name for name in ("fa3", "cudnn", "flash") if table.select(impl=name)]
    rows, columns = verdict.table_rows([table], "attnlib", peers, task, book_chapters.label)
    return f"{tables.markdown(rows, columns)}\n\n*{table.source}*"


def host_table() -> str:
    """The tables of host time, of the record of `tests/gpu/time_host.py`: backward passes, and the step
    of a model that keeps the GPU waiting."""
    table = records.load(*HOST, gpu=records.REFERENCE_GPU)
    columns = {
        "call": "Backward pass through autograd, bf16", "kernels_us": "kernels alone, µs",
        "attnlib_us": "attnlib, µs", "cudnn_us": "cuDNN, µs", "of_cudnn": "attnlib / cuDNN",
    }  # fmt: skip
    forms = {key: ".2f" if key == "of_cudnn" else ".0f" for key in columns if key != "call"}
    steps = [
        {
            "step": "{layers} layers, {tokens} tokens, batch {batch}".format(**row),
            **{impl: f"{row[f'{impl}_us'] / 1000:.1f}" for impl in ("attnlib", "sdpa")},
            "of_sdpa": _interval(row, "attnlib_of_sdpa"),
            "control": _interval(row, "control_of_sdpa"),
        }
        for row in records.load(*STEP, gpu=records.REFERENCE_GPU).rows
    ]
    names = {
        "step": "Step of a model, bf16", "attnlib": "attnlib, ms", "sdpa": "SDPA, ms",
        "of_sdpa": "attnlib / SDPA (99 of 100)", "control": "SDPA / SDPA",
    }  # fmt: skip
    parts = tables.markdown(table.rows, columns, formats=forms), tables.markdown(steps, names)
    return "\n\n".join([*parts, f"*{table.gpu}, {table.date}*"])


def _interval(row: dict, field: str) -> str:
    """A median and where 99 of 100 repetitions would have it."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*(row[field + end] for end in ("", "_low", "_high")))


Lines = dict[str, dict[str, str | None]]


def _cells(lines: Lines, call: str, columns: Iterable[str]) -> dict[str, str | None]:
    """Those of a call's line, which has all columns; a new one is empty but for its name."""
    return lines.setdefault(call, dict.fromkeys(columns) | {"call": call})


def _shown(lines: Lines, columns: dict[str, str], *found: records.Table) -> str:
    """Lines with where they are from: the tables of a record may be of several days."""
    sources = "; ".join(dict.fromkeys(table.source for table in found))
    return f"{tables.markdown(list(lines.values()), columns)}\n\n*{sources}*"


def decode_table() -> str:
    """The tables of decoding, of each GPU that has a record of `tests/gpu/time_decode.py`: GB/s of keys and
    values. Who was at hand for no call has no column."""
    impls = {
        "attnlib": "attnlib", "fa3": "FA3", "cudnn": "cuDNN", "cudnn, lengths": "cuDNN with lengths",
        "flashinfer": "FlashInfer", "flashinfer, xqa": "its XQA", "copy": "device copy",
    }  # fmt: skip
    parts = []
    for table in records.of_all_gpus(*DECODE):
        there = {row["impl"] for row in table.measured().rows}
        columns = {"call": "Decoding, fp16, GB/s of keys and values"}
        columns |= {impl: title for impl, title in impls.items() if impl in there}
        lines: Lines = {}
        for row in table.rows:
            if row["impl"] in columns and row["status"] == "ok":
                _cells(lines, row["call"], columns)[row["impl"]] = f"{row['gb_per_s']:.0f}"
        parts.append(_shown(lines, columns, table))
    return "\n\n".join(parts)


def fp8_caches_table() -> str:
    """Decoding from caches in FP8 beside those in 16 bits, in the record of `tests/gpu/time_decode.py`."""
    table = records.load(*FP8_CACHES, gpu=records.REFERENCE_GPU)
    impls = {
        "attnlib": "16 bits, µs", "attnlib fp8": "FP8", "attnlib, pages of 64": "pages of 64, 16 bits",
        "attnlib fp8, pages of 64": "FP8, a scale for each", "attnlib, pages of 16": "pages of 16, 16 bits",
        "attnlib fp8, pages of 16": "FP8, for each of these",
    }  # fmt: skip
    columns, lines = {"call": "Decoding, caches in FP8", **impls}, {}
    for row in table.rows:
        if row["impl"] in impls and row["status"] == "ok":
            _cells(lines, row["call"], columns)[row["impl"]] = f"{1e3 * row['ms']:.1f}"
    return _shown(lines, columns, table)


def generate_table() -> str:
    """The table of transformers' `generate()`, or that it has not been measured yet."""
    found = generation.tables(records.REFERENCE_GPU)
    if not found:
        return generation.WAITING
    text = tables.markdown(generation.lines(found), generation.COLUMNS)
    return f"{text}\n\n*{'; '.join(dict.fromkeys(f'{table.gpu}, {table.date}' for table in found))}*"


def fp8_table() -> str:
    """The table of FP8: speeds, and errors against fp64, in the record of `tests/gpu/time_fp8.py`."""
    table = records.load(*FP8, gpu=records.REFERENCE_GPU)
    impls = {
        "attnlib fp8": "attnlib FP8", "attnlib fp8, with the pass": "and quantizing", "fa3 fp8": "FA3 FP8",
        "cudnn fp8": "cuDNN FP8", "attnlib bf16": "attnlib bf16", "fa3 bf16": "FA3 bf16",
    }  # fmt: skip
    columns = {"call": "FP8 (e4m3), TFLOP/s", **impls}
    columns |= {"error of attnlib fp8": "RMS error, FP8", "error of attnlib bf16": "bf16"}
    lines: Lines = {}
    for row in table.rows:
        if row["status"] != "ok" or row["impl"] not in impls:
            continue
        cells = _cells(lines, Shape.of_row(row).label, columns)
        cells[row["impl"]] = f"{row['tflops']:.0f}"
        if "error of " + row["impl"] in columns:
            cells["error of " + row["impl"]] = f"{row['rms_error']:.1e}"
    return _shown(lines, columns, table)


def head_dims_table() -> str:
    """The tables of head dimensions that are no powers of two, of the record of
    `tests/gpu/time_head_dims.py`: forward, and backward once that has been measured."""
    found = [_head_dims(records.load(*HEAD_DIMS, gpu=records.REFERENCE_GPU), "Forward")]
    with suppress(records.RecordError):
        table = records.load(*HEAD_DIMS_BACKWARD, gpu=records.REFERENCE_GPU)
        found.append(_head_dims(table, "Backward"))
    return "\n\n".join(found)


def values_table() -> str:
    """The tables of values with a head dimension of their own, of the same record."""
    ways = {"Forward": VALUES, "Backward": VALUES_BACKWARD}
    return "\n\n".join(
        _head_dims(records.load(*where, gpu=records.REFERENCE_GPU), way, "filled up")
        for way, where in ways.items()
    )


def _head_dims(table: records.Table, way: str, padded: str = "padded to a power of two") -> str:
    impls = {"attnlib": "attnlib", "padded": padded, "fa3": "FA3", "cudnn": "cuDNN"}
    columns = {"call": f"{way}, TFLOP/s", **impls, "of_fa3": "attnlib / FA3"}
    lines: Lines = {}
    for row in table.rows:
        if row["status"] == "ok":
            cells = _cells(lines, Shape.of_row(row).label, columns)
            cells[row["impl"]] = f"{row['tflops']:.0f}"
            if row["impl"] == "fa3":
                found = verdict.judge(table, Shape.of_row(row), "attnlib", "fa3")
                cells["of_fa3"] = f"{found.ratio:.3f}, {found.word}"
    return _shown(lines, columns, table)


def varlen_table() -> str:
    """The tables of varlen sequences, of the record of `tests/gpu/time_varlen.py`: forward and backward."""
    names = {"attnlib": "attnlib", "triton": "our Triton kernel", "fa3": "FA3"}
    found = [records.load(VARLEN, name, gpu=records.REFERENCE_GPU) for name in ("short", "equal", "lengths")]
    parts = []
    for way in ("forward", "backward"):
        columns = {"call": f"Varlen, fp16, {way}, TFLOP/s", **names, "of_fa3": "attnlib / FA3"}
        lines: Lines = {}
        for table in found:
            rows = [row for row in table.rows if row["varlen"] and row["pass"] == way]
            for call in dict.fromkeys(row["call"] for row in rows):
                of = {row["kernel"]: row for row in rows if row["call"] == call}
                cells = _cells(lines, call, columns)
                cells |= {name: f"{of[name]['tflops']:.0f}" for name in names if name in of}
                if "fa3" in of:
                    ours, theirs = of["attnlib"], of["fa3"]
                    control, ratio = of["attnlib (control)"]["ms"] / ours["ms"], theirs["ms"] / ours["ms"]
                    noise = max(control, 1 / control), verdict.spread(ours, theirs)
                    cells["of_fa3"] = verdict.Verdict("attnlib", "fa3", None, ratio, *noise).cell()
        parts.append(_shown(lines, columns, *found))
    return "\n\n".join(parts)


def kept_shift_table() -> str:
    """The table of the forward kernel without and with shifts that are kept, of the record of
    `time_kept_shift.py`."""
    columns = {
        "call": "Forward, TFLOP/s", "without": "a maximum in each step", "kept": "shift kept", "fa3": "FA3",
        "over": "kept / without", "of_fa3": "kept / FA3",
    }  # fmt: skip
    lines: Lines = {}
    both = [records.load_anywhere(KEPT_SHIFT, name, records.REFERENCE_GPU) for name in ("calls", "more")]
    for table in both:
        for row in table.rows:
            tile, *option = row["impl"].split(", ")
            if option != ["kept"]:
                continue
            shape = Shape.of_row(row)
            cells = _cells(lines, f"{shape.label}, {tile}", columns)
            for name, impl in (("without", tile), ("kept", row["impl"]), ("fa3", "fa3")):
                cells[name] = f"{table.one(shape, impl=impl)['tflops']:.0f}"
            for name, other in (("over", tile), ("of_fa3", "fa3")):
                found = verdict.judge(table, shape, row["impl"], other)
                cells[name] = f"{found.ratio:.3f}, {found.word}"
    return _shown(lines, columns, *both)


def plane_table() -> str:
    """The table of the plane of `time_plane.py`: for each head dimension and pass the ratios to
    FlashAttention-3, and in how many cells which of both is faster."""
    table = records.load_anywhere(*PLANE, records.REFERENCE_GPU)
    columns = {"call": "attnlib / FA3, median (lowest to highest)"}
    for way in plane.PASSES:
        columns |= {way: way, f"{way} cells": "faster, tie, slower"}
    lines: Lines = {}
    measured = {row["head_dim"] for row in table.rows}
    for head_dim in [*sorted(measured), None]:
        cells = _cells(lines, f"D = {head_dim}" if head_dim else "**all**", columns)
        for way in plane.PASSES:
            rows = [row for row in table.select(**{"pass": way}) if head_dim in (row["head_dim"], None)]
            ratios = [row["ratio"] for row in rows if "ratio" in row]
            if ratios:
                cells[way] = f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            words = Counter(plane.verdict_of(row).word for row in rows)
            cells[f"{way} cells"] = f"{words[FASTER]}, {words[TIE]}, {words[SLOWER]}"
    return f"{_shown(lines, columns, table)}\n\n{losses(table.rows)}"


def losses(rows: Iterable[dict]) -> str:
    """In a sentence: where attnlib is slower than FlashAttention-3 in the plane, and by how much."""
    slower = [row for row in rows if plane.verdict_of(row).word == SLOWER]
    if not slower:
        return "attnlib is slower than FlashAttention-3 in no cell."
    found: dict[tuple, list[int]] = {}
    for row in sorted(slower, key=lambda row: (row["head_dim"], row["kind"], row["dtype"], row["seqlen"])):
        key = row["pass"], row["head_dim"], plane.KINDS[row["kind"]].label, row["dtype"]
        found.setdefault(key, []).append(row["seqlen"])
    calls = "; ".join(
        f"{way}, D = {d}, {label}{', fp16' if dtype == 'float16' else ''}, S = {', '.join(map(str, lengths))}"
        for (way, d, label, dtype), lengths in found.items()
    )
    ends = " to ".join(f"{1 - edge(row['ratio'] for row in slower):.1%}" for edge in (max, min))
    return f"attnlib is slower than FlashAttention-3 in {len(slower)} cells, by {ends}: {calls}."


def approximate_tables() -> str:
    """The tables of approximations beside dense attention, of the records of `tests/gpu/time_monarch.py`
    and `tests/gpu/time_distr.py`: times, and of DistrAttention the relative error of the output."""
    parts = []
    monarch = {
        "monarch, 1 rounds": "1 round", "monarch, 2 rounds": "2 rounds", "monarch, 3 rounds": "3 rounds",
        "attnlib": "attnlib, dense", "cudnn": "cuDNN, dense",
    }  # fmt: skip
    distr = {
        "distr G2": "groups of 2", "distr G4": "groups of 4", "attnlib": "attnlib",
        "attnlib fp8, with the pass": "FP8 and quantizing",
    }  # fmt: skip
    for title, where, lengths, impls in (
        ("MonarchAttention, ms", MONARCH, MONARCH_TOKENS, monarch),
        ("DistrAttention, ms", DISTR, DISTR_TOKENS, distr),
    ):
        table = records.load(*where, gpu=records.REFERENCE_GPU)
        columns = {"call": title, **impls}
        if where == DISTR:
            columns |= {f"error of {impl}": f"error, {impls[impl]}" for impl in impls if impl != "distr G4"}
        lines: Lines = {}
        for row in table.rows:
            shape = Shape.of_row(row)
            wanted = row["impl"] in impls and shape.seqlen in lengths and shape.causal == (where == DISTR)
            if not wanted or row["status"] != "ok":
                continue
            cells = _cells(lines, shape.label, columns)
            cells[row["impl"]] = f"{row['ms']:.3f}"
            if "error of " + row["impl"] in columns:
                cells["error of " + row["impl"]] = f"{row['relative_error']:.3f}"
        parts.append(_shown(lines, columns, table))
    return "\n\n".join(parts)


def entmax_table() -> str:
    """The table of entmax beside AdaSplash 2 and our softmax, of the record of `time_entmax.py`: inputs
    N(0, 1), and some whose weights lie in a tenth of the blocks."""
    impls = {
        f"{impl}, {way}": f"{title}, {way}"
        for way in ("forward", "backward")
        for impl, title in (("attnlib", "entmax"), ("adasplash 2", "AdaSplash 2"),
                            ("attnlib, softmax", "attnlib's softmax"))
    }  # fmt: skip
    columns = {"call": "entmax of alpha 1.5, ms", **impls}
    calls, blocks, lists = (
        records.load_anywhere(ENTMAX, name, records.REFERENCE_GPU) for name in ("calls", "blocks", "lists")
    )
    lines: Lines = {}
    for row in [*calls.rows, *blocks.select(codes=ENTMAX_CODES)]:
        label = Shape.of_row(row).label
        if row["codes"]:
            label += f", weights in {lists.one(codes=row['codes'])['blocks']:.0%} of the blocks"
        if row["impl"] in impls and row["status"] == "ok":
            _cells(lines, label, columns)[row["impl"]] = f"{row['ms']:.3f}"
    return _shown(lines, columns, calls, blocks)


def distributed_table() -> str:
    """The table of two GPUs: speed-ups over one, in the record of `tests/gpu/time_distributed.py`. Who was at
    hand in neither pass has no column."""
    impls = {
        "attnlib": "attnlib", "attnlib (control)": "the same again", "attnlib, ulysses": "its Ulysses",
        "ring-flash-attn, FA3": "ring-flash-attn, FA3", "torch context_parallel, cuDNN": "PyTorch, cuDNN",
        "torch context_parallel, attnlib": "PyTorch's ring, attnlib's kernels",
    }  # fmt: skip

    def named(impl: str) -> str:
        return impl if impl in impls else impl.rpartition(", ")[0]  # without its variant

    found = {way: records.load_anywhere(DISTRIBUTED, way, records.REFERENCE_GPU)
             for way in ("forward", "backward")}  # fmt: skip
    asked = {named(row["impl"]) for table in found.values() for row in table.rows}
    there = {named(row["impl"]) for table in found.values() for row in table.measured().rows}
    impls = {impl: title for impl, title in impls.items() if impl not in asked - there}
    columns = {"call": "Two GPUs, bf16 B1 H16 D128", "one": "one GPU, ms", **impls}
    lines: Lines = {}
    for way, table in found.items():
        rows = [row for row in table.rows + table.controls if row["status"] == "ok"]
        for row in sorted(rows, key=lambda row: (not row["causal"], row["seqlen"])):
            cells, name = _cells(lines, f"{row['call']}, {way}", columns), named(row["impl"])
            if row["impl"] == "attnlib, one GPU":
                cells["one"] = f"{row['ms']:.4g}"
            elif row["gpus"] > 1 and name in impls and row["impl"] != "attnlib, without transfers":
                cells[name] = cells[name] or f"{row['speedup']:.2f}x"
    return _shown(lines, columns, *found.values())


def sparse_tables() -> str:
    """The tables of block masks and of scores, of the records of `tests/gpu/time_sparse.py`."""
    parts = []
    blocks = "Random blocks of 128 x 128, fp16, TFLOP/s of what is kept", "tflops", ".0f"
    functions = "Masks made by functions, fp16, TFLOP/s of what is kept", "tflops", ".0f"
    scores = "Scores, fp16, ms", "ms", ".2f"
    shown = (SPARSE, "blocks", blocks), (SPARSE_LONG, "blocks", blocks)
    shown += (SPARSE, "functions", functions), (SPARSE, "scores", scores)
    for record, name, (title, column, form) in shown:
        try:
            table = records.load_anywhere(record, name, records.REFERENCE_GPU)
        except records.RecordError:
            continue
        columns = {"call": title, "attnlib": "attnlib", "FlexAttention": "FlexAttention"}
        if name == "blocks":
            columns |= {"FlashAttention-4": "FlashAttention-4", "cuDNN": "cuDNN"}
            columns["of_ideal"] = "attnlib, of the dense kernel times the part kept"
        lines: Lines = {}
        for row in table.rows:
            if row["implementation"] in columns:
                cells = _cells(lines, row["call"], columns)
                cells[row["implementation"]] = f"{row[column]:{form}}"
                if row["implementation"] == "attnlib" and name == "blocks":
                    cells["of_ideal"] = f"{row['of_ideal']:.0%}"
        parts.append(_shown(lines, columns, table))
    return "\n\n".join(parts)


def s2_table() -> str:
    """The table of S2-Attention: how many times as fast as all keys, in the record of
    `tests/gpu/time_s2.py`, beside what its blocks allow."""
    impls = {"forward": "forward", "backward": "backward", "decode": "a token against the cache"}
    columns = {"call": "S2-Attention, bf16 B4 H16 D128, over dense attention", "bound": "at most", **impls}
    lines: Lines = {}
    found = {way: records.load_anywhere(S2, way, records.REFERENCE_GPU) for way in impls}
    for way, table in found.items():
        for row in table.select(impl="S2", status="ok"):
            shape = Shape.of_row(row)
            cells = _cells(lines, f"{shape.keys} tokens", columns)
            cells[way] = verdict.judge(table, shape, "S2", "attnlib").cell()
            if way != "decode":
                cells["bound"] = f"{1 / row['share']:.2f}x"
    return _shown(lines, columns, *found.values())


SECTIONS = {
    "ladder": ladder_table, "modes": modes_table, "teaching": partial(ladder_table, TEACHING),
    "kept_shift": kept_shift_table, "plane": plane_table, "head_dims": head_dims_table,
    "values": values_table, "varlen": varlen_table, "backward": backward_table, "host": host_table,
    "decode": decode_table, "fp8_caches": fp8_caches_table, "generate": generate_table,
    "fp8": fp8_table, "sparse": sparse_tables, "s2": s2_table, "approximate": approximate_tables,
    "entmax": entmax_table, "distributed": distributed_table,
}  # fmt: skip
"""What pages show between `<!-- name -->` and `<!-- /name -->`."""

README, RESULTS = ROOT / "README.md", NOTEBOOKS / "results.md"
IN_README = "ladder", "plane"
PAGES = {README: IN_README, RESULTS: tuple(name for name in SECTIONS if name not in IN_README)}
"""Page -> the tables that it shows."""


def with_sections(text: str, page: Path) -> str:
    """A page's text with the present tables between their markers; ValueError unless there is one of each."""
    for name in PAGES[page]:
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise ValueError(f"{page.name}: expected {start} and then {end}, once each")
        table = SECTIONS[name]()
        pattern = re.escape(start) + r".*?" + re.escape(end)
        text = re.sub(pattern, lambda _: f"{start}\n{table}\n{end}", text, flags=re.DOTALL)  # noqa: B023
    return text


def stale() -> dict[Path, str]:
    """Pages of which a table differs from the records -> their text with the present tables."""
    old = {page: page.read_text(encoding="utf-8") for page in PAGES}
    new = {page: with_sections(text, page) for page, text in old.items()}
    return {page: text for page, text in new.items() if text != old[page]}


def rewrite() -> list[Path]:
    """Rewrite the tables from the records; the pages of which one was different."""
    pages = stale()
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return list(pages)
