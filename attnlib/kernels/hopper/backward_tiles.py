"""What a program of the Hopper backward kernels works on: a block of keys of one head, the sequence that they
belong to, the blocks of queries that see them, and what in a block is hidden. Chapter 21 builds the kernels.
`plan` is a `plan.BackwardPlan`, `WideBackwardPlan` or `Keys96BackwardPlan`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import varlen_tiles
from attnlib.kernels.common.tile_scheduler import VARLEN_ROWS, by_sections

ARMS = gl.constexpr(128)  # branches of a search
HIDDEN = gl.constexpr(1 << 30)  # farther than any query
NOWHERE = gl.constexpr(1 << 30)  # a row beyond all, which copies fill with zeros


class Work(NamedTuple):
    """The problem and its division into tiles; see the kernel's arguments."""

    S_q: gl.tensor
    S_k: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS_KV: gl.tensor
    SECTION: gl.tensor
    LAST: gl.tensor  # None where the last section is like the others
    num_m: gl.tensor
    num_n: gl.tensor
    right: gl.tensor
    left: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    i_b: gl.tensor  # varlen: the sequence of this program
    turns_ptr: gl.tensor = None  # see `turns`
    SHARE: gl.tensor = None  # programs of a block of keys of a key head, where the plan says `shared`
    tiles: gl.tensor = None  # of all programs, where the plan says `persistent`
    counter_ptr: gl.tensor = None  # from which they draw tiles
    first: gl.tensor = None  # tile of this program, see `backward_persistent.drawn_first`
    B: gl.tensor = None  # varlen sequences, where the plan says `persistent`


class Tile(NamedTuple):
    """A block of keys, and the blocks of queries m_start .. m_end - 1 that see one of them. A program begins
    with `m_first`. That is the first one, or, of a `rotated` plan, the one beside its keys, and those before
    it come last. Under a diagonal programs of a head begin at different blocks anyway. Without one, all would
    begin at the same block and go on together: each new block of Q and dO comes from memory, not from the L2,
    while all of them wait for it, and all add to the same block of dQ.

    A program visits GROUP query heads: all that share the keys, or, of a shared plan, every SHARE-th part of
    them. Heads of keys are counted with SHARE copies then.
    """

    head: gl.tensor  # batch * H / GROUP + key head
    start: gl.tensor  # first key
    m_start: gl.tensor
    m_end: gl.tensor
    m_first: gl.tensor
    S_q: gl.tensor
    S_k: gl.tensor
    end_q: gl.tensor  # of the varlen sequence
    end_k: gl.tensor


class Steps(NamedTuple):
    """The steps of a tile in `backward_kernel`. The first three are 0 but in a persistent plan."""

    c: gl.tensor  # steps of the program before
    first: gl.tensor  # buffer of K and of V
    last: gl.tensor  # block of sums of the step before
    block: gl.tensor  # the first block of sums
    gap: gl.tensor  # blocks of sums between two heads
    n: gl.tensor  # steps


@gluon.jit
def owner(block, cu, B, BLOCK: gl.constexpr):
    """The varlen sequence that a block belongs to. Blocks are numbered across all sequences: the first one of
    sequence b is cu[b] // BLOCK + b, far enough from that of b - 1 whatever the lengths are.

    `varlen_rows.sequence_of` has the same search in plain Triton: neither language can call the other's
    functions.
    """
    # Each warp finds it by itself.
    arms = gl.arange(0, ARMS, layout=gl.BlockedLayout([ARMS // 32], [32], [4], [0]))  # [ARMS]
    stride = 1
    while stride * ARMS < B:
        stride *= ARMS
    i_b = 0
    while stride > 0:
        o_b = i_b + stride * arms  # [ARMS]
        first = gl.load(cu + gl.minimum(o_b, B)) // BLOCK + o_b  # [ARMS], from B on past all
        i_b = gl.max(gl.where(first <= block, o_b, 0), 0)
        stride //= ARMS
    return i_b


@gluon.jit
def _key_block(tile, num_n, HEADS_KV, SECTION, LAST, plan: gl.constexpr):
    """(block of keys, head) of a program. The first keys, which causal most queries see, come first, or last;
    see `turn`."""
    i_n, head = by_sections(tile, num_n, HEADS_KV, SECTION, LAST)
    if plan.backwards:
        i_n = num_n - 1 - i_n
    return i_n, head


@gluon.jit
def sequence(tile, cu_k, B, num_n, HEADS_KV, SECTION, LAST, plan: gl.constexpr):
    """The varlen sequence of a program's keys, and whether there are any: each has a block to spare."""
    i_n, _ = _key_block(tile, num_n, HEADS_KV, SECTION, LAST, plan)
    i_b = owner(i_n, cu_k, B, plan.block_n)
    start = gl.load(cu_k + i_b)
    i_n -= start // plan.block_n + i_b
    return i_b, start + i_n * plan.block_n < gl.load(cu_k + i_b + 1)


@gluon.jit
def locate(tile, work, plan: gl.constexpr):
    i_n, head = _key_block(tile, work.num_n, work.HEADS_KV, work.SECTION, work.LAST, plan)
    S_q, S_k, end_q, end_k, m_end = work.S_q, work.S_k, 0, 0, work.num_m
    if plan.varlen:
        i_b = work.i_b
        head += i_b * (work.H // work.GROUP)
        start_k = gl.load(work.cu_k + i_b)
        end_q = gl.load(work.cu_q + i_b + 1)
        end_k = gl.load(work.cu_k + i_b + 1)
        S_q = end_q - gl.load(work.cu_q + i_b)
        S_k = end_k - start_k
        i_n -= start_k // plan.block_n + i_b
        m_end = gl.cdiv(S_q, plan.block_m)
    return _tile(head, i_n * plan.block_n, m_end, S_q, S_k, end_q, end_k, work, plan)


@gluon.jit
def key_blocks(work, plan: gl.constexpr):
    """Blocks of keys of a head, of a persistent plan; of all varlen sequences together."""
    if plan.varlen:
        return varlen_tiles.count_blocks(work.cu_k, work.B, plan.block_n)
    else:
        return work.num_n


@gluon.jit
def find(number, blocks, cursor, work, plan: gl.constexpr):
    """(tile, cursor) of a persistent plan; `blocks` is what `key_blocks` found. The cursor is that of
    `varlen_tiles.find`, (0, 0) at first."""
    if plan.varlen:
        place, i_kv = by_sections(number, blocks, work.HEADS_KV, work.SECTION, work.LAST)
        # The first keys first, as of other tiles.
        i_b, _, i_n, cursor = varlen_tiles.find(place, cursor, work.cu_k, work.B, plan.block_n)
        seq = varlen_tiles.sequence(i_b, work)
        return _varlen_tile(i_b * (work.H // work.GROUP) + i_kv, i_n * plan.block_n, seq, work, plan), cursor
    else:
        return locate(number, work, plan), cursor


@gluon.jit
def varlen_words(tile):
    """What tells a consumer everything of a tile of varlen sequences, as many as `plan.words`; the first one
    is not negative."""
    return tile.head, tile.start, tile.S_q, tile.S_k, tile.end_q, tile.end_k


@gluon.jit
def of_words(words, work, plan: gl.constexpr):
    """The tile of these words."""
    return _varlen_tile(words[0], words[1], varlen_tiles.Sequence(*words[2:]), work, plan)


@gluon.jit
def _varlen_tile(head, start, seq, work, plan: gl.constexpr):
    m_end = gl.cdiv(seq.S_q, plan.block_m)
    return _tile(head, start, m_end, seq.S_q, seq.S_k, seq.end_q, seq.end_k, work, plan)


@gluon.jit
def _tile(head, start, m_end, S_q, S_k, end_q, end_k, work, plan: gl.constexpr):
    """m_end: blocks of queries of a head, of which those that see the keys are the tile's."""
    # Query i stands at i + S_k - S_q among the keys.
    m_start = 0
    if plan.mask.causal:
        before = start + S_q - S_k
        if plan.mask.shifted:
            before -= work.right
        m_start = gl.maximum(before, 0) // plan.block_m
    if plan.mask.left:
        after = start + plan.block_n + S_q - S_k + work.left
        m_end = gl.minimum(m_end, gl.cdiv(gl.maximum(after, 0), plan.block_m))
    if plan.sparse:
        m_start = gl.minimum(m_start, m_end)
    if plan.persistent:
        m_start, m_end = _two_blocks(m_start, m_end, plan)
    m_first = m_start
    if plan.rotated:
        m_first += start // plan.block_m % gl.maximum(m_end - m_start, 1)
    return Tile(head, start, m_start, m_end, m_first, S_q, S_k, end_q, end_k)


@gluon.jit
def _two_blocks(m_start, m_end, plan: gl.constexpr):
    """At least two, of which some may be hidden altogether: a persistent plan has no tile of fewer steps. Of
    a varlen sequence they may lie behind its queries, see `behind_all`."""
    if plan.mask.causal or plan.mask.left or plan.varlen:
        m_start = gl.minimum(m_start, gl.maximum(m_end - 2, 0))
        m_end = gl.maximum(m_end, m_start + 2)
    return m_start, m_end


@gluon.jit
def behind_all(tile, m, plan: gl.constexpr):
    """Whether block m is behind the queries of a varlen sequence, in a persistent plan. Copies fill it with
    zeros, its LSE and delta, too, so that it changes neither dK nor dV, and nobody adds its dQ."""
    if plan.persistent and plan.varlen:
        return m * plan.block_m >= tile.S_q
    else:
        return False


@gluon.jit
def seen(tile, plan: gl.constexpr):
    """Whether a query sees a key of the tile."""
    if plan.sparse:
        return tile.m_start < tile.m_end
    else:
        return True


@gluon.jit
def turn(tile, m, work, plan: gl.constexpr):
    """How many programs add to the sums of block m of queries before this one, which visits it.

    Under a diagonal the last keys come first, as programs do then: each begins at the block of queries at
    which its keys end, where it is the first one, and visits the next block a step after the program before
    it. Without one all begin at the first block, and each is a step behind the one before it.
    """
    place = m * plan.block_m + tile.S_k - tile.S_q  # of the first query among the keys
    if plan.mask.causal:
        last = place - tile.start + plan.block_m - 1  # key that a query sees, from the first one here
        if plan.mask.shifted:
            last += work.right
        return gl.minimum(last, tile.S_k - tile.start - 1) // plan.block_n
    elif plan.mask.left:
        return tile.start // plan.block_n - gl.maximum(place - work.left, 0) // plan.block_n
    else:
        return tile.start // plan.block_n


@gluon.jit
def counted(tile, m, work, plan: gl.constexpr):
    """Whether additions of the tile to block m have a turn. Those to a block of `_two_blocks` that sees none
    of the keys have none: they add 0, which changes no bit."""
    found = m >= 0
    if plan.persistent:
        place = m * plan.block_m + tile.S_k - tile.S_q  # of the first query among the keys
        if plan.mask.causal:
            last = place + plan.block_m - 1
            if plan.mask.shifted:
                last += work.right
            found = found & (last >= tile.start)
        if plan.mask.left:
            found = found & (place - work.left < tile.start + plan.block_n)
    return found


# ---------------------------------------------------------------- places in memory


@gluon.jit
def _split(tile, work):
    """(batch, key head)."""
    heads = work.H // work.GROUP
    return tile.head // heads, tile.head % heads


@gluon.jit
def queries(tile, work, plan: gl.constexpr):
    """Where a descriptor finds the rows of the first head that shares the keys; see `coordinates`."""
    i_b, i_kv = _split(tile, work)
    if plan.varlen:
        return tile.end_q, i_kv * work.GROUP, VARLEN_ROWS - tile.S_q
    else:
        return i_b, i_kv * work.GROUP


@gluon.jit
def keys(tile, work, plan: gl.constexpr):
    """Where a descriptor finds the keys, the values, and, where no other program adds to them, their
    gradients."""
    i_b, i_kv = _split(tile, work)
    if plan.shared:
        i_kv //= work.SHARE
    if plan.varlen:
        return tile.end_k, i_kv, VARLEN_ROWS - tile.S_k
    else:
        return i_b, i_kv


@gluon.jit
def block_after(m, g, tile, plan: gl.constexpr):
    """(m, g) of the block of queries that a producer copies after block m of query head g: of a rotated plan,
    which visits one head, the first one comes after the last one."""
    m += 1
    if m == tile.m_end:
        m = tile.m_start
        g += 0 if plan.rotated else 1
    return m, g


@gluon.jit
def coordinates(at, g, row):
    """Of a row, counted from the beginning of its sequence, `g` heads further."""
    if len(at) == 2:
        return at[0], at[1] + g, row, 0
    else:
        return VARLEN_ROWS, at[0], at[1] + g, at[2] + row, 0


@gluon.jit
def _first_rows(i_b, tile, plan: gl.constexpr):
    """The first block of rows of a varlen sequence where each has blocks of its own."""
    return (tile.end_q - tile.S_q) // plan.block_m + i_b


@gluon.jit
def rows(tile, which, g, m, work, plan: gl.constexpr):
    """Where a descriptor finds LSE2 or delta of a block of queries."""
    i_b, i_kv = _split(tile, work)
    if plan.varlen:
        row = (_first_rows(i_b, tile, plan) + m) * plan.block_m
        if plan.persistent:
            row = gl.where(behind_all(tile, m, plan), NOWHERE, row)
        return which, i_kv * work.GROUP + g, row
    else:
        return which, i_b * work.H + i_kv * work.GROUP + g, m * plan.block_m


@gluon.jit
def first_sums(tile, work, plan: gl.constexpr):
    """The block of sums of dQ, over all heads, that the first block of queries adds to; varlen as in
    `varlen_rows.first_sums`."""
    i_b, i_kv = _split(tile, work)
    if plan.varlen:
        num_m = gl.cdiv(tile.S_q, plan.block_m)
        return _first_rows(i_b, tile, plan) * work.H + i_kv * work.GROUP * num_m + tile.m_first
    else:
        return (i_b * work.H + i_kv * work.GROUP) * work.num_m + tile.m_first


@gluon.jit
def key_sums(ptr, WG: gl.constexpr, tile, work, plan: gl.constexpr):
    """Where the sums of dK and then dV of 64 keys are, of a plan with `few` of 96, which `WG` of 64 keys are
    before: those of the key head, or where programs do not add up, of their own."""
    rows: gl.constexpr = plan.block_n if plan.few else 64
    i_b, head = _split(tile, work)
    heads = work.H // work.GROUP
    if plan.added:
        head //= work.SHARE
        heads //= work.SHARE
    if plan.varlen:  # as those of dQ, see `varlen_rows.first_sums`
        first = (tile.end_k - tile.S_k) // plan.block_n + i_b
        block = first * heads + head * gl.cdiv(tile.S_k, plan.block_n)
    else:
        block = (i_b * heads + head) * work.num_n
    block = block * (plan.block_n // rows) + tile.start // rows + WG
    return ptr + block.to(gl.int64) * (rows * plan.sums_width)


@gluon.jit
def gap(tile, work, plan: gl.constexpr):
    """Blocks of sums between the last one of a head and the first one that is visited then, of the next head
    or, of a rotated plan, of the same one."""
    if plan.rotated:
        return tile.m_start - tile.m_end
    num_m = gl.cdiv(tile.S_q, plan.block_m) if plan.varlen else work.num_m
    return num_m - (tile.m_end - tile.m_start)


# ---------------------------------------------------------------- what is hidden


@gluon.jit
def visible(p, row, m, tile, work, plan: gl.constexpr, WHOLE: gl.constexpr = False):
    """P^T [64, BLOCK_M] of the keys from `row` on and the queries of block m, 0 where a query does not see a
    key; of a plan with an early mask its logarithm, -inf there. WHOLE: the keys all exist."""
    if plan.mask.causal or plan.mask.left:
        first = row - tile.S_k + tile.S_q - m * plan.block_m  # the first key's place among these queries
        last = first
        if plan.mask.shifted:
            first -= work.right  # the query that it is the last key of
        hides = first > -64
        if plan.mask.left:
            last += work.left  # the query that it is the first key of
            if plan.mask.causal:
                hides = hides | (last < plan.block_m - 1)
            else:
                hides = last < plan.block_m - 1
        if plan.mask.tail:
            hides = hides | (row + 64 > tile.S_k)
        if hides:
            p = _mask(p, first, last, tile.S_k - row, plan)
    elif plan.mask.tail and not WHOLE:
        if row + 64 > tile.S_k:
            p = _mask(p, 0, 0, tile.S_k - row, plan)
    return p


@gluon.jit
def _mask(p, first, last, keys_left, plan: gl.constexpr):
    o_k = gl.arange(0, 64, layout=gl.SliceLayout(1, plan.s_layout))  # [64]
    o_q = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, plan.s_layout))  # [BLOCK_M]
    # A thread has columns 8 i, 8 i + 1 plus one of 0, 2, 4, 6: taken to the left, the rest is constants.
    if plan.mask.causal:
        place = o_k + first  # [64] the first query that sees each key
        if plan.mask.tail:
            place = gl.where(o_k < keys_left, place, HIDDEN)
        place = place[:, None] - (o_q & 6)[None, :]  # [64, BLOCK_M]
        if plan.mask.left:
            # Counted without a sign, queries before the first one are too far, too.
            after = ((o_q & ~6)[None, :] - place).to(gl.uint32)  # [64, BLOCK_M]
            seen = after <= (last - first).to(gl.uint32)
        else:
            seen = place <= (o_q & ~6)[None, :]
    elif plan.mask.left:
        place = o_k + last  # [64] the last query that sees each key
        if plan.mask.tail:
            place = gl.where(o_k < keys_left, place, -HIDDEN)
        seen = place[:, None] - (o_q & 6)[None, :] >= (o_q & ~6)[None, :]
    else:
        seen = (o_k < keys_left)[:, None]  # [64, 1]
    return _seen_only(p, seen, plan)


@gluon.jit
def visible_keys(p, key, m, tile, work, plan: gl.constexpr):
    """The same where keys are columns: P [BLOCK_M, N] of the queries of block m and keys from `key` on."""
    N: gl.constexpr = p.shape[1]
    keys_left = tile.S_k - key
    if plan.mask.causal or plan.mask.left:
        first = m * plan.block_m + tile.S_k - tile.S_q - key  # the first query's place among these keys
        last = first
        hides = False
        if plan.mask.causal:
            if plan.mask.shifted:
                last += work.right  # the last key that it sees
            hides = last < N - 1
        if plan.mask.left:
            first -= work.left  # the first one
            hides = hides | (first > 1 - plan.block_m)
        if plan.mask.tail:
            hides = hides | (keys_left < N)
        if hides:
            p = _mask_keys(p, first, last, keys_left, plan)
    elif plan.mask.tail:
        if keys_left < N:
            p = _mask_keys(p, 0, 0, keys_left, plan)
    return p


@gluon.jit
def _mask_keys(p, first, last, keys_left, plan: gl.constexpr):
    o_q = gl.arange(0, plan.block_m, layout=gl.SliceLayout(1, p.type.layout))  # [BLOCK_M]
    o_k = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, p.type.layout))  # [N]
    # As in `_mask`: what differs between the threads of a row is taken to the left, the rest is constants.
    place, column = (o_k & 6)[None, :], (o_k & ~6)[None, :]  # [1, N]
    if plan.mask.causal:
        end = o_q + last  # [BLOCK_M] the last key that each query sees
        if plan.mask.tail:
            end = gl.minimum(end, keys_left - 1)
        seen = column <= end[:, None] - place  # [BLOCK_M, N]
        if plan.mask.left:
            seen = seen & (column >= (o_q + first)[:, None] - place)
    elif plan.mask.left:
        seen = column >= (o_q + first)[:, None] - place
        if plan.mask.tail:
            seen = seen & (column < keys_left - place)
    else:
        seen = column < keys_left - place  # [1, N]
    return _seen_only(p, seen, plan)


@gluon.jit
def _seen_only(p, seen, plan: gl.constexpr):
    return gl.where(seen, p, float("-inf") if plan.early_mask else 0.0)
