"""Checks of the exercises of chapter 03. A check raises AssertionError with a hint and returns nothing."""

from collections.abc import Callable

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _scores(rng: np.random.Generator, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [rows, keys] with a large spread, and values [keys, 8]."""
    return 30 * rng.standard_normal((rows, keys)), rng.standard_normal((keys, 8))


def _part(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(m, l, o) of each row; keys with score -inf do not count."""
    m = scores.max(1, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(m), m, 0)[:, None])
    return m, weights.sum(1), weights @ values


def check_merge(answer: Callable) -> None:
    """`answer(x, y)` -> (m, l, o) of both; x, y = (m [n], l [n], o [n, D])."""
    rng = np.random.default_rng(0)
    scores, values = _scores(rng, 5, 12)
    scores[0, :7] = -np.inf  # row 0: the first part is empty
    scores[1, 7:] = -np.inf  # row 1: the second is
    scores[2] = -np.inf  # row 2: both are
    with np.errstate(all="ignore"):
        got = answer(_part(scores[:, :7], values[:7]), _part(scores[:, 7:], values[7:]))
    names = ("m", "l", "o")
    expected = _part(scores, values)
    assert got is not None and len(got) == 3, "return the three arrays (m, l, o)"
    for name, want, have in zip(names, expected, got, strict=True):
        have = np.asarray(have)
        assert have.shape == want.shape, f"{name}: expected shape {want.shape}, got {have.shape}"
        lost = np.unique(np.argwhere(np.isnan(have))[:, 0])
        assert not len(lost), f"{name}: NaN in rows {lost.tolist()}, where one part or both are empty"
        assert np.allclose(have, want, rtol=1e-9, atol=1e-12), f"{name} is wrong: expected {want}, got {have}"
    other = answer(_part(scores[3:, 7:], values[7:]), _part(scores[3:, :7], values[:7]))
    for name, want, have in zip(names, expected, other, strict=True):
        assert np.allclose(have, want[3:], rtol=1e-9), f"{name}: the order of the two parts must not matter"


def check_merge_outputs(answer: Callable) -> None:
    """`answer(out1, lse1, out2, lse2)` -> (out [n, D], lse [n])."""
    rng = np.random.default_rng(1)
    scores, values = _scores(rng, 6, 20)
    scores[0] += 2000  # exp(LSE) overflows: a solution has to subtract a max
    (m1, l1, o1), (m2, l2, o2) = _part(scores[:, :9], values[:9]), _part(scores[:, 9:], values[9:])
    with np.errstate(all="ignore"):
        got = answer(o1 / l1[:, None], m1 + np.log(l1), o2 / l2[:, None], m2 + np.log(l2))
    assert got is not None and len(got) == 2, "return the two arrays (out, lse)"
    m, row_sum, o = _part(scores, values)
    for name, want, have in (("out", o / row_sum[:, None], got[0]), ("lse", m + np.log(row_sum), got[1])):
        have = np.asarray(have)
        assert have.shape == want.shape, f"{name}: expected shape {want.shape}, got {have.shape}"
        assert np.isfinite(have).all(), f"{name}: not finite where LSE is large: subtract the larger one"
        error = np.abs(have - want).max()
        assert np.allclose(have, want, rtol=1e-8, atol=1e-10), f"{name}: largest error {error:.2e}"


def check_one_head(answer: Callable) -> None:
    """`answer(q, k, v, sm_scale)` -> (O [S, D], LSE [S]), dense."""
    generator = torch.Generator().manual_seed(2)
    for seqlen in (20, 32, 70, 96):
        q, k, v = (torch.randn(seqlen, 32, generator=generator) for _ in range(3))
        k[seqlen // 2 :] *= 3  # larger scores come late: the max moves
        scores = q.double() @ k.double().T * 0.5
        out, lse = answer(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), 0.5)
        error = (out.double().cpu() - scores.softmax(1) @ v.double()).abs().max().item()
        lse_error = (lse.double().cpu() - scores.logsumexp(1)).abs().max().item()
        tiles = -(-seqlen // 32)
        assert lse_error <= 1e-4, f"S={seqlen} ({tiles} tiles): error of LSE {lse_error:.1e}, it was right"
        assert error <= 1e-4, f"S={seqlen} ({tiles} tiles): error of O {error:.1e}"


def check_causal_head(answer: Callable) -> None:
    """`answer(q, k, v, sm_scale)` -> (O [S, D], LSE [S]), causal, in blocks of 32 rows and 32 keys."""
    generator = torch.Generator().manual_seed(3)
    for seqlen, seen in ((20, 20), (32, 32), (70, 70), (96, 96), (96, 32), (96, 64)):
        longer = torch.randn(3, seqlen + 32, 32, generator=generator)
        longer[:, seqlen:] = torch.nan  # what lies behind the last row in memory
        q, k, v = longer[:, :seqlen]
        k[seqlen // 2 :] *= 3  # larger scores come late: the max moves
        later = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
        scores = (q.double() @ k.double().T * 0.5).masked_fill(later, -torch.inf)
        k[seen:], v[seen:] = torch.nan, torch.nan  # rows before them have no business there
        found = answer(*longer.to(DEVICE)[:, :seqlen], 0.5)
        assert found is not None and len(found) == 2, "return the two tensors (O, LSE)"
        case = f"S={seqlen}" + (f", rows before {seen}, NaN in later keys" if seen < seqlen else "")
        expected = (scores[:seen, :seen].softmax(1) @ v[:seen].double(), scores[:seen].logsumexp(1))
        for name, want, have in zip(("O", "LSE"), expected, found, strict=True):
            error = (have[:seen].double().cpu() - want).abs().max().item()
            assert error <= 1e-4, f"{case}: error of {name} {error:.1e}"
