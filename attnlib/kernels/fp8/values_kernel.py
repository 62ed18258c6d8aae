"""Values centered and quantized in one launch, which reads them from memory once: what `mean_kernels` and
`quantize_kernels.quantize_values` do in three launches that read them twice. In plain `triton.language`.

A head's mean and largest magnitude are known when all of it has been read, and then it is read again. Heads
are small beside L2, so that the second reading finds there what the first one brought, if it follows soon.
So the tasks of a head stand in a queue, one head after the other:

    stage t:  the sums of parts of head t;  then the quantizing of blocks of head t - ahead

A program draws the number of its task. The last one to finish a sum of a head joins all of them, in their
order, and says that mean and scale are there; who quantizes waits for that. `ahead` is such that the wait is
over before it begins, as a rule.

Nobody waits in vain: a task waits for tasks of smaller numbers, all of which were drawn by programs that run
already, and those that are waited for do not wait themselves.

`state` holds the number of tasks drawn and, for each head, how many of its parts are summed, one more when
these are joined, and one more for each task that has quantized. The last of a head sets its number back to 0,
and who draws the last task the first.
"""

import triton
import triton.language as tl

from attnlib.kernels.fp8.mean_kernels import joined, sum_part
from attnlib.kernels.fp8.quantize_kernels import CHUNK, GROUP, quantize_blocks, scale_of


@triton.jit
def _known(state, head, parts):
    """Wait for a head's mean and scale."""
    while tl.atomic_add(state + 1 + head, 0, sem="acquire") <= parts:
        pass


@triton.jit(
    do_not_specialize=[
        "x_b", "x_h", "x_s", "S", "H", "heads", "parts", "span", "blocks", "each", "ahead", "groups",
    ]
)  # fmt: skip
def center_values(
    x_ptr,  # (B, H, S, D)
    data_ptr,  # (B, H, WIDTH, groups * GROUP), contiguous
    scale_ptr, amax_ptr,  # (B, H)
    mean_ptr,  # (B, H, WIDTH)
    parts_ptr,  # (B, H, parts, 3, WIDTH)
    state,  # (1 + B * H) int32, 0 before and after a launch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S, H,
    heads,  # B * H
    parts, span,  # parts of a head that are summed; their blocks of SUMMED rows
    blocks, each,  # blocks of ROWS rows; how many of them a task quantizes, CHUNK columns each
    ahead,  # stages
    groups,  # of keys in data_ptr
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SUMMED: tl.constexpr, TALL: tl.constexpr,  # ROWS and TALL of `sum_part`
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A task. Grid: ((heads + ahead) * (parts + quantizing),)."""
    chunks: tl.constexpr = WIDTH // CHUNK
    quantizing = tl.cdiv(blocks, each) * chunks
    number = tl.atomic_add(state, 1, sem="relaxed")
    if number == tl.num_programs(0) - 1:
        tl.store(state, 0)  # for the next launch
    stage, task = number // (parts + quantizing), number % (parts + quantizing)
    head = tl.where(task < parts, stage, stage - ahead)
    if (head >= 0) & (head < heads):
        i_b, i_h, first = head // H, head % H, head.to(tl.int64) * parts
        x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
        if task < parts:
            sum_part(x_ptr, parts_ptr, first, task, x_s, S, span, D, WIDTH, SUMMED, TALL, UNIT)
            tl.debug_barrier()  # all of this program's stores, then the one that says so
            if tl.atomic_add(state + 1 + head, 1, sem="acq_rel") == parts - 1:
                o_c = tl.arange(0, WIDTH)  # [WIDTH]
                mean, left = joined(parts_ptr, first, parts, o_c, WIDTH, WIDTH, STEP)  # [WIDTH]
                tl.store(mean_ptr + head.to(tl.int64) * WIDTH + o_c, mean)
                amax = tl.maximum(tl.max(left, 0), 0.0)
                scale, _ = scale_of(amax, 1.0)
                tl.store(amax_ptr + head, amax)
                tl.store(scale_ptr + head, scale)
                tl.debug_barrier()
                tl.atomic_add(state + 1 + head, 1, sem="release")
        else:
            _known(state, head, parts)
            place = task - parts
            o_c = place % chunks * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
            _, factor = scale_of(tl.load(amax_ptr + head), 1.0)
            mean = tl.load(mean_ptr + head.to(tl.int64) * WIDTH + o_c)  # [CHUNK]
            columns = data_ptr + (head.to(tl.int64) * WIDTH + o_c) * (groups.to(tl.int64) * GROUP)  # [CHUNK]
            begin = place // chunks * each
            quantize_blocks(
                x_ptr, columns, mean, factor, begin, tl.minimum(begin + each, blocks), S, groups, x_s, o_c,
                D, WIDTH, ROWS, UNIT, INTERPRETED,
            )  # fmt: skip
            if tl.atomic_add(state + 1 + head, 1, sem="relaxed") == parts + quantizing:
                tl.store(state + 1 + head, 0)  # for the next launch
