"""Checks of the exercises of chapter 22."""

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

import attnlib
from attnlib.bench import sources
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import in_each_order
from attnlib.kernels.reference import fp8 as reference
from attnlib.params import mask_window

STEP = "22_fp8"
FOURTEEN = 'twelve = load_step("12_overlap")\nfourteen = load_step("14_ring")'
"""What the kernel of an answer has besides the chapter's: chapter 14's functions."""
SHIFTS = reference.Rounding(8, lazy=0), reference.Rounding(6, lazy=2.8)
"""Two ways to round P that are right: with the chapter's shift, which follows every maximum, and with the
package's, which lags."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 64


def _hadamard(n: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / n**0.5


def _blocks(kind: str, S: int, D: int) -> torch.Tensor:
    """x [S, D]; "outlier" has one number that is far larger, "zeros" a first block of nothing else."""
    x = torch.randn(S, D, generator=torch.Generator().manual_seed(S + D))
    if kind == "outlier":
        x[S // 2, 3] = 300.0
    if kind == "zeros":
        x[:ROWS] = 0
    return x


def check_rotate_and_scale(kernel: Callable) -> None:
    """`kernel[(blocks,)](x, signs, matrix, y, scale, S, D, ROWS)`."""
    for kind, S, D in (("normal", 128, 64), ("normal", 100, 32), ("outlier", 65, 64), ("zeros", 130, 32)):
        x, blocks = _blocks(kind, S, D), -(-S // ROWS)
        signs = torch.where(torch.arange(D) * 7 % 5 < 2, -1.0, 1.0)
        room = torch.full((blocks * ROWS + 1, D), 77.0, device=DEVICE)  # what lies behind y must stay
        scale = torch.full((blocks + 1,), 77.0, device=DEVICE)
        given = [t.to(DEVICE) for t in (x, signs, _hadamard(D))]
        kernel[(blocks,)](*given, room, scale, S, D, ROWS)
        y, scales, case = room[:S].cpu(), scale[:blocks].cpu(), f"{kind} inputs, S = {S}, D = {D}"
        assert not bool((scales == 77).any()), f"{case}: the scales of {blocks} blocks were not all written"
        assert not bool((y == 77).all()), f"{case}: nothing was written to y"
        beyond = bool((room[S:] == 77).all()) and bool(scale[blocks] == 77)
        assert beyond, f"{case}: something was written beyond row {S - 1}, or beyond the last scale"
        rotated = (x * signs) @ _hadamard(D)
        amax = torch.stack([block.abs().max() for block in rotated.split(ROWS)])
        want = torch.where(amax > 0, amax / 448, 1.0)
        assert torch.allclose(scales, want, rtol=1e-4), (
            f"{case}: expected the scales {want.tolist()}, got {scales.tolist()}"
        )
        values = y * scales.repeat_interleave(ROWS)[:S, None]
        error = (values - rotated).abs().max().item()
        assert error <= 1e-4 * max(1.0, rotated.abs().max().item()), (
            f"{case}: y times its scale differs from the rotated rows by up to {error:.2g}: signs first, "
            "then the matrix"
        )
        largest = y.abs().max().item()
        assert largest <= 448.1, f"{case}: the largest number of y is {largest:.1f}, expected 448"


def _adder(bits: int) -> Callable[[int], float]:
    """add_ones of hardware that keeps so many bits below the leading one."""

    def add_ones(n: int) -> float:
        assert n > 0 and n % 128 == 0, f"add_ones: expected a multiple of 128, got {n}"
        return float(min(n, 2 ** (bits + 1)))

    return add_ones


def check_fraction_bits(answer: Callable[[Callable], int]) -> None:
    """`answer(add_ones)` -> the bits below the leading one; on a Hopper GPU of the real adder, too."""
    for bits in (13, 10, 12, 16, 18):
        got = answer(_adder(bits))
        assert isinstance(got, int), f"expected an int, got {type(got).__name__}"
        assert got == bits, f"the sum stops at {2 ** (bits + 1)}: expected {bits} bits, got {got}"
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        notebook = sources.notebook_of("22_fp8")
        module = sources.load_source("22_sums", sources.cells_tagged(notebook, "variant")[1])

        def add_ones(n: int) -> float:
            ones = torch.ones(64, n, device="cuda").to(torch.float8_e4m3fn)
            return module.multiplied(ones, ones, None)[0, 0].item()

        got, stops = answer(add_ones), add_ones(2**20)
        assert 2 ** (got + 1) == stops, f"this GPU stops at {stops:.0f}, which is not 2^({got} + 1)"


def check_centered(answer: Callable) -> None:
    """`answer(attend, q, k, v)` -> attend's output, computed with values that have no mean."""
    rng = np.random.default_rng(22)
    for S, D in ((48, 8), (1, 4), (129, 16)):
        q, k, v = rng.standard_normal((3, S, D))
        v = v + rng.standard_normal(D) * 5
        before, seen = v.copy(), []

        def attend(q, k, v, seen=seen):
            seen.append(v)
            s = q @ k.T
            p = np.exp(s - s.max(1, keepdims=True))
            return p @ v / p.sum(1, keepdims=True)

        got = answer(attend, q, k, v)
        assert got is not None and np.shape(got) == v.shape, f"expected an array of shape {v.shape}"
        assert np.array_equal(v, before), "v itself must stay as it is"
        assert len(seen) == 1, f"attend was called {len(seen)} times, expected once"
        mean = np.abs(seen[0].mean(0)).max()
        assert mean < 1e-9, f"the values that attend gets have a mean of up to {mean:.2g} in a column"
        want = attend(q, k, v)
        assert np.allclose(got, want, rtol=1e-9, atol=1e-9), "the output is not that of the given values"


def kernel_of(functions: Sequence) -> ModuleType:
    """The chapter's kernel with these functions in the place of its own."""
    return changes.with_functions(STEP, functions, FOURTEEN)


def judge_output(out: torch.Tensor, operands: Sequence, causal: bool, case: str) -> None:
    """`out`, of all rows of a call or of the last ones, against fp64 of the same eight-bit operands. Its RMS
    error may be 1.1 times the worse of `SHIFTS`, and a rounding of the output."""
    q, k, v = (torch.stack(list(reference.values_of(x))) for x in operands)
    rows, scale = out.shape[2], q.shape[-1] ** -0.5
    for b in range(len(q)):
        call = q[b, :, -rows:], k[b], v[b], mask_window(causal, None), scale
        exact, *models = (reference.attend(*call, how)[0] for how in (reference.Rounding(None), *SHIFTS))
        due = max(_rms(model - exact) for model in models)
        allowed, error = 1.1 * (due + _rms(exact.half() - exact)), _rms(out[b] - exact)
        assert error <= allowed, (
            f"{case}: RMS error {error:.1e}, {error / due:.1f} times what rounding P costs"
        )


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check_lagging(functions: Sequence) -> None:
    """Right in the emulator, with maxima that stay and with maxima that grow from block to block."""
    module = kernel_of(functions)
    for shape, louder in ((Shape(1, 1, 300, 64), 1), (Shape(1, 1, 400, 128, causal=False), 6),
                          (Shape(1, 1, 300, 256), 6)):  # fmt: skip
        q, k, v = make_inputs(shape, device="cpu")
        k = k * torch.linspace(louder**0.5, louder**-0.5, shape.seqlen)[:, None].to(k.dtype)
        given = zip((q, k, v), "qkv", strict=True)
        eight = [attnlib.quantize_fp8(x, role, center=False) for x, role in given]
        case = f"S = {shape.seqlen}, D = {shape.head_dim}, first keys {louder} times as large as the last"

        def call(eight=eight, shape=shape) -> torch.Tensor:
            return module.forward(*eight, shape.causal, shape.head_dim**-0.5)

        for named, out in in_each_order(vars(module), case, call):
            judge_output(out, eight, shape.causal, named)
