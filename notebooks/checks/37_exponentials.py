"""Checks of the exercises of chapter 37. Each raises AssertionError with a hint if the answer is wrong."""

from unittest import mock

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from attnlib.bench import exponentials, sources
from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import judge_gluon
from attnlib.emulator import emulated
from attnlib.kernels.common import kept_shift

STEP = "15_teaching"


def check_half_and_half(functions):
    """The left columns are those of `exp2`, which sees no others; the right ones those of the polynomial."""
    module = changes.with_functions(STEP, functions)
    text = open(module.__file__, encoding="utf-8").read()
    alone = sources.load_source("37_answer_powers", text + exponentials.POWERS)
    x = torch.linspace(-20, 0, 4096)
    y, seen, exp2 = torch.empty_like(x), [], torch.exp2

    def noted(tile):
        seen.append(tuple(tile.shape))
        return exp2(tile)

    with mock.patch.object(torch, "exp2", noted), emulated(vars(alone), "eager", 0):
        alone.powers[(1,)](x, y, num_warps=4)
    assert seen == [(64, 32)], f"of 64 columns: expected exp2 of 64 x 32 once, got {seen or 'none'}"
    left, right = (x.view(64, 2, 32)[:, i].numpy() for i in (0, 1))
    found = y.view(64, 2, 32).numpy()
    assert np.array_equal(found[:, 0], exp2(torch.from_numpy(left)).numpy()), "the left half is not exp2"
    model = exponentials.polynomial(right, 3, fused=False)
    error = np.abs(found[:, 1] / np.exp2(right.astype(np.float64)) - 1).max()
    assert error < 1e-4, f"the right half is off by {error:.1e}, the polynomial of degree 3 by 7.5e-05"
    assert np.allclose(found[:, 1], model, rtol=1e-6, atol=0), "the right half is not the polynomial's"
    judge_gluon(module.attention, Shape(1, 2, 130, 64))


def check_binding_rate(binding_rate):
    """At that rate the unit takes as long as the rule says."""
    for tensor, slots, exps, share in ((256, 225, 34, 0.8), (512, 400, 66, 0.75), (128, 90, 32, 1.0)):
        rate = binding_rate(tensor, slots, exps, share)
        unit, rule = exps * 32 * 4 / rate, share * tensor + slots
        assert np.isclose(unit, rule), (
            f"tensor {tensor}, slots {slots}, {exps} instructions, share {share}: at {rate:.4g} a clock the "
            f"unit takes {unit:.4g} clocks, the rule says {rule:.4g}"
        )


SMALL = (  # lines, early results of x, y and z; operands are s, sum and t
    ([("mov", "x", "s"), ("add", "y", "s", "t")], {"x"}),
    ([("add", "y", "s", "t"), ("mov", "x", "y")], set()),  # y is read later, and no operand
    ([("mul", "a", "s", "t"), ("mov", "b", "sum"), ("add", "x", "a", "b"), ("sub", "z", "a", "x")], set()),
    ([("add", "z", "s", "t"), ("bra", "", "p"), ("mul", "z", "z", "sum"), ("mov", "a", "z"),
      ("mov", "y", "s"), ("mov", "x", "y")], {"z"}),
)  # fmt: skip


def check_early(early):
    """Of small programs, and of the package's own assembly of a step."""
    for lines, expected in SMALL:
        found = early(lines, ("x", "y", "z"), ("s", "sum", "t"))
        text = "; ".join(" ".join(line) for line in lines)
        assert found == expected, f"{text}: expected {expected or 'none'}, got {found or 'none'}"
    m = 16  # words of a thread, 64 rows and 64 keys
    text = kept_shift._asm.fn(m, gl.float16, 0)
    lines = [line.strip().replace(",", "").split() for line in text.strip("{} ").split(";")]
    lines = [tuple(line) for line in lines if len(line) > 2 and line[0] not in (".reg", "@!q")]
    constraints = kept_shift._constraints.fn(m, gl.float16, 0).split(",")
    results = [f"${i}" for i, kind in enumerate(constraints) if kind.startswith("=")]
    operands = [f"${i}" for i in range(len(results), len(constraints))]
    written = {line[1] for line in lines} & set(results)  # others are there to make up the number
    found = early(lines, results, operands)
    assert found == written, f"the package's assembly: expected all {len(written)} results, got {found}"
