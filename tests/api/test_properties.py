"""Any call, of any shape, layout, dtype and mask: forward and backward against fp64."""

from __future__ import annotations

import torch
from cases import INTERPRETER_REMARKS
from draws import DTYPES, LAYOUTS, Draw, check
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = INTERPRETER_REMARKS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

lengths = st.tuples(st.integers(1, 40), st.integers(1, 40))
bounds = st.one_of(st.just(-1), st.integers(0, 45))


def draws(varlen: bool) -> st.SearchStrategy[Draw]:
    some = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), min_size=1, max_size=4)
    some = some.filter(lambda found: any(rows for rows, _ in found) and any(keys for _, keys in found))
    return st.builds(
        Draw,
        lengths=some.map(tuple) if varlen else st.tuples(lengths),
        varlen=st.just(varlen),
        batch=st.just(1) if varlen else st.integers(1, 2),
        kv_heads=st.integers(1, 2),
        group=st.integers(1, 3),
        head_dim=st.integers(1, 9).map(lambda n: 8 * n),
        dtype=st.sampled_from(DTYPES),
        causal=st.booleans(),
        window=st.one_of(st.none(), st.tuples(bounds, bounds)),
        sm_scale=st.sampled_from([None, None, -0.3, 0.7, 0.0]),
        layouts=st.tuples(*[st.integers(0, len(LAYOUTS) - 1)] * 4),
        seed=st.integers(0, 2**20),
        value_dim=st.one_of(st.none(), st.integers(1, 9).map(lambda n: 8 * n)),
    )


@settings(max_examples=10)
@given(draw=draws(varlen=False))
def test_any_call(draw):
    check(draw, DEVICE, "triton")


@settings(max_examples=6)
@given(draw=draws(varlen=True))
def test_any_varlen_sequences(draw):
    check(draw, DEVICE, "triton")


@settings(max_examples=10)
@given(draw=st.one_of(draws(varlen=False), draws(varlen=True)))
def test_the_reference_too(draw):
    """And what checks it: the reference is the oracle, so a fault in `check` shows here."""
    check(draw, DEVICE, "reference")
