"""Checks of the exercises of chapter 30."""

import numpy as np
import torch

from attnlib import Score
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.scores import parts_of

KEPT = (  # of each head's blocks: lists of different lengths, an empty one, a column that nobody sees
    ((1, 0, 1), (0, 0, 0), (0, 0, 1)),
    ((1, 1, 1), (1, 0, 0), (0, 0, 1)),
)


def _lists(keep: torch.Tensor) -> list[torch.Tensor]:
    """starts, ends and steps of bool blocks (H, rows, blocks across)."""
    counts = keep.flatten(0, 1).sum(1)
    ends = counts.cumsum(0)
    found = ends - counts, ends, keep.nonzero()[:, 2]
    return [x.to(torch.int32).to(lesson.device()) for x in found]


def _mask(keep: torch.Tensor) -> torch.Tensor:
    """The elements of these blocks, (1, H, S, S)."""
    return keep.repeat_interleave(64, 1).repeat_interleave(64, 2)[None].to(lesson.device())


def check_capped_attention(capped_attention):
    """Against fp64, with sinks of different sizes, a cap that bends the scores and one that hardly does, and
    a scale that D does not say."""
    keep = torch.tensor(KEPT).bool()
    for D, scale, cap, sinks in ((32, 0.3, 1.5, (0.5, -3.0)), (16, 0.15, 30.0, (-2.0, 4.0))):
        q, k, v = make_inputs(Shape(1, 2, 192, D), device=lesson.device())
        score = Score(soft_cap=cap, sinks=torch.tensor(sinks, device=q.device))
        with np.errstate(all="ignore"):  # a wrong answer makes the interpreter warn of NaN
            out = capped_attention(q, k, v, score.sinks, *_lists(keep), scale, cap)
        found = Oracle(q, k, v, sm_scale=scale, mask=_mask(keep), score=parts_of(score, q, k)).judge(out)
        case = f"D = {D}, sm_scale {scale}, cap {cap}, sinks {sinks}"
        assert found.ok, f"{case}: {found.reason}"
        assert not out[0, 0, 64:128].any(), f"{case}: expected 0 in the rows whose list is empty"


def check_gradient_of_values(gradient_of_values):
    """dV against fp64, under a scale that D does not say; the lists are those of the columns."""
    keep = torch.tensor(KEPT).bool()
    for D, scale in (16, 0.15), (32, 0.3):
        q, k, v, d_out = (make_inputs(Shape(1, 2, 192, D), seed=seed, device=lesson.device())[i]
                          for i, seed in ((0, 0), (1, 0), (2, 0), (0, 1)))  # fmt: skip
        mask = _mask(keep)
        lse = attention_fp64(q, k, v, mask=mask, sm_scale=scale)[1].float()
        with np.errstate(all="ignore"):
            dv = gradient_of_values(q, k, d_out, lse, *_lists(keep.mT), scale)
        assert isinstance(dv, torch.Tensor), f"expected a torch.Tensor, got {type(dv).__name__}"
        found = GradientOracle(d_out, q, k, v, mask=mask, sm_scale=scale).judge_one("dv", dv)
        assert found.ok, f"D = {D}, sm_scale {scale}: {found.reason}"


def check_fewest_blocks(fewest_blocks):
    """That many reach the share, one less does not."""
    for share, x, N in ((0.8, 1.5, 128), (0.95, 2.2, 128), (0.5, 0.7, 512), (0.9, 3.0, 64), (1.0, 1.0, 32)):
        n = fewest_blocks(share, x, N)
        case = f"share {share}, x = {x}, N = {N}"
        assert isinstance(n, int), f"{case}: expected a whole number, got {n!r}"

        def reached(blocks, x=x, N=N):
            return (1 + x / N) / (1 + x / blocks) if blocks > 0 else 0.0

        assert reached(n) >= share - 1e-9, f"{case}: {n} blocks reach {reached(n):.3f}"
        assert reached(n - 1) < share - 1e-9, f"{case}: {n - 1} blocks reach {reached(n - 1):.3f} already"
