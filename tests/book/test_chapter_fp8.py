"""The kernels of chapter 22 on a CPU, and the layouts that it draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated import ORDERS
from triton.experimental.gluon import language as gl

import attnlib
from attnlib.bench import sources
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson
from attnlib.book.layouts import columns_of
from attnlib.emulator import emulated
from attnlib.kernels.reference import fp8 as reference
from attnlib.params import Params, mask_window

STEP = "22_fp8"


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check(shape: Shape, order: str = "random", seed: int = 0, **recipe) -> None:
    """The kernel rounds P as the model does, so that hardly more than the output's rounding is left."""
    module, scale = sources.load_step(STEP), shape.head_dim**-0.5
    tensors = make_inputs(shape, device="cpu")
    recipe |= {"center": False}  # as the chapter's kernel wants it
    eight = [attnlib.quantize_fp8(x, role, **recipe) for x, role in zip(tensors, "qkv", strict=True)]
    call = Params(mask_window(shape.causal, None), scale), torch.float64
    keys = module.TILES[shape.head_dim][0]
    exact, _ = reference.forward(*eight, *call, reference.Rounding(None, lazy=0))
    model, _ = reference.forward(*eight, *call, reference.Rounding(8, keys=keys, lazy=0))
    with emulated(vars(module), order, seed) as kernels:
        assert list(kernels) == ["flash_forward"]
        out = module.forward(*eight, shape.causal, scale)
    due = rms(model - exact)
    assert rms(out.double() - model) <= 0.2 * due + 1.1 * rms(exact.half().double() - exact)
    assert shape.seqlen == 1 or due > 1e-4, "the model rounds nothing"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
def test_kernel(causal: bool, order: str) -> None:
    check(Shape(1, 3, 200, 64, causal), order)


@pytest.mark.parametrize(
    ("S", "D", "causal"), [(1, 64, True), (17, 128, False), (129, 256, True), (300, 128, True)]
)
def test_lengths_and_widths(S: int, D: int, causal: bool) -> None:
    check(Shape(2, 1, S, D, causal), "late", seed=1)


@pytest.mark.parametrize("scaling", ["head", "tensor"])
@pytest.mark.parametrize("rotate", [True, False])
def test_recipes(scaling: str, rotate: bool) -> None:
    check(Shape(2, 2, 150, 64), scaling=scaling, rotate=rotate)


def test_columns_of_the_accumulator_and_of_an_operand() -> None:
    accumulator = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32])
    gives = columns_of(accumulator, 32)
    assert gives.tolist() == [[2 * t + i + 8 * j for j in range(4) for i in (0, 1)] for t in range(4)]
    assert columns_of(accumulator, 32, row=9).tolist() == gives.tolist()
    wants = columns_of(gl.DotOperandLayout(0, accumulator, 4), 32)
    assert wants.tolist() == [[4 * t + i + 16 * j for j in (0, 1) for i in range(4)] for t in range(4)]
    with pytest.raises(ValueError, match="row: expected one that the first warp holds, got 16"):
        columns_of(accumulator, 32, row=16)


def test_sums_of_the_chapter() -> None:
    """Its model of the tensor core is exact where nothing is dropped, and stops where it says."""
    notebook = sources.notebook_of(STEP)
    module = sources.load_source("22_sums", sources.cells_tagged(notebook, "variant")[1])
    ones = np.ones(1 << 15)
    assert module.tensor_core(ones, ones[:, None])[0] == 2**14
    assert module.tensor_core(ones, ones[:, None], bits=12)[0] == 2**13
    assert module.tensor_core(ones, ones[:, None], keys=128)[0] == 2**15
    p, v = module.weights_and_values(256, 1)
    assert module.relative_error(module.multiplied(p, v, 128), p, v) < 1e-6
    found = module.tensor_core(p[0].double().numpy(), v.double().T.numpy(), bits=40)
    np.testing.assert_allclose(found, (p[0].double() @ v.double().T).numpy(), rtol=1e-9)


def test_contest_takes_the_chapters_kernel_and_not_weights_that_are_cut_off() -> None:
    """Its last rows on a GPU, whose tensor cores cut sums off: right, if P is rounded as the chapter does."""
    checks, shape, rows = lesson.checks(STEP), Shape(1, 1, 2048, 256), 32
    tensors = make_inputs(shape, device="cpu")
    eight = [attnlib.quantize_fp8(x, role, center=False) for x, role in zip(tensors, "qkv", strict=True)]
    q, k, v = (torch.stack(list(reference.values_of(x))) for x in eight)
    call = q[0, :, -rows:], k[0], v[0], mask_window(True, None), shape.head_dim**-0.5
    exact, right, cut_off = (
        reference.attend(*call, how)[0]
        for how in (reference.Rounding(None), reference.Rounding(8, lazy=0), reference.Rounding(8, lazy=8))
    )
    notebook = sources.notebook_of(STEP)
    module = sources.load_source("22_sums", sources.cells_tagged(notebook, "variant")[1])
    p = torch.softmax(call[0][0].double() @ call[1][0].double().T * call[4], 1).numpy()  # but for the mask
    lost = np.stack([module.tensor_core(row, v[0, 0].double().numpy()) for row in p])
    lost = torch.from_numpy(lost - p @ v[0, 0].double().numpy())
    checks.judge_output((right + lost).half()[None], eight, True, "the chapter's")
    with pytest.raises(AssertionError, match="times what rounding P costs"):
        checks.judge_output(cut_off.half()[None], eight, True, "lag and offset of 8")
