"""The Hopper backward kernel as NumPy: its tiles, masks and places in memory, against dense attention; then
the real kernels around it, in the interpreter. What the GPU computes of a tile is left to tests/gpu."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from attnlib import launch_hopper_backward
from attnlib.band import band
from attnlib.configs_backward_hopper import hopper_backward_config
from attnlib.reference_gradients import gradient_fp64

LOG2_E = math.log2(math.e)
SCALE = 0.3


@dataclass(frozen=True)
class Problem:
    B: int
    H: int
    H_kv: int
    S_q: int
    S_k: int
    D: int = 64
    causal: bool = True


LENGTHS = [
    (1, 1, 1, 128, 128), (2, 4, 2, 300, 300), (1, 2, 1, 129, 700), (1, 2, 2, 700, 129), (2, 1, 1, 63, 65),
    (1, 1, 1, 1, 1), (1, 3, 1, 17, 1), (1, 2, 1, 257, 511), (1, 2, 2, 64, 1000),
]  # fmt: skip
PROBLEMS = [Problem(*x, 64, causal) for x in LENGTHS for causal in (True, False)]
PROBLEMS += [Problem(*x, d, causal) for d in (128, 256) for x in LENGTHS[1:3] for causal in (True, False)]
PROBLEMS += [Problem(*x, 256, causal) for x in LENGTHS[3:7] for causal in (True, False)]


def tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """d_out, q, k, v in float64."""
    generator = torch.Generator().manual_seed(0)
    rows = (problem.B, problem.H, problem.S_q, problem.D)
    keys = (problem.B, problem.H_kv, problem.S_k, problem.D)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (rows, rows, keys, keys)
    )


def lse_and_delta(d_out, q, k, v, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(log-sum-exp, sum of out * d_out) of each row, (B * H, S_q)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ v
    return torch.logsumexp(scores, -1).flatten(0, 1).numpy(), (out * d_out).sum(-1).flatten(0, 1).numpy()


def padded(x: np.ndarray, start: int, rows: int) -> np.ndarray:
    """Rows from start on; what lies beyond the tensor is read as 0."""
    part = x[start : start + rows]
    return np.pad(part, ((0, rows - len(part)), (0, 0)))


def locate(tile: int, section_size: int, heads_kv: int, num_n: int) -> tuple[int, int]:
    """(batch * H_kv + key head, key block), as `_locate`."""
    section, rest = divmod(tile, num_n * section_size)
    heads = min(section_size, heads_kv - section * section_size)
    return section * section_size + rest % heads, rest // heads


def mask(first: int, block_m: int) -> np.ndarray:
    """As `_mask`: a thread's own columns on the left."""
    o_q = np.arange(block_m)
    return (np.arange(64) + first)[:, None] - (o_q & 6)[None] <= (o_q & ~6)[None]


def in_registers(x: np.ndarray) -> np.ndarray:
    """[64, C] as the accumulator lies in a warpgroup's registers, the order in memory. The other way round
    from the conversion kernel: from the rows and columns that each of 128 threads has."""
    t, i = np.arange(128)[None, :, None], np.arange(x.shape[1] // 8)[:, None, None]
    four = np.arange(4)[None, None, :]
    rows = 16 * (t // 32) + t % 32 // 4 + 8 * (four // 2)
    return x[rows + 0 * i, 8 * i + 2 * (t % 4) + four % 2].reshape(-1)


def backward(problem: Problem, section: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sums of dQ as the kernel leaves them, dk, dv), program by program."""
    d_out, q, k, v = tensors(problem)
    call = prepared(problem)
    config = hopper_backward_config(problem.D)
    block_m, block_n = config.block_m, config.block_n
    parts = range(block_n // 64)  # 64 keys each
    lse, delta = lse_and_delta(d_out, q, k, v, problem.causal)
    lse2 = np.full((problem.B * problem.H, call.rows_shape[2]), np.inf)
    lse2[:, : problem.S_q] = np.where(np.isinf(lse), np.inf, lse * LOG2_E)
    delta = np.pad(delta, ((0, 0), (0, call.rows_shape[2] - problem.S_q)))
    d_out, q, k, v = (x.numpy() for x in (d_out, q, k, v))
    tail = call.kind[4]
    sums, dk, dv = np.zeros(call.sums), np.full(k.shape, np.nan), np.full(v.shape, np.nan)
    S_q, S_k, group = problem.S_q, problem.S_k, problem.H // problem.H_kv
    num_m, num_n = call.scalars[-2:]
    seen = set()
    for tile in range(call.programs):
        i_bkv, i_n = locate(tile, section, problem.B * problem.H_kv, num_n)
        seen.add((i_bkv, i_n))
        m_start = max(i_n * block_n + S_q - S_k, 0) // block_m if problem.causal else 0
        b, kv = divmod(i_bkv, problem.H_kv)
        keys = [padded(k[b, kv], i_n * block_n + 64 * w, 64) for w in parts]
        values = [padded(v[b, kv], i_n * block_n + 64 * w, 64) for w in parts]
        own_dk, own_dv = np.zeros((2, len(parts), 64, problem.D))
        block, m, h = (b * problem.H + kv * group) * num_m + m_start, m_start, kv * group
        for _ in range((num_m - m_start) * group):
            here = slice(m * block_m, (m + 1) * block_m)
            b_q, b_do = (padded(x[b, h], m * block_m, block_m) for x in (q, d_out))
            ds = []
            for w in parts:
                row = i_n * block_n + w * 64
                p = np.exp2(keys[w] @ b_q.T * (SCALE * LOG2_E) - lse2[b * problem.H + h, here])
                first = row - S_k + S_q - m * block_m
                if problem.causal and first > -64:
                    p = np.where(mask(first, block_m), p, 0)
                elif tail and row + 64 > S_k:
                    p = np.where((np.arange(64) + row + 1 - S_k <= 0)[:, None], p, 0)
                ds.append(p * (values[w] @ b_do.T - delta[b * problem.H + h, here]))
                own_dv[w] += p @ b_do
                own_dk[w] += ds[w] @ b_q
            dq = np.concatenate(ds).T @ np.concatenate(keys)  # [block_m, D]
            for w, part in enumerate(np.split(dq, 2, axis=0 if block_m == 128 else 1)):
                start = block * block_m * problem.D + w * part.size
                sums[start : start + part.size] += in_registers(part)
            block, m = block + 1, m + 1
            if m == num_m:
                block, m, h = block + m_start, m_start, h + 1
        for w in parts:
            start = i_n * block_n + 64 * w
            rows = slice(start, max(min(start + 64, S_k), start))
            n = rows.stop - rows.start
            if n > 0:
                dk[b, kv, rows], dv[b, kv, rows] = own_dk[w, :n] * SCALE, own_dv[w, :n]
    assert seen == {(head, n) for head in range(problem.B * problem.H_kv) for n in range(num_n)}
    return sums, dk, dv


def prepared(problem: Problem) -> launch_hopper_backward.Call:
    return launch_hopper_backward._prepare(
        torch.Size((problem.B, problem.H, problem.S_q, problem.D)),
        torch.Size((problem.B, problem.H_kv, problem.S_k, problem.D)),
        torch.float32, -1, band(problem.causal, None), SCALE, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_tiles_masks_and_places(problem: Problem, device: str) -> None:
    if device != "cpu":
        pytest.skip("the conversion runs in the interpreter")
    sums, dk, dv = backward(problem, section=2)
    dq = torch.full((problem.B, problem.H, problem.S_q, problem.D), math.nan)
    launch_hopper_backward._convert(torch.from_numpy(sums).float(), dq, None, prepared(problem))
    truth = gradient_fp64(*tensors(problem), causal=problem.causal, sm_scale=SCALE)
    torch.testing.assert_close(dq, truth[0].float(), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dk, truth[1].numpy(), atol=1e-9)
    np.testing.assert_allclose(dv, truth[2].numpy(), atol=1e-9)


def test_conversion_keeps_to_the_rows_and_columns_of_dq(device: str) -> None:
    """A head dimension between the widths, memory with more around it."""
    if device != "cpu":
        pytest.skip("the conversion runs in the interpreter")
    problem = Problem(1, 2, 2, 130, 130, 40)
    more = torch.full((1, 2, 134, 48), 7.0)
    dq = more[:, :, 2:132, 4:44]
    call = prepared(problem)
    sums = torch.arange(call.sums, dtype=torch.float32)
    launch_hopper_backward._convert(sums, dq, None, call)
    blocks = sums.numpy().reshape(2, -1, 64 * 64) * np.float32(SCALE)
    for h, i in ((0, 0), (1, 1), (1, 2)):
        rows = dq[0, h, 64 * i : 64 * i + 64].numpy()
        full = np.zeros((64, 64), np.float32)
        numbers = in_registers(np.arange(4096).reshape(64, 64))  # which element lies at each place
        full.reshape(-1)[numbers] = blocks[h, i]
        np.testing.assert_array_equal(rows, full[: len(rows), :40])
    dq.fill_(7.0)
    assert bool((more == 7.0).all()), "written outside of dq"


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "reason"),
    [
        (264, False, "needs a head dimension of at most 256 for the backward pass; q has 264"),
        (64, True, "adds up dq in an order that changes; deterministic=True is asked for"),
        (256, False, None),
    ],
)
def test_what_it_cannot_run(head_dim, deterministic, reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_hopper_backward.launch_hopper, "unsupported_here", lambda q: None)
    q = torch.zeros(1, 1, 4, head_dim, dtype=torch.float16)
    assert launch_hopper_backward.unsupported(q, deterministic) == reason


def test_a_cpu_is_refused_as_by_the_forward() -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    assert launch_hopper_backward.unsupported(q) == "needs CUDA tensors; q is on cpu"
