"""Calls drawn at random, forward and backward, on this GPU against fp64, for a given time; and a report.

    python tests/gpu/random_draws.py                        ten minutes; figures/data/<gpu>/random_draws.json
    python tests/gpu/random_draws.py --seconds 60 --seed 7  other calls, for a minute
    python tests/gpu/random_draws.py --jobs 12              in as many processes, which compile side by side
    python tests/gpu/random_draws.py --only 1234            one of them again, with its traceback
    python tests/gpu/random_draws.py --decode               attention_decode's; random_draws_decode.json

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

import decode_cases  # noqa: E402
from decode_cases import DecodeCase  # noqa: E402
from draws import LAYOUTS, Draw, check  # noqa: E402

SHOWN = 20
"""Failures that the report tells in full."""


def draw(number: int) -> tuple[Draw, str | None, bool]:
    """A call, the same one for the same number: (call, implementation, deterministic)."""
    rng = random.Random(number)
    dtype = rng.choice(("float16", "float16", "bfloat16", "bfloat16", "float32"))
    # Each kind of call is another kernel to compile: few in float32, whose kernels compile slowly.
    width = 64 if dtype == "float32" else rng.choice((64, 128, 256, 80, 96, 160, 192))
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


def draw_decode(number: int) -> DecodeCase:
    """A call of attention_decode, the same one for the same number."""
    rng = random.Random(number)
    dtype = rng.choice(("float16", "float16", "bfloat16", "bfloat16", "float32"))
    width = 64 if dtype == "float32" else rng.choice((64, 128, 256))
    count, kv_heads = rng.choice((1, 1, 2, 3, 17, 150)), rng.choice((1, 2, 8))
    most = rng.choice((300, 3000, 60000)) // count + 1
    full = rng.random() < 0.25
    lengths = [rng.choice((0, 1, rng.randrange(most), rng.randrange(most))) for _ in range(count)]
    room = 1 + (max(lengths) if rng.random() < 0.5 else most)
    counts = [room] * count if full else lengths
    starts = tuple(rng.choice((0, n, rng.randint(0, n), rng.randint(0, n) // 8)) for n in counts)
    return DecodeCase(
        f"call {number}", None if full else tuple(lengths), room=room, batch=count,
        heads=kv_heads * rng.choice((1, 4, 8)), kv_heads=kv_heads, queries=rng.choice((1, 1, 1, 2, 5, 16)),
        head_dim=width - rng.choice((0, 0, 8, 24)), dtype=dtype,
        page=None if rng.random() < 0.5 or (full and room % 16) else 16,
        causal=rng.random() < 0.7, window=rng.choice((None, None, (rng.randrange(3000), rng.randrange(4)))),
        sm_scale=rng.choice((None, None, 0.05)),
        split=rng.choice((None, None, "none", "fixed", "stream_k", 3)),
        kind=rng.choice(("normal", "normal", "normal", "large", "outlier", "constant", "sink")),
        same_launch=rng.random() < 0.2, starts=None if rng.random() < 0.6 else starts,
    )  # fmt: skip


def one(number: int, decode: bool, device: str) -> str:
    """Check a call; returns its kind. AssertionError if it is wrong."""
    if decode:
        case = draw_decode(number)
        decode_cases.check(case, device)
        where = "contiguous" if case.page is None else "pages"
        return f"{case.dtype}, {where}{', window' if case.window else ''}{', starts' if case.starts else ''}"
    call, impl, deterministic = draw(number)
    check(call, device, impl, deterministic=deterministic)
    return kind(call)


def told(number: int, decode: bool) -> dict:
    """The call, for a report."""
    if decode:
        return {"call": str(draw_decode(number))[:2000]}
    call, impl, deterministic = draw(number)
    return {"impl": impl, "deterministic": deterministic, "call": str(call)}


def run(numbers, device: str, limit_s: float, decode: bool = False) -> dict:
    """Check one call after the other until the time is up."""
    begin, done, kinds, failures = time.monotonic(), 0, Counter(), []
    shown = begin
    for number in numbers:
        if time.monotonic() - begin > limit_s:
            break
        try:
            kinds[one(number, decode, device)] += 1
        except Exception as error:  # whatever goes wrong is a finding
            reason = f"{type(error).__name__}: {error}"
            failures.append({"number": number, **told(number, decode), "reason": reason[:500]})
            kinds["failed"] += 1
            print(f"{number}: {reason}", flush=True)
            if "CUDA error" in reason or "illegal memory access" in reason:
                break  # nothing on this GPU can be trusted in this process any more
        done += 1
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(f"{done} calls, {len(failures)} failed, {shown - begin:.0f} s", flush=True)
    return {
        "calls": done, "failed": len(failures), "seconds": round(time.monotonic() - begin, 1),
        "kinds": dict(sorted(kinds.items())), "failures": failures[:SHOWN],
    }  # fmt: skip


def run_jobs(first: int, draws: int, limit_s: float, jobs: int, decode: bool = False) -> dict:
    """`run` in several processes: process j takes every `jobs`-th number from first + j on."""
    if jobs == 1:
        return run(range(first, first + draws), "cuda", limit_s, decode)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        shares = [
            pool.submit(run, range(first + j, first + draws, jobs), "cuda", limit_s, decode)
            for j in range(jobs)
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
    parser.add_argument("--decode", action="store_true", help="calls of attention_decode")
    parser.add_argument("--only", type=int, help="the number of one call, which a report names")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/random_draws.json)")
    args = parser.parse_args(argv)
    import torch

    from attnlib.bench import records

    if not torch.cuda.is_available():
        print("the kernels need a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    if args.only is not None:
        print(*told(args.only, args.decode).items(), sep="\n")
        try:
            one(args.only, args.decode, "cuda")
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    first = args.seed * 10**6
    found = run_jobs(first, args.draws, args.seconds, args.jobs, args.decode)
    print(f"{found['calls']} calls in {found['seconds']:.0f} s, {found['failed']} failed")
    header = records.provenance({"seed": args.seed, "limit_s": args.seconds})
    name = "random_draws_decode" if args.decode else "random_draws"
    path = records.report_path(name, header, args.out)
    records.write_report(path, header, {name: {"rows": [found]}})
    print(path)
    return int(bool(found["failed"]) or not found["calls"])


if __name__ == "__main__":
    sys.exit(main())
