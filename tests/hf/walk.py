"""Every text architecture of the installed transformers through every case, and the table of verdicts.

    python tests/hf/walk.py                      all; figures/data/transformers.json, notebooks/transformers.md
    python tests/hf/walk.py --only llama bert    these model types, printed, nothing written
    python tests/hf/walk.py --jobs 2             in as many processes

Models are tiny and have random weights. On a GPU attnlib's kernels compute, elsewhere its reference. Status 0
if nothing is WRONG.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hf")]

import torch  # noqa: E402
import transformers  # noqa: E402
from tiny import Architecture, architectures  # noqa: E402
from walk_cases import CASES, ELSE, REFUSED, WRONG, refusal, verdict  # noqa: E402

import attnlib.hf  # noqa: E402

DATA, PAGE = ROOT / "figures" / "data" / "transformers.json", ROOT / "notebooks" / "transformers.md"
SECONDS = 60
"""What a case may take."""


class TooLong(BaseException):
    pass


def _ring(*_):
    raise TooLong


def walk(architecture: Architecture, device: str) -> dict:
    """The verdicts of one architecture."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    attnlib.hf.register()
    row = {"type": architecture.model_type, "role": architecture.role, "class": architecture.class_name}
    row["sdpa"] = architecture.claims_sdpa
    row["verdicts"] = {}
    cases = [(case.name, lambda case=case: verdict(architecture, case, device)) for case in CASES]
    if not architecture.claims_sdpa:
        cases = [("made", lambda: refusal(architecture))]
    signal.signal(signal.SIGALRM, _ring)
    begin = time.monotonic()
    for name, judge in cases:
        signal.alarm(SECONDS)
        try:
            row["verdicts"][name] = judge()
        except TooLong:
            row["verdicts"][name] = WRONG + f"more than {SECONDS} s"
        except Exception as error:
            row["verdicts"][name] = WRONG + f"{type(error).__name__}: {error!s:.90}"
        finally:
            signal.alarm(0)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="only write the page anew from the table")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads(DATA.read_text())))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    todo = [a for a in architectures() if not arguments.only or a.model_type in arguments.only]
    rows = []
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        for row in pool.map(walk, todo, [device] * len(todo)):
            rows.append(row)
            count = Counter(word.split(":")[0] for word in row["verdicts"].values())
            print(f"[{len(rows)}/{len(todo)}] {row['type']} ({row['role']}): {dict(count)}, {row['seconds']} s", flush=True)
            for name, found in row["verdicts"].items():
                if found.startswith(WRONG) or arguments.only:
                    print(f"    {name}: {found}", flush=True)
    wrong = sum(found.startswith(WRONG) for row in rows for found in row["verdicts"].values())
    print(f"{len(rows)} architectures, {wrong} verdicts that are WRONG")
    if not arguments.only:
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU, attnlib's reference"
        table = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "device": name}
        table["rows"] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        DATA.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(table))
    return bool(wrong)


def page(table: dict) -> str:
    return ""


if __name__ == "__main__":
    sys.exit(main())
