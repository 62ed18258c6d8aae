"""What a chapter says about speed, held against the control rows of its records.

A text of a chapter gets its verdicts from `bench.verdict`, which knows the noise of the run. Two mistakes are
looked for. A verdict that no record gives: it was typed, or it is of an older run. And a sentence that
compares with a number ("7% faster", "gains 1.03 times") without a verdict: nobody has asked whether the
difference is noise. Sentences are found by their words: a comparison in other words, in the cells of a table
or in a chart is not.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations

from attnlib.bench import plane, records, verdict
from attnlib.bench.shapes import Shape
from attnlib.book import generation

VERDICT = re.compile(
    r"\d+(?:\.\d+)?x(?:, noise (?:of this run )?\d+\.\d{3}: \w+|, noise not measured"
    r"|: a tie, the (?:same kernel differs by \d+\.\d{3} from itself in this run"
    r"|rounds of this run leave \d+\.\d{3} open))"
)
"""A verdict as `Verdict.sentence` and `Verdict.cell` write it."""

_COMPARES = re.compile(
    r"\b(?:faster|slower|quicker|ahead of|behind|beats?|gains?|gained|loses?|lost|loss|losses|wins?|won"
    r"|outruns?|speed-?ups?)\b",
    re.IGNORECASE,
)
_RATIO = re.compile(r"(?<![\w.])\d+(?:\.\d+)?\s?(?:(?:x\b|×)(?!\s?\d)|times\b|%|percent\b)")
"""How many times, or by what share; "64 x 128" is a size."""
_NO_MEASUREMENT = re.compile(
    r"\b(?:predict\w*|expect\w*|should|would|could|might|may|if|at most|bound|model\w*)\b", re.IGNORECASE
)
"""Words of a prediction or a bound, which is no verdict."""
_ELSEWHERE = re.compile(r"\barXiv\b|\bpapers?\b|\blogs?\b|\breports?\b|\]\(", re.IGNORECASE)
"""Words of a sentence that names another source than this chapter's records."""
_COMPARED = {"impl", "batch", "heads", "seqlen", "head_dim"}
"""Columns of a table that compares implementations on shapes."""
_INPUTS = "codes"
"""A column that tells inputs of one shape apart, each with a control row of its own."""


def given(tables: Iterable[records.Table]) -> set[str]:
    """Every verdict that these tables give, on any two implementations, in both of its forms."""
    texts = set()
    for table in tables:
        calls = {(Shape.of_row(row), row.get(_INPUTS)) for row in table.rows if _COMPARED <= row.keys()}
        for shape, inputs in calls:
            own = _of_call(table, shape, inputs)
            impls = [row["impl"] for row in own.rows]
            if len(set(impls)) == len(impls):  # else the table has more columns that tell its rows apart
                for one, other in permutations(impls, 2):
                    found = verdict.judge(own, shape, one, other)
                    texts |= {found.sentence(), found.cell()}
        for row in table.rows:
            if "round_ratios" in row:  # of one call beside one peer, as `time_plane.py` writes it
                found = plane.verdict_of(row)
                texts |= {found.sentence(), found.cell()}
    return texts


def _of_call(table: records.Table, shape: Shape, inputs: object) -> records.Table:
    """The rows of one shape and kind of inputs, which are asked for once for each pair of them."""
    rows, controls = (
        [row for row in found if Shape.of_row(row) == shape and row.get(_INPUTS) == inputs]
        for found in (table.rows, table.controls)
    )
    return replace(table, rows=rows, controls=controls)


def stated(text: str) -> list[str]:
    """The verdicts that a text states."""
    return VERDICT.findall(text)


def unjudged(text: str) -> Iterator[str]:
    """Sentences of a text that compare speeds by a number without a verdict."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "    ")))
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*#] )", prose):
        for sentence in re.split(r"(?<=[.!?])[*_]*\s+(?=[*_`]*[A-Z0-9])", " ".join(paragraph.split())):
            free = VERDICT.search(sentence) or _NO_MEASUREMENT.search(sentence) or _ELSEWHERE.search(sentence)
            if _COMPARES.search(sentence) and _RATIO.search(sentence) and not free:
                yield sentence


def tables_of(notebook: str, source: str = "") -> list[records.Table]:
    """The tables of a notebook's record, and of those that its source loads by name: of the reference GPU, of
    another one where that has none, or of all where the source asks for them."""
    wanted = {notebook, *re.findall(r"\b(?:load|recorded)\(\s*[\"'](\w+)[\"']", source)}
    found = generation.tables(records.REFERENCE_GPU) if "generation.tables(" in source else []
    for name in sorted(wanted):
        paths = sorted(records.data_dir().glob(f"*/{name}.json"))
        tables = {table for path in paths for table in records.read(path)["tables"]}
        found += [records.load_anywhere(name, table, records.REFERENCE_GPU) for table in sorted(tables)]
    every = re.findall(r"\bof_all_gpus\(\s*[\"'](\w+)[\"'],\s*[\"'](\w+)[\"']", source)
    for name, table in sorted(set(every)):
        found += records.of_all_gpus(name, table)
    return found
