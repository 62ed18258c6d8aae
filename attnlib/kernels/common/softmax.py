"""What a consumer of the forward Hopper kernel does in registers: mask, maxima, exponentials, sums,
rescaling. Chapter 12 runs it beside the products, chapter 19 measures its parts.

No memory, no barrier, no wait: those are in `forward_kernel`. `plan` is a `plan.ForwardPlan`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import tile_scheduler as tiling

LAZY = gl.constexpr(8)  # weights of a row may grow to 2**LAZY before the output is rescaled


@gluon.jit
def row_max(s):
    """Largest score of each row of a block: [64, BLOCK_N] -> [64]."""
    return gl.max(s, 1)


@gluon.jit
def row_sum(p):
    """[64, N] -> [64, 4]: each of the four threads that share a row sums what it has. The four sums are added
    at the end of the tile, so that no block needs a shuffle."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def mask(s, row, first, seq, work, plan: gl.constexpr):
    """-inf for keys that a row does not see; `row` is the first row, `first` the first key."""
    o_n = gl.arange(0, plan.block_n, layout=gl.SliceLayout(0, plan.s_layout))[None, :]  # [1, BLOCK_N]
    o_m = gl.arange(0, 64, layout=plan.row_layout)  # [64]
    # Bits 1 and 2 of a column are those of the thread, the others are known to the compiler. Taken to the
    # other side of a comparison they leave it with a constant, instead of a register for each column.
    of_thread, o_n = o_n & 6, o_n & -7
    if plan.mask.causal:  # the last key that each row sees [64]
        last = o_m + (tiling.on_diagonal(row, seq, work, plan) - first)
        if plan.mask.shifted:
            last = gl.minimum(last, seq.S_k - 1 - first)
    else:
        last = gl.full([64], seq.S_k - 1 - first, gl.int32, plan.row_layout)
    after = last[:, None] - of_thread  # [64, BLOCK_N], a number for each row of a thread
    if plan.mask.left:
        # Keys before the last one, counted without a sign: those after it are too many, too.
        earlier = last - (o_m + (row + seq.S_k - seq.S_q - work.left - first))  # [64]
        seen = (after - o_n).to(gl.uint32) <= earlier.to(gl.uint32)[:, None]
    else:
        seen = o_n <= after
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def any_in_warp(flag):
    """1 in all rows of a warp where `flag`, [64] or [64, 4], is not 0 in one of them. A thread has two rows:
    pack=2."""
    asm: gl.constexpr = """{
        .reg .pred q;
        setp.ne.b32 q, $2, 0;
        setp.ne.or.b32 q, $3, 0, q;
        vote.sync.any.pred q, q, 0xffffffff;
        selp.b32 $0, 1, 0, q;
        mov.b32 $1, $0;
    }"""
    return gl.inline_asm_elementwise(asm, "=r,=r,r,r", [flag], dtype=gl.int32, is_pure=False, pack=2)


# The expansion for four elements of a thread, _branch_asm(4). $0 to $3 are the results, $4 to $7 the elements
# of acc, $8 to $11 the factors; $12 says whether to multiply.
#
#     { .reg .pred q; setp.ne.b32 q, $12, 0;
#     mov.b32 $0, $4;mov.b32 $1, $5;mov.b32 $2, $6;mov.b32 $3, $7;
#     @!q bra DONE;
#     mul.f32 $0, $0, $8;mul.f32 $1, $1, $9;mul.f32 $2, $2, $10;mul.f32 $3, $3, $11;
#     DONE: }
@gluon.constexpr_function
def _branch_asm(n):
    keep = "".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    scale = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred q; setp.ne.b32 q, ${3 * n}, 0; {keep} @!q bra DONE; {scale} DONE: }}"


@gluon.constexpr_function
def _branch_constraints(n):
    return ",".join(["=f"] * n + ["f"] * (2 * n) + ["r"] * n)


@gluon.jit
def rows_of_o(x, acc):
    """A value per row [64] for each element of the output [64, D]."""
    x, _ = gl.broadcast(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout))[:, None], acc)
    return x


@gluon.jit
def quads_of_o(x, acc):
    """The same for a value for each row and each of the four threads that share it [64, 4]."""
    parts = acc.reshape([64, acc.shape[1] // 8, 4, 2])
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    x = gl.expand_dims(gl.expand_dims(gl.convert_layout(x, layout, assert_trivial=True), 1), 3)
    x, _ = gl.broadcast(x, parts)
    return gl.convert_layout(x.reshape(acc.shape), acc.type.layout, assert_trivial=True)


@gluon.jit
def rescale(acc, alpha, changed):
    """acc * alpha [64, D]; each warp branches around the products where none of its rows changed. alpha and
    changed: [64] or [64, 4]."""
    n: gl.constexpr = acc.shape[1] // 2  # elements of acc in a thread
    if len(alpha.shape) == 1:
        factors, flags = rows_of_o(alpha, acc), rows_of_o(changed, acc)
    else:
        factors, flags = quads_of_o(alpha, acc), quads_of_o(changed, acc)
    return gl.inline_asm_elementwise(
        _branch_asm(n), _branch_constraints(n), [acc, factors, flags], dtype=gl.float32,
        is_pure=False, pack=n,
    )  # fmt: skip


@gluon.jit
def new_shift(
    top, shift, qk_scale, MASKED: gl.constexpr, room: gl.constexpr = LAZY, offset: gl.constexpr = 0
):
    """(new shift [64], alpha = 2**(old - new) [64], whether a row of the warp changed [64]), from the largest
    score of each row of a block, `top` [64].

    The shift is what the exponents are reduced by: P = 2**(s * qk_scale - shift). It is the running row
    maximum of s * qk_scale, less `offset`, -inf before the first key, but follows it only when P would exceed
    2**room. Row sums and O are in the same units, and nothing is lost but a rescaling of O at every little
    step.
    """
    grown = top * qk_scale - shift > room  # [64]; not where both are -inf
    new = gl.where(grown, top * qk_scale - offset, shift)
    changed = any_in_warp(grown.to(gl.int32))
    step = shift - new
    if MASKED:
        step = gl.where(new == float("-inf"), 0.0, step)
    return new, gl.exp2(step), changed


@gluon.jit
def weights(s, shift, qk_scale, MASKED: gl.constexpr, BY_ROW: gl.constexpr = False):
    """P = 2**(s * qk_scale - shift) [64, N]; 0 in a row that has seen no key and has a shift of -inf.
    qk_scale: a number, or BY_ROW [64]."""
    if MASKED:
        shift = gl.where(shift == float("-inf"), 0.0, shift)
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if BY_ROW:
        qk_scale = gl.convert_layout(qk_scale, layout)[:, None]
    return gl.exp2(s * qk_scale - gl.convert_layout(shift, layout)[:, None])


@gluon.jit
def pin(x):
    """x, with a side effect that ptxas can't move: a harmless one (a profiler's event), and only if x is NaN.
    Without it ptxas moves the wait for the tensor cores that follows up, above the work that computes x and
    is to run beside them."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.nan.f32 q, $1, $1; @q pmevent 0; mov.b32 $0, $1; }", "=f,f", [x],
        dtype=gl.float32, is_pure=False, pack=1,
    )


@gluon.jit
def pin_both(x, y):
    """The same of what computes x and y; returns x."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.nan.f32 q, $1, $2; @q pmevent 0; mov.b32 $0, $1; }", "=f,f,f", [x, y],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_sums(sums, weights):
    """[64, 4] and [64, N] -> [64, 4]."""
    return sums + gl.convert_layout(row_sum(weights), sums.type.layout)


@gluon.jit
def halves(x):
    """Left and right half of the columns, without moving anything between threads."""
    N: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([64, 2, N // 2]).permute((0, 2, 1)))


@gluon.jit
def whole(left, right):
    N: gl.constexpr = left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([64, 2 * N])
