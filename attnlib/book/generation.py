"""Tokens per second of transformers' `generate()`, as README and chapter 23 show them: from the record of
`tests/gpu/measure_generate.py`, where there is one."""

from __future__ import annotations

from attnlib.bench import records, verdict
from attnlib.bench.records import Table
from attnlib.bench.shapes import Shape

RECORD = "generate"
CACHES = {
    "dynamic": "it grows", "static": "a fixed size", "compiled": "a fixed size, the steps compiled",
}  # fmt: skip
"""Table of the record -> the cache that it is about."""
COLUMNS = {
    "call": "Llama, 1.2 billion parameters", "cache": "cache", "attnlib": "attnlib, tokens/s",
    "sdpa": "SDPA, tokens/s", "gpu": "GPU", "against": "attnlib against SDPA", "prompt": "the prompt",
}  # fmt: skip
WAITING = (
    "*Not measured yet: `python tests/gpu/measure_generate.py` on a GPU of compute capability 9.x writes "
    "the record.*"
)


def tables(gpu: str | None = None) -> list[Table]:
    """Those that there are, in the order of `CACHES`. Of a cache that was not measured on `gpu`, or else on
    this machine's or the reference GPU, another GPU's."""
    found = []
    for name in CACHES:
        try:
            first = [records.load(RECORD, name, gpu)]
        except records.RecordError:
            first = []
        some = first + records.of_all_gpus(RECORD, name)
        found += [next(filter(calls, some), some[0])] if some else []
    return found


def calls(table: Table) -> list[str]:
    """Those of a table that were measured."""
    return [row["call"] for row in table.rows if row["impl"] == "attnlib" and row["status"] == "ok"]


def steps(table: Table, call: str) -> verdict.Verdict:
    """attnlib against SDPA, by the time of a token after the first."""
    return verdict.judge(table, Shape.of_row(table.one(call=call, impl="attnlib")), "attnlib", "sdpa")


def lines(found: list[Table]) -> list[dict[str, str]]:
    """A line for each call that was measured with a cache, and one for the others of that cache. The prompt:
    SDPA's time to the first token over attnlib's."""
    shown = []
    for table in found:
        gpu, reasons = table.gpu.removeprefix("NVIDIA ").split()[0], {}
        cache = {"cache": CACHES[table.name], "gpu": gpu}
        for row in table.select(impl="attnlib"):
            if row["status"] != "ok":
                reasons.setdefault(row["status"], []).append(row["call"])
                continue
            rows = {row["impl"]: row for row in table.select(call=row["call"])}
            speeds = {impl: f"{rows[impl]['tokens_per_s']:.0f}" for impl in ("attnlib", "sdpa")}
            prompt = rows["sdpa"]["prompt_ms"] / row["prompt_ms"]
            against = {"against": steps(table, row["call"]).cell(), "prompt": f"{prompt:.2f}x"}
            shown.append({"call": row["call"], **cache, **speeds, **against})
        shown += [{"call": "; ".join(some), **cache, "attnlib": reason} for reason, some in reasons.items()]
    return shown
