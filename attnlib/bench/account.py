"""An account of the clocks of a trip through a Hopper kernel's hot loop: counts of machine code, and a line.

The terms are for one trip of all consumers, as one scheduler sees it, which has a warp of each: the clocks of
the tensor cores, the issue slots, and the path of a warp. Their weights are fitted to measured kernels
(chapter 37). Beside the line there may be a limit: machine code that does not fit into a scheduler's
instruction cache has to be fetched anew in each trip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnlib.bench.budget import path, product, walked
from attnlib.bench.inspect_sm90 import Stats

INSTRUCTION = 16
"""Bytes of an instruction."""
CACHE = 33 * 1024
"""Bytes of loops up to which fetching was to show in no clocks, when chapter 37 predicted eleven kernels:
loops of 32.1 KiB were on the line, and what is published for a later GPU, Blackwell's GB202, is 32 KiB for
each scheduler. It is too small: `poly6`, one of the eleven, has loops of 36.1 KiB and is on the line."""
CACHE_SINCE = 40 * 1024
"""The same as it was read afterwards, from the kernels that refuted `CACHE`: all from 36.1 to 43.5 KiB,
the length of `vexp`, which is fetched anew, would do. No prediction was made with it."""
FETCHED = 8
"""Bytes that a scheduler is given in a clock from beyond that cache. Read off one kernel, `vexp`; of two that
were predicted with it, `thrice` is given as much within 5%, and `poly3_twice` less."""


@dataclass(frozen=True)
class Terms:
    """Of one trip of all consumers: clocks of the tensor cores, issue slots, the paths of all warps of a
    scheduler, and of one of them (the mean); bytes of machine code of all loops, and of a trip."""

    tensor: float
    slots: float
    paths: float
    path: float
    code: int
    fetched: float

    @property
    def line(self) -> list[float]:
        """What is weighted and added up, with a constant."""
        return [self.tensor, self.slots, self.path, 1.0]

    @property
    def limit(self) -> float:
        """Clocks that fetching the code takes; 0 if it stays in the cache that predictions were made with."""
        return self.limit_beyond(CACHE)

    def limit_beyond(self, cache: int) -> float:
        """The same with another capacity."""
        return self.fetched / FETCHED if self.code > cache else 0.0


def terms(stats: Stats, blocks: int = 1) -> Terms:
    """blocks: of keys in a pass through the loop, more than one where it has been unrolled."""
    own = range(len(stats.loops))
    texts = [walked(stats, i) for i in own]
    tensor = sum(product(text)[0] for trip in texts for text in trip if "HGMMA" in text)
    paths = sum(path(stats, i) for i in own) / blocks
    code = INSTRUCTION * sum(sum(loop.values()) for loop in stats.loops)
    return Terms(tensor / blocks, sum(map(len, texts)) / blocks, paths, paths / len(own), code, code / blocks)


def fit(counted: Sequence[Sequence[float]], took: Sequence[float]) -> np.ndarray:
    """Weights that make the squares of the relative errors least."""
    relative = np.array(counted, float) / np.array(took, float)[:, None]
    return np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0]


def weights_without(
    counted: Mapping[str, Sequence[float]], took: Mapping[str, float], name: str
) -> np.ndarray:
    """The same of all kernels but one."""
    others = [other for other in counted if other != name]
    return fit([counted[other] for other in others], [took[other] for other in others])


def clocks(weights: np.ndarray, found: Terms, cache: int = CACHE) -> float:
    """The line, or the limit where that is more."""
    return max(float(np.dot(weights, found.line)), found.limit_beyond(cache))
