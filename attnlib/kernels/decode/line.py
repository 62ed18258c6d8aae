"""Which tiles of keys there are, and who has them: the line of the tiles of all pairs, for `decode_kernels`.

Programs look at AT_ONCE sequences together. Where FEW are all, each warp does so by itself, without a loop
and without a barrier: it has to be done before a program can load its first keys.
"""

import triton
import triton.language as tl

from attnlib.kernels.decode import configs

FEW = tl.constexpr(configs.FEW)


@triton.jit
def span(lengths, starts, o_b, inside, S):
    """(keys of a sequence, or of several, the first one that counts): at most what the cache has room for."""
    if lengths is None:
        length = S + o_b * 0
    else:
        length = tl.minimum(tl.maximum(tl.load(lengths + o_b, mask=inside, other=0), 0), S)
    if starts is None:
        start = o_b * 0
    else:
        start = tl.minimum(tl.maximum(tl.load(starts + o_b, mask=inside, other=0), 0), S)
    return length, start


@triton.jit
def tiles_of(length, start, left, S_Q: tl.constexpr, BLOCK_N: tl.constexpr, IDLE: tl.constexpr):
    """(the first tile in sight, how many there are): at least one, so that a program writes each row; and
    IDLE more at the end. These have no keys and cost nothing; they stand for the time that beginning a pair
    takes when shares are made."""
    first = (tl.maximum(start, length - S_Q - left) if left is not None else start) // BLOCK_N
    return first, tl.maximum(tl.cdiv(length, BLOCK_N) - first, 1) + IDLE


@triton.jit
def tiles_before(
    i_b, lengths, starts, B, S, left, S_Q: tl.constexpr, BLOCK_N: tl.constexpr, IDLE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """(tiles of the sequences before i_b, tiles of all, most of one), of one head."""
    if lengths is None and starts is None:
        _, tiles = tiles_of(S, 0, left, S_Q, BLOCK_N, IDLE)
        return i_b * tiles, B * tiles, tiles
    else:
        before, total, longest = 0, 0, 0
        for begin in tl.range(0, FEW if AT_ONCE == FEW else B, AT_ONCE):
            o_b = begin + tl.arange(0, AT_ONCE)  # [AT_ONCE]
            length, start = span(lengths, starts, o_b, o_b < B, S)  # [AT_ONCE]
            _, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)  # [AT_ONCE]
            tiles = tl.where(o_b < B, tiles, 0)
            before += tl.sum(tl.where(o_b < i_b, tiles, 0), 0)
            total += tl.sum(tiles, 0)
            longest = tl.maximum(longest, tl.max(tiles, 0))
        return before, total, longest


@triton.jit
def sequence_at(
    tile, pairs, lengths, starts, B, S, left, S_Q: tl.constexpr, BLOCK_N: tl.constexpr, IDLE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """(the sequence that has this tile of the line, tiles of one head before it). `pairs` of a sequence."""
    if lengths is None and starts is None:
        _, tiles = tiles_of(S, 0, left, S_Q, BLOCK_N, IDLE)
        i_b = tile // (tiles * pairs)
        return i_b, i_b * tiles
    else:
        i_b, before, counted = 0, 0, 0
        for begin in tl.range(0, FEW if AT_ONCE == FEW else B, AT_ONCE):
            o_b = begin + tl.arange(0, AT_ONCE)  # [AT_ONCE]
            length, start = span(lengths, starts, o_b, o_b < B, S)  # [AT_ONCE]
            _, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)  # [AT_ONCE]
            first = counted + tl.cumsum(tiles, 0) - tiles  # [AT_ONCE]
            begun = (o_b < B) & (first * pairs <= tile)
            i_b = tl.maximum(i_b, tl.max(tl.where(begun, o_b, 0), 0))
            before = tl.maximum(before, tl.max(tl.where(begun, first, 0), 0))
            counted += tl.sum(tiles, 0)
        return i_b, before


@triton.jit
def are_whole(longest, total, WHOLE: tl.constexpr):
    """Whether no pair is split, and program i takes all of pair i: WHOLE pairs like the longest would have no
    more tiles than all pairs have. Then programs are busy for most of the time that the longest takes, and a
    split would gain less than a merge costs. `configs.fewest_whole` says how many WHOLE is."""
    return total // WHOLE >= longest


@triton.jit
def share_of(program, total, programs):
    """The first tile of a program's share of the line: the first `total % programs` have one more."""
    return program * (total // programs) + tl.minimum(program, total % programs)


@triton.jit
def owner_of(tile, total, programs):
    """The program that has a tile of the line: the inverse of `share_of`. Those without a tile come last."""
    fewer, longer = total // programs, total % programs
    ahead = longer * (fewer + 1)  # tiles of the programs that have one more
    return tl.where(tile < ahead, tile // (fewer + 1), longer + (tile - ahead) // tl.maximum(fewer, 1))


@triton.jit
def parts_of(pair, begin, tiles, total, shares, STREAM_K: tl.constexpr):
    """(slot of a pair's first partial result, how many it has). `begin`: its first tile in the line.

    With stream-K a program has two slots: one for a pair that it does not begin, which it has at most once,
    and one for a pair that it begins and does not end.
    """
    if STREAM_K:
        first = owner_of(begin, total, shares)
        return 2 * first + 1, owner_of(begin + tiles - 1, total, shares) - first + 1
    else:
        return pair * shares, tl.cdiv(tiles, tl.cdiv(tiles, shares))


