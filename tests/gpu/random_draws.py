"""Calls drawn at random, forward and backward, on this GPU against fp64, for a given time; and a report.

    python tests/gpu/random_draws.py                        ten minutes; figures/data/<gpu>/random_draws.json
    python tests/gpu/random_draws.py --seconds 60 --seed 7  other calls, for a minute
    python tests/gpu/random_draws.py --jobs 12              in as many processes, which compile side by side
    python tests/gpu/random_draws.py --only 1234            one of them again, with its traceback

Which calls are drawn follows from the seed alone, how many from the time. Kinds of call that are new take
seconds to compile, so the first minutes see fewer. Status 0 when every call was within the error budget, 1
otherwise, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from draws import LAYOUTS, Draw, check  # noqa: E402

SHOWN = 20
"""Failures that the report tells in full."""


def draw(number: int) -> tuple[Draw, str | None, bool]:
    """A call, the same one for the same number: (call, implementation, deterministic)."""
    rng = random.Random(number)
    dtype = rng.choice(("float16", "float16", "bfloat16", "bfloat16", "float32"))
    # Each kind of call is another kernel to compile: few in float32, whose kernels compile slowly.
    width = 64 if dtype == "float32" else rng.choice((64, 128, 256))
    varlen = rng.random() < 0.35

    def length() -> int:
        if varlen and rng.random() < 0.1:
            return 0
        return int(2 ** rng.uniform(0, 9 if varlen else 10.3))

    lengths = [(length(), length()) for _ in range(rng.randint(1, 6) if varlen else 1)]
    if rng.random() < 0.4:
        lengths = [(rows, rows) for rows, _ in lengths]
    if not all(map(any, zip(*lengths, strict=True))):  # no query at all, or no key
        lengths.append((17, 33))
    window = None
    if rng.random() < 0.4:
        window = tuple(-1 if rng.random() < 0.3 else int(2 ** rng.uniform(0, 10)) - 1 for _ in range(2))
    scales = [None, None, 0.05]
    if dtype == "float16" and width == 64:
        scales.append(-0.2)
    call = Draw(
        lengths=tuple(lengths),
        varlen=varlen,
        batch=1 if varlen else rng.choice((1, 2, 3)),
        kv_heads=rng.choice((1, 2, 3)),
        group=rng.choice((1, 1, 2, 4)),
        head_dim=width - rng.choice((0, 0, 8, 24)),
        dtype=dtype,
        causal=rng.random() < 0.5,
        window=window,
        sm_scale=rng.choice(scales),
        layouts=tuple(rng.choice((0, 0, 1, rng.randrange(len(LAYOUTS)))) for _ in range(4)),
        seed=number,
    )
    return call, rng.choice((None, "triton")), rng.random() < 0.5


def kind(call: Draw) -> str:
    """What the report counts calls by."""
    window = " window" if call.window else ""
    mask = f"{'causal' if call.causal else 'dense'}{window}"
    return f"{call.dtype}, {'varlen' if call.varlen else 'batch'}, {mask}"


def run(numbers, device: str, limit_s: float) -> dict:
    """Check one call after the other until the time is up."""
    begin, done, kinds, failures = time.monotonic(), 0, Counter(), []
    shown = begin
    for number in numbers:
        if time.monotonic() - begin > limit_s:
            break
        call, impl, deterministic = draw(number)
        try:
            check(call, device, impl, deterministic=deterministic)
        except Exception as error:  # whatever goes wrong is a finding
            reason = f"{type(error).__name__}: {error}"
            failures.append({"number": number, "impl": impl, "call": str(call), "reason": reason[:500]})
            print(f"{number} ({impl}): {reason}", flush=True)
            if "CUDA error" in reason or "illegal memory access" in reason:
                break  # nothing on this GPU can be trusted in this process any more
        done += 1
        kinds[kind(call)] += 1
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(f"{done} calls, {len(failures)} failed, {shown - begin:.0f} s", flush=True)
    return {
        "calls": done, "failed": len(failures), "seconds": round(time.monotonic() - begin, 1),
        "kinds": dict(sorted(kinds.items())), "failures": failures[:SHOWN],
    }  # fmt: skip


def run_jobs(first: int, draws: int, limit_s: float, jobs: int) -> dict:
    """`run` in several processes: process j takes every `jobs`-th number from first + j on."""
    if jobs == 1:
        return run(range(first, first + draws), "cuda", limit_s)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        shares = [
            pool.submit(run, range(first + j, first + draws, jobs), "cuda", limit_s) for j in range(jobs)
        ]
        found = [share.result() for share in shares]
    kinds = sum((Counter(part["kinds"]) for part in found), Counter())
    failures = [failure for part in found for failure in part["failures"]]
    return {
        "calls": sum(part["calls"] for part in found), "failed": sum(part["failed"] for part in found),
        "seconds": max(part["seconds"] for part in found), "kinds": dict(sorted(kinds.items())),
        "failures": sorted(failures, key=lambda failure: failure["number"])[:SHOWN],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check calls drawn at random against fp64 on this GPU.")
    parser.add_argument("--seconds", type=float, default=600, help="time limit (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=10**9, help="at most so many calls (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="which calls (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--only", type=int, help="the number of one call, which a report names")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/random_draws.json)")
    args = parser.parse_args(argv)
    import torch

    from attnlib.bench import records

    if not torch.cuda.is_available():
        print("the kernels need a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    if args.only is not None:
        call, impl, deterministic = draw(args.only)
        print(f"{call}\nimpl {impl}, deterministic {deterministic}")
        try:
            check(call, "cuda", impl, deterministic=deterministic)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    first = args.seed * 10**6
    found = run_jobs(first, args.draws, args.seconds, args.jobs)
    print(f"{found['calls']} calls in {found['seconds']:.0f} s, {found['failed']} failed")
    header = records.provenance({"seed": args.seed, "limit_s": args.seconds})
    path = records.report_path("random_draws", header, args.out)
    tables = {"random_draws": {"rows": [found]}}
    records.write_report(path, header, tables)
    print(path)
    return int(bool(found["failed"]) or not found["calls"])


if __name__ == "__main__":
    sys.exit(main())
