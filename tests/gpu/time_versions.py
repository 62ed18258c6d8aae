"""Time attnlib with several versions of Triton: forward and backward at the task's shapes, causal.

    python tests/gpu/time_versions.py FOLDER...    150 s for one; a table, and lines of JSON with --out FILE

Each FOLDER holds another Triton; the first one is that of this Python. No process can have two, so processes
take turns: the first version, each of the others, and back. Before them, one of each compiles. The first
process of each judges what it computes against fp64, before it is timed and after. What two processes of one
version differ by is noise, as is what a call differs by from itself within a process. Status 0 when all was
right and ran the Hopper kernels, 1 otherwise.
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
Found = dict[tuple[str, str], dict[Path | None, list[dict[str, Any]]]]
"""By pass and shape, and by the folder of a Triton, the rows of its two processes."""
FIELDS = "ms", "tflops", "max_error", "reason", "registers", "spills", "round_ms"
INSTALLED = None
"""In the place of a folder: the Triton of this Python."""


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


def child(folder: Path | None, judged: bool, warm: bool = False) -> subprocess.Popen:
    paths = [] if folder is INSTALLED else [str(folder)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    env |= {"ATTNLIB_WARM": "2"} if warm else {}
    command = [sys.executable, __file__, "--child", *["--judged"] * judged]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def run(others: list[Path], out: Path | None) -> int:
    versions = [INSTALLED, *others]
    for process in [child(folder, False, warm=True) for folder in versions]:
        process.communicate()
        if process.returncode:
            return 1
    found: Found = {}
    bad = 0
    for number, folder in enumerate([*versions, *versions[::-1]]):
        process = child(folder, judged=number < len(versions))
        for line in process.stdout:
            row = json.loads(line)
            found.setdefault((row["pass"], row["shape"]), {}).setdefault(folder, []).append(row)
            bad += row["status"] != "ok" or row["kernel"] != "hopper" or not row["direct"]
            print(line, end="", flush=True)
            if out:
                with out.open("a") as file:
                    file.write(line)
        bad += process.wait() != 0
    for other in others:
        print(table(found, other))
    return int(bool(bad))


def table(found: Found, other: Path) -> str:
    """Each pass and shape with the first Triton and with another one, in the two processes of each."""
    lines = []
    for (way, shape), rows_of in found.items():
        rows = [rows_of.get(folder, []) for folder in (INSTALLED, other)]
        times = [[row["ms"] for row in of if "ms" in row] for of in rows]
        if any(len(of) != 2 for of in times):
            lines.append(f"{way:8s} {shape:5s} not timed in every process")
            continue
        apart = [a / b for a, b in times]
        apart += [row["control"] for of in rows for row in of]
        noise = math.exp(max(abs(math.log(x)) for x in apart))
        first, second = map(statistics.mean, times)
        ratio = first / second
        word = "tie" if abs(math.log(ratio)) <= math.log(noise) else "faster" if ratio > 1 else "slower"
        names = [of[0]["triton"] for of in rows]
        lines.append(
            f"{way:8s} {shape:5s} {first:.4f} ms with {names[0]}, {second:.4f} ms with {names[1]}: "
            f"{names[1]} is {ratio:.3f}x, noise {noise:.3f}: {word}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="of another Triton")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--judged", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measured(args.judged)
        return 0
    if not args.folders:
        parser.error("FOLDER: expected at least one")
    for folder in args.folders:
        if not (folder / "triton").is_dir():
            parser.error(f"FOLDER: expected one that holds triton, got {folder}")
    return run(args.folders, args.out)


if __name__ == "__main__":
    sys.exit(main())
