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

import ctypes
import glob
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tune_backward  # noqa: E402
from tune_backward import cell_of, side_by_side  # noqa: E402
from tuned_forms import failure, forms_asked_for, judge, parser_of, table_of, tell  # noqa: E402

import attnlib  # noqa: E402
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
FOLDER, PEER, HALF = "ATTNLIB_FA3_FP8", "fa3 fp8", "attnlib bf16"
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
    device = tune_backward.DEVICE
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


def default_of(cell: Cell) -> HopperConfig:
    """What calls get."""
    return fp8_config(cell.shape.head_dim, dense=not cell.shape.causal)


def params(cell: Cell, config: HopperConfig | None) -> Params:
    return Params(mask_window(cell.shape.causal, None), cell.shape.head_dim**-0.5, config=config)


def kernel(operands: Quantized, cell: Cell, config: HopperConfig) -> Callable[[], Tensor]:
    return lambda: launch.forward(*operands, params(cell, config), torch.bfloat16)[0]


def shape_of(cell: Cell) -> tuple[int, int, int]:
    return cell.shape.batch, cell.shape.heads, cell.shape.seqlen


def fa3_fp8(inputs: Sequence[Tensor], causal: bool) -> Callable[[], Tensor] | None:
    """FlashAttention-3 on q, k, v (B, H, S, D) with a scale per head; None without it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    for library in glob.glob(f"{folder}/libcudart.so.12*"):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(f"{folder}/fa3_fwd.so")
    data, scales = [], []
    for x in inputs:
        scale = x.abs().amax((2, 3)).float() / 448
        data.append((x.float() / scale[..., None, None]).to(torch.float8_e4m3fn).transpose(1, 2).contiguous())
        scales.append(scale)
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options |= {"softmax_scale": inputs[0].shape[-1] ** -0.5, "is_causal": causal, "num_splits": 1}
    return lambda: torch.ops.fa3_fwd.fwd(*data, **options)[0].transpose(1, 2)


# ---------------------------------------------------------------- judging


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def reason_of(cell: Cell, config: HopperConfig) -> str:
    """Why a form is wrong; empty when it is right."""
    for shape, kind in [*((SMALL, kind) for kind in KINDS), (shape_of(cell), "normal")]:
        operands = quantized(tensors(cell.shape.head_dim, shape, kind))
        out = kernel(operands, cell, config)()[-1:, -1:]
        exact, model = (
            reference.forward(*operands.head(), params(cell, None), torch.float64, rounding)[0]
            for rounding in (EXACT, reference.AS_KERNEL._replace(keys=config.block_n))
        )
        error, expected = rms(out - exact), rms(model.bfloat16() - exact)
        if not error <= LARGEST * expected:
            return f"{kind}, {shape[-1]} tokens: RMS error {error:.3e}, the model's {expected:.3e}"
    return ""


# ---------------------------------------------------------------- command


def compile_one(name: str, form: HopperConfig) -> str:
    """In a child: what it compiles stays in Triton's cache."""
    cell = cell_of(name)
    operands = quantized(tensors(cell.shape.head_dim, SMALL))
    return failure(name, form, kernel(operands, cell, form))


def report(name: str, forms: Forms, rounds: int) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell = cell_of(name)
    right = {form: partial(reason_of, cell, config) for form, config in forms.items()}
    bad = judge(name, right, lambda reason: reason)
    inputs = tensors(cell.shape.head_dim, shape_of(cell))
    operands, causal = quantized(inputs), cell.shape.causal
    calls = {form: kernel(operands, cell, forms[form]) for form in right}
    calls[HALF] = lambda: attnlib.attention(*inputs, causal=causal)
    peer = fa3_fp8(inputs, causal)
    if peer is not None:
        exact = attnlib.attention(*(x[-1:, -1:] for x in inputs), causal=causal)
        if not rms(peer()[-1:, -1:] - exact) < 0.1 * rms(exact):
            raise RuntimeError("FlashAttention-3's output is not attention")
        calls[PEER] = peer
    found = tune_backward.times(calls, rounds)
    return table_of(name, found, cell.flops("forward"), PEER), bad


def checked(name: str) -> Cell:
    """The cell of this name. ValueError unless operands in FP8 are timed so."""
    cell = cell_of(name)
    if cell.shape.head_dim not in WIDTHS or cell.shape.head_dim_v or cell.kind not in ("causal", "dense"):
        raise ValueError(f"cells: expected D of {WIDTHS}, causal or dense, such as 64-dense-4096, got {name}")
    return cell


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("Time forms of the FP8 forward pass beside each other.")
    args, begin = parser.parse_args(argv), time.monotonic()
    if no_hopper():
        return 2
    try:
        forms = forms_asked_for(args, lambda name: default_of(checked(name)))
        for one in (one for found in forms.values() for one in found.values() if one.block_n > ROWS["k"]):
            raise ValueError(f"--vary: expected block_n of at most {ROWS['k']} keys, got {one.block_n}")
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    failed = side_by_side(compile_one, [(name, form) for name in forms for form in forms[name].values()])
    print(f"compiled after {time.monotonic() - begin:.0f} s", *failed, sep="\n", flush=True)
    return tell(report, forms, args.rounds, begin + args.seconds)


if __name__ == "__main__":
    sys.exit(main())
