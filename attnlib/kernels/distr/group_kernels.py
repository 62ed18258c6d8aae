"""DistrAttention before its product, in plain `triton.language`: which columns form a group, and Q and K with
one column for each group.

- `project_columns`: each column times random signs, 16 times: sums of parts of the rows.
- `order_columns`: the signs of these sums are a hash, the hashes are sorted. A Gray code makes neighbors in
  the order differ in one sign.
- `sum_queries`, `gather_keys`: tiles of Q and K times a matrix of 0 and 1: a product with such a matrix is a
  sum or a gather of columns, and exact, since each number is multiplied by 1 and added to zeros.
"""

import triton
import triton.language as tl

from attnlib.kernels.common import distr

PROJECTIONS = tl.constexpr(distr.PROJECTIONS)
CODES = tl.constexpr(1 << distr.PROJECTIONS)


@triton.jit
def _mixed(x):
    """32 bits in which each bit of x, uint32, changes about half of the bits."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _load_rows(x_ptr, o_m, S, x_s, UNIT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows o_m of a head, zeros beyond the last one and beyond column D."""
    o_c = tl.arange(0, WIDTH)  # [WIDTH]
    rows = x_ptr + o_m.to(tl.int64) * (x_s * UNIT)  # [ROWS]
    mask = (o_m < S)[:, None] & (o_c < D)[None, :]
    return tl.load(rows[:, None] + o_c[None, :], mask=mask, other=0.0)  # [ROWS, WIDTH]


@triton.jit(do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "chunks", "chunk_rows", "seed"])
def project_columns(
    x_ptr,  # (B, H, S, D)
    partial_ptr,  # (B, H, chunks, 16, WIDTH) float32
    x_b, x_h, x_s,  # strides of x, in UNITs
    S, H,
    chunks, chunk_rows,  # of a head; rows of each
    seed,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * H * B,)."""
    i_c, i_bh = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    x_ptr += ((i_bh // H).to(tl.int64) * x_b + (i_bh % H).to(tl.int64) * x_h) * UNIT
    o_j = tl.arange(0, PROJECTIONS)  # [16]
    mixed_seed = _mixed(seed.to(tl.uint32))
    b_sums = tl.zeros([PROJECTIONS, WIDTH], tl.float32)
    for start in tl.range(i_c * chunk_rows, tl.minimum((i_c + 1) * chunk_rows, S), ROWS):
        o_m = start + tl.arange(0, ROWS)  # [ROWS]
        word = _mixed(o_m.to(tl.uint32) + mixed_seed)  # [ROWS], a bit for each projection
        odd = (word[None, :] >> o_j.to(tl.uint32)[:, None]) & 1  # [16, ROWS]
        b_x = _load_rows(x_ptr, o_m, S, x_s, UNIT, D, WIDTH)  # [ROWS, WIDTH]
        b_signs = tl.where(odd == 1, 1.0, -1.0).to(b_x.dtype)  # [16, ROWS]
        b_sums = tl.dot(b_signs, b_x, b_sums, input_precision=PRECISION)  # [16, WIDTH]
    place = (tl.program_id(0).to(tl.int64) * PROJECTIONS + o_j)[:, None] * WIDTH  # [16, 1]
    tl.store(partial_ptr + place + tl.arange(0, WIDTH)[None, :], b_sums)


@triton.jit(do_not_specialize=["chunks", "of_block", "blocks"])
def order_columns(
    partial_ptr,  # (B, H, chunks, 16, WIDTH) float32
    places_ptr,  # (B, H, blocks, D) int32
    chunks, of_block,  # of a head; of a block of rows with groups of their own
    blocks,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks * H * B,)."""
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    o_j = tl.arange(0, PROJECTIONS)  # [16]
    o_c = tl.arange(0, WIDTH)  # [WIDTH]
    b_sums = tl.zeros([PROJECTIONS, WIDTH], tl.float32)
    for i in tl.range(i_n * of_block, tl.minimum((i_n + 1) * of_block, chunks), num_stages=4):
        part = (i_bh * chunks + i).to(tl.int64) * (PROJECTIONS * WIDTH)
        b_sums += tl.load(partial_ptr + part + o_j[:, None] * WIDTH + o_c[None, :])  # [16, WIDTH]
    code = tl.sum(tl.where(b_sums > 0.0, 1 << o_j[:, None], 0), 0)  # [WIDTH]
    # Where this code stands among all Gray codes.
    code ^= code >> 1
    code ^= code >> 2
    code ^= code >> 4
    code ^= code >> 8
    # The column goes into the key: no two are equal, so the number of smaller ones is the place in the order.
    key = tl.where(o_c < D, code * WIDTH + o_c, CODES * WIDTH + o_c)  # [WIDTH]
    place = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)  # [WIDTH]
    tl.store(places_ptr + tl.program_id(0).to(tl.int64) * D + o_c, place, mask=o_c < D)


@triton.jit
def _load_places(places_ptr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Of a head's columns, -1 beyond the last one."""
    o_c = tl.arange(0, WIDTH)
    return tl.load(places_ptr + o_c, mask=o_c < D, other=-1)  # [WIDTH]


@triton.jit
def _store_rows(y_ptr, head, o_m, S, b_y, COLUMNS: tl.constexpr):
    rows = y_ptr + (head.to(tl.int64) * S + o_m) * COLUMNS  # [ROWS]
    o_g = tl.arange(0, COLUMNS)
    tl.store(rows[:, None] + o_g[None, :], b_y.to(y_ptr.dtype.element_ty), mask=(o_m < S)[:, None])


@triton.jit(do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "tiles", "blocks", "shared"])
def sum_queries(
    x_ptr,  # (B, H, S, D)
    places_ptr,  # (B, H / PER_KEY_HEAD, blocks, D) int32
    y_ptr,  # (B, H, S, COLUMNS)
    x_b, x_h, x_s,  # strides of x, in UNITs
    S, H,
    tiles,  # of ROWS rows
    blocks, shared,  # how many there are in S, and rows of each
    PER_KEY_HEAD: tl.constexpr,  # query heads that share their groups
    GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Column g of y is the sum of the columns of x in group g. Grid: (tiles * H * B,)."""
    i_m, i_bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    x_ptr += ((i_bh // H).to(tl.int64) * x_b + (i_bh % H).to(tl.int64) * x_h) * UNIT
    places_ptr += ((i_bh // PER_KEY_HEAD) * blocks + i_m * ROWS // shared).to(tl.int64) * D
    o_m = i_m * ROWS + tl.arange(0, ROWS)  # [ROWS]
    b_x = _load_rows(x_ptr, o_m, S, x_s, UNIT, D, WIDTH)  # [ROWS, WIDTH]
    group = _load_places(places_ptr, D, WIDTH) // GROUP  # [WIDTH]
    member = (group[:, None] == tl.arange(0, COLUMNS)[None, :]) & (tl.arange(0, WIDTH) < D)[:, None]
    b_y = tl.dot(b_x, member.to(b_x.dtype), input_precision=PRECISION)  # [ROWS, COLUMNS]
    _store_rows(y_ptr, i_bh, o_m, S, b_y, COLUMNS)


@triton.jit(do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "tiles", "blocks", "shared", "shift"])
def gather_keys(
    x_ptr,  # (B, H / PER_KEY_HEAD, S, D)
    places_ptr,  # (B, H, blocks, D) int32
    y_ptr,  # (B, H * blocks, S, COLUMNS)
    x_b, x_h, x_s,  # strides of x, in UNITs
    S, H,
    tiles,  # of ROWS rows
    blocks, shared,  # of queries that have keys of their own; rows of each
    shift,  # S_k - S_q
    CAUSAL: tl.constexpr,  # keys that no query of a block sees are left out
    PER_KEY_HEAD: tl.constexpr,  # heads of y that share a head of x
    GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Column g of y is the first column of x in group g. Grid: (tiles * H * B,)."""
    i_m, i_bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    x_ptr += ((i_bh // H).to(tl.int64) * x_b + (i_bh % H // PER_KEY_HEAD).to(tl.int64) * x_h) * UNIT
    o_m = i_m * ROWS + tl.arange(0, ROWS)  # [ROWS]
    b_x = _load_rows(x_ptr, o_m, S, x_s, UNIT, D, WIDTH)  # [ROWS, WIDTH]
    first = 0
    if CAUSAL:  # a kernel reads the first tile even for queries that see no key
        if i_m > 0:
            first = tl.maximum(i_m * ROWS - shift, 0) // shared
    for i_n in tl.range(first, blocks):
        head = i_bh * blocks + i_n
        place = _load_places(places_ptr + head.to(tl.int64) * D, D, WIDTH)  # [WIDTH]
        chosen = place[:, None] == (tl.arange(0, COLUMNS) * GROUP)[None, :]  # [WIDTH, COLUMNS]
        b_y = tl.dot(b_x, chosen.to(b_x.dtype), input_precision=PRECISION)  # [ROWS, COLUMNS]
        _store_rows(y_ptr, head, o_m, S, b_y, COLUMNS)
