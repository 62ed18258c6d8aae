"""Judge and time forms of the FP8 forward pass on this GPU, beside each other, attnlib's 16-bit kernel and
FlashAttention-3 in FP8.

    python tests/gpu/tune_fp8.py 64-dense-4096 64-causal-4096 --vary late_wait=0,1 --vary pin=0,1
    python tests/gpu/tune_fp8.py 128-dense-16384 --vary keep_shift=0,1 --vary q_columns=0,64,128

Cells and `--vary` are those of `tune_forward.py`; D is 64, 128 or 256, and operands have a scale for each
block, which steps of more than 128 keys don't. A form that does not compile is told. Each form is judged: on
small calls of all KINDS, some of which are made to mislead kept shifts, and on the timed one, the RMS of what
it adds to exact attention of the same quantized operands (fp64) must be that of a model that rounds P as the
kernel does. Nothing wrong is timed. Then shuffled rounds with cold L2; quantizing is not timed. Tables as
those of `tune_backward.py`: FlashAttention-3's time over a form's where ATTNLIB_FA3_FP8 is a folder that
holds its fa3_fwd.so, else the default's. Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tuned_forms  # noqa: E402
from tune_backward import cell_of  # noqa: E402
from tuned_forms import Rounds, each_form, failure, judge, table_of  # noqa: E402

import attnlib  # noqa: E402
from attnlib.bench import fp8_peers  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.kernels.common.fp8 import ROWS, Fp8, Recipe  # noqa: E402
from attnlib.kernels.hopper import launch_fp8 as launch  # noqa: E402
from attnlib.kernels.hopper.configs import HopperConfig  # noqa: E402
from attnlib.kernels.hopper.configs_fp8 import fp8_config  # noqa: E402
from attnlib.kernels.reference import fp8 as reference  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

WIDTHS = 64, 128, 256
KINDS = "normal", "flat", "outliers", "rising"
SMALL = 2, 4, 512
PEER, HALF = "fa3 fp8", "attnlib bf16"
EXACT = reference.Rounding(offset=None)
LARGEST = 1.25
"""The model's RMS error times so much is what a form may have."""

Tensor = torch.Tensor
Forms = dict[str, HopperConfig]


# ---------------------------------------------------------------- calls


class Quantized(NamedTuple):
    q: Fp8
    k: Fp8
    v: Fp8

    def head(self) -> Quantized:
        """The last head of the last batch element alone."""
        return Quantized(*(_head(x) for x in self))


def _head(x: Fp8) -> Fp8:
    rest = x.role, x.scaling, x.rotated, x.head_dim, x.dtype, x.tokens
    mean = None if x.mean is None else x.mean[-1:, -1:].contiguous()
    return Fp8(x.data[-1:, -1:], x.scale[-1:, -1:], *rest, mean=mean)


def tensors(head_dim: int, shape: tuple[int, int, int], kind: str = "normal") -> list[Tensor]:
    """q, k, v of (B, H, S). Of rows of kind rising scores grow by 11.5 powers of two in every 64 keys that a
    row visits, from the last on; those of kind flat differ by a tenth of what is usual."""
    device = tuned_forms.DEVICE
    generator = torch.Generator(device).manual_seed(head_dim)
    make = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    q, k, v = (torch.randn(*shape, head_dim, **make) for _ in range(3))
    if kind == "flat":
        q *= 0.1
    if kind == "outliers":
        for x in (q, k, v):
            x += 10 * torch.randn(x.shape, **make) * (torch.rand(x.shape, **make) < 0.001)
    if kind == "rising":
        q[..., 0], S = head_dim**0.5, shape[-1]
        k[..., 0] = 8.0 * (S // 64 - torch.arange(S, device=device) // 64).to(k.dtype)
    return [q, k, v]


def quantized(inputs: Sequence[Tensor]) -> Quantized:
    named = zip(inputs, "qkv", strict=True)
    return Quantized(*(reference.quantize(x, role, Recipe("block")) for x, role in named))


def params(cell: Cell, config: HopperConfig | None) -> Params:
    return Params(mask_window(cell.shape.causal, None), cell.shape.head_dim**-0.5, config=config)


def kernel(operands: Quantized, cell: Cell, config: HopperConfig) -> Callable[[], Tensor]:
    return lambda: launch.forward(*operands, params(cell, config), torch.bfloat16)[0]


def shape_of(cell: Cell) -> tuple[int, int, int]:
    return cell.shape.batch, cell.shape.heads, cell.shape.seqlen


def fa3_fp8(inputs: Sequence[Tensor], causal: bool) -> Callable[[], Tensor] | None:
    """FlashAttention-3 with a scale per head; None without it. RuntimeError if that is not attention."""
    try:
        peer = fp8_peers.fa3_fp8(*inputs, causal)
    except ImportError:
        return None
    exact = attnlib.attention(*(x[-1:, -1:] for x in inputs), causal=causal)
    if not rms(peer()[-1:, -1:] - exact) < 0.1 * rms(exact):
        raise RuntimeError("FlashAttention-3's output is not attention")
    return peer


# ---------------------------------------------------------------- judging


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


class Case:
    """What forms of a cell are judged on: quantized operands, and their attention with and without the
    kernel's rounding of P, of the last head."""

    def __init__(self, cell: Cell, shape: tuple[int, int, int], kind: str) -> None:
        self.cell, self.label = cell, f"{kind}, {shape[-1]} tokens"
        self.inputs = tensors(cell.shape.head_dim, shape, kind)
        self.operands = quantized(self.inputs)
        self.exact = self.attention(EXACT)
        self.expected: dict[int, float] = {}

    def attention(self, rounding: reference.Rounding) -> Tensor:
        return reference.forward(*self.operands.head(), params(self.cell, None), torch.float64, rounding)[0]

    def expected_of(self, block_n: int) -> float:
        """The model's RMS error in steps of so many keys."""
        if block_n not in self.expected:
            model = self.attention(reference.AS_KERNEL._replace(keys=block_n))
            self.expected[block_n] = rms(model.bfloat16() - self.exact)
        return self.expected[block_n]


def cases_of(cell: Cell) -> list[Case]:
    """The last one is the call that is timed."""
    return [Case(cell, *of) for of in [*((SMALL, kind) for kind in KINDS), (shape_of(cell), "normal")]]


def reason_of(cases: Sequence[Case], config: HopperConfig) -> str:
    """Why a form is wrong; empty when it is right."""
    for case in cases:
        out = kernel(case.operands, case.cell, config)()[-1:, -1:]
        error, expected = rms(out - case.exact), case.expected_of(config.block_n)
        if not error <= LARGEST * expected:
            return f"{case.label}: RMS error {error:.3e}, the model's {expected:.3e}"
    return ""


# ---------------------------------------------------------------- command


def compile_one(name: str, form: HopperConfig) -> str:
    """In a child: what it compiles stays in Triton's cache."""
    cell = cell_of(name)
    operands = quantized(tensors(cell.shape.head_dim, SMALL))
    return failure(name, form, kernel(operands, cell, form))


def report(name: str, forms: Forms, rounds: Rounds) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell = cell_of(name)
    cases = cases_of(cell)
    right = {form: partial(reason_of, cases, config) for form, config in forms.items()}
    bad = judge(name, right, lambda reason: reason)
    inputs, operands, causal = cases[-1].inputs, cases[-1].operands, cell.shape.causal
    calls = {form: kernel(operands, cell, forms[form]) for form in right}
    calls[HALF] = lambda: attnlib.attention(*inputs, causal=causal)
    peer = fa3_fp8(inputs, causal)
    if peer is not None:
        calls[PEER] = peer
    found = tuned_forms.times(calls, rounds)
    return table_of(name, found, cell.flops("forward"), PEER), bad


def default_of(name: str) -> HopperConfig:
    """What calls get. ValueError unless operands in FP8 are timed so."""
    cell = cell_of(name)
    if cell.shape.head_dim not in WIDTHS or cell.shape.head_dim_v or cell.kind not in ("causal", "dense"):
        raise ValueError(f"cells: expected D of {WIDTHS}, causal or dense, such as 64-dense-4096, got {name}")
    return fp8_config(cell.shape.head_dim, cell.kind)


def check(form: HopperConfig) -> None:
    """A block of keys has one scale."""
    if form.block_n > ROWS["k"]:
        raise ValueError(f"--vary: expected block_n of at most {ROWS['k']} keys, got {form.block_n}")


def main(argv: Sequence[str] | None = None) -> int:
    return tuned_forms.run(
        argv, "Time forms of the FP8 forward pass beside each other.", default_of,
        partial(each_form, compile_one), report, check=check,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
