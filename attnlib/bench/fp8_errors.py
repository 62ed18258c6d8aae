"""How far FP8 attention is from fp64, by kinds of input and ways to quantize:
`python -m attnlib.bench.fp8_errors`.

All of it is computed by the model in `attnlib.kernels.reference.fp8`, so it needs no GPU; with one, and
`--kernel`, rows of the kernel stand beside them. `--shift` says what other shifts of P would cost in rows
with and without a peak, in errors and in rescalings of the output.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib.bench.oracle import INPUTS, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.common.fp8 import ROWS, Recipe
from attnlib.kernels.reference.dense import attention_fp64, attention_math
from attnlib.kernels.reference.fp8 import (
    AS_KERNEL,
    Rounding,
    attend,
    looked_up,
    means_of,
    quantize,
    rotation,
    values_of,
)  # fmt: skip
from attnlib.params import MaskWindow, mask_window

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EXACT = Rounding(offset=None)
RECIPES = {
    "tensor": Recipe("tensor", False, False),
    "head": Recipe("head", False, False),
    "block": Recipe("block", False, False),
    "tensor, rotated": Recipe("tensor", True, False),
    "block, rotated": Recipe("block", True, False),
    "block, rotated, centered": Recipe("block", True, True),
}
ROUNDINGS = {
    "sum of the rounded weights": AS_KERNEL._replace(sum_rounded=True),
    **{f"offset {n}, shift follows": Rounding(offset=float(n), lazy=0.0) for n in (0, 4, 6, 8)},
    "offset 0, lazy 8": Rounding(offset=0.0, lazy=8.0),
    "offset 8, shift whole": Rounding(offset=8.0, lazy=0.0, whole=True),
}


def model(tensors: Tensors, causal: bool, recipe: Recipe, rounding: Rounding, parts: str = "qkv",
          v_rows: int | None = None) -> torch.Tensor:  # fmt: skip
    """Attention with the operands in `parts` quantized, (B, H, S, D) in fp64. v_rows: keys that share a scale
    of V, which then is not centered."""
    values, mean = [], 0.0
    for role, x in zip("qkv", tensors, strict=True):
        if role not in parts:
            exact = x.double()
            if recipe.rotate and role != "v":
                exact = exact @ rotation(x.shape[-1]).to(x.device) / x.shape[-1] ** 0.5
            values.append(list(exact))
        elif role == "v" and v_rows is not None:
            plain = recipe._replace(center=False)
            blocks = [quantize(part, role, plain) for part in x.split(v_rows, 2)]
            values.append([torch.cat(part, 1) for part in zip(*map(values_of, blocks), strict=True)])
        else:
            quantized = quantize(x, role, recipe)
            values.append(list(values_of(quantized)))
            if role == "v":
                mean = torch.stack(list(means_of(quantized)))
    scale = tensors[0].shape[-1] ** -0.5
    window: MaskWindow = mask_window(causal, None)
    return torch.stack(
        [
            torch.stack([attend(*heads, window, scale, rounding)[0] for heads in zip(*batch, strict=True)])
            for batch in zip(*values, strict=True)
        ]
    ) + mean  # no row is without keys


def variants(
    tensors: Tensors, causal: bool, kernel: bool
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """(name, what computes it)."""
    best = RECIPES["block, rotated"]
    yield "16 bits, PyTorch", lambda: attention_math(*tensors, causal=causal)
    for name, recipe in RECIPES.items():
        yield name, lambda recipe=recipe: model(tensors, causal, recipe, AS_KERNEL)
    yield "block, rotated; P exact", lambda: model(tensors, causal, best, EXACT)
    yield "V and P exact", lambda: model(tensors, causal, best, EXACT, "qk")
    yield "Q, K and P exact", lambda: model(tensors, causal, best, EXACT, "v")
    yield "Q, K and V exact", lambda: model(tensors, causal, best, AS_KERNEL, "")
    yield f"V per {ROWS['k']} keys", lambda: model(tensors, causal, best, AS_KERNEL, v_rows=ROWS["k"])
    for name, rounding in ROUNDINGS.items():
        yield name, lambda rounding=rounding: model(tensors, causal, best, rounding)
    if kernel:
        for name, recipe in RECIPES.items():
            options = {"causal": causal, **recipe._asdict()}
            yield f"kernel: {name}", lambda o=options: attnlib.attention_fp8(*tensors, **o)
        yield "kernel: 16 bits", lambda: attnlib.attention(*tensors, causal=causal)


def error_rows(
    shape: Shape, kind: str, seeds: int = 1, device: str = "cpu", kernel: bool = False
) -> list[dict[str, Any]]:
    """For each variant the RMS and the largest error over so many draws of a kind of input."""
    sums: dict[str, list[float]] = {}
    largest: dict[str, float] = {}
    for seed in range(seeds):
        tensors = make_inputs(shape, kind, seed, device)
        truth, _ = attention_fp64(*tensors, causal=shape.causal)
        for name, compute in variants(tensors, shape.causal, kernel):
            error = (compute().double() - truth).abs()
            sums.setdefault(name, []).append(error.square().mean().item())
            largest[name] = max(largest.get(name, 0.0), error.max().item())
    common = {"inputs": kind, "S": shape.seqlen, "D": shape.head_dim, "causal": shape.causal, "draws": seeds}
    return [
        {**common, "variant": name, "rms": (sum(squares) / seeds) ** 0.5, "max": largest[name]}
        for name, squares in sums.items()
    ]


# ---------------------------------------------------------------- the shift of P

SHIFTS = {
    "as the kernel": AS_KERNEL,
    "kept": AS_KERNEL._replace(kept=True),
    "sum of the rounded weights": AS_KERNEL._replace(sum_rounded=True),
    "moves by more than 2": Rounding(offset=7.0, lazy=1.0),
    "follows every maximum": Rounding(offset=8.0, lazy=0.0),
    "a whole number": Rounding(offset=6.0, lazy=2.0, whole=True),
}


def peaked(kind: str, rows: int, keys: int, head_dim: int) -> tuple[Tensors, float]:
    """(q [rows, D], k and v [keys, D] of a head, sm_scale) of rows with a peak."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, head_dim, generator=rng, dtype=torch.float64) for n in (rows, keys, keys))
    scale = head_dim**-0.5
    if kind == "two keys":  # in two blocks, of weights 1 to 1 up to 1 to 64; all others weigh nothing
        scale, q = math.log(2.0), torch.zeros_like(q)
        q[:, 0], q[:, 1] = torch.linspace(0.0, 6.0, rows), 1.0
        k = torch.zeros_like(k)
        k[:, 1] = -60.0
        k[0, :2], k[-1, :2] = torch.tensor([1.0, 0.0]), 0.0
    elif kind == "a key for each row":  # about half of the row's weight
        k[torch.randperm(keys, generator=rng)[:rows]] += 8 * scale * q
    elif kind != "N(0, 1)":
        q *= float(kind.partition(" ")[0])
    return (q, k, v), scale


def shift_rows(keys: int, head_dim: int, rows: int = 512) -> Iterator[dict[str, Any]]:
    """What rounding P adds to the output, as a share of it: RMS of all rows, and of the worst row; and in
    which share of the steps a warp of 16 rows rescales."""
    window = mask_window(False, None)
    for kind in ("N(0, 1)", "4 times N(0, 1)", "16 times N(0, 1)", "a key for each row", "two keys"):
        tensors, scale = peaked(kind, rows, keys, head_dim)
        head = [x[None] for x in tensors]
        truth = attend(*head, window, scale, EXACT)[0][0]
        for name, rounding in SHIFTS.items():
            error = attend(*head, window, scale, rounding)[0][0] - truth
            by_row = (error.square().sum(-1) / truth.square().sum(-1)).sqrt()
            scores = tensors[0] @ tensors[1].mT * (scale * math.log2(math.e))
            share = _moves(scores.unflatten(1, (-1, rounding.keys)), rounding)
            found = (error.square().sum() / truth.square().sum()).sqrt()
            row = {"inputs": kind, "shift": name, "rms": found.item(), "row": by_row.max().item()}
            yield row | {"steps": share}


def _moves(scores: torch.Tensor, rounding: Rounding) -> float:
    """Of scores in base 2, [rows, blocks, keys], of which the last block is looked at first. Of kept shifts
    the steps in which a warp looks up its largest scores."""
    largest, moves = scores.amax(-1), 0.0
    now = largest[:, -1]
    for block in reversed(range(largest.shape[1] - 1)):
        grown = looking = largest[:, block] > now + rounding.lazy
        if rounding.kept:
            looking = looked_up(scores[None, :, block] - now[None, :, None] + rounding.offset)[0]
            grown = looking & (largest[:, block] > now)
        now = torch.where(grown, largest[:, block], now)
        moves += looking.unflatten(0, (-1, 16)).any(1).double().mean().item()
    return moves / max(1, largest.shape[1] - 1)


# ---------------------------------------------------------------- command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--inputs", nargs="+", default=[kind for kind in INPUTS if kind != "constant"])
    parser.add_argument("--kernel", action="store_true", help="on a Hopper GPU, the kernel's errors too")
    parser.add_argument("--shift", action="store_true", help="other shifts of P, and nothing else")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    if args.shift:
        for row in shift_rows(args.seqlen, args.head_dims[0]):
            print("{inputs:20} {shift:28} {rms:.4f} worst row {row:.4f}, {steps:.1%} of steps".format(**row))
        return
    device, rows = "cuda" if args.kernel else "cpu", []
    for head_dim in args.head_dims:
        for kind in args.inputs:
            shape = Shape(1, args.heads, args.seqlen, head_dim, causal=False)
            found = error_rows(shape, kind, args.seeds, device, args.kernel)
            base = next(row["rms"] for row in found if row["variant"] == "tensor")
            print(f"\nD {head_dim}, S {args.seqlen}, {kind}: RMS error; that of one scale per tensor over it")
            for row in found:
                print(f"  {row['variant']:32} {row['rms']:.3e}  {base / row['rms']:7.2f}", flush=True)
            rows += found
    if args.out:
        where = torch.cuda.get_device_name() if args.kernel else f"a model on a CPU ({platform.machine()})"
        record = {"computed_by": where, "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
