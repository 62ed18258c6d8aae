"""Time attnlib with two versions of Triton: forward and backward at the task's shapes, causal.

    python tests/gpu/time_versions.py FOLDER    some 150 s; a table, and lines of JSON with --out FILE

FOLDER holds the other Triton; the first one is that of this Python. No process can have both, so
processes take turns: first, other, other, first. Before them, one of each compiles. The first process of each
judges what it computes against fp64, before it is timed and after. What two processes of one version differ
by is noise, as is what a call differs by from itself within a process. Status 0 when all was right and ran
the Hopper kernels, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
FIELDS = "ms", "tflops", "max_error", "reason", "registers", "spills", "round_ms"
TURNS = "first", "other", "other", "first"


def measured(judged: bool) -> None:
    """In a child: a line of JSON for each pass and shape."""
    import triton

    from attnlib import attention, explain, node
    from attnlib.bench import backward, harness, timing
    from attnlib.bench.oracle import make_inputs
    from attnlib.bench.setting import BOOK, warming
    from attnlib.bench.shapes import TASK
    from attnlib.kernels.common import direct

    def ours(q, k, v, causal, sm_scale):
        return attention(q, k, v, causal=causal, sm_scale=sm_scale)

    for way, collect in (("forward", harness.collect), ("backward", backward.collect)):
        for name, shape in TASK.items():
            row, *controls = collect({"attnlib": ours}, [shape], setting=BOOK, gate=judged)
            q, k, v = make_inputs(shape, device="cuda")
            found = {"triton": triton.__version__, "pass": way, "shape": name, "status": row["status"]}
            found |= {field: row[field] for field in FIELDS if field in row}
            found |= {"kernel": explain(q, k, v, causal=True).kernel, "direct": direct.launcher() is not None}
            if row["status"] == "ok" and not warming():
                found["control"] = row["ms"] / controls[0]["ms"]
                if way == "forward":
                    node.wait()
                    found["host_us"] = timing.host_us(partial(attention, q, k, v, causal=True), 20)
            print(json.dumps(found), flush=True)


def child(turn: str, other: Path, judged: bool, warm: bool = False) -> subprocess.Popen:
    paths = [str(other)] if turn == "other" else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    env |= {"ATTNLIB_WARM": "2"} if warm else {}
    command = [sys.executable, __file__, "--child", *["--judged"] * judged]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def run(other: Path, out: Path | None) -> int:
    for process in [child(turn, other, False, warm=True) for turn in ("first", "other")]:
        process.communicate()
        if process.returncode:
            return 1
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    bad = 0
    for number, turn in enumerate(TURNS):
        process = child(turn, other, judged=number < 2)
        for line in process.stdout:
            row = json.loads(line)
            found.setdefault((row["pass"], row["shape"]), {}).setdefault(turn, []).append(row)
            bad += row["status"] != "ok" or row["kernel"] != "hopper" or not row["direct"]
            print(line, end="", flush=True)
            if out:
                with out.open("a") as file:
                    file.write(line)
        bad += process.wait() != 0
    print(table(found))
    return int(bool(bad))


def table(found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]]) -> str:
    lines = []
    for (way, shape), turns in found.items():
        times = {turn: [row["ms"] for row in rows if "ms" in row] for turn, rows in turns.items()}
        if any(len(times.get(turn, ())) != 2 for turn in set(TURNS)):
            lines.append(f"{way:8s} {shape:5s} not timed in every process")
            continue
        apart = [a / b for a, b in times.values()]
        apart += [row["control"] for rows in turns.values() for row in rows]
        noise = math.exp(max(abs(math.log(x)) for x in apart))
        first, other = (statistics.mean(times[turn]) for turn in ("first", "other"))
        ratio = first / other
        word = "tie" if abs(math.log(ratio)) <= math.log(noise) else "faster" if ratio > 1 else "slower"
        names = [turns[turn][0]["triton"] for turn in ("first", "other")]
        lines.append(
            f"{way:8s} {shape:5s} {first:.4f} ms with {names[0]}, {other:.4f} ms with {names[1]}: "
            f"{names[1]} is {ratio:.3f}x, noise {noise:.3f}: {word}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of the other Triton")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--judged", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measured(args.judged)
        return 0
    if args.folder is None or not (args.folder / "triton").is_dir():
        parser.error(f"folder: expected one that holds triton, got {args.folder}")
    return run(args.folder, args.out)


if __name__ == "__main__":
    sys.exit(main())
