"""Judge and time forms of the Hopper forward kernel under a block mask: two buffers for the queries, kept
shifts where steps carry bits or scores change, and consumers that leave out steps with bits.

    python tests/gpu/tune_sparse.py                  D = 64 and 128, some 90 s
    python tests/gpu/tune_sparse.py --dims 64        one head dimension alone
    python tests/gpu/tune_sparse.py --groups blocks  random blocks alone

Tables on the screen, no record. First, processes side by side compile. Then each form is judged against fp64
where a program has several tiles: for normal inputs, large ones, and scores that rise from block to block.
Last, fp16, 16384 tokens, shuffled rounds, cold L2: random blocks at 50 to 0.8%, a causal mask, documents and
a window, which have bits, and a soft cap and sinks under the causal mask. Milliseconds, for blocks the
percent of ideal (the dense kernel's time times the part that is kept), and speed over the form that a call
gets. A form that was wrong is not timed.
Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from time_sparse import KEPT, TOKENS, causal, documents, inputs_of, kept_blocks, scores_of, times  # noqa: E402

from attnlib import BlockMask, attention  # noqa: E402
from attnlib.bench.oracle import Oracle  # noqa: E402
from attnlib.kernels.sparse import hopper  # noqa: E402
from attnlib.kernels.sparse.configs_hopper import HopperSparseConfig, hopper_sparse_config  # noqa: E402
from attnlib.params import MaskWindow, Params  # noqa: E402
from attnlib.scores import ScoreParts, parts_of  # noqa: E402

DEVICE = "cuda"
CHOSEN = "chosen"
JUDGED, HEADS = 1024, 96
"""Tokens and heads: 768 tiles, which are three for each pair of consumers at D = 64 and six at D = 128."""
KINDS = "normal", "large", "rising"
GROUPS = {
    "blocks": ("half", "one block"), "bits": ("causal", "documents", "window"),
    "soft cap": ("causal",), "sinks": ("causal",),
}  # fmt: skip
"""What is compared -> the masks under which it is judged. Those of functions are timed, too."""


def forms(head_dim: int, group: str, chosen: HopperSparseConfig) -> dict[str, HopperSparseConfig]:
    """Forms by name; chosen: that of a call."""
    if group != "blocks":
        found = {CHOSEN: chosen, "not kept": replace(chosen, keep_shift=False)}
        if group == "bits":
            fine = hopper_sparse_config(head_dim, coarse=False, keep=True, short=True)
            found["steps of 64"] = replace(fine, leaves_out=False)
            found["ends left out"] = replace(fine, leaves_out=True)
        return found
    kept = hopper_sparse_config(head_dim, keep=True)
    if head_dim == 64:
        found = {"apart": replace(kept, joint=False), "sections of 8 MB": replace(kept, l2_bytes=8 << 20)}
    else:
        fine = hopper_sparse_config(head_dim, coarse=False, keep=True)
        two = replace(fine, q_buffers=2)
        found = {
            "steps of 64": fine, "steps of 128": kept, "two Q": two, "two Q, joint": replace(two, joint=True),
            "two Q, of 128": replace(kept, q_buffers=2),
        }  # fmt: skip
    return {CHOSEN: chosen} | {name: config for name, config in found.items() if config != chosen}


def inputs(head_dim: int, kind: str) -> list[torch.Tensor]:
    """q, k, v that are judged; rising: scores grow by 16 powers of e from a block of 64 keys to the next."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, JUDGED, head_dim, generator=rng, device=DEVICE) for _ in range(3))
    if kind == "large":
        q *= 12
    if kind == "rising":
        q[..., 0] = head_dim**0.5
        k[..., 0] = 16.0 * (torch.arange(JUDGED, device=DEVICE) // 64)
    return [x.half() for x in (q, k, v)]


def mask_of(name: str, tokens: int) -> BlockMask:
    """Of `GROUPS`, for inputs that are judged or timed."""
    if name in ("half", "one block"):
        part = 1 / 2 if name == "half" else 128 / tokens
        return BlockMask.from_blocks(kept_blocks(HEADS, tokens, part, DEVICE), tokens, tokens)
    functions = {"causal": causal, "documents": documents(tokens, DEVICE), "window": window}
    return BlockMask.from_function(functions[name], tokens, tokens, device=DEVICE)


def window(b, h, q, k):
    return (q >= k) & (q - k < 512)


def score_of(group: str, q: torch.Tensor) -> ScoreParts | None:
    if group not in ("soft cap", "sinks"):
        return None
    return parts_of(scores_of(q.shape[1], q.shape[2], DEVICE)[group][0], q, q)


def params_of(q: torch.Tensor, mask: BlockMask, score: ScoreParts | None) -> Params:
    """With the form that a call gets."""
    params = Params(MaskWindow(None, None), q.shape[-1] ** -0.5, block_mask=mask, score=score)
    return params._replace(config=hopper.configuration(q, q, q, params))


def wrong(head_dim: int, group: str, name: str) -> Iterator[str]:
    """What is wrong with a form; nothing if it is right."""
    for kind, mask_name in product(KINDS, GROUPS[group]):
        q, k, v = inputs(head_dim, kind)
        mask, score = mask_of(mask_name, JUDGED), score_of(group, q)
        params = params_of(q, mask, score)
        config = forms(head_dim, group, params.config).get(name, params.config)
        out, _ = hopper.forward(q, k, v, params._replace(config=config))
        found = Oracle(q, k, v, mask=mask.to_dense(), score=score).judge(out)
        if not found.ok:
            yield f"{mask_name}, {kind}: {found.reason}"


def names_of(head_dim: int, group: str) -> list[str]:
    """Of all forms: under some masks one of them is the chosen one."""
    return list(forms(head_dim, group, replace(hopper_sparse_config(head_dim), stages=1)))


def compile_one(head_dim: int, group: str, name: str) -> str:
    """In a child: what it compiles stays in Triton's cache. Why it does not fit, or ""."""
    q, k, v = inputs(head_dim, "normal")
    params = params_of(q, mask_of(GROUPS[group][0], JUDGED), score_of(group, q))
    config = forms(head_dim, group, params.config).get(name, params.config)
    try:
        hopper.forward(q, k, v, params._replace(config=config))
    except OutOfResources as why:
        return str(why)
    torch.cuda.synchronize()
    return ""


def compile_all(work: Sequence[tuple[int, str, str]]) -> list[str]:
    children = min(len(work), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(compile_one, *zip(*work, strict=True)))


def timed(head_dim: int, group: str, left_out: Collection[str], rounds: int) -> Iterator[str]:
    """Lines of a table."""
    q, k, v = inputs_of(head_dim, TOKENS, DEVICE)[:3]
    score = score_of(group, q)
    for label in KEPT if group == "blocks" else GROUPS[group]:
        if group == "blocks":
            mask = BlockMask.from_blocks(kept_blocks(q.shape[1], TOKENS, label, DEVICE), TOKENS, TOKENS)
        else:
            mask = mask_of(label, TOKENS)
        params = params_of(q, mask, score)
        own = {
            name: params._replace(config=config)
            for name, config in forms(head_dim, group, params.config).items()
            if name not in left_out
        }
        calls = {name: lambda given=given: hopper.forward(q, k, v, given) for name, given in own.items()}
        if group == "blocks":
            calls["dense"] = lambda: attention(q, k, v)
        found = times(calls, rounds)
        dense, what = found.pop("dense", None), f"{100 * label:.1f}%" if group == "blocks" else label
        for name, ms in found.items():
            share = "" if dense is None else f"  {100 * dense * label / ms:5.1f}% of ideal"
            over = f"  {found[CHOSEN] / ms:5.3f} x {CHOSEN}" if CHOSEN in found else ""
            yield f"D{head_dim} {group:8} {what:9} {name:14} {ms:7.4f} ms{share}{over}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judge and time forms of attention under block masks.")
    parser.add_argument("--dims", type=int, nargs="+", choices=(64, 128), default=(64, 128))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=4, help="(default: %(default)s)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    work = [(d, group, name) for d in args.dims for group in args.groups for name in names_of(d, group)]
    refused = dict(zip(work, compile_all(work), strict=True))
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    bad: dict[tuple[int, str], set[str]] = {}
    for head_dim, group, name in work:
        if refused[head_dim, group, name]:
            print(f"left out: D{head_dim} {group} {name}: {refused[head_dim, group, name]}", flush=True)
            bad.setdefault((head_dim, group), set()).add(name)
            continue
        for said in wrong(head_dim, group, name):
            print(f"WRONG D{head_dim} {group} {name}: {said}", flush=True)
            bad.setdefault((head_dim, group), set()).add(name)
    judged = sum(len(KINDS) * len(GROUPS[group]) for _, group, _ in work)
    forms_bad = sum(map(len, bad.values()))
    print(f"judged: {judged}, wrong forms: {forms_bad}, {time.monotonic() - begin:.0f} s", flush=True)
    for head_dim, group in product(args.dims, args.groups):
        for line in timed(head_dim, group, bad.get((head_dim, group), ()), args.rounds):
            print(line, flush=True)
    print(f"{time.monotonic() - begin:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
