"""attnlib.distributed on two GPUs with NCCL: within the budgets of one GPU."""

from __future__ import annotations

from functools import partial

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


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative RMS difference; NaN is infinite."""
    off = [(x.float() - y.float()).square().mean() / y.float().square().mean()
           for x, y in zip(found, expected, strict=True)]  # fmt: skip
    return max(x.sqrt().nan_to_num(nan=float("inf")).item() for x in off)


def results(call, inputs: list[torch.Tensor], d_out: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    given = [x.detach().requires_grad_() for x in inputs]
    out = call(*given)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in given)]


def varlen() -> float:
    """Packed sequences over ranks beside one GPU, in all ways; the largest difference."""
    from attnlib import attention_varlen
    from attnlib import distributed as cp

    offsets = torch.tensor([0, 1000, 1000, 1700, 4096], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    *whole, d_out = (torch.randn(4096, h, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
                     for h in (8, 4, 4, 8))  # fmt: skip
    expected = results(
        lambda *x: attention_varlen(*x, offsets, offsets, 2396, 2396, causal=True), whole, d_out
    )
    own = [cp.shard(x, dim=0) for x in (*whole, d_out)]
    expected, differences = [cp.shard(x, dim=0) for x in expected], []
    for method in ("ulysses", "all_gather"):
        call = partial(cp.attention_varlen, cu_seqlens=offsets, max_seqlen=2396, causal=True, method=method)
        differences.append(apart(results(call, own[:3], own[3]), expected))
    return max(differences)


def ring_of_pytorch() -> float:
    """PyTorch's context_parallel with attnlib as its FlashAttention, beside attnlib's own ranks."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import attention as backends

    from attnlib import distributed as cp
    from attnlib import sdpa

    generator = torch.Generator("cuda").manual_seed(0)
    *whole, d_out = (torch.randn(1, 8, 4096, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
                     for _ in range(4))  # fmt: skip
    own = [cp.shard(x, causal=True) for x in (*whole, d_out)]
    expected = results(lambda *x: cp.attention(*x, causal=True), own[:3], own[3])
    sdpa.register()
    backends.activate_flash_attention_impl(sdpa.NAME)
    buffers = [x.clone() for x in whole]
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, no_restore_buffers=set(buffers)),
        backends.sdpa_kernel(backends.SDPBackend.FLASH_ATTENTION),
    ):
        found = results(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), buffers, own[3])
    backends.restore_flash_attention_impl()
    return apart(found, expected)


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2, backend="nccl")
    yield ranks
    ranks.close()


def test_within_the_budgets(two):
    for found in two.run(judged, CASES, timeout=240):
        assert not any(found), [(case, wrong) for case, wrong in zip(CASES, found, strict=True) if wrong]


@pytest.mark.parametrize("job", [varlen, ring_of_pytorch])
def test_beside_another_way(two, job):
    assert max(two.run(job, timeout=120)) < 8e-3


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_repeated_calls(two, method):
    assert all(two.run(repeated, Case(True, None, method, **{**BIG, "rows": 16384}), timeout=120))


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_rank_that_does_not_come(two, which):
    (message, seconds), late = two.run(jobs.late, which, 3.0, "cuda", timeout=60)
    assert late[0] == "late" and seconds < 12
    assert message.startswith("RuntimeError: attention: a rank of the group died, or did not come within 3 s")


def test_a_rank_that_dies():
    """Between two passes, so that no transfer of NCCL's is on its way: the options, which gloo compares, tell
    of it. During a transfer NCCL's watchdog ends the process."""
    ranks = Ranks(2, backend="nccl")
    try:
        (ok, found), (_, other) = ranks.outcomes(jobs.died, 100.0, "cuda", timeout=120)
    finally:
        ranks.close()
    assert ok and other == "died", (found, other)
    first, second, seconds = found
    assert seconds < 50, "the lost connection, not the time limit"
    for message in (first, second):
        assert message.startswith("RuntimeError: attention: a rank of the group died"), message


@pytest.mark.parametrize("what", ["shape", "argument"])
def test_ranks_that_differ(two, what):
    """Tensors are on the CPU there, so gloo carries them: the options are compared in the same way."""
    (first, again), (second, also) = two.run(jobs.unlike, what)
    assert "expected the same" in first + second or "can't take part" in first + second
    assert again == also == "no error"
