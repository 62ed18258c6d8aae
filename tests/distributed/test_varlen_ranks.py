"""attnlib.distributed.attention_varlen with ranks that keep their tokens, of any number of heads: equal to
one process."""

from __future__ import annotations

import pytest
import varlen_jobs as jobs
from ranks import Ranks
from varlen_jobs import Cut

EXACT = 1e-6
"""Float32 results of fp64 attention; gradients of keys from up to three ranks are added in float32."""

LENGTHS = {
    "one sequence": (0, 42),
    "a rank within a sequence": (0, 5, 37, 42),
    "cuts and empty ones": (0, 7, 7, 20, 23, 23, 42),
    "ends where ranks do": (0, 0, 14, 21, 21, 28, 42, 42),
    "short ones": (0, 1, 2, 15, 20, 22, 29, 41, 42),
}
MASKS = [
    (True, None), (False, None), (True, (5, -1)), (False, (4, -1)), (False, (-1, 6)), (False, (5, 3)),
    (False, (0, 0)), (False, (2, 30)), (False, (90, 100)), (True, (20, 8)),
    (False, (2**31 - 1, 3)),
]  # fmt: skip


@pytest.fixture(scope="module")
def three():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def near(ranks: Ranks, cases: list[Cut], *args) -> None:
    for found in ranks.run(jobs.errors, cases, *args):
        off = [(case, error) for case, error in zip(cases, found, strict=True) if not error <= EXACT]
        assert not off


@pytest.mark.parametrize("name", LENGTHS)
def test_two_ranks(two, name):
    near(two, [Cut(LENGTHS[name], *mask) for mask in MASKS])


@pytest.mark.parametrize("name", LENGTHS)
def test_three_ranks(three, name):
    """Keys of which two others send gradients back, and a rank all of whose tokens are of one sequence."""
    near(three, [Cut(LENGTHS[name], *mask, heads=4, kv_heads=2) for mask in MASKS])


def test_other_options(two):
    near(two, [
        Cut(causal=True, heads=3, kv_heads=3, deterministic=True), Cut(causal=True, scale=-0.7),
        Cut(window=(6, 2), head_dim_v=24), Cut(causal=True, heads=4, kv_heads=1, method="auto"),
        Cut(window=(3, 1), heads=4, kv_heads=2), Cut(causal=True, heads=4, kv_heads=2, method="ulysses"),
    ])  # fmt: skip


def test_dtensors(two):
    near(two, [Cut(causal=True), Cut(window=(5, 3))], True)


def test_with_kernels(two):
    """The same in Triton's interpreter: two calls of which one has another window, and one."""
    near(two, [Cut(window=(5, 3), impl=None), Cut(causal=True, impl=None)])


def test_what_auto_is(two):
    heads = [(4, 2), (2, 2), (3, 1), (4, 1), (3, 3)]
    expected = ["ulysses", "ulysses", "all_gather", "all_gather", "all_gather"]
    assert two.run(jobs.ways, heads) == [expected] * 2


def test_only_keys_that_are_needed_are_sent(three):
    """By (from, to), tokens; 32 numbers each, of k and of v of one head."""
    for case, moves in {
        Cut((0, 42), causal=True): {(0, 1): 14, (0, 2): 14, (1, 2): 14},
        Cut((0, 12, 28, 42), causal=True): {(0, 1): 2},
        Cut((0, 12, 30, 42)): {(0, 1): 2, (1, 0): 14, (2, 0): 2, (2, 1): 2, (0, 2): 2, (1, 2): 14},
        Cut((0, 42), window=(3, 1)): {(0, 1): 3, (1, 2): 3, (1, 0): 1, (2, 1): 1},
        Cut((0, 14, 28, 42)): {},
    }.items():
        for rank, found in enumerate(three.run(jobs.elements_sent, case)):
            goes = 32 * sum(count for (source, _), count in moves.items() if source == rank)
            comes = 32 * sum(count for (_, target), count in moves.items() if target == rank)
            assert found["forward"] == {"sent": goes, "received": comes}, (case, rank)
            # Keys go once more, and gradients come back.
            both = {"sent": 2 * goes + comes, "received": 2 * comes + goes}
            assert found["both"] == both, (case, rank)


WRONG = {
    "ulysses": "ValueError: q: expected a multiple of 2 heads, which the ranks share, got 3; "
    "method='all_gather' takes any number",
    "another method": "ValueError: method: expected 'ulysses', 'all_gather' or 'auto', got 'ring'",
    "no method": "TypeError: method: expected 'ulysses', 'all_gather' or 'auto', got NoneType",
    "unlike": "ValueError: method: expected the same on all ranks of the group, got all_gather on rank 0 and "
    "auto on rank 1",
    "gradients": "ValueError: requires_grad: expected the same on all ranks of the group, got False on rank "
    "0 and True on rank 1",
    "captured": "RuntimeError: method: 'all_gather' reads cu_seqlens, which can't be done while a CUDA graph "
    "is captured; 'ulysses' does not",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake(two, what):
    assert two.run(jobs.wrong, what) == [WRONG[what]] * 2


@pytest.mark.parametrize("impl", ["decode", "hopper"])
def test_an_implementation_that_can_not_run_it(two, impl):
    for found in two.run(jobs.wrong, impl):
        assert found.startswith(f"ValueError: impl: '{impl}'"), found


def test_gradients_of_another_call(two):
    first, second = two.run(jobs.crossed)
    assert first == second and first.startswith("ValueError: step: expected the same on all ranks"), first


def test_a_second_derivative(two):
    for found in two.run(jobs.second_derivative):
        assert found.startswith("RuntimeError: attnlib.attention has no second derivative"), found


def test_gradients_of_different_inputs(two):
    """A pass backward sends all that others need, whatever this rank asks for."""
    assert max(two.run(jobs.of_different_inputs)) <= EXACT


def test_without_elements(two):
    expected = [(0, 3, 16), (3, 0), (0, 3, 16), (4, 0, 16), (0, 4), (4, 0, 16)]
    assert two.run(jobs.without_elements) == [expected] * 2
