"""What the tiles of the package's Hopper kernel, and their order, make of a sequence that fits no tile."""

import heapq

from attnlib.bench.roofline import H200
from attnlib.bench.shapes import Shape
from attnlib.kernels.common.signature import mean_keys
from attnlib.kernels.hopper.configs import HopperConfig, hopper_config
from attnlib.params import mask_window


def config_of(shape: Shape) -> HopperConfig:
    """The tile that the package takes for a forward call with as many keys as queries."""
    keys, heads = shape.seqlen, shape.batch * shape.heads
    seen = mean_keys(keys, keys, mask_window(shape.causal, None))
    return hopper_config(shape.head_dim, keys, heads, keys=keys, seen=seen)


def useful_share(shape: Shape) -> float:
    """Share of the scores that the warpgroups compute which the mask and the end of the keys let through."""
    end, config = shape.seqlen, config_of(shape)
    rows, step, blocks = 64 * config.warpgroups, config.block_n, 0
    together = shape.causal and rows == step  # the warpgroups of a tile visit the same blocks
    for row in range(0, -(-end // rows) * rows, 64):
        last = end if not shape.causal else row - row % rows + rows if together else row + 64
        blocks += 1 if row >= end and not together else -(-min(last, end) // step)
    return _useful(shape) / (64 * step * blocks)


def scheduled(shape: Shape, sms: int = H200.sms) -> float:
    """Useful scores of a launch in the time of one of the last SM: chapter 13's simulation, in which a tile
    costs its blocks of keys and nothing else, and the SM that is free first draws the next one. Sections are
    equal, as the package had them when chapter 19's sweep was measured (2026-11-29)."""
    end, heads, config = shape.seqlen, shape.batch * shape.heads, config_of(shape)
    rows, step = 64 * config.warpgroups, config.block_n
    group = shape.heads // (shape.heads_kv or shape.heads)
    width = config.heads_per_section(heads, group, end, shape.head_dim)
    free = [0] * sms  # when each SM is
    for first in range(0, heads, width):
        for row in reversed(range(0, end, rows)):  # the longest of a section first
            last = min(row + rows, end) if shape.causal else end
            for _ in range(min(width, heads - first)):
                heapq.heapreplace(free, free[0] + rows * step * -(-last // step))
    return heads * _useful(shape) / max(free)


def _useful(shape: Shape) -> float:
    """Scores of a head by the count of FLOPs."""
    return shape.seqlen**2 / (2 if shape.causal else 1)
