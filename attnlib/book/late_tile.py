"""What chapters 07 and 08 predict from chapter 06's loop as the compiler wrote it: the kernels with that
chapter's launcher as they are compiled, and what a product that runs one tile late can bring."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Protocol

from attnlib.bench import inspect_sm90


class Tile(Protocol):
    """What chapter 06 calls a configuration."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def job(module: ModuleType, head_dim: int, tile: Tile) -> inspect_sm90.Job:
    """A kernel as chapter 06's launcher, or that of chapter 07's variants, compiles it: causal, fp16, at a
    length of the benchmark task. Its tiles come through pointers, or through descriptors."""
    fixed = {"D": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "CAUSAL": True}
    if "q_ptr" in inspect.signature(module.flash_forward.fn).parameters:
        types = dict.fromkeys(["q_ptr", "k_ptr", "v_ptr", "o_ptr"], "*fp16:16")
        fixed |= {"TWO_PASS": True, "ORDER": module.LAUNCH_ORDER}
    else:
        rows = {"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "o": tile.block_m}
        types = {f"{name}_desc": f"tensordesc<fp16[1, {n}, {head_dim}]>" for name, n in rows.items()}
    types |= {"S": "i32:16", "qk_scale": "fp32"}
    return inspect_sm90.Job(module.__file__, "flash_forward", types, fixed, tile.num_warps, tile.num_stages)


def pieces(stats: inspect_sm90.Stats, tile: Tile, head_dim: int) -> tuple[float, float]:
    """SM clocks of one of the two products of a trip of the loop, and of its softmax."""
    clocks = stats.tile_clocks(tile.block_m, tile.block_n, head_dim)
    return clocks["tensor"] / 2, max(clocks["issue"], clocks["exp"])


def bounds(stats: inspect_sm90.Stats, tile: Tile, head_dim: int) -> tuple[float, float]:
    """The least and the most that one tile late can speed up a loop in order: nothing where other programs
    fill each wait already; and where the pieces of a trip take turns, what it saves to have the second
    product under the softmax."""
    product, softmax = pieces(stats, tile, head_dim)
    return 1.0, (softmax + 2 * product) / (product + max(softmax, product))
