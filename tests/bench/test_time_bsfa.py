"""tests/gpu/time_bsfa.py without a GPU: its judge, shares and ceilings, configurations; and the structure of
its inputs."""

from __future__ import annotations

import pytest
import time_bsfa
import torch

from attnlib import attention_bsfa, bsfa_threshold
from attnlib.bench.shapes import Shape
from attnlib.bench.structured import NEEDLES, structured

TENSORS = structured(Shape(1, 2, 512, 64, True, "float16"))


def test_right_outputs_pass_and_wrong_ones_do_not() -> None:
    limits = bsfa_threshold(*TENSORS[:2], kept=1)
    out, kept = attention_bsfa(*TENSORS, threshold=limits, return_kept=True, impl="reference")
    judge = time_bsfa.Judge(TENSORS, kept)
    assert judge.judge(out).ok
    assert not judge.judge(out * 1.1).ok and not judge.judge(out * float("nan")).ok
    dense = attention_bsfa(*TENSORS, threshold=-torch.inf, impl="reference")
    assert time_bsfa.Judge(TENSORS, None).judge(dense).ok
    assert not judge.judge(dense).ok


def test_shares_and_ceilings() -> None:
    _, kept = attention_bsfa(*TENSORS, threshold=-torch.inf, return_kept=True, impl="reference")
    assert time_bsfa.kept_share(kept, 512, 512) == 1.0 and time_bsfa.ceiling(1.0) == 1.0
    _, last = attention_bsfa(*TENSORS, threshold=torch.inf, return_kept=True, impl="reference")
    assert time_bsfa.kept_share(last, 512, 512) == pytest.approx(8 / (2 * (1 + 2 + 3 + 4)))
    assert time_bsfa.ceiling(0.0) == 2.0


def test_names_differ() -> None:
    for counts in time_bsfa.ASKED.values():
        assert len({time_bsfa.called("bsfa", count) for count in counts}) == len(counts)
    configs = time_bsfa.variants()
    assert len(set(configs.values())) == len(configs) == 5


def test_structured_inputs_have_few_blocks_with_high_scores() -> None:
    """A block of queries has as many needles as were planted, at most, and a sink; the softmax is theirs."""
    shape = Shape(1, 1, 2048, 128, True, "float16")
    q, k, v = structured(shape)
    limits = bsfa_threshold(q, k, kept=len(NEEDLES) + 2)
    out, kept = attention_bsfa(q, k, v, threshold=limits, return_kept=True, impl="reference")
    dense = attention_bsfa(q, k, v, threshold=-torch.inf, impl="reference")
    apart = (out.float() - dense.float()).square().mean() / dense.float().square().mean()
    assert time_bsfa.kept_share(kept, 2048, 2048) < 0.75 and apart.sqrt() < 0.1
    assert not torch.equal(structured(shape, seed=1)[0], q) and torch.equal(structured(shape)[0], q)
