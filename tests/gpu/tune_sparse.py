"""Judge and time forms of the Hopper forward kernel under a block mask, with kept shifts and without.

    python tests/gpu/tune_sparse.py              D = 64 and 128, some 90 s
    python tests/gpu/tune_sparse.py --dims 64    one head dimension alone

Tables on the screen, no record. First, processes side by side compile. Then each form is judged against fp64:
random blocks, and a causal mask with bits and LSE, fp16 and bf16, for normal inputs, large ones, and scores
that rise from block to block. Last, random blocks of 16384 tokens at 50 to 3%, fp16, shuffled rounds, cold
L2: milliseconds, percent of ideal (the dense kernel's time times the part that is kept), and speed over the
form that is chosen. A form that was wrong is not timed.
Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from time_sparse import KEPT, TOKENS, causal, inputs_of, kept_blocks, times  # noqa: E402

from attnlib import BlockMask, attention  # noqa: E402
from attnlib.bench.oracle import Oracle  # noqa: E402
from attnlib.kernels.sparse import hopper  # noqa: E402
from attnlib.kernels.sparse.configs_hopper import WIDE, HopperSparseConfig, hopper_sparse_config  # noqa: E402
from attnlib.params import MaskWindow, Params  # noqa: E402

DEVICE = "cuda"
CHOSEN = "chosen"
JUDGED = 1024
"""Tokens."""
KINDS = "normal", "large", "rising"
MASKS = ("blocks", "float16", False), ("causal", "float16", True), ("causal", "bfloat16", True)
"""Mask, dtype, LSE: the first is the kernel that is timed, the others have bits."""


def configs(head_dim: int) -> dict[str, HopperSparseConfig]:
    """Forms by name."""
    chosen = hopper_sparse_config(head_dim)
    kept = replace(chosen, keep_shift=True)
    found = {CHOSEN: replace(chosen, keep_shift=False), "kept": kept}
    if head_dim == 64:
        found["kept, late wait"] = replace(kept, late_wait=True, pin=True)
        found["kept, wide"] = replace(WIDE, keep_shift=True)
    else:
        found["kept, early wait"] = replace(kept, late_wait=False, pin=False)
        found["kept, steps of 64"] = replace(hopper_sparse_config(head_dim, coarse=False), keep_shift=True)
    return found


def inputs(head_dim: int, kind: str, dtype: str) -> list[torch.Tensor]:
    """q, k, v of two heads; rising: scores grow by 16 powers of e from one block of 64 keys to the next."""
    q, k, v = (x[:, :2].float() for x in inputs_of(head_dim, JUDGED, DEVICE)[:3])
    if kind == "large":
        q *= 12
    if kind == "rising":
        q[..., 0] = head_dim**0.5
        k[..., 0] = 16.0 * (torch.arange(JUDGED, device=DEVICE) // 64)
    return [x.to(getattr(torch, dtype)) for x in (q, k, v)]


def mask_of(name: str) -> BlockMask:
    """Of `MASKS`."""
    if name == "causal":
        return BlockMask.from_function(causal, JUDGED, JUDGED, device=DEVICE)
    return BlockMask.from_blocks(kept_blocks(2, JUDGED, 1 / 4, DEVICE), JUDGED, JUDGED)


def called(config: HopperSparseConfig, q, k, v, mask: BlockMask, lse: bool = False):
    """(out, lse)"""
    window, scale = MaskWindow(None, None), q.shape[-1] ** -0.5
    return hopper.forward(q, k, v, Params(window, scale, return_lse=lse, config=config, block_mask=mask))


def wrong(head_dim: int, config: HopperSparseConfig) -> Iterator[str]:
    """What is wrong with a form; nothing if it is right."""
    for kind, (name, dtype, lse) in product(KINDS, MASKS):
        q, k, v = inputs(head_dim, kind, dtype)
        mask = mask_of(name)
        out, found_lse = called(config, q, k, v, mask, lse)
        found = Oracle(q, k, v, mask=mask.to_dense()).judge(out, found_lse)
        if not found.ok:
            yield f"{name}, {dtype}, {kind}: {found.reason}"


def compile_one(head_dim: int, name: str, case: tuple[str, str, bool]) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    mask, dtype, lse = case
    called(configs(head_dim)[name], *inputs(head_dim, "normal", dtype), mask_of(mask), lse)
    torch.cuda.synchronize()


def compile_all(dims: Sequence[int]) -> None:
    work = [(d, name, case) for case in MASKS for d in dims for name in configs(d)]
    children = min(len(work), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*work, strict=True)))


def timed(head_dim: int, right: dict[str, HopperSparseConfig], rounds: int) -> Iterator[str]:
    """Lines of a table."""
    q, k, v = inputs_of(head_dim, TOKENS, DEVICE)[:3]
    for part in KEPT:
        mask = BlockMask.from_blocks(kept_blocks(q.shape[1], TOKENS, part, DEVICE), TOKENS, TOKENS)
        calls = {
            name: lambda config=config, mask=mask: called(config, q, k, v, mask)
            for name, config in right.items()
        }
        found = times(calls | {"dense": lambda: attention(q, k, v)}, rounds)
        ideal = found.pop("dense") * part
        for name, ms in found.items():
            over = f"  {found[CHOSEN] / ms:5.3f} x {CHOSEN}" if CHOSEN in found else ""
            label = f"D{head_dim} {100 * part:4.1f}%  {name:18}"
            yield f"{label} {ms:7.4f} ms  {100 * ideal / ms:5.1f}% of ideal{over}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judge and time forms of attention under block masks.")
    parser.add_argument("--dims", type=int, nargs="+", choices=(64, 128), default=(64, 128))
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    compile_all(args.dims)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    forms, bad = {d: configs(d) for d in args.dims}, 0
    for head_dim, found in forms.items():
        for name in list(found):
            for said in wrong(head_dim, found[name]):
                print(f"WRONG D{head_dim} {name}: {said}", flush=True)
                bad, _ = bad + 1, found.pop(name, None)
    judged = sum(map(len, map(configs, args.dims))) * len(KINDS) * len(MASKS)
    print(f"judged: {judged}, wrong: {bad}, {time.monotonic() - begin:.0f} s", flush=True)
    for head_dim, found in forms.items():
        for line in timed(head_dim, found, args.rounds):
            print(line, flush=True)
    print(f"{time.monotonic() - begin:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
