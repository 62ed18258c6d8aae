"""What the profiler counted of the book's steps, in the words and tables of a chapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnlib.book import card, lesson

HEAD_DIMS = (64, 128, 256)


def factors(
    counters: Mapping[str, str], before: str, after: str, head_dims: Sequence[int] = HEAD_DIMS
) -> dict[tuple[str, int], float | None]:
    """What the counters of a step are over those of another: (name, head dimension) -> factor, as
    `predictions.rows` takes it. counters: name -> field of `lesson.counters`. None where one was not counted.
    """
    found: dict[tuple[str, int], float | None] = {}
    for d in head_dims:
        old, new = (lesson.counters(step, d) for step in (before, after))
        for name, field in counters.items():
            known = old.get(field) and new.get(field) is not None
            found[name, d] = new[field] / old[field] if known else None
    return found


def waits(step: str, head_dims: Sequence[int] = HEAD_DIMS) -> str:
    """What the warps of a step wait for most, as the end of a sentence: "a barrier at D = 64 (31% of their
    cycles), global memory at D = 128 (20%)"."""
    found = {d: card.longest_wait(lesson.counters(step, d)) for d in head_dims}
    of_what = [" of their cycles", *[""] * len(found)]
    return ", ".join(
        f"{name} at D = {d} ({100 * share:.0f}%{what})"
        for (d, (name, share)), what in zip(found.items(), of_what, strict=False)
    )
