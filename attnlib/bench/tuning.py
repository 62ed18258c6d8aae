"""Choose a kernel configuration by timing it, once per GPU, and remember the choice on disk.

`triton.autotune(..., cache_results=True)` does most of this. Three things it does not do, and `tune` does:

* its key holds the compile target (sm_90), not the GPU: an H100, an H200 and an H20 share one entry;
* a wrong candidate wins if it is fast: here `time_one` may raise, and the candidate is out;
* it takes the minimum of one noisy pass: here the best few are timed again, and the lowest median wins.

Notebook 06 shows each of the three. Nothing here needs triton or a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TypeVar

from attnlib.bench.files import write_atomically

Config = TypeVar("Config")
Key = Mapping[str, str | int | bool]

SCHEMA = 1


def tuning_key(head_dim: int, dtype: str, causal: bool, seqlen: int, source: str = "") -> Key:
    """What a measured choice depends on: the GPU by name, the compiler, the kernel's text and the problem.

    `source` is the kernel's source text, of which a hash is kept, so that an edited kernel is tuned again.
    `seqlen` is rounded up by `seqlen_bucket`.
    """
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "triton": metadata.version("triton"),
        "kernel": hashlib.sha256(source.encode()).hexdigest()[:16],
        "head_dim": head_dim,
        "dtype": dtype,
        "causal": causal,
        "seqlen": seqlen_bucket(seqlen),
    }


def seqlen_bucket(seqlen: int) -> int:
    """The power of two at or above `seqlen`, at least 16: lengths in one bucket share one choice."""
    return 1 << max(4, (max(seqlen, 1) - 1).bit_length())


def cache_folder(cache_dir: str | os.PathLike | None = None) -> Path:
    """Where choices are kept: `cache_dir`, else `$ATTNLIB_CACHE`, else `~/.cache/attnlib`."""
    return Path(cache_dir or os.environ.get("ATTNLIB_CACHE") or Path.home() / ".cache" / "attnlib")


def tune(
    candidates: Sequence[Config],
    time_one: Callable[[Config], float],
    key: Key,
    cache_dir: str | os.PathLike | None = None,
    *,
    finalists: int = 4,
    rounds: int = 5,
) -> Config:
    """The fastest candidate for `key`: read from the cache, or found by timing and then written to it.

    Args:
        candidates: configurations; each has a `repr` of its own, as frozen dataclasses and named tuples do.
        time_one: milliseconds of one candidate. It should raise when the candidate does not compile, does
            not fit the GPU or computes a wrong answer; that candidate is left out.
        key: what the choice depends on, see `tuning_key`. The list of candidates is added to it, so that a
            changed search space is searched again.
        cache_dir: see `cache_folder`. A file that is missing, damaged or not writable costs a search.
        finalists: how many of the fastest are timed again: the best of many noisy times is partly luck.
        rounds: how often each finalist is timed again; every round takes them in a new random order.

    Raises:
        ValueError: no candidates, or two with the same `repr`.
        RuntimeError: every candidate failed; the message says why.
    """
    by_name = {repr(candidate): candidate for candidate in candidates}
    if not by_name or len(by_name) != len(candidates):
        got = f"{len(candidates)}, {len(by_name)} of them distinct"
        raise ValueError(f"candidates: expected one or more distinct configurations, got {got}")
    path = _file_of({**key, "candidates": sorted(by_name)}, cache_folder(cache_dir))
    remembered = _read(path).get("best")
    if isinstance(remembered, str) and remembered in by_name:
        return by_name[remembered]

    failed: dict[str, str] = {}
    times = _time_all(list(by_name), by_name, time_one, failed)
    ranked = sorted(times, key=lambda name: times[name][0])
    final = times
    if finalists > 1 and rounds > 0 and len(ranked) > 1:
        best_few, order = ranked[:finalists], random.Random(0)
        again = [name for _ in range(rounds) for name in order.sample(best_few, len(best_few))]
        # The first time made it a finalist, so it is too good on average: only the new times count.
        final = _time_all(again, by_name, time_one, failed)
    final = {name: ms for name, ms in final.items() if name not in failed}
    if not final:
        reasons = "\n".join(f"  {name}: {why}" for name, why in failed.items())
        raise RuntimeError(f"every candidate failed:\n{reasons}")
    best = min(final, key=lambda name: median(final[name]))
    times.update(final)
    ms = {name: median(found) for name, found in times.items() if name not in failed}
    _write(path, {"schema": SCHEMA, "key": dict(key), "best": best, "ms": ms, "failed": failed})
    return by_name[best]


def _time_all(
    names: Sequence[str],
    by_name: Mapping[str, Config],
    time_one: Callable[[Config], float],
    failed: dict[str, str],
) -> dict[str, list[float]]:
    """Milliseconds of each name, in order, once per mention; what raises goes to `failed` with the reason."""
    times: dict[str, list[float]] = {}
    for name in names:
        if name in failed:
            continue
        try:
            ms = float(time_one(by_name[name]))
            if not (math.isfinite(ms) and ms > 0):
                raise ValueError(f"time_one: expected milliseconds above 0, got {ms}")
        except Exception as error:  # a candidate may fail in any way; an interrupt still stops the search
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            times.setdefault(name, []).append(ms)
    return times


def _file_of(key: Mapping, folder: Path) -> Path:
    """One file a key, so that two processes never have to merge what they write."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    gpu = re.sub(r"[^a-z0-9]+", "-", str(key.get("gpu", "any")).lower()).strip("-")
    return folder / f"{gpu}-{digest}.json"


def _read(path: Path) -> dict:
    """The stored choice, or {} where none can be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # missing, not text, not JSON, or too deep
        return {}
    return stored if isinstance(stored, dict) and stored.get("schema") == SCHEMA else {}


def _write(path: Path, choice: dict) -> None:
    """Keep the choice where the folder can be written to; where it can't, the next call tunes again."""
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps(choice, indent=1, sort_keys=True))
