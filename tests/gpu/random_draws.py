"""Calls drawn at random on this GPU against fp64, for a given time; and a report.

    python tests/gpu/random_draws.py                        attention, forward and backward, for ten minutes
    python tests/gpu/random_draws.py --seconds 60 --seed 7  other calls, for a minute
    python tests/gpu/random_draws.py --jobs 14              in as many processes, which compile side by side
    python tests/gpu/random_draws.py --family fp8 --only 7  one call again, with its traceback
    python tests/gpu/random_draws.py --family decode --family decode_fp8 --family fp8 --seconds 90 --jobs 14

Families: "attention", batches and varlen sequences; "decode", attention_decode with caches in the dtype of q;
"decode_fp8", with caches in FP8; "fp8", quantize_fp8 and attention_fp8; "entmax", forward and backward,
"monarch" and "distr", each against its own model; "masks", attention under block masks and with scores,
forward and backward. Several run one after the other, each for --seconds, and each writes
figures/data/<gpu>/random_draws_<family>.json; "attention" random_draws.json.
Which calls are drawn follows from the seed alone, how many from the time. Kinds of call that are new take
seconds to compile, so the first minutes see fewer; but for attention's several calls in a row share what is
compiled, and one process has them all. The first call that fails is told as a command that repeats it.
Status 0 when every call was within the error budget, 1 otherwise, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import beyond_draws  # noqa: E402
import decode_cases  # noqa: E402
import decode_draws  # noqa: E402
import fp8_draws  # noqa: E402
import mask_draws  # noqa: E402
from draws import LAYOUTS, Draw, check  # noqa: E402

SHOWN = 20
"""Failures that the report tells in full."""


class Asked(NamedTuple):
    """A call of attention, and how it is to be computed."""

    call: Draw
    impl: str | None
    deterministic: bool


def draw(number: int) -> Asked:
    """A call, the same one for the same number."""
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
    of_values = random.Random(f"values of {number}")  # drawn apart: other calls stay what they were
    value_dim = None
    if dtype != "float32" and of_values.random() < 0.1:
        value_dim = of_values.choice((64, 128, 256, 120))
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
        value_dim=value_dim,
    )
    return Asked(call, rng.choice((None, "triton")), rng.random() < 0.5)


def kind(asked: Asked) -> str:
    """What the report counts calls by."""
    call = asked.call
    window = " window" if call.window else ""
    mask = f"{'causal' if call.causal else 'dense'}{window}"
    return f"{call.dtype}, {'varlen' if call.varlen else 'batch'}, {mask}"


def check_attention(asked: Asked, device: str) -> None:
    check(asked.call, device, asked.impl, deterministic=asked.deterministic)


class Family(NamedTuple):
    """draw: the call of a number. check: AssertionError if it is wrong on a device. kind: what calls are
    counted by. together: so many consecutive numbers share what is compiled."""

    draw: Callable[[int], Any]
    check: Callable[[Any, str], None]
    kind: Callable[[Any], str]
    together: int = 1


_decode = decode_cases.check, decode_draws.kind, decode_draws.TOGETHER
_beyond = beyond_draws.kind, beyond_draws.TOGETHER
FAMILIES = {
    "attention": Family(draw, check_attention, kind),
    "decode": Family(decode_draws.draw, *_decode),
    "decode_fp8": Family(partial(decode_draws.draw, fp8=True), *_decode),
    "fp8": Family(fp8_draws.draw, fp8_draws.check, fp8_draws.kind, fp8_draws.TOGETHER),
    "entmax": Family(beyond_draws.draw_entmax, beyond_draws.check_entmax, *_beyond),
    "monarch": Family(beyond_draws.draw_monarch, beyond_draws.check_monarch, *_beyond),
    "distr": Family(beyond_draws.draw_distr, beyond_draws.check_distr, *_beyond),
    "masks": Family(mask_draws.draw, mask_draws.check, mask_draws.kind, mask_draws.TOGETHER),
}


def numbers(first: int, draws: int, together: int, job: int = 0, jobs: int = 1) -> Iterator[int]:
    """Those that one of several processes takes: pieces of `together` numbers in turn."""
    for start in range(first + job * together, first + draws, jobs * together):
        yield from range(start, min(start + together, first + draws))


def command(family: str, number: int) -> str:
    """What repeats a call."""
    return f"python tests/gpu/random_draws.py --family {family} --only {number}"


def run(family: str, taken: Iterator[int], device: str, limit_s: float) -> dict:
    """Check one call after the other until the time is up."""
    begin, done, kinds, failures = time.monotonic(), 0, Counter(), []
    shown, of = begin, FAMILIES[family]
    for number in taken:
        if time.monotonic() - begin > limit_s:
            break
        call = of.draw(number)
        try:
            of.check(call, device)
            kinds[of.kind(call)] += 1
        except Exception as error:  # whatever goes wrong is a finding
            reason = f"{type(error).__name__}: {error}"
            failures.append({"number": number, "call": str(call)[:2000], "reason": reason[:500]})
            kinds["failed"] += 1
            print(f"{command(family, number)}  # {reason[:500]}", flush=True)
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


def run_job(family: str, first: int, draws: int, limit_s: float, job: int, jobs: int) -> dict:
    """The share of one process."""
    return run(family, numbers(first, draws, FAMILIES[family].together, job, jobs), "cuda", limit_s)


def joined(parts: Sequence[dict]) -> dict:
    """What the processes found, as one report."""
    failures = [failure for part in parts for failure in part["failures"]]
    seconds, calls = max(part["seconds"] for part in parts), sum(part["calls"] for part in parts)
    return {
        "calls": calls, "failed": sum(part["failed"] for part in parts), "seconds": seconds,
        "kinds": dict(sorted(sum((Counter(part["kinds"]) for part in parts), Counter()).items())),
        "failures": sorted(failures, key=lambda failure: failure["number"])[:SHOWN],
    }  # fmt: skip


def told(family: str, found: dict) -> str:
    """A line for the screen, and one that repeats the first call that failed."""
    speed = found["calls"] / max(found["seconds"], 0.1)
    lines = [
        f"{family}: {found['calls']} calls in {found['seconds']:.0f} s, {speed:.1f} a second, "
        f"{found['failed']} failed"
    ]
    for failure in found["failures"][:1]:
        lines += ["first of them:", command(family, failure["number"])]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check calls drawn at random against fp64 on this GPU.")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="(default: attention)")
    parser.add_argument("--seconds", type=float, default=600, help="for a family (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=10**9, help="at most so many calls (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="which calls (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--only", type=int, help="the number of one call, which a report names")
    parser.add_argument("--out", type=Path, help="of one family (default: see above)")
    args = parser.parse_args(argv)
    families = args.family or ["attention"]
    if len(families) > 1 and (args.only is not None or args.out):
        parser.error("--only, --out: expected one --family")
    import torch

    from attnlib.bench import records

    if not torch.cuda.is_available():
        print("the kernels need a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    if args.only is not None:
        of = FAMILIES[families[0]]
        call = of.draw(args.only)
        print(call)
        try:
            of.check(call, "cuda")
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    header, good = records.provenance({"seed": args.seed, "limit_s": args.seconds}), True
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for family in families:
            share = partial(run_job, family, args.seed * 10**6, args.draws, args.seconds, jobs=args.jobs)
            found = joined(list(pool.map(share, range(args.jobs))))
            print(told(family, found), flush=True)
            name = "random_draws" if family == "attention" else f"random_draws_{family}"
            path = records.report_path(name, header, args.out)
            records.write_report(path, header, {name: {"rows": [found]}})
            print(path, flush=True)
            good &= found["calls"] > 0 and not found["failed"]
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
