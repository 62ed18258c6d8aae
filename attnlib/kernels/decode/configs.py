"""Configurations of the decoding kernel: a frozen dataclass, chosen by a pure function."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from attnlib.kernels.common.tiles import block_d

Split = Literal["none", "fixed", "stream_k"]
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


class Work(NamedTuple):
    """What a call has to read, and who reads it.

    rows: query rows of all heads that share a key/value head. pairs: sequences times key/value heads. keys:
    the most that a sequence can have in sight. sms: multiprocessors of the GPU.
    """

    rows: int
    head_dim: int
    dtype: str
    pairs: int
    keys: int
    sms: int


@dataclass(frozen=True)
class DecodeConfig:
    """How `decode.decode_kernels` is compiled and launched.

    Attributes:
        block_m: query rows of one tile, of all heads of a group.
        block_n: keys of one tile.
        num_warps: warps of one program.
        num_stages: key/value tiles in flight and in use.
        split: who takes which tiles; see the kernels' module.
        shares: programs of "stream_k", splits of "fixed", 1 of "none".
        same_launch: partial results are merged by the program that finishes a pair last, instead of by a
            second launch.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: Split
    shares: int
    same_launch: bool = False


TILE_BYTES = 16 << 10
"""Of a tile of keys, and of one of values. A load takes about 1 us from memory when many are under way, so
4.3 TB/s need 4.3 MB in flight, 33 KB for each of 132 multiprocessors; twice that leaves room for moments in
which a program waits for something else. With three stages a program has one pair of tiles in flight while it
works on another, 32 KB, and two pairs when it is done with that."""
MOST_KEYS, FEWEST_KEYS = 128, 16
MOST_ROWS = 64
"""Of a tile; further rows make further tiles, which read the keys again, from L2."""
LARGE_TILE = 8 << 10
"""Bytes of queries, beyond which their sums and the addresses of keys do not fit in the registers of four
warps."""
FEW_TILES = 2
"""Up to so many tiles a pair is not split: reading them takes less than a merge."""
GOOD_WAVES = 0.9
"""Of the best use of the last wave of programs: the fewest splits that come so near are taken."""


def decode_config(work: Work, split: Split | int | None = None) -> DecodeConfig:
    """The configuration for one call; `split`: as it was asked for, an int for so many splits, None for what
    is best: "stream_k", which needs no luck with the number of pairs, but "none" for few keys."""
    block_m = min(MOST_ROWS, max(16, 1 << (work.rows - 1).bit_length()))
    row_bytes = block_d(work.head_dim) * ITEMSIZE[work.dtype]
    num_warps = 8 if block_m * row_bytes > LARGE_TILE else 4
    block_n = min(MOST_KEYS, max(FEWEST_KEYS, TILE_BYTES // row_bytes))
    tiles = max(1, -(-work.keys // block_n))
    pairs = work.pairs * -(-work.rows // block_m)
    programs = work.sms * programs_per_sm(block_m, work.head_dim)
    if split is None:
        split = "none" if tiles <= FEW_TILES else "stream_k"
    if split == "stream_k":
        shares = min(programs, pairs * tiles)
    elif split == "none":
        shares = 1
    else:
        shares = min(tiles, fixed_splits(pairs, tiles, programs) if split == "fixed" else split)
        split = "none" if shares == 1 else "fixed"
    return DecodeConfig(block_m, block_n, num_warps, num_stages=3, split=split, shares=shares)


def programs_per_sm(block_m: int, head_dim: int) -> int:
    """Programs that run on a multiprocessor at a time: two, which hide each other's starts, merges and waits
    between a load and its exponentials. A program takes 72 to 115 KB of its 227 KB of shared memory. With 64
    rows of 128 columns and more it takes most of the registers too, and is alone."""
    return 1 if block_m == MOST_ROWS and block_d(head_dim) >= 128 else 2


def fixed_splits(pairs: int, tiles: int, programs: int) -> int:
    """The fewest splits of each pair that use `programs`, which run at a time, nearly as well as any number
    of splits would: what counts is how full the last wave of them is."""

    def use(splits: int) -> float:
        waves = pairs * splits / programs
        return waves / -(-pairs * splits // programs)

    most = min(tiles, max(1, 4 * programs // pairs))
    found = [use(splits) for splits in range(1, most + 1)]
    return 1 + next(i for i, value in enumerate(found) if value >= GOOD_WAVES * max(found))
