"""Configurations of the decoding kernel: a frozen dataclass, chosen by a pure function."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from attnlib.kernels.common.device import H200_BANDWIDTH, SLOW_MEMORY
from attnlib.kernels.common.tiles import block_d

Split = Literal["none", "fixed", "stream_k"]
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


class Work(NamedTuple):
    """What a call has to read, and who reads it.

    rows: query rows of all heads that share a key/value head. pairs: sequences times key/value heads. keys:
    the most that a sequence can have in sight. sms: multiprocessors of the GPU. equal: all have so many keys.
    dtype: of queries, and of caches unless these are in FP8. page_scales: each page has a scale. bandwidth:
    GB/s of memory for each multiprocessor.
    """

    rows: int
    head_dim: int
    dtype: str
    pairs: int
    keys: int
    sms: int
    equal: bool = False
    fp8: bool = False
    page_scales: bool = False
    bandwidth: float = H200_BANDWIDTH

    @property
    def crowded(self) -> bool:
        """Whether what makes numbers of FP8 leaves few registers to the rest."""
        return self.fp8 and (self.page_scales or block_d(self.head_dim) == 256)

    @property
    def row_bytes(self) -> int:
        """Of a key, or a value, in a tile."""
        return block_d(self.head_dim) * (1 if self.fp8 else ITEMSIZE[self.dtype])


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
        prefetch: a program asks for its first keys before its queries have come.
        prefetch_next: with `prefetch`, also for the first keys of its next pair before it has done the last.
        whole: of "stream_k": no pair is split where there are at most `shares` and all together have at least
            as many tiles as so many of the longest would have; 0 for never.
        idle_tiles: of "stream_k": beginning a pair takes as long as so many tiles, which shares allow for.
        registers: most that a thread may have; None for what the compiler thinks best.
        late_sums: weights are added up over a row behind all tiles; until then a thread keeps as many sums as
            it has weights of a tile.
        merge_columns: of a row, which a program that merges takes; None for what `merge_config` chooses.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: Split
    shares: int
    same_launch: bool = False
    prefetch: bool = True
    prefetch_next: bool = False
    whole: int = 0
    idle_tiles: int = 0
    registers: int | None = None
    late_sums: bool = False
    merge_columns: int | None = None


TILE_BYTES = 16 << 10
"""Of a tile of keys, and of one of values. A load takes about 1 us from memory when many are under way, so
4.3 TB/s need 4.3 MB in flight, 33 KB for each of 132 multiprocessors; twice that leaves room for moments in
which a program waits for something else. With three stages a program has one pair of tiles in flight while it
works on another, 32 KB, and two pairs when it is done with that."""
FP8_TILE_BYTES = 8 << 10
"""The same in FP8, at most."""
REGISTERS, MOST_REGISTERS = 1 << 16, 255
"""Of a multiprocessor, and of a thread."""
MERGE_REGISTERS = 128 * 64
"""Of a program that merges. It may begin early only where programs that read keys leave it room."""
FEW, MANY = 32, 128
"""Sequences that programs look at together, where there are no more, and where there are."""
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
FULL_WAVES = 0.95
"""Pairs that keep so many of the multiprocessors busy until the longest has been read are not split. Where
they are known to be equal, the host sees whether they do, otherwise the kernels, by `fewest_whole`."""


ALONE = 0.5
"""Of the time in which an SM's share of the memory bandwidth reads the keys and values of a head: a program
of the dense kernels takes at least so long. With 32 of them on 132 SMs they read 67 GB/s each, on a GPU that
copies 32.5 GB/s for each SM (docs/lab/decode.md)."""
SLOWER, START = 1.05, 128 << 10
"""What a split costs: 5% of the speed, and the bytes that an SM's share of the bandwidth reads in 4 us, which
the merge and its launch take."""


def pays_to_split(work: Work, heads: int) -> bool:
    """Whether the decoding kernels read the keys faster than the dense ones, which give each of `heads` query
    heads one program, on an SM of its own.

    Three things make that slow: fewer heads than SMs, a last wave of few heads, and heads of one group that
    each read the same keys (from L2, but no faster than an SM can). With one query head for each key head,
    and about as many as SMs or several times more, nothing is left to gain.
    """
    group = max(1, heads // max(1, work.pairs))
    waves, last = divmod(heads, work.sms)
    dense = waves * max(ALONE, 1 / group)
    if last:
        dense += max(ALONE, last / work.sms / group)
    split = SLOWER * work.pairs / work.sms
    return (dense - split) * 2 * work.keys * work.head_dim * ITEMSIZE[work.dtype] > START


def decode_config(work: Work, split: Split | int | None = None) -> DecodeConfig:
    """The configuration for one call; `split`: as it was asked for, an int for so many splits, None for what
    is best: "stream_k", which needs no luck with the number of pairs, but "none" for few keys, and for pairs
    of equal length that fill the GPU. Where pairs fill it once, and would be equal as far as the host knows,
    "stream_k" leaves them whole if the kernels find that they nearly are."""
    block_m = min(MOST_ROWS // 2 if work.crowded else MOST_ROWS, max(16, 1 << (work.rows - 1).bit_length()))
    row_bytes = work.row_bytes
    query_bytes = block_m * block_d(work.head_dim) * ITEMSIZE[work.dtype]
    if work.fp8:
        block_n, num_warps, _ = fp8_tile(block_m, work)
    else:
        block_n = min(MOST_KEYS, max(FEWEST_KEYS, TILE_BYTES // row_bytes))
        num_warps = 8 if query_bytes > LARGE_TILE else 4
    stages, programs_per_sm = residency(block_m, work)
    tiles = max(1, -(-work.keys // block_n))
    pairs = work.pairs * -(-work.rows // block_m)
    programs = work.sms * programs_per_sm
    whole = 0
    if split is None:
        # In FP8 a program for each SM would have to read twice as many keys at a time.
        full = not work.fp8 and pairs >= fewest_whole(-(-pairs // work.sms) * work.sms)
        split = "none" if full and work.equal or tiles <= FEW_TILES else "stream_k"
        if full and split == "stream_k" and pairs <= work.sms and (block_m == 16 or programs_per_sm == 1):
            whole, programs_per_sm, programs = fewest_whole(work.sms), 1, work.sms
    if split == "stream_k":
        shares = min(programs, pairs * tiles)
    elif split == "none":
        shares = 1
    else:
        shares = min(tiles, fixed_splits(pairs, tiles, programs) if split == "fixed" else split)
        split = "none" if shares == 1 else "fixed"
    # A program for each SM: it alone keeps enough loads in flight.
    if (split == "none" or whole) and block_m == 16:
        block_n, stages = 2 * block_n, 3
    prefetch = row_bytes <= 256  # with more, its addresses are registers too many
    # Left alone, the compiler spills two words of some calls to fit one program more than there are.
    limited = (work.dtype == "float32" or programs_per_sm > 2) and num_warps == 4 and block_m == 16
    limited = split != "none" and (work.fp8 or limited)
    spare = 0 if work.fp8 else MERGE_REGISTERS
    registers = registers_for(programs_per_sm, num_warps, spare) if limited else None
    return DecodeConfig(
        block_m, block_n, num_warps, stages, split, shares, prefetch=prefetch, whole=whole,
        registers=registers, late_sums=work.fp8 and block_m == 16 and split != "none",
    )  # fmt: skip


def fewest_whole(programs: int) -> int:
    """The fewest pairs of one length that are not split where so many programs take one each. Those of unlike
    lengths are not either if together they have as many tiles as so many of the longest would have."""
    return math.ceil(FULL_WAVES * programs)


def registers_for(programs: int, num_warps: int, spare: int = 0) -> int:
    """Of a thread, where so many programs run on a multiprocessor at a time and leave `spare` registers."""
    return min(MOST_REGISTERS, (REGISTERS - spare) // (32 * programs * num_warps) // 8 * 8)


class MergeConfig(NamedTuple):
    """parts: partial results that a program merges in one step. columns: of them that it takes."""

    parts: int
    columns: int


MERGED = 8192
"""Numbers that a program of 128 threads takes in one step: 64 registers of each."""
NARROW = 32
"""Columns: 128 bytes of float32, what memory moves at a time."""


def merge_config(rows: int, width: int, most: int, sms: int, columns: int | None = None) -> MergeConfig:
    """How partial results are merged: `rows` of all pairs, `width` columns, at most `most` results of each.

    A merge takes as long as memory takes to answer, once for each step. So few rows are cut into narrow
    slices, of which many results are taken at once. Of more than 4 programs an SM few find room before the
    kernel ends, so more rows are not cut (docs/lab/decode.md)."""
    columns = min(width, columns or (NARROW if rows * (width // NARROW) <= 4 * sms else 128))
    return MergeConfig(min(1 << max(0, most - 1).bit_length(), MERGED // columns), columns)


class Residency(NamedTuple):
    """Stages of a program, and programs that run on a multiprocessor at a time."""

    stages: int
    programs: int


def residency(block_m: int, work: Work) -> Residency:
    """Two programs hide each other's starts, merges and waits between a load and its exponentials. A program
    takes 72 to 115 KB of its 227 KB of shared memory. With 64 rows of 128 columns and more it takes most of
    the registers too, and is alone. Three with one pair of tiles in flight each are 0.5 to 2% faster for few
    rows of 128 columns in 16 bits, and 1% slower for 64 (docs/lab/decode.md). Slower memory is kept busy by
    one program an SM, which is 2 to 6% faster there if it never has to begin a sequence of other length."""
    width = block_d(work.head_dim)
    if work.fp8:
        return Residency(3, fp8_tile(block_m, work).programs)
    if block_m == MOST_ROWS and width >= 128:
        return Residency(3, 1)
    if block_m == 16 and width == 128 and ITEMSIZE[work.dtype] == 2:
        return Residency(3, 1) if work.equal and work.bandwidth < SLOW_MEMORY else Residency(2, 3)
    return Residency(3, 2)


class Fp8Tile(NamedTuple):
    """Keys of a tile in FP8, warps of a program, and programs that run on a multiprocessor at a time."""

    keys: int
    warps: int
    programs: int


def fp8_tile(block_m: int, work: Work) -> Fp8Tile:
    """Warps make numbers of 16 bits of keys and values, some of them in several warps where there are many,
    and each computes the places and scales of all pages of a tile. So a program has two warps, but where many
    rows take their registers. Pages with a scale each have larger tiles, over which that is divided, but for
    more rows. Timed on an H200 beside one and four warps (docs/lab/decode.md)."""
    width, many = block_d(work.head_dim), block_m > 16

    def keys(nbytes: int, most: int = MOST_KEYS // 2) -> int:
        return max(FEWEST_KEYS, min(most, nbytes // width))

    if block_m == MOST_ROWS:
        return Fp8Tile(keys(FP8_TILE_BYTES, MOST_KEYS), 4, 2)
    if many and width == 256:
        return Fp8Tile(keys(FP8_TILE_BYTES), 4, 2)
    if work.page_scales:
        return Fp8Tile(keys(FP8_TILE_BYTES // 2 if many else FP8_TILE_BYTES), 2, 4)
    return Fp8Tile(keys(FP8_TILE_BYTES), 2, 4) if many else Fp8Tile(keys(FP8_TILE_BYTES // 2), 2, 6)


def fixed_splits(pairs: int, tiles: int, programs: int) -> int:
    """The fewest splits of each pair that use `programs`, which run at a time, nearly as well as any number
    of splits would: what counts is how full the last wave of them is."""

    def use(splits: int) -> float:
        waves = pairs * splits / programs
        return waves / -(-pairs * splits // programs)

    most = min(tiles, max(1, 4 * programs // pairs))
    found = [use(splits) for splits in range(1, most + 1)]
    return 1 + next(i for i, value in enumerate(found) if value >= GOOD_WAVES * max(found))
