"""What a tile of the forward Hopper kernel is: its rows and head, the sequence that these belong to, the
blocks of keys that they see, and where descriptors find them. Chapter 13 teaches it. `plan` is a
`plan.ForwardPlan`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import signature

VARLEN_ROWS = gl.constexpr(signature.VARLEN_ROWS)


class Scales(NamedTuple):
    """Of e4m3 operands: pointers, and strides of a batch, a head, a block of rows or keys."""

    q: gl.tensor
    q_b: gl.tensor
    q_h: gl.tensor
    q_n: gl.tensor
    k: gl.tensor
    k_b: gl.tensor
    k_h: gl.tensor
    k_n: gl.tensor
    v: gl.tensor
    v_b: gl.tensor
    v_h: gl.tensor
    mean: gl.tensor  # of V
    mean_b: gl.tensor  # heads of a batch


class Work(NamedTuple):
    """The problem and its division into tiles; see the kernel's arguments."""

    S_q: gl.tensor
    S_k: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS: gl.tensor
    SECTION: gl.tensor
    num_m: gl.tensor
    tiles: gl.tensor
    right: gl.tensor
    left: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    T_q: gl.tensor
    B: gl.tensor
    scales: Scales
    shared_rows: gl.tensor = None
    key_blocks: gl.tensor = None
    maxima: gl.tensor = None


class Sequence(NamedTuple):
    """What a tile belongs to: its lengths, and where its rows and keys end if it is varlen."""

    S_q: gl.tensor
    S_k: gl.tensor
    end_q: gl.tensor
    end_k: gl.tensor


@gluon.jit
def divide(n, d):
    """(n // d, n % d), neither of them negative: a division without a sign is shorter."""
    quotient = (n.to(gl.uint32) // d.to(gl.uint32)).to(gl.int32)
    return quotient, n - quotient * d


@gluon.jit
def on_diagonal(i, seq, work, plan: gl.constexpr):
    """The key at which the diagonal ends the keys of query i."""
    place = i + seq.S_k - seq.S_q
    if plan.mask.shifted:
        place += work.right
    return place


@gluon.jit
def sequence(i_b, work, plan: gl.constexpr):
    """The sequence of a batch, or the varlen one of this number."""
    if plan.varlen:
        end_q = gl.load(work.cu_q + i_b + 1)
        end_k = gl.load(work.cu_k + i_b + 1)
        S_q = end_q - gl.load(work.cu_q + i_b)
        S_k = end_k - gl.load(work.cu_k + i_b)
        return Sequence(S_q, S_k, end_q, end_k)
    else:
        return Sequence(work.S_q, work.S_k, 0, 0)


@gluon.jit
def top(end, seq, work, plan: gl.constexpr):
    """Blocks up to the last one that the rows before `end` see; one, all masked, where they see none."""
    visible = seq.S_k
    if plan.mask.causal:
        visible = gl.minimum(gl.maximum(on_diagonal(end, seq, work, plan), 0), seq.S_k)
    return gl.maximum(gl.cdiv(visible, plan.block_n), 1)


@gluon.jit
def by_sections(number, blocks, HEADS, SECTION):
    """(block, head) of a number: section of heads by section, so that what they share stays in L2, and within
    one the first block of each, then the second."""
    section, rest = divide(number, blocks * SECTION)
    heads = gl.minimum(SECTION, HEADS - section * SECTION)
    block, head = divide(rest, heads)
    return block, section * SECTION + head


@gluon.jit
def _place(number, num_m, HEADS, SECTION):
    """(row block, head) of what is drawn: the last, longest rows first."""
    block, head = by_sections(number, num_m, HEADS, SECTION)
    return num_m - 1 - block, head


@gluon.jit
def lanes():
    """[32], the producer's."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def draw(counter_ptr):
    """Start to draw a number from the counter; `drawn` waits for it."""
    lane = lanes()
    return gl.atomic_add(counter_ptr + lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def drawn(asked, counter_ptr, end, producers: gl.constexpr):
    """The number of a tile, of `end`; `producers` of a program draw. The first tile of each is its own
    number, the drawn ones follow, and the last draw of each finds no tile: so there are as many draws as
    tiles, and the last one sets the counter back to 0."""
    number = gl.max(gl.where(lanes() == 0, asked, 0), 0)
    if number == end - 1:
        gl.store(counter_ptr, 0)
    return number + producers * gl.num_programs(0)


@gluon.jit
def _row_blocks(group, work, plan: gl.constexpr):
    """How many row blocks 32 varlen sequences have [32]: groups and lanes count from the last sequence on."""
    i_b = work.B - 1 - 32 * group - lanes()
    at = work.cu_q + gl.maximum(i_b, 0)
    rows = gl.load(at + 1) - gl.load(at)
    return gl.where(i_b >= 0, (rows + (plan.block_m - 1)) // plan.block_m, 0)


@gluon.jit
def row_blocks(work, plan: gl.constexpr):
    """Row blocks of a head, in all varlen sequences together."""
    if plan.varlen:
        blocks = 0
        for group in range(gl.cdiv(work.B, 32)):
            blocks += gl.sum(_row_blocks(group, work, plan), 0)
        return blocks
    else:
        return work.num_m


@gluon.jit
def tiles(blocks, work, plan: gl.constexpr):
    """How many there are; `blocks` is what `row_blocks` found."""
    return blocks * work.H if plan.varlen else work.tiles


@gluon.jit
def locate(number, blocks, cursor, work, plan: gl.constexpr):
    """(first row, batch or varlen sequence, query head, blocks of keys up to the last one in sight, cursor)
    of a tile. The cursor is where the next one is looked for: a group of sequences, and how many row blocks
    there are before it; (0, 0) at first. The numbers that a program draws grow, so it goes on from where it
    was, but for a new section of heads."""
    number = gl.maximum(gl.minimum(number, tiles(blocks, work, plan) - 1), 0)  # none left: any
    if plan.varlen:
        place, i_h = by_sections(number, gl.maximum(blocks, 1), work.H, work.SECTION)
        group, before = cursor
        group, before = gl.where(place < before, 0, group), gl.where(place < before, 0, before)
        own = _row_blocks(group, work, plan)
        inside = gl.sum(own, 0)
        while (before + inside <= place) & (32 * group + 32 < work.B):
            before += inside
            group += 1
            own = _row_blocks(group, work, plan)
            inside = gl.sum(own, 0)
        lane = 0  # by bisection: the last one before which there are no more than `place` blocks
        for i in gl.static_range(5):
            half = lane + (16 >> i)
            lane = gl.where(before + gl.sum(gl.where(lanes() < half, own, 0), 0) <= place, half, lane)
        # The last rows first, as within `_place`.
        last = before + gl.sum(gl.where(lanes() <= lane, own, 0), 0) - 1
        row, i_b = (last - place) * plan.block_m, work.B - 1 - 32 * group - lane
        cursor = group, before
    else:
        i_m, i_bh = _place(number, blocks, work.HEADS, work.SECTION)
        i_b, i_h = divide(i_bh, work.H)
        row = i_m * plan.block_m
    return row, i_b, i_h, top(row + plan.block_m, sequence(i_b, work, plan), work, plan), cursor


@gluon.jit
def first_block(row, seq, work, plan: gl.constexpr):
    """The first block that a row of the tile from `row` on sees."""
    if plan.mask.left:
        return gl.maximum(row + seq.S_k - seq.S_q - work.left, 0) // plan.block_n
    else:
        return 0


@gluon.jit
def of_keys(row, i_b, i_h, work, plan: gl.constexpr):
    """Where a descriptor finds the keys of the tile from `row` on of a query head; see `coordinates`."""
    i_kv, _ = divide(i_h, work.GROUP)
    if plan.own_keys:
        i_own, _ = divide(row, work.shared_rows)
        return i_b, i_kv, i_h * work.key_blocks + i_own, 0
    elif plan.varlen:
        seq = sequence(i_b, work, plan)
        at = seq.end_k, i_kv, VARLEN_ROWS - seq.S_k
        if plan.fp8:  # and of V^T, whose sequences begin at multiples of 16
            groups = gl.cdiv(seq.S_k, 16)
            at = at + ((seq.end_k - seq.S_k) // 16 + i_b + groups, VARLEN_ROWS - 16 * groups)
        return at
    else:
        return i_b, i_kv


@gluon.jit
def of_queries(i_b, i_h, seq, plan: gl.constexpr):
    """Where a descriptor finds the rows of a head, or its output."""
    if plan.varlen:
        return seq.end_q, i_h, VARLEN_ROWS - seq.S_q
    else:
        return i_b, i_h


@gluon.jit
def coordinates(at, row, column):
    """Of a row, which is counted from the beginning of its sequence."""
    if len(at) == 2:
        return at[0], at[1], row, column
    else:
        return VARLEN_ROWS, at[0], at[1], at[2] + row, column


@gluon.jit
def of_key(at, key, plan: gl.constexpr):
    """The coordinates of the keys from `key` on."""
    if plan.own_keys:
        return at[0], at[2], key, 0
    else:
        return coordinates(at, key, 0)


@gluon.jit
def of_values(at, key, plan: gl.constexpr):
    """The coordinates of the values from `key` on: of their row, or of their column where V is transposed."""
    if plan.own_keys:
        return at[0], at[1], key, 0
    elif not plan.fp8:
        return coordinates(at, key, 0)
    elif len(at) == 2:
        return at[0], at[1], 0, key
    else:
        return VARLEN_ROWS // 16, at[3], at[1], 0, at[4] + key


@gluon.jit
def of_mean(i_b, i_h, work):
    """The head, among those of all batches or varlen sequences, whose mean the output of a tile gets."""
    i_kv, _ = divide(i_h, work.GROUP)
    return i_b * work.scales.mean_b + i_kv


@gluon.jit
def of_scales(row, i_b, i_h, work, plan: gl.constexpr):
    """Where the scales of a tile are: of Q for its first row, of K for the first key, of V."""
    i_kv, _ = divide(i_h, work.GROUP)
    s = work.scales
    if plan.varlen:
        first_q = (gl.load(work.cu_q + i_b) // 64 + i_b + row // 64) * s.q_n
        first_k = (gl.load(work.cu_k + i_b) // 128 + i_b) * s.k_n
        return i_h * s.q_h + first_q, i_kv * s.k_h + first_k, i_kv * s.v_h
    else:
        return (
            i_b * s.q_b + i_h * s.q_h + (row // 64) * s.q_n,
            i_b * s.k_b + i_kv * s.k_h,
            i_b * s.v_b + i_kv * s.v_h,
        )
