"""How far FP8 attention is from fp64, by kinds of input and ways to quantize:
`python -m attnlib.bench.fp8_errors`.

All of it is computed by the model in `attnlib.kernels.reference.fp8`, so it needs no GPU; with one, and
`--kernel`, rows of the kernel stand beside them.
"""

from __future__ import annotations

import argparse
import json
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
from attnlib.kernels.reference.fp8 import AS_KERNEL, Rounding, attend, quantize, rotation, values_of
from attnlib.params import MaskWindow, mask_window

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EXACT = Rounding(offset=None)
RECIPES = {
    "tensor": Recipe("tensor", False),
    "head": Recipe("head", False),
    "block": Recipe("block", False),
    "tensor, rotated": Recipe("tensor", True),
    "block, rotated": Recipe("block", True),
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
    of V."""
    values = []
    for role, x in zip("qkv", tensors, strict=True):
        if role not in parts:
            exact = x.double()
            if recipe.rotate and role != "v":
                exact = exact @ rotation(x.shape[-1]).to(x.device) / x.shape[-1] ** 0.5
            values.append(list(exact))
        elif role == "v" and v_rows is not None:
            blocks = [quantize(part, role, recipe) for part in x.split(v_rows, 2)]
            values.append([torch.cat(part, 1) for part in zip(*map(values_of, blocks), strict=True)])
        else:
            values.append(list(values_of(quantize(x, role, recipe))))
    scale = tensors[0].shape[-1] ** -0.5
    window: MaskWindow = mask_window(causal, None)
    return torch.stack(
        [
            torch.stack([attend(*heads, window, scale, rounding)[0] for heads in zip(*batch, strict=True)])
            for batch in zip(*values, strict=True)
        ]
    )


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
            options = {"causal": causal, "scaling": recipe.scaling, "rotate": recipe.rotate}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--inputs", nargs="+", default=[kind for kind in INPUTS if kind != "constant"])
    parser.add_argument("--kernel", action="store_true", help="on a Hopper GPU, the kernel's errors too")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
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
