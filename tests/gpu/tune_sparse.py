"""Judge and time forms of the Hopper forward pass under a block mask on this GPU, beside the ideal.

    python tests/gpu/tune_sparse.py 64-50 64-25 128-3.125 --vary late_wait=0,1 --vary pin=0,1
    python tests/gpu/tune_sparse.py 128-causal 128-documents --vary block_n=64 --vary leaves_out=0,1

A cell is D-WHAT: the percent of random blocks of 128 keys that are kept, or causal, documents or window (all
of them have bits), or soft cap or sinks (under a causal mask). fp16, 16384 tokens. Forms: "default", what a
call gets, and that with each combination of the values of `--vary`, for fields of its configuration
(`kernels.sparse.configs_hopper`); combinations that it refuses are told and left out.

First, processes side by side compile. Then each form is judged against fp64 where a program has several
tiles: for normal inputs, large ones, and scores that rise from block to block. Nothing wrong is timed. Last,
shuffled rounds with cold L2. Tables as those of `tune_backward.py`: each form's time, and over it, of random
blocks the ideal, the dense kernel's time times the part that is kept, else the default's. Status 0 when all
were right, 1 otherwise, 2 without a Hopper GPU. docs/lab/sparse.md has what came of such runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tuned_forms  # noqa: E402
from time_sparse import TOKENS, causal, documents, inputs_of, kept_blocks, scores_of  # noqa: E402
from tuned_forms import Rounds, each_form, failure, judge, table_of  # noqa: E402

from attnlib import BlockMask, attention  # noqa: E402
from attnlib.bench.oracle import Oracle  # noqa: E402
from attnlib.kernels.sparse import hopper  # noqa: E402
from attnlib.kernels.sparse.configs_hopper import HopperSparseConfig  # noqa: E402
from attnlib.params import MaskWindow, Params  # noqa: E402
from attnlib.scores import ScoreParts, parts_of  # noqa: E402

JUDGED, HEADS = 1024, 96
"""Tokens and heads: 768 tiles, which are three for each pair of consumers at D = 64 and six at D = 128."""
KINDS = "normal", "large", "rising"
WINDOW = 512
MASKS = "causal", "documents", "window"
SCORES = "soft cap", "sinks"
DENSE, IDEAL = "dense", "ideal"

Tensor = torch.Tensor
Forms = dict[str, HopperSparseConfig]


class Cell(NamedTuple):
    """part: of the blocks that are kept, None where a mask or a score is asked for."""

    head_dim: int
    part: float | None
    mask: str
    score: str | None

    def over(self, q: Tensor) -> BlockMask:
        """The mask that is timed."""
        heads, tokens = q.shape[1:3]
        return mask_of(self.mask, tokens) if self.part is None else random_blocks(heads, tokens, self.part)

    def judged(self) -> list[BlockMask]:
        """Masks of 1024 tokens that forms are judged under."""
        if self.part is None:
            return [mask_of(self.mask, JUDGED)]
        return [random_blocks(HEADS, JUDGED, part) for part in (1 / 2, 128 / JUDGED)]


def cell_of(name: str) -> Cell:
    """ValueError for a name that has no such form."""
    columns, _, what = name.partition("-")
    what = what.replace("softcap", "soft cap")
    if columns not in ("64", "128"):
        raise ValueError(f"cells: expected 64 or 128 and what is asked for, such as 64-25, got {name}")
    if what in MASKS or what in SCORES:
        mask, score = (what, None) if what in MASKS else ("causal", what)
        return Cell(int(columns), None, mask, score)
    try:
        part = float(what) / 100
    except ValueError:
        known = ", ".join((*MASKS, "softcap", "sinks"))
        raise ValueError(f"cells: expected a percentage or one of {known}, got {name}") from None
    if not 0 < part <= 1:
        raise ValueError(f"cells: expected more than 0 and at most 100 percent, got {name}")
    return Cell(int(columns), part, "", None)


# ---------------------------------------------------------------- calls


def random_blocks(heads: int, tokens: int, part: float) -> BlockMask:
    return BlockMask.from_blocks(kept_blocks(heads, tokens, part, tuned_forms.DEVICE), tokens, tokens)


def mask_of(name: str, tokens: int) -> BlockMask:
    device = tuned_forms.DEVICE
    functions = {"causal": causal, "documents": documents(tokens, device), "window": window}
    return BlockMask.from_function(functions[name], tokens, tokens, device=device)


def window(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def score_of(cell: Cell, q: Tensor) -> ScoreParts | None:
    if cell.score is None:
        return None
    return parts_of(scores_of(q.shape[1], q.shape[2], tuned_forms.DEVICE)[cell.score][0], q, q)


def params_of(q: Tensor, mask: BlockMask, score: ScoreParts | None) -> Params:
    """With the form that a call gets."""
    params = Params(MaskWindow(None, None), q.shape[-1] ** -0.5, block_mask=mask, score=score)
    return params._replace(config=hopper.configuration(q, q, q, params))


def default_of(name: str) -> HopperSparseConfig:
    cell = cell_of(name)
    q = inputs_of(cell.head_dim, TOKENS, tuned_forms.DEVICE)[0]
    return params_of(q, cell.over(q), score_of(cell, q)).config


def inputs(head_dim: int, kind: str) -> list[Tensor]:
    """q, k, v that are judged; rising: scores grow by 16 powers of e from a block of 64 keys to the next."""
    device = tuned_forms.DEVICE
    rng = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, JUDGED, head_dim, generator=rng, device=device) for _ in range(3))
    if kind == "large":
        q *= 12
    if kind == "rising":
        q[..., 0] = head_dim**0.5
        k[..., 0] = 16.0 * (torch.arange(JUDGED, device=device) // 64)
    return [x.half() for x in (q, k, v)]


# ---------------------------------------------------------------- command


class Case(NamedTuple):
    """What forms of a cell are judged on."""

    kind: str
    tensors: list[Tensor]
    params: Params
    oracle: Oracle


def cases_of(cell: Cell) -> list[Case]:
    cases = []
    for kind, mask in product(KINDS, cell.judged()):
        q, k, v = inputs(cell.head_dim, kind)
        score = score_of(cell, q)
        oracle = Oracle(q, k, v, mask=mask.to_dense(), score=score)
        cases.append(Case(kind, [q, k, v], params_of(q, mask, score), oracle))
    return cases


def reason_of(cases: Sequence[Case], config: HopperSparseConfig) -> str:
    """Why a form is wrong; empty when it is right."""
    for case in cases:
        out, _ = hopper.forward(*case.tensors, case.params._replace(config=config))
        if not (found := case.oracle.judge(out)).ok:
            return f"{case.kind}: {found.reason}"
    return ""


def compile_one(name: str, form: HopperSparseConfig) -> str:
    """In a child: what it compiles stays in Triton's cache."""
    cell = cell_of(name)
    q, k, v = inputs(cell.head_dim, "normal")
    params = params_of(q, cell.judged()[0], score_of(cell, q))._replace(config=form)
    return failure(name, form, lambda: hopper.forward(q, k, v, params))


def pairs_of(mask: str, tokens: int) -> float:
    """Queries and keys that see each other, of a head."""
    whole, rest = divmod(tokens, 1000)
    return {
        "causal": tokens * (tokens + 1) / 2,
        "documents": whole * 1000 * 1001 / 2 + rest * (rest + 1) / 2,
        "window": WINDOW * (WINDOW + 1) / 2 + (tokens - WINDOW) * WINDOW,
    }[mask]


def report(name: str, forms: Forms, rounds: Rounds) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell = cell_of(name)
    cases = cases_of(cell)
    right = {form: partial(reason_of, cases, config) for form, config in forms.items()}
    bad = judge(name, right, lambda reason: reason)
    q, k, v = inputs_of(cell.head_dim, TOKENS, tuned_forms.DEVICE)[:3]
    mask, score = cell.over(q), score_of(cell, q)
    params = params_of(q, mask, score)
    own = {form: params._replace(config=forms[form]) for form in right}
    calls = {form: lambda given=given: hopper.forward(q, k, v, given) for form, given in own.items()}
    pairs = pairs_of(cell.mask, TOKENS) if cell.part is None else cell.part * TOKENS**2
    if cell.part is not None:
        calls[DENSE] = lambda: attention(q, k, v)
    found = tuned_forms.times(calls, rounds)
    if cell.part is not None:
        found[IDEAL] = [ms * cell.part for ms in found.pop(DENSE)]
    return table_of(name, found, 4 * q.shape[1] * cell.head_dim * pairs, IDEAL), bad


def main(argv: Sequence[str] | None = None) -> int:
    return tuned_forms.run(
        argv, "Time forms of attention under block masks beside each other.", default_of,
        partial(each_form, compile_one), report, cells="D-WHAT", over="the ideal's or the default's",
        default_needs_gpu=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
