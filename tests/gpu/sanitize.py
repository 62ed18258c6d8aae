"""Run small calls of every kernel under NVIDIA's compute-sanitizer, tool by tool, and write what it found.

    python tests/gpu/sanitize.py                     all four tools; figures/data/<gpu>/sanitizer.json
    python tests/gpu/sanitize.py --tool racecheck    one of them, into the same report
    python tests/gpu/sanitize.py --jobs 8            the calls of each tool shared out to 8 processes
    python tests/gpu/sanitize.py --impl kept entmax  calls of these implementations alone; no report

compute-sanitizer comes with the CUDA toolkit, and as the package nvidia-cuda-sanitizer-api; the first on PATH
is taken. A tool slows a kernel down by a factor of 10 to 100. Status 0 when every tool ran to its end without
a finding, 1 otherwise, 2 without a GPU or compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

from sanitized import calls, run  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NAMES = "kns=attention_|pool_|quantize_|sum_values|join_parts|entmax_"
NAMES += "|r_step|l_step|center_step|project_columns|order_columns|sum_queries|gather_keys"
OURS = ["--kernel-regex", NAMES]
OPTIONS = {
    "memcheck": OURS,
    "racecheck": OURS,
    # PyTorch's kernel that fills a tensor has to be seen too: it initializes the counter of tiles. What a
    # copy to the host reads is not checked: the tool does not see what TMA stores.
    "initcheck": ["--kernel-regex", f"{NAMES}|FillFunctor", "--check-api-memory-access", "no"],
    "synccheck": OURS,
}
"""Options of each tool. Only these kernels are instrumented: it is faster."""
ENVIRONMENT = {
    # One cudaMalloc for each tensor: an access beyond its end is then outside of all that is allocated.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "ATTNLIB_REPLAY": "1",
}
ALL_CALLS = "all calls done:"


# ---------------------------------------------------------------- what runs under the sanitizer


def run_calls(part: int, parts: int, impls: Sequence[str] = ()) -> None:
    """Every `parts`-th call once, from `part` on; its outputs and gradients have to be finite. impls: of
    these implementations alone, if there are any. RuntimeError, after all of them, that names each call with
    a result that is not."""
    done, wrong = 0, []
    chosen = (call for call in calls() if not impls or call.impl in impls)
    for call in islice(chosen, part, None, parts):
        results = run(call)
        if not all(result.detach().cpu().isfinite().all() for result in results):
            wrong.append(call)
        done += bool(results)
    print(ALL_CALLS, done, flush=True)
    if wrong:
        raise RuntimeError(f"a result is not finite: {', '.join(map(str, wrong))}")


# ---------------------------------------------------------------- what the sanitizer says


@dataclass(frozen=True)
class Report:
    """What a tool said. errors: of its summary, None if it has none; findings: kind -> how often."""

    errors: int | None
    warnings: int
    calls: int
    findings: dict[str, int]


_CONTINUED = re.compile(r" (at|by|and|in|Address|Access|Barrier is|Saved|Host|Device|COMPUTE-SANITIZER|\[)\b")


def parse(output: str) -> Report:
    """Read the output of one tool.

    Its lines start with "=========". Among the last is "ERROR SUMMARY: 0 errors", or of racecheck "RACECHECK
    SUMMARY: 0 hazards displayed (0 errors, 0 warnings)". A finding is a paragraph: its first line says what
    was found, the others say where.
    """
    errors, warnings = None, 0
    findings: Counter[str] = Counter()
    for line in output.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if "were not printed" in text:
            continue
        if summary := re.search(r"\bERROR SUMMARY: (\d+) error", text):
            errors = int(summary[1])
        elif summary := re.search(r"RACECHECK SUMMARY:.*\((\d+) errors?, (\d+) warnings?\)", text):
            errors, warnings = int(summary[1]), int(summary[2])
        elif re.match(r" \S", text) and not _CONTINUED.match(text):
            findings[_kind(text)] += 1
    done = re.search(rf"^{ALL_CALLS} (\d+)", output, re.MULTILINE)
    return Report(errors, warnings, int(done[1]) if done else 0, dict(sorted(findings.items())))


def _kind(text: str) -> str:
    """A finding without what differs from one to the next: addresses, blocks, threads, names of kernels."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x?", text.strip())
    text = re.sub(r"\(\d+,\s*\d+,\s*\d+\)", "(?)", text)
    return re.sub(r"\b\d{3,}\b", "?", text)[:160]


def verdict(report: Report, status: int | None) -> str:
    """ "ok", or why it is not. status: of the tool's process, None when its time was up."""
    if status is None:
        return "timed out"
    if report.errors is None:
        return f"no summary, status {status}"
    if report.errors or report.warnings:
        return f"{report.errors} errors, {report.warnings} warnings"
    if status or not report.calls:
        return f"failed with status {status}"
    return "ok"


# ---------------------------------------------------------------- the command line


def check_part(
    program: str, tool: str, limit_s: float, part: int, parts: int, impls: Sequence[str] = ()
) -> tuple[Report, str, str]:
    """Run a share of the calls under one tool; the report, its verdict, and the end of the output."""
    command = [program, "--tool", tool, "--error-exitcode", "9", *OPTIONS[tool]]
    command += [sys.executable, str(Path(__file__).resolve()), "--calls", f"{part}/{parts}"]
    command += ["--impl", *impls] if impls else []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the tool and what runs under it
        output, _ = process.communicate()
        status = None
    report = parse(output)
    return report, verdict(report, status), "\n".join(output.splitlines()[-40:])


def check(
    program: str, tool: str, limit_s: float, jobs: int, impls: Sequence[str] = ()
) -> dict[str, Any]:
    """Run all calls under one tool in `jobs` processes, `limit_s` seconds at most; a row of the report."""
    begin = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        share = lambda part: check_part(program, tool, limit_s, part, jobs, impls)  # noqa: E731
        found = list(pool.map(share, range(jobs)))
    reports = [report for report, _, _ in found]
    wrong = [(said, end) for _, said, end in found if said != "ok"]
    known = [report.errors for report in reports if report.errors is not None]
    row = {
        "tool": tool,
        "version": version(program),
        "verdict": "; ".join(dict.fromkeys(said for said, _ in wrong)) or "ok",
        "errors": sum(known) if known else None,
        "warnings": sum(report.warnings for report in reports),
        "calls": sum(report.calls for report in reports),
        "seconds": round(time.monotonic() - begin, 1),
        "findings": dict(sorted(sum((Counter(report.findings) for report in reports), Counter()).items())),
    }
    print(f"{tool:10s} {row['verdict']}; {row['calls']} calls, {row['seconds']:.0f} s", flush=True)
    for _, end in wrong:
        print(end, flush=True)
    return row


def merged(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of TOOLS: the new ones, and of the tools that did not run those of before."""
    found = {row["tool"]: row for row in (*before, *rows)}
    return [found[tool] for tool in TOOLS if tool in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run small calls of every kernel under compute-sanitizer.")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one tool, or several (default: all)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a tool (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/sanitizer.json)")
    parser.add_argument("--jobs", type=int, default=1, help="processes for a tool (default: %(default)s)")
    parser.add_argument("--impl", nargs="+", default=[], choices=sorted({call.impl for call in calls()}),
                        help="calls of these implementations alone (default: all)")  # fmt: skip
    parser.add_argument("--calls", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs: expected 1 or more, got {args.jobs}")
    if args.calls:
        run_calls(*map(int, args.calls.split("/")), args.impl)
        return 0
    import torch

    from attnlib.bench import records

    program = shutil.which("compute-sanitizer")
    if program is None:
        print(
            "compute-sanitizer: not on PATH; it comes with the CUDA toolkit (usually /usr/local/cuda/bin)",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print("the kernels need a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    header = records.provenance({"limit_s": args.limit})
    path = records.report_path("sanitizer", header, args.out)
    tools = args.tool or TOOLS
    with ThreadPoolExecutor(len(tools)) as pool:  # most of the time goes into compiling, on the CPU
        rows = list(pool.map(lambda tool: check(program, tool, args.limit, args.jobs, args.impl), tools))
    status = int(any(row["verdict"] != "ok" for row in rows))
    if args.impl:
        return status
    tables = {"sanitizer": {"rows": merged(rows, earlier(path, header["commit"]))}}
    records.write_report(path, header, tables)
    print(path)
    return status


def earlier(path: Path, commit: str | None) -> list[dict[str, Any]]:
    """Rows of an earlier report, if it is of the same code."""
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    return report["tables"]["sanitizer"]["rows"] if report["commit"] == commit else []


def version(program: str) -> str:
    """Such as "2025.1.0.0"; "unknown" where the program does not say."""
    output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"(?i)version\s+(\d[\d.]*\d)", output)
    return found[1] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
