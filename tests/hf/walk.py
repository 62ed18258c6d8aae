"""Every text architecture of the installed transformers through every case, and the table of verdicts.

    python tests/hf/walk.py                        figures/data/transformers.json, notebooks/transformers.md
    python tests/hf/walk.py --only llama bert      these model types, printed, nothing written
    python tests/hf/walk.py --only llama --update  and written into the table in place of their rows
    python tests/hf/walk.py --jobs 2               in as many processes
    python tests/hf/walk.py --page                 the page alone, from the table

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
from tiny import ROLES, Architecture, architectures  # noqa: E402
from walk_cases import (  # noqa: E402
    ALONE,
    CASES,
    ELSE,
    EQUAL,
    NOT_FOR_IT,
    ONE,
    REFUSED,
    WRONG,
    Case,
    refusal,
    verdict,
)  # fmt: skip

import attnlib.hf  # noqa: E402

DATA, PAGE = ROOT / "figures" / "data" / "transformers.json", ROOT / "notebooks" / "transformers.md"
REFUSAL = "made"
"""The only case of an architecture that is refused."""
SECONDS = 60
"""What a case may take of processor time: how busy a machine is decides nothing."""


class TooLong(BaseException):
    pass


def _ring(*_):
    raise TooLong


def walk(architecture: Architecture, device: str, chosen: list[Case] = CASES) -> dict:
    """The verdicts of one architecture, in the cases chosen."""
    attnlib.hf.register()
    row = {"type": architecture.model_type, "role": architecture.role, "class": architecture.class_name}
    row["sdpa"] = architecture.claims_sdpa
    row["verdicts"] = {}
    cases = [(case.name, lambda case=case: verdict(architecture, case, device)) for case in chosen]
    if not architecture.is_taken:
        cases = [(REFUSAL, lambda: refusal(architecture))]
    before = signal.signal(signal.SIGPROF, _ring)
    begin = time.monotonic()
    for name, judge in cases:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            row["verdicts"][name] = judge()
        except TooLong:
            row["verdicts"][name] = WRONG + f"more than {SECONDS} s"
        except Exception as error:
            row["verdicts"][name] = WRONG + f"{type(error).__name__}: {error!s:.90}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def _settle() -> None:
    """What holds for the whole of a process that walks."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there, and no page")
    parser.add_argument("--page", action="store_true", help="only write the page anew from the table")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads(DATA.read_text())))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    todo = [a for a in architectures() if not arguments.only or a.model_type in arguments.only]
    rows = []
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), _settle) as pool:
        for row in pool.map(walk, todo, [device] * len(todo)):
            rows.append(row)
            count = Counter(word.split(":")[0] for word in row["verdicts"].values())
            done = f"[{len(rows)}/{len(todo)}] {row['type']} ({row['role']})"
            print(f"{done}: {dict(count)}, {row['seconds']} s", flush=True)
            for name, found in row["verdicts"].items():
                if found.startswith(WRONG) or arguments.only:
                    print(f"    {name}: {found}", flush=True)
    wrong = sum(found.startswith(WRONG) for row in rows for found in row["verdicts"].values())
    print(f"{len(rows)} architectures, {wrong} verdicts that are WRONG")
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    computed = torch.cuda.get_device_name() if device == "cuda" else "CPU, attnlib's reference"
    table = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    table |= {"device": computed, "rows": rows}
    if arguments.update:
        old, new = json.loads(DATA.read_text()), {(row["type"], row["role"]): row for row in rows}
        if any(old[name] != table[name] for name in ("transformers", "torch", "device")):
            parser.error(
                f"--update: expected a table of {table['transformers']}, {table['torch']}, {computed}"
            )
        table["rows"] = [new.get((row["type"], row["role"]), row) for row in old["rows"]]
    if arguments.table:
        arguments.table.write_text(_text(table))
    elif arguments.update or not arguments.only:
        DATA.write_text(_text(table))
        PAGE.write_text(page(table))
    return bool(wrong)


def _text(table: dict) -> str:
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------- the page

_HEAD = """# Models of transformers

<!-- Written by tests/hf/walk.py from figures/data/transformers.json; not by hand. -->

Every text architecture of transformers {transformers}, tiny and with random weights, in float32, with
`attn_implementation="attnlib"` beside `"eager"` and `"sdpa"` (torch {torch}; {device}).
`python tests/hf/walk.py` writes this page anew; on a GPU it runs the kernels.

{number} architectures are computed: those that claim to support `"sdpa"`, and {scored}, which lack it because
of their soft caps or sinks. The other {others} are refused when the model is made, by the name of its class:
{refused}.

A cell says what came out:

- **=** the same as `"eager"`: the same tokens, or logits and gradients within the error budget (twice the
  error that `"eager"` and `"sdpa"` have against float64, and a rounding).
- **a**, **b**, … refused with a `ValueError` that names the argument:
  {letters}.
- **s** equal to each packed sequence computed alone. `"eager"` takes the row for one sequence, because the
  model does not tell its mask of `position_ids`, or because there is a cache.
- **1** one sequence, as `"eager"` has it: this model hands `position_ids` to neither its mask nor its
  attention when there is a cache.
- **×** this model does not do that with `"eager"` or `"sdpa"` either, or not in so small a size.
- **!** wrong. There are {wrong} of these.
- An empty cell: the case is not for this architecture.

Windows: a sliding window, or chunks, of 5 tokens in a text of 17; in the cases without the word it is 64.
Holes: tokens in the middle of a row that the attention_mask hides. Compiled: `torch.compile(model,
fullgraph=True)`.
"""


def page(table: dict) -> str:
    """The table as a page of the book."""
    rows = [row for row in table["rows"] if REFUSAL not in row["verdicts"]]
    refused = [row["class"] for row in table["rows"] if REFUSAL in row["verdicts"]]
    scored = ", ".join(sorted(row["type"] for row in rows if not row["sdpa"]))
    found = [verdict for row in rows for verdict in row["verdicts"].values()]
    names = sorted({verdict.removeprefix(REFUSED) for verdict in found if verdict.startswith(REFUSED)})
    letters = dict(zip(names, "abcdefghijklmno", strict=False))

    def mark(verdict: str) -> str:
        if verdict.startswith(REFUSED):
            return letters[verdict.removeprefix(REFUSED)]
        return {EQUAL: "=", ALONE: "s", ONE: "1", NOT_FOR_IT: ""}.get(
            verdict, "×" if verdict.startswith(ELSE) else "!"
        )

    text = _HEAD.format(
        transformers=table["transformers"], torch=table["torch"], device=table["device"],
        number=len(rows), scored=scored, others=len(refused), refused=", ".join(sorted(set(refused))),
        letters="; ".join(f"**{letter}** `{name}`" for name, letter in letters.items()),
        wrong=sum(verdict.startswith(WRONG) for verdict in found),
    )  # fmt: skip
    for role in ROLES:
        of_role = [row for row in rows if row["role"] == role]
        cases = [c.name for c in CASES if any(row["verdicts"][c.name] != NOT_FOR_IT for row in of_role)]
        text += f"\n## {role.capitalize()}s\n\n| model type | {' | '.join(cases)} |\n"
        text += "| --- |" + " :-: |" * len(cases) + "\n"
        for row in of_role:
            text += f"| {row['type']} | {' | '.join(mark(row['verdicts'][case]) for case in cases)} |\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
