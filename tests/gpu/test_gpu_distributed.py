"""attnlib.distributed on two GPUs with NCCL: within the budgets of one GPU."""

from __future__ import annotations

import distributed_jobs as jobs
import pytest
import torch
from distributed_jobs import Case
from ranks import Ranks

from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
BIG = {"heads": 8, "kv_heads": 2, "rows": 2048, "impl": None, "head_dim": 128, "dtype": "bfloat16"}
CASES = [
    Case(causal, window, method, **BIG)
    for causal, window in ((True, None), (False, None), (True, (300, -1)), (False, (70, 90)))
    for method in ("ring", "all_gather", "ulysses")
] + [
    Case(True, None, "auto", **{**BIG, "rows": 132}), Case(True, None, "auto", **{**BIG, "head_dim": 64}),
    Case(True, None, "ring", **{**BIG, "head_dim": 256, "dtype": "float16"}),
    Case(True, None, "auto", **{**BIG, "kv_heads": 1}), Case(False, None, "ring", **{**BIG, "mesh": (1, 2)}),
    Case(True, None, "auto", **{**BIG, "dtype": "float32", "rows": 512}),
]  # fmt: skip


def judged(cases: list[Case]) -> list[str]:
    """What is wrong with each, on this rank; "" if nothing is."""
    found, here = [], f"cuda:{torch.cuda.current_device()}"
    for case in cases:
        out, lse, *gradients = jobs.over_ranks(case, here)
        q, k, v, d_out = jobs.inputs(case, here)
        options = {"causal": case.causal, "window": case.window}
        oracle = Oracle(q, k, v, **options)
        verdicts = [oracle.judge(out), *GradientOracle(d_out, q, k, v, **options).judge(*gradients).values()]
        wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
        if not (lse - oracle.lse).abs().max() <= oracle.lse_tolerance:
            wrong.append("LSE")
        found.append("; ".join(wrong))
    return found


def repeated(case: Case) -> bool:
    """Whether ten calls in a row, on a stream of one's own, have equal outputs: no one reads what is still on
    its way, or overwrites what is still read."""
    from attnlib import distributed as cp

    here = f"cuda:{torch.cuda.current_device()}"
    stream = torch.cuda.Stream()
    tensors = [cp.shard(x, causal=case.causal) for x in jobs.inputs(case, here)[:3]]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [cp.attention(*tensors, causal=case.causal, method=case.method) for _ in range(10)]
        torch.full((64 << 20,), float("nan"), device=here)  # over whatever was given back too early
        found += [cp.attention(*tensors, causal=case.causal, method=case.method)]
    torch.cuda.synchronize()
    return all(torch.equal(found[0], x) for x in found)


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2, backend="nccl")
    yield ranks
    ranks.close()


def test_within_the_budgets(two):
    for found in two.run(judged, CASES, timeout=240):
        assert not any(found), [(case, wrong) for case, wrong in zip(CASES, found, strict=True) if wrong]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_repeated_calls(two, method):
    assert all(two.run(repeated, Case(True, None, method, **{**BIG, "rows": 16384}), timeout=120))


@pytest.mark.parametrize("what", ["shape", "argument"])
def test_ranks_that_differ(two, what):
    """Tensors are on the CPU there, so gloo carries them: the options are compared in the same way."""
    (first, again), (second, also) = two.run(jobs.unlike, what)
    assert "expected the same" in first + second or "can't take part" in first + second
    assert again == also == "no error"
