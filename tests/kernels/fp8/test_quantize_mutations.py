"""The checks catch planted bugs: each edit of the quantizing kernels' source fails a case of
test_quantize."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from families import fresh_launches  # noqa: F401  (a fixture)
from fp8_cases import CASES, check_quantize
from mutations import Mutation, check_places, load

from attnlib.kernels.fp8 import mean_kernels, quantize_kernels

pytestmark = INTERPRETER_REMARKS

KERNELS = {
    quantize_kernels: ("quantize_amax", "quantize_rows", "quantize_values"),
    mean_kernels: ("sum_values", "join_parts"),
}
ROTATED, PLAIN = "q B2 S150 H2 D64 block rotated float16", "q B2 S150 H2 D64 block float16"
HEAD, VALUES = "k B2 S150 H2 D64 head rotated float16", "v B2 S150 H2 D64 block rotated float16"
VARLEN_Q, VARLEN_V = (f"{role} varlen (15, 0, 2, 133, 0, 129) H2 D64 block rotated float16" for role in "qv")
WIDE = "k B1 S130 H2 D256 block rotated float16"
LONG, LONG_VALUES = (f"{role} B1 S{n} H1 D64 block rotated float16" for role, n in (("q", 4160), ("v", 4100)))
LONG_PLAIN = f"{LONG_VALUES} not centered"
WIDE_VALUES = "v B2 S16 H2 D256 block rotated float16"
INFINITE = f"{VALUES} infinite"
MEAN, MEAN_VARLEN = f"{VALUES} mean 100", f"{VARLEN_V.replace('block', 'tensor')} mean 9"
DATA, SCALE, EITHER = "data", "scale", "data|scale"
PLACE = "(i_b * H + i_h).to(tl.int64) * WIDTH"

MUTATIONS = [
    Mutation("the signs are left out", "odd ^= (word >>", "odd ^= 0 * (word >>", ROTATED, EITHER),
    Mutation("a bit is left out of the parity", "odd ^= odd >> 4", "odd ^= odd >> 6", ROTATED, EITHER),
    Mutation("chunks are combined in another order", "chunks = (a + c, b + d, a - c, b - d)",
             "chunks = (a + c, a - c, b + d, b - d)", WIDE, DATA),
    Mutation("sqrt(width) is left out of the scale", "used * (NORM / LARGEST)", "used / LARGEST", ROTATED,
             SCALE),
    Mutation("the last columns are cut off", "b_max = tl.maximum(b_max, tl.abs(chunks[i]))",
             "b_max = tl.abs(chunks[i])", WIDE, EITHER),
    Mutation("negative numbers have no magnitude", "tl.abs(chunks[i])", "chunks[i]", PLAIN, EITHER),
    Mutation("the scale is that of the block before", "tl.store(scale_ptr + of_scale + i_n, scale)",
             "tl.store(scale_ptr + of_scale + tl.maximum(i_n - 1, 0), scale)", PLAIN, SCALE),
    Mutation("heads share a scale", "tl.atomic_max(amax_ptr + (i_b * H + i_h if",
             "tl.atomic_max(amax_ptr + (i_b * H if", HEAD, EITHER),
    Mutation("values lose a bit", "* 12582912.0", "* 25165824.0", PLAIN, DATA),
    Mutation("small numbers are rounded like large ones", "tl.maximum(bits & 0x7F800000, 0x3C800000)",
             "(bits & 0x7F800000)", "q B2 S150 H2 D40 block bfloat16", DATA),
    Mutation("keys are not permuted", "position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2",
             "position % GROUP", VALUES, DATA),
    Mutation("halves of a group are swapped with pairs", "position // 2 % 2 * 8 + position // 4 % 4 * 2",
             "position // 8 % 2 * 8 + position // 2 % 4 * 2", VALUES, DATA),
    Mutation("values past the end are not zero", "seen = (o_n < length - i_n * ROWS)[:, None]",
             "seen = (o_n < length + 1 - i_n * ROWS)[:, None]", f"{VARLEN_V} not centered", DATA),
    Mutation("a sequence's positions begin too early", "before = start // GROUP + i_b",
             "before = start // GROUP + i_b - (i_b > 3)", VARLEN_V, DATA),
    Mutation("what is between two sequences is not written", "groups = end_x // GROUP + i_b + 1 - before",
             "groups = tl.cdiv(length, GROUP)", VARLEN_V, DATA),
    Mutation("a sequence's blocks begin at its tokens' block", "before = start // ROWS + i_b",
             "before = start // ROWS", VARLEN_Q, EITHER),
    Mutation("varlen tokens of other heads", "of_data, stride = start.to(tl.int64) * H + i_h, H * WIDTH",
             "of_data, stride = start.to(tl.int64) * H, H * WIDTH", VARLEN_Q, DATA),
    Mutation("a program takes only its first block", "tl.minimum(i_n + span, blocks)",
             "tl.minimum(i_n + 1, blocks)", LONG, EITHER),
    Mutation("the maximum of a program's last block", "b_max = _maximum(b_max, _load_rows(",
             "b_max = _maximum(b_max * 0, _load_rows(", LONG_PLAIN, EITHER),
    Mutation("columns past the head dimension are read", "if first + CHUNK <= D else", "if True else",
             "q B2 S150 H2 D40 block rotated float16", EITHER),
    Mutation("the mean is not subtracted", "b_x -= mean[None, :]", "b_x -= 0 * mean[None, :]", MEAN,
             DATA),
    Mutation("the mean is subtracted past the end", "if (i_n + 1) * ROWS > length:", "if i_n < 0:", MEAN,
             DATA),
    Mutation("columns of the first program", "o_c = _backwards() % chunks * CHUNK", "o_c = 0 * CHUNK",
             WIDE_VALUES, DATA),
    Mutation("a block of values begins where the one before did", "x_s.to(tl.int64) * UNIT * (i_n *",
             "x_s.to(tl.int64) * UNIT * (tl.maximum(i_n - 1, 0) *", VALUES, DATA),
    Mutation("programs from the last one on, but one", "tl.num_programs(0) - 1 - tl.program_id(0)",
             "tl.maximum(tl.num_programs(0) - 2 - tl.program_id(0), 0)", LONG_VALUES, EITHER),
    Mutation("the mean of the first sequence", PLACE, PLACE.replace("i_b", "0 * i_b"), MEAN_VARLEN, DATA),
    Mutation("the mean of the first head", PLACE, PLACE.replace(" + i_h", ""), MEAN, DATA),
    Mutation("the largest magnitude with the mean", "tl.maximum(most - mean, mean - least)",
             "tl.maximum(most, -least)", MEAN, EITHER, (), mean_kernels),
    Mutation("keys past the end have a share", "share = 1.0 / length", "share = 1.0 / S", MEAN_VARLEN, "mean",
             (), mean_kernels),
    Mutation("a part is its first block", "tl.range(i_n, whole, count)", "tl.range(i_n, whole, 2 * count)",
             LONG_VALUES, "mean", (), mean_kernels),
    Mutation("a tile of a block is left out", "for n in tl.static_range(ROWS // TALL)",
             "for n in tl.static_range(ROWS // TALL - 1)", MEAN, "mean", (), mean_kernels),
    Mutation("the last block is left out", "tl.where(finite, last, i_n)",
             "tl.where(finite, blocks, i_n)", MEAN, "mean", (), mean_kernels),
    Mutation("a number that is not finite is added", "tl.sum(tl.sum(b_sum * 0.0, 1), 0) == 0.0", "i_n >= 0",
             INFINITE, "mean", (), mean_kernels),
    Mutation("and its part is not done again", "tl.where(finite, last, i_n)", "last",
             INFINITE, "mean|data|scale", (), mean_kernels),
    Mutation("its part is added twice", "b_sum = tl.where(finite, b_sum * share, 0.0)", "b_sum *= share",
             INFINITE, "mean", (), mean_kernels),
    Mutation("it counts as the largest", "tl.where(finite, b_max, -INF)", "b_max",
             INFINITE, "mean", (), mean_kernels),
    Mutation("a sequence's parts begin at its tokens' part", "(start // (ROWS * span) + i_b)",
             "(start // (ROWS * span))", MEAN_VARLEN, "mean", (), mean_kernels),
    Mutation("a part too many", "return start, length, first, tl.cdiv(length, ROWS * span)",
             "return start, length, first, tl.cdiv(length, ROWS * span) + 1", LONG_VALUES, "mean", (),
             mean_kernels),
]  # fmt: skip


def test_the_kernels_pass(device: str) -> None:
    for name in {mutation.caught_by for mutation in MUTATIONS}:
        check_quantize(CASES[name], device)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS, quantize_kernels)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(
    mutation: Mutation, device: str, tmp_path, monkeypatch: pytest.MonkeyPatch, fresh_launches
) -> None:
    module = mutation.module or quantize_kernels
    mutant = load(mutation.of(inspect.getsource(module)), tmp_path)
    for name in KERNELS[module]:
        monkeypatch.setattr(module, name, getattr(mutant, name))
    with pytest.raises(AssertionError, match=rf"is wrong: ({mutation.verdict}): "):
        check_quantize(CASES[mutation.caught_by], device)
