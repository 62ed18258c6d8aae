"""Tensors to quantize, and a check of what the kernels make of them against the model in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.bench import fp8_sums
from attnlib.kernels import fp8
from attnlib.kernels.common.fp8 import Fp8, Recipe
from attnlib.kernels.reference import fp8 as model


@dataclass(frozen=True)
class QuantizeCase:
    """A call of `quantize`. lengths: of varlen sequences, in place of B and S. mean: added to every other
    column, in each head and sequence another multiple of it. infinite: so is a number of each head."""

    role: str = "q"
    recipe: Recipe = Recipe()
    D: int = 64
    S: int = 150
    B: int = 2
    H: int = 2
    dtype: torch.dtype = torch.float16
    lengths: tuple[int, ...] = ()
    transposed: bool = False
    mean: float = 0.0
    infinite: bool = False

    def __str__(self) -> str:
        where = f"varlen {self.lengths}" if self.lengths else f"B{self.B} S{self.S}"
        how = f"{self.recipe.scaling}{' rotated' if self.recipe.rotate else ''}"
        name = f"{self.role} {where} H{self.H} D{self.D} {how} {str(self.dtype).removeprefix('torch.')}"
        name += f" mean {self.mean:g}" if self.mean else ""
        name += " infinite" * self.infinite
        return name + " transposed" * self.transposed + " not centered" * (not self.recipe.center)

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor | None, int | None]:
        """x, and of varlen sequences their offsets and the longest. Magnitudes differ from block to block."""
        shape = (sum(self.lengths), self.H, self.D) if self.lengths else (self.B, self.H, self.S, self.D)
        if self.transposed:
            shape = (shape[0], shape[2], shape[1], shape[3])
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x = x.transpose(1, 2) if self.transposed else x
        tokens = torch.arange(x.shape[0 if self.lengths else 2])
        size = 4.0 ** (tokens // 50 % 3) * 5.0 ** torch.arange(self.H)[:, None]  # [H, tokens]
        x = x * (size.mT if self.lengths else size)[..., None]
        if self.mean:
            one = torch.arange(1, self.H + 1)[:, None] * self.mean * (torch.arange(self.D) % 2)  # [H, D]
            if self.lengths:
                each = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
                x += (1 + each)[:, None, None] * one
            else:
                x += torch.arange(1, self.B + 1).view(-1, 1, 1, 1) * one[:, None]
        if self.infinite:
            x[..., 17, 5] = float("inf")
        x = x.to(self.dtype).to(device)
        if not self.lengths:
            return x, None, None
        offsets = torch.tensor([0, *self.lengths]).cumsum(0).int().to(device)
        return x, offsets, max(self.lengths)


PLAIN, LENGTHS = Recipe("block", False), (15, 0, 2, 133, 0, 129)
CASES = {
    str(case): case
    for case in [
        *(QuantizeCase(role, recipe) for role in "qk" for recipe in (Recipe(), PLAIN, Recipe("head", True))),
        *(QuantizeCase(role, Recipe("tensor", False), lengths=LENGTHS) for role in "qkv"),
        *(QuantizeCase(role, lengths=LENGTHS) for role in "qkv"),
        QuantizeCase("v"), QuantizeCase("v", Recipe("tensor")),
        QuantizeCase("v", infinite=True), QuantizeCase("v", mean=100.0),
        QuantizeCase("v", Recipe("tensor"), lengths=LENGTHS, mean=9.0),
        QuantizeCase("v", Recipe(), 40, 700, 1, 1, torch.bfloat16, mean=-3.0),
        QuantizeCase("v", Recipe(center=False), lengths=LENGTHS), QuantizeCase("v", Recipe(center=False)),
        QuantizeCase("k", Recipe("head", False), lengths=LENGTHS),
        QuantizeCase("q", PLAIN, 40, dtype=torch.bfloat16), QuantizeCase("q", Recipe(), 40),
        QuantizeCase("v", Recipe(), 72, 33), QuantizeCase("k", PLAIN, 128, 129, dtype=torch.float32),
        QuantizeCase("q", Recipe(), 128, 70, dtype=torch.bfloat16), QuantizeCase("k", Recipe(), 256, 130, 1),
        QuantizeCase("k", Recipe("tensor"), 200, 40, dtype=torch.float32),
        QuantizeCase("v", Recipe(), 256, 16),
        QuantizeCase("q", transposed=True), QuantizeCase("v", transposed=True),
        QuantizeCase("q", Recipe(), 64, 65 * 64, 1, 1), QuantizeCase("v", Recipe(), 64, 4100, 1, 1),
        QuantizeCase("v", Recipe(center=False), 64, 4100, 1, 1),
    ]
}  # fmt: skip


def check_quantize(case: QuantizeCase, device: str) -> None:
    """AssertionError that says what is wrong."""
    x, offsets, longest = case.tensors(device)
    found = fp8.quantize(x, case.role, case.recipe, offsets, longest)
    compare_with_model(found, x, case.recipe, str(case))


def compare_with_model(found: Fp8, x: torch.Tensor, recipe: Recipe, name: str = "") -> None:
    """`compare` with what the model makes of x; if x is centered, by the mean that was found. That is to be
    the model's but for roundings of a sum in float32."""
    if found.mean is not None:
        own = model.quantize(x, found.role, recipe, found.cu_seqlens).mean
        assert own is not None and found.mean.shape == own.shape, f"{name} is wrong: mean: shape"
        assert found.mean.dtype == torch.float32, f"{name} is wrong: mean: dtype"
        assert found.mean.is_contiguous(), f"{name} is wrong: mean: strides"
        size = x.float().abs().where(x.isfinite(), 0.0)
        limit = 1e-5 * size.max().item() if size.numel() else 0.0
        error = (found.mean - own).abs().max().item() if own.numel() else 0.0
        assert error <= limit, f"{name} is wrong: mean: error {error:.2e}, at most {limit:.2e}"
    compare(found, model.quantize(x, found.role, recipe, found.cu_seqlens, mean=found.mean), name)


def compare(found: Fp8, expected: Fp8, name: str = "") -> None:
    """Bit for bit; rotated: scales to 1e-6, and data that differs, next to the middle of two neighbors, by
    one step in at most one of 200 elements."""
    about = ("role", "scaling", "rotated", "head_dim", "dtype", "tokens", "shape", "device")
    for field in about:
        got, wanted = getattr(found, field), getattr(expected, field)
        assert got == wanted, f"{name} is wrong: {field}: expected {wanted}, got {got}"
    assert found.cu_seqlens is expected.cu_seqlens
    assert (found.mean is None) == (expected.mean is None), f"{name} is wrong: mean: one has none"
    assert found.data.dtype == expected.data.dtype and found.scale.dtype == expected.scale.dtype
    assert found.data.shape == expected.data.shape, f"{name} is wrong: shape of data"
    assert found.scale.shape == expected.scale.shape, f"{name} is wrong: shape of scale"
    if not found.data.numel():
        return
    assert found.data.is_contiguous(), f"{name} is wrong: strides of data"
    tolerance = 1e-6 if found.rotated else 0.0
    error = ((found.scale - expected.scale).abs() / expected.scale).max().item()
    assert error <= tolerance, f"{name} is wrong: scale: relative error {error}"
    codes = [ordered(x.data) for x in (found, expected)]
    steps = (codes[0] - codes[1]).abs()
    limit, share = (1, 0.005) if found.rotated else (0, 0.0)
    wrong = (steps > 0).float().mean().item()
    assert steps.max() <= limit and wrong <= share, (
        f"{name} is wrong: data: {wrong:.2%} of the elements differ, by up to {steps.max()} steps"
    )


def ordered(data: torch.Tensor) -> torch.Tensor:
    """The numbers of float8_e4m3fn counted from the smallest on; NaN is far from all others."""
    bits = data.view(torch.uint8).int()
    size = bits & 127
    return torch.where(size == 127, 1000, torch.where(bits >= 128, -size, size))


# ---------------------------------------------------------------- attention

EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}
"""Of an output's rounding; of float32 what accumulating on tensor cores may cost."""
ACCUMULATED = 2.0**-11
"""Of the largest output, the error that tensor cores may make in each of the two sums."""
SCRATCH = 1 << 24


ADDED = 33
"""What tensor cores add at once: 32 products and what they have so far, each cut off at the same bit."""
LATEST = 4.0
"""Standard deviations that the largest of some thousand errors may be away from their mean."""


def cut_scores(operands: tuple[Fp8, ...], params) -> torch.Tensor:
    """Of each row, a bound on the error of a score that comes from how tensor cores add (`bench.fp8_sums`).
    (B, H, S_q), of varlen sequences (H, T_q).

    With a large product of either sign in a row, what is cut off is large beside the score that is left."""
    found = []
    for q, k in zip(*(model.values_of(x) for x in operands[:2]), strict=True):
        found.append(_cut_scores(q, k.repeat_interleave(len(q) // max(1, len(k)), 0)))
    errors = torch.cat(found, 1) if operands[0].varlen else torch.stack(found)
    return errors * abs(params.sm_scale)


def _cut_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Of heads: q [H, S_q, D], k [H, S_k, D].

    A term that is cut off toward 0 loses up to a last bit, half of it on average, with the term's sign; the
    standard deviation is a root of 1/12 of it. Which bit is the last one follows from the largest term."""
    if not k.shape[1]:
        return q.new_zeros(q.shape[:2])
    errors = []
    for rows in q.split(max(1, SCRATCH // (ADDED * len(k) * k.shape[1])), 1):
        total = q.new_zeros(*rows.shape[:2], k.shape[1])
        drift, variance = torch.zeros_like(total), torch.zeros_like(total)
        for columns in range(0, q.shape[2], fp8_sums.TOGETHER):
            part = slice(columns, columns + fp8_sums.TOGETHER)
            products = rows[..., part].movedim(-1, 0)[..., None] * k[..., part].movedim(-1, 0)[:, :, None]
            last = fp8_sums.last_bit(total, products)  # of [32, H, rows, S_k]
            drift += last / 2 * (products.sign().sum(0) + total.sign()).abs()
            variance += last.square() * (ADDED / 12)
            total += products.sum(0)
        errors.append((drift + LATEST * variance.sqrt()).amax(-1))
    return torch.cat(errors, 1)


def cut_values(v: Fp8) -> float:
    """A bound on the same error of an output whose values have a mean: each addition takes half a last bit of
    all that is added, in one direction."""
    means = [x.mean(1).abs().max().item() * -(-x.shape[1] // fp8_sums.TOGETHER)
             for x in model.values_of(v) if x.numel()]  # fmt: skip
    return max(means, default=0.0) * ADDED / 2 * 2.0**-fp8_sums.KEPT / 2


FLIPS = 5e-3
"""What an LSE may differ by where a kernel rotates queries itself: with sums in another order than the
model's, so that a number next to the middle of two neighbors may become either."""


def own_queries(q: torch.Tensor, rotate: bool, cu_seqlens=None, max_seqlen: int | None = None) -> Fp8:
    """What attention makes of queries that it quantizes itself, by the model."""
    return model.quantize(q, "q", Recipe("row", rotate), cu_seqlens, max_seqlen)


def check_forward(
    found: tuple[torch.Tensor, torch.Tensor | None], operands: tuple[Fp8, ...], params, name: str
) -> None:
    """AssertionError unless the error of the output, against fp64 with the same quantized operands, is that
    of rounding P, as the model has it, and of rounding the output."""
    out, lse = found
    exact, exact_lse = model.forward(*operands, params, torch.float64, model.Rounding(offset=None))
    expected, _ = model.forward(*operands, params, torch.float64)
    assert out.shape == exact.shape, f"{name} is wrong: expected shape {exact.shape}, got {out.shape}"
    undefined = exact.isnan()
    assert torch.equal(out.isnan(), undefined), f"{name} is wrong: NaN in other places"
    if not out.numel() or undefined.all():
        return
    truth = exact[~undefined]
    error, usual = ((x.double()[~undefined] - truth).abs() for x in (out, expected))
    size, cut = EPSILON[out.dtype] + 2 * ACCUMULATED, cut_values(operands[2])
    for kind, limit, of in (("RMS", 1.5, lambda x: x.square().mean().sqrt()), ("max", 2.0, torch.max)):
        got, allowed = of(error).item(), limit * of(usual).item() + size * truth.abs().max().item() + cut
        assert got <= allowed, f"{name} is wrong: {kind} error {got:.3e}, at most {allowed:.3e}"
    if lse is not None:
        seen = exact_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen), f"{name} is wrong: LSE of rows without keys"
        if seen.any():
            error = (lse.double() - exact_lse.double()).abs() - cut_scores(operands, params)
            got = error[seen].max().item()
            allowed = FLIPS if operands[0].scaling == "row" and operands[0].rotated else 2e-4
        beyond = f"error {got:.3e} beyond what sums cost, at most {allowed}"
        assert got <= allowed, f"{name} is wrong: LSE: {beyond}"
