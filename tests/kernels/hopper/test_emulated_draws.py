"""Any call of the Hopper kernels, forward and backward through autograd, in the emulator against fp64."""

from __future__ import annotations

from dataclasses import replace

from cases import INTERPRETER_REMARKS
from draws import Draw, check
from emulated import on_the_cpu
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = INTERPRETER_REMARKS

bounds = st.one_of(st.just(-1), st.integers(0, 150))


nothing, own = st.none(), st.sampled_from([64, 128, 256, 40, 72, 200])


def draws(varlen: bool, value_dims: st.SearchStrategy = nothing) -> st.SearchStrategy[Draw]:
    if varlen:
        one = st.tuples(st.integers(0, 140), st.integers(0, 140))
        lengths = st.lists(one, min_size=1, max_size=3).map(tuple)
        lengths = lengths.filter(lambda found: all(map(any, zip(*found, strict=True))))
    else:
        lengths = st.tuples(st.tuples(st.integers(1, 270), st.integers(1, 270)))
    return st.builds(
        Draw,
        lengths=lengths,
        varlen=st.just(varlen),
        batch=st.just(1),
        kv_heads=st.integers(1, 2),
        group=st.integers(1, 2),
        head_dim=st.sampled_from([64, 128, 256, 80, 96, 160, 192, 40, 120, 200]),
        dtype=st.sampled_from(["float16", "bfloat16"]),
        causal=st.booleans(),
        window=st.one_of(st.none(), st.tuples(bounds, bounds)),
        sm_scale=st.sampled_from([None, None, -0.2, 0.3, 0.0]),
        layouts=st.tuples(*[st.integers(0, 2)] * 3, st.integers(0, 6)),  # dO may lie as it likes
        seed=st.integers(0, 2**20),
        value_dim=value_dims,
    )


orders = st.sampled_from(["random", "random", "late", "eager"])


@settings(max_examples=10)
@given(draw=draws(varlen=False), order=orders, seed=st.integers(0, 1000))
def test_any_call(draw, order, seed):
    with on_the_cpu(order, seed):
        check(draw, "cpu", "hopper")


@settings(max_examples=10)
@given(draw=st.one_of(draws(False), draws(True)), order=orders, seed=st.integers(0, 1000))
def test_any_call_with_sums_in_order(draw, order, seed):
    with on_the_cpu(order, seed, in_order=True):
        check(draw, "cpu", "hopper", deterministic=True)


@settings(max_examples=10)
@given(draw=st.one_of(draws(False, own), draws(True, own)), order=orders, seed=st.integers(0, 1000))
def test_any_call_with_values_of_another_width(draw, order, seed):
    """The forward pass."""
    with on_the_cpu(order, seed):
        check(draw, "cpu", "hopper", backward=False)


@settings(max_examples=8)
@given(
    draw=st.one_of(draws(False), draws(True)), order=orders, seed=st.integers(0, 1000),
    pair=st.sampled_from([(192, 128), (136, 72), (64, 128), (48, 112), (128, 64), (80, 40), (40, 256)]),
)  # fmt: skip
def test_any_call_of_a_pair_with_a_backward_kernel(draw, pair, order, seed):
    with on_the_cpu(order, seed):
        check(replace(draw, head_dim=pair[0], value_dim=pair[1]), "cpu", "hopper")


@settings(max_examples=7)
@given(draw=draws(varlen=True), order=orders, seed=st.integers(0, 1000))
def test_any_varlen_sequences(draw, order, seed):
    with on_the_cpu(order, seed):
        check(draw, "cpu", "hopper")
