"""attention_distr() in the interpreter and in the emulator: its kernels against the model, and where the
method is exact."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from distr_cases import BLOCKS, CASES, QUERIES, DistrCase, check
from emulated import on_the_cpu

from attnlib import attention, attention_distr
from attnlib.bench.oracle import Oracle, poisoned_empty
from attnlib.kernels.common.distr import Grouping
from attnlib.kernels.hopper import narrow
from attnlib.kernels.reference import distr as model

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels(case: DistrCase, device: str) -> None:
    with poisoned_empty():
        check(case, device)


# ---------------------------------------------------------------- Hopper's product

EMULATED = [
    DistrCase(200, Grouping(2), 64, 4, 2, 330), DistrCase(300, Grouping(4), 128, 2, 1, causal=False),
    DistrCase(300, BLOCKS, 128), DistrCase(300, BLOCKS, 64, 4, 2, 330),
    DistrCase(300, QUERIES, 64, 2, 1, 200), DistrCase(520, Grouping(4, "q", 256), 64, 1, 1),
    DistrCase(70, Grouping(1), 128), DistrCase(70, Grouping(8), 40),
    DistrCase(130, Grouping(2, seed=1), 72, 2, 1, dtype="bfloat16", sm_scale=-0.1),
]  # fmt: skip


@pytest.mark.parametrize(("case", "order"), in_turn(EMULATED, ["late", "random"]), ids=str)
def test_hopper(case: DistrCase, order: str) -> None:
    def forward(made, v, params):
        with on_the_cpu(order, 1):
            return narrow.forward(made, v, params)

    check(case, "cpu", forward)


# ---------------------------------------------------------------- exact where it should be


@pytest.mark.parametrize("hashed, rows", [("k", None), ("q", None), ("q", 128)])
def test_groups_of_one_are_exact(hashed: str, rows: int | None, device: str) -> None:
    q, k, v = DistrCase(200, keys=230).tensors(device)
    out = attention_distr(q, k, v, group=1, causal=True, hashed=hashed, rows=rows)
    Oracle(q, k, v, True).judge(out).raise_if_bad("groups of one column")


@pytest.mark.parametrize("group, alike", [(2, (2, 1)), (4, (4, 1)), (2, (4, 1))])
def test_equal_columns_of_keys_are_exact(group: int, alike: tuple[int, int], device: str) -> None:
    """Whatever the queries are: a score needs one of equal columns."""
    case = DistrCase(150, Grouping(group), alike=alike, dtype="float32")
    q, k, v = case.tensors(device)
    out = attention_distr(q, k, v, group=group, causal=True)
    Oracle(q, k, v, True).judge(out).raise_if_bad("equal columns")


def test_equal_columns_of_both_are_exact_with_hashed_queries(device: str) -> None:
    for rows in (None, 128):
        q, k, v = DistrCase(200, alike=(2, 2), dtype="float32").tensors(device)
        out = attention_distr(q, k, v, group=2, hashed="q", rows=rows)
        Oracle(q, k, v).judge(out).raise_if_bad("equal columns")


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_more_rows_than_there_are_share_all_groups(impl: str, device: str) -> None:
    q, k, v = DistrCase(150).tensors(device)
    options = {"group": 2, "hashed": "q", "impl": impl}
    whole = attention_distr(q, k, v, **options)
    for rows in (256, 128 * 179424673, 2**63):
        assert torch.equal(attention_distr(q, k, v, rows=rows, **options), whole)


def test_hashing_queries_does_not_find_equal_columns_of_keys(device: str) -> None:
    """What is dropped are columns of K. The chapter's text says so."""
    q, k, v = DistrCase(150, alike=(2, 1), dtype="float32", causal=False).tensors(device)
    exact = attention(q, k, v).double()
    errors = {
        hashed: (attention_distr(q, k, v, group=2, hashed=hashed) - exact).norm() / exact.norm()
        for hashed in "qk"
    }
    assert errors["k"] < 1e-5 and errors["q"] > 0.1


# ---------------------------------------------------------------- the model


def test_the_model_is_the_definition() -> None:
    """Scores by groups, written as in the paper: a sum of queries' columns, one column of the keys."""
    case = DistrCase(20, Grouping(4, "q"), D=16, heads=1, kv_heads=1, dtype="float32", causal=False)
    q, k, v = case.tensors("cpu")
    order = model.places_of(q, k, case.grouping)[0, 0, 0].argsort()
    q64, k64, v64 = (x[0, 0].double() for x in (q, k, v))
    scores = sum(
        q64[:, group].sum(1)[:, None] * k64[:, group[0]][None, :] for group in order.long().split(4)
    )
    expected = torch.softmax(scores * 16**-0.5, -1) @ v64
    out = attention_distr(q, k, v, group=4, hashed="q", impl="reference")
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=1e-6, atol=1e-6)


def test_neighbors_in_the_order_differ_in_one_sign() -> None:
    """All 16-bit codes in the order of their ranks are a Gray code: of one column each, so 2^16 of them."""
    code = torch.arange(1 << 16)
    rank = code.clone()
    for shift in (1, 2, 4, 8):
        rank = rank ^ (rank >> shift)
    following = code[rank.argsort()]
    changed = following[1:] ^ following[:-1]
    assert torch.equal(rank.sort().values, code)
    assert ((changed & (changed - 1)) == 0).all() and (changed > 0).all()


def test_signs_are_balanced_and_depend_on_the_seed() -> None:
    signs = [model.projections(4096, seed, torch.device("cpu")) for seed in (0, 1, 2**31 - 1)]
    for one in signs:
        assert one.sum(1).abs().max() < 5 * 64 and one.sum(0).abs().mean() < 5
    for one, other in product(signs, signs):
        together = one @ other.T / 4096
        expected = torch.eye(16, dtype=torch.float64) if one is other else torch.zeros(16, 16)
        assert (together - expected).abs().max() < 0.1


def test_the_seed_changes_the_groups(device: str) -> None:
    q, k, v = DistrCase(150, dtype="float32").tensors(device)
    outs = [attention_distr(q, k, v, group=2, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (1, 0, 5, 64), (1, 2, 0, 64)])
def test_nothing_to_do(shape: tuple[int, ...], device: str) -> None:
    q = torch.ones(shape, device=device)
    assert attention_distr(q, q, q, group=2).shape == shape
    keys = torch.ones(shape[0], shape[1], 0, 64, device=device)
    assert not attention_distr(q, keys, keys, group=2).any()
