"""The FP8 kernel through its launcher, on the CPU: `attnlib.emulator` in place of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import emulated
import torch
from emulated import on_the_cpu

from attnlib.kernels.common.fp8 import Recipe, scaled_by_row
from attnlib.kernels.hopper import launch_fp8 as launch
from attnlib.kernels.reference import fp8 as reference

AS_THE_MODEL = 1.5
"""The model's errors times so much are what the kernel's may be: it rounds P under other shifts."""
ROUNDING = 1e-3
"""Of the largest value, what a float16 output may add."""


@dataclass(frozen=True)
class Call(emulated.Call):
    """A call of FP8 attention. `spread`: blocks of 16 rows differ in size by up to so many powers of two.
    `mean`: of the first column of the values of the first head; others have other means. `own_queries`: the
    kernel quantizes them."""

    scaling: str = "block"
    rotate: bool = True
    center: bool = True
    mean: float = 0.0
    spread: float = 0.0
    out_dtype: torch.dtype = torch.float16
    own_queries: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v."""
        made = super().tensors()[:3]
        rng = torch.Generator().manual_seed(1)
        for x in made[:2]:
            rows = x if self.varlen else x.movedim(2, 0)
            size = torch.rand(-(-len(rows) // 16), generator=rng).repeat_interleave(16)[: len(rows)] - 0.5
            rows *= (2 ** (self.spread * size)).to(x.dtype).view(-1, *[1] * (rows.dim() - 1))
        if self.mean:
            v, heads, columns = made[2], torch.arange(self.H_kv)[:, None], torch.arange(self.D) % 3
            mean = self.mean * (1 + heads - 2 * columns)  # [H_kv, D]
            if self.varlen:
                lengths = torch.tensor([n for _, n in self.varlen])
                v += torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)[:, None, None] * mean
            else:
                v += torch.arange(1, self.B + 1).view(-1, 1, 1, 1) * mean[:, None]
        return made

    def operands(self, q, k, v) -> list:
        """The same quantized."""
        varlen, recipe = self._varlen(), Recipe(self.scaling, self.rotate, self.center)
        ends, of_q = [(None, None)] * 3, recipe._replace(scaling="row") if self.own_queries else recipe
        if varlen is not None:
            ends = [(varlen[0], varlen[2]), (varlen[1], varlen[3]), (varlen[1], varlen[3])]
        return [
            reference.quantize(x, role, recipe if role != "q" else of_q, *end)
            for x, role, end in zip((q, k, v), "qkv", ends, strict=True)
        ]


def check(
    call: Call, order: str = "random", seed: int = 0, tensors: tuple | None = None, **where
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """AssertionError for a wrong result; returns it."""
    tensors = tensors or call.tensors()
    q, k, v = call.operands(*tensors)
    if call.own_queries:
        assert scaled_by_row(tensors[0], call.scaling)
    with on_the_cpu(order, seed, **where):
        given = tensors[0] if call.own_queries else q
        out, lse = launch.forward(given, k, v, call.params(), call.out_dtype)
    roundings = reference.Rounding(offset=None), reference.Rounding(6.0, keys=128)
    (exact, exact_lse), (model, _) = (
        reference.forward(q, k, v, call.params(), torch.float64, rounding) for rounding in roundings
    )
    assert out.dtype == call.out_dtype and out.shape == exact.shape and (lse is not None) == call.return_lse
    known = ~exact.isnan()
    torch.testing.assert_close(out.isnan(), ~known)
    if known.any():
        truth = exact[known]
        errors, expected = ((x.double()[known] - truth).abs() for x in (out, model))
        allowed = float(ROUNDING * (8 if call.out_dtype == torch.bfloat16 else 1) * truth.abs().max())
        mean, largest = errors.pow(2).mean().sqrt(), errors.max()
        limits = AS_THE_MODEL * expected.pow(2).mean().sqrt() + allowed, 4 * expected.max() + allowed
        assert mean <= limits[0], f"RMS error {mean:.2e}, at most {limits[0]:.2e}"
        assert largest <= limits[1], f"max error {largest:.2e}, at most {limits[1]:.2e}"
    if lse is not None:
        torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)
    return out, lse
