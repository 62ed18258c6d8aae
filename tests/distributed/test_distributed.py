"""attnlib.distributed on two processes of a CPU: equal to one process; mistakes are errors on all ranks."""

from __future__ import annotations

import re
import textwrap
from types import SimpleNamespace

import distributed_jobs as jobs
import pytest
import torch
from distributed_jobs import Case
from inductor import can_run_inductor
from ranks import Ranks

from attnlib import distributed as cp
from attnlib.arguments.exact import Options
from attnlib.bench.paths import ROOT
from attnlib.distributed import api
from attnlib.distributed.layout import parts_of, pieces_of
from attnlib.distributed.order import Moved
from attnlib.params import MaskWindow

MASKS = [(True, None), (False, None), (False, (5, 3)), (True, (20, -1)), (False, (40, -1)), (False, (-1, 7))]
CASES = [
    Case(causal, window, method)
    for causal, window in MASKS
    for method in ("ring", "all_gather", "ulysses", "auto")
] + [
    Case(causal=True, heads=6, kv_heads=3), Case(causal=True, heads=4, kv_heads=1),
    Case(heads=2, kv_heads=2, scale=-0.7), Case(causal=True, window=(0, 0)), Case(causal=True, mesh=(1, 2)),
    Case(causal=True, mesh=(2, 1), method="ring"), Case(causal=True, window=(100, -1)), Case(rows=4),
]  # fmt: skip
WITH_KERNELS = [Case(True, None, "ring", impl=None), Case(False, (9, 3), "all_gather", impl=None)]
EXACT = 1e-6
"""Float32 results of fp64 attention, merged once."""


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def test_equal_to_one_process(two):
    for found in two.run(jobs.many_errors, CASES):
        for case, errors in zip(CASES, found, strict=True):
            assert all(error <= EXACT for error in errors), (case, errors)


def test_every_call_merges_into_the_result(two):
    """No kernel but attention makes the output: own keys of two groups of heads, and the other rank's."""
    for errors, counts in two.run(jobs.errors_and_roads, Case(True, None, "ring", impl=None)):
        assert all(error <= 2 * EXACT for error in errors)
        assert counts == {True: 4, False: 0}


EMPTY = [(0, 4, 8, 16), (0, 8, 5), (1, 4, 0, 16), (1, 0, 8, 16), (1, 8, 5)]


def test_without_elements(two):
    assert two.run(jobs.without_elements) == [EMPTY] * 2


def test_three_ranks():
    """Rows that are merged into more than twice, and buffers that are filled again."""
    ranks = Ranks(3)
    try:
        cases = [
            Case(True, None, "ring", rows=48, impl=None), Case(False, None, "ring", rows=51),
            Case(False, (20, 3), "ring", rows=51, kv_heads=1), Case(True, None, "all_gather", rows=48),
        ]  # fmt: skip
        for found in ranks.run(jobs.in_groups_that_overlap):
            assert max(found) <= EXACT
        for shapes in ranks.run(jobs.without_elements):
            assert shapes == EMPTY
        for found in ranks.run(jobs.many_errors, cases):
            for case, errors in zip(cases, found, strict=True):
                assert all(error <= 2 * EXACT for error in errors), (case, errors)
    finally:
        ranks.close()


def test_equal_with_kernels(two):
    """The same in Triton's interpreter."""
    for found in two.run(jobs.many_errors, WITH_KERNELS):
        for case, errors in zip(WITH_KERNELS, found, strict=True):
            assert all(error <= 2 * EXACT for error in errors), (case, errors)


def test_a_loss_of_one_ranks_rows(two):
    assert all(error <= EXACT for found in two.run(jobs.one_rank_has_no_gradient) for error in found)


def test_dtensors(two):
    assert max(two.run(jobs.dtensors)) == 0


IN_ORDER = [(method, None, False) for method in ("ring", "all_gather", "ulysses", "auto")]
IN_ORDER += [("ring", (20, 0), False), ("auto", None, True), ("ulysses", None, True)]


@pytest.mark.parametrize(("method", "window", "spread"), IN_ORDER)
def test_rows_in_order(two, method, window, spread):
    assert max(two.run(jobs.rows_in_order, method, window, spread)) <= EXACT


def test_odd_rows_in_order(two):
    """Where nothing has two halves."""
    assert max(two.run(jobs.rows_in_order, "ulysses", None, False, 66)) <= EXACT


def test_an_order_that_ranks_or_meshes_do_not_share(two):
    for found in two.run(jobs.order_said_wrong):
        ranks, mesh, kind, unsaid, no_mask = found
        assert ranks.startswith("ValueError: in_order: expected the same on all ranks of the group")
        assert mesh == "ValueError: in_order: expected False or None with a mesh of 2 dimensions, got True"
        assert kind == "TypeError: in_order: expected a bool or None, got int"
        assert unsaid.startswith("ValueError: in_order: expected True or False with DTensors under a causal")
        assert no_mask == "no error"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_function(two, backend):
    """A graph breaks at each of the three, forward and backward."""
    for off, errors in two.run(jobs.compiled, backend):
        assert off <= EXACT
        for error in errors:
            assert error.startswith("Unsupported: Skip calling `torch.compiler.disable()`d function"), error


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "row_parallel_output"])
def test_in_a_module_compiled_by_inductor(two, name):
    """One graph before the call and one after it."""
    if not can_run_inductor():
        pytest.skip("inductor needs a C++ compiler")
    for off, graphs in two.run(jobs.compiled_by_inductor, name):
        assert off <= 4 * EXACT and graphs == 2


ON_A_CPU = {
    'torch.distributed.init_process_group("nccl")\n': "",  # the test has done so, with gloo
    "torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())\n": "",
    'device="cuda"': 'device="cpu"', "65536": "64", "5000": "20", "60536": "44",
}  # fmt: skip
"""What README says to change without GPUs, and lengths."""


def test_the_example_of_readme(two):
    """It tells sequences of 20 and 44 tokens apart, and joins what ranks have."""
    text = (ROOT / "README.md").read_text()
    start = text.index("    import torch\n    from attnlib.distributed import")
    code = textwrap.dedent(re.match(r"(?: {4}.*\n|\n)+", text[start:])[0]).strip()
    for old, new in ON_A_CPU.items():
        assert old in code, old
        code = code.replace(old, new)
    for found in two.run(jobs.readme, code):
        assert len(found) == 3 and max(found) <= 2e-2, found  # bfloat16


def test_as_the_kernels_of_pytorchs_ring(two):
    assert max(two.run(jobs.ring_of_pytorch)) <= 4 * EXACT


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (False, (6, 2))])
def test_varlen(two, causal, window):
    assert all(error <= EXACT for found in two.run(jobs.varlen, causal, window) for error in found)


def test_varlen_dtensors(two):
    assert all(error <= EXACT for found in two.run(jobs.varlen, True, None, True) for error in found)


BAD_VARLEN = {
    "heads": "ValueError: q: expected a multiple of 2 heads, which the ranks share, got 3; "
    "method='all_gather' takes any number",
    "keys": "ValueError: k: expected 20 tokens as q has on this rank, got 10",
    "unlike": "ValueError: max_seqlen: expected the same on all ranks of the group, got 20 on rank 0 and 30 "
    "on rank 1",
    "value dimension": "ValueError: v: expected the same on all ranks of the group, got shape (20, 4, 16) on "
    "rank 0 and shape (20, 4, 24) on rank 1",
    "gradients": "ValueError: requires_grad: expected the same on all ranks of the group, got ['q'] on rank "
    "0 and ['k'] on rank 1",
    "DTensor of heads": "TypeError: q: expected a DTensor with Shard(0) in every dimension of its mesh",
    "a DTensor among others": "TypeError: q: expected a DTensor with Shard(0) in every dimension of its mesh",
    "an uneven DTensor": "ValueError: q: expected dimension 0 to be a multiple of 2, so that all ranks have "
    "as much, got 39",
    "values": "ValueError: cu_seqlens_q: expected values that never go down, got 20 after 30 at index 2",
}


@pytest.mark.parametrize("what", BAD_VARLEN)
def test_a_mistake_with_varlen(two, what):
    assert two.run(jobs.bad_varlen, what) == [BAD_VARLEN[what]] * 2


def test_offsets_that_differ(two):
    first, second = two.run(jobs.bad_varlen, "offsets")
    assert first == second and first.startswith(
        "ValueError: cu_seqlens: expected the same on all ranks of the group, got 3 entries"
    )
    own = "ValueError: cu_seqlens_q: expected to end at q's number of tokens, 40, got 39"
    first, second = two.run(jobs.bad_varlen, "wrong offsets")
    assert second == own
    assert first == f"RuntimeError: attention_varlen: rank 1 of the group can't take part: {own}"


BAD_SEQUENCE = {
    "rows": "ValueError: rows: expected a multiple of 2 rows on each rank, for a part of either half of the "
    "sequence, got 9",
    "negative": "ValueError: rows: expected 0 or more, got -2",
    "kind": "TypeError: rows: expected an int, got float",
    "odd part": "ValueError: x: expected a multiple of 2 positions in dimension 0, got 3",
    "mask": "ValueError: causal: expected the same on all ranks of the group, got True on rank 0 and False "
    "on rank 1",
}


@pytest.mark.parametrize("what", BAD_SEQUENCE)
def test_a_mistake_with_a_sequence(two, what):
    assert two.run(jobs.bad_sequence, what) == [BAD_SEQUENCE[what]] * 2


def test_rows_of_a_mesh_with_odd_pieces():
    """Three ranks that hold a third each of what has two halves."""
    heard = []

    def links(ranks: int) -> SimpleNamespace:
        return SimpleNamespace(ranks=ranks, agree=lambda stated, error: heard.append(error))

    q = torch.zeros(1, 6, 3, 8)
    with pytest.raises(ValueError, match="q: expected a multiple of 2 rows on each rank"):
        api._agree((q, q, q), Options(causal=True), api.Way(), links(2), links(3))
    assert len(heard) == 2 and all(heard)
    api._agree((q[:, :, :2],) * 3, Options(causal=True), api.Way(), links(2), links(3))


@pytest.mark.parametrize("method", ["ring", "ulysses", "output"])
def test_a_second_derivative(two, method):
    for found in two.run(jobs.second_derivative, method):
        assert found.startswith("RuntimeError: attnlib.attention has no second derivative"), found


def test_a_second_derivative_where_all_rows_have_moved():
    """Of four ranks in order the second has none of the rows that a causal mask gives it."""
    sent = SimpleNamespace(wait=lambda: None)
    links = SimpleNamespace(rank=1, ranks=4, agree=lambda _: None, start=lambda *_: sent)
    before, after = pieces_of(4, 4), tuple(parts_of(rank, 4, 4, MaskWindow(None, 0)) for rank in range(4))
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = Moved.apply(x, links, before, after, "gradient of q")
    (gradient,) = torch.autograd.grad((out * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="^attnlib.attention has no second derivative"):
        gradient.sum().backward()


MISTAKES = {
    "a list": "TypeError: x: expected a torch.Tensor of this rank, got list",
    "time": "TypeError: timeout: expected a number of seconds, got str",
    "a weight": "TypeError: weight: expected a torch.Tensor, got NoneType",
    "a replica": "TypeError: q: expected a DTensor with Shard(2) in every dimension of its mesh",
    "a replica of tokens": "TypeError: q: expected a DTensor with Shard(0) in every dimension of its mesh",
    "offsets": "TypeError: cu_seqlens: expected a torch.Tensor of this rank, got a DTensor; x.to_local() has "
    "its part",
    "meta": "ValueError: q: expected a tensor with memory, got one on device meta",
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_one_rank_reaches_the_other(two, what):
    """And no later call of one meets this call of the other."""
    (heard, after), (own, behind) = two.run(jobs.mistaken, what)
    assert own == MISTAKES[what] and after == behind == "no error"
    function = {"a list": "unshard", "a weight": "row_parallel_output", "offsets": "attention_varlen",
                "a replica of tokens": "attention_varlen"}  # fmt: skip
    called = function.get(what, "attention")
    assert heard == f"RuntimeError: {called}: rank 1 of the group can't take part: {own}"


@pytest.mark.parametrize("kind", ["ulysses", "varlen", "in order"])
def test_gradients_of_different_inputs(two, kind):
    first, second = two.run(jobs.of_different_inputs, kind)
    assert first == second and first.startswith("ValueError: step: expected the same on all ranks"), first


def test_a_conjugated_part(two):
    for found in two.run(jobs.conjugated):
        assert found == [1 - 2j] * 4


@pytest.mark.parametrize("method", ["ring", "ulysses", "in order"])
def test_gradients_of_another_call(two, method):
    first, second = two.run(jobs.crossed, method)
    assert first == second and first.startswith("ValueError: step: expected the same on all ranks"), first


def test_an_error_while_keys_come(two):
    for error, errors in two.run(jobs.refused):
        assert error.startswith("ValueError: impl: 'hopper'") and max(errors) <= EXACT


def test_with_another_default_device(two):
    assert two.run(jobs.on_another_default_device) == [["cpu"] * 3] * 2


def test_autocast(two):
    assert two.run(jobs.dtypes_in_autocast) == [{"torch.bfloat16"}] * 2


def test_positions(two):
    found = two.run(jobs.where)
    assert found[0][0] == found[0][1] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert found[1][0] == found[1][1] == [4, 5, 6, 7, 8, 9, 10, 11]


UNLIKE = {
    "shape": "ValueError: q: expected the same on all ranks of the group, got shape (1, 2, 8, 8) of float32 "
    "on rank 0 and shape (1, 2, 16, 8) of float32 on rank 1",
    "dtype": "ValueError: q: expected the same on all ranks of the group, got shape (1, 2, 8, 8) of float32 "
    "on rank 0 and shape (1, 2, 8, 8) of float16 on rank 1",
    "mask": "ValueError: causal: expected the same on all ranks of the group, got True on rank 0 and False "
    "on rank 1",
    "gradients": "ValueError: requires_grad: expected the same on all ranks of the group, got ['q'] on rank "
    "0 and ['k'] on rank 1",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_differ_hear_the_same(two, what):
    assert two.run(jobs.unlike, what) == [(UNLIKE[what], "no error")] * 2


def test_the_error_of_one_rank_reaches_the_other(two):
    own = "TypeError: sm_scale: expected a number or None, got str"
    first, second = two.run(jobs.unlike, "argument")
    assert second == (own, "no error")
    assert first == (f"RuntimeError: attention: rank 1 of the group can't take part: {own}", "no error")


BAD = {
    "method": "ValueError: method: expected 'ring', 'all_gather', 'ulysses' or 'auto', got 'best'",
    "kind": "TypeError: method: expected 'ring', 'all_gather', 'ulysses' or 'auto', got int",
    "heads": "ValueError: q: expected a multiple of 2 heads, which the ranks share, got 3",
    "rows": "ValueError: q: expected a multiple of 2 rows on each rank, for a part of either half of the "
    "sequence, got 9",
    "timeout": "ValueError: timeout: expected seconds above 0, at most 1e+09, got 0",
    "group": "TypeError: group: expected a ProcessGroup, a DeviceMesh or None, got int",
}


@pytest.mark.parametrize("what", BAD)
def test_a_mistake(two, what):
    assert two.run(jobs.bad, what) == [BAD[what]] * 2


def test_without_a_group():
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        cp.attention(*(torch.zeros(1, 1, 8, 8) for _ in range(3)))


def test_time_limits_may_differ(two):
    assert two.run(jobs.timeouts_that_differ) == [["no error"] * 4] * 2


@pytest.mark.parametrize("what", ["no group", "another group"])
def test_a_wrong_group_of_one_rank(two, what):
    """That rank can't reach the others, which wait for their time limit; whatever they call next says so."""
    (heard, after, seconds), (own, *_) = two.run(jobs.wrong_group, what, 2.0)
    gone = "a rank of the group died, or did not come within 2 s; seen by rank"
    assert heard.startswith(f"RuntimeError: attention: {gone} 0 of 2") and 1 < seconds < 12
    assert after.startswith(f"RuntimeError: unshard: {gone} 0 of 2")
    if what == "no group":
        assert own == "TypeError: group: expected a ProcessGroup, a DeviceMesh or None, got int"
    else:
        assert own.startswith(f"RuntimeError: attention: {gone} 1 of 2")


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_rank_that_does_not_come(two, which):
    (message, seconds), late = two.run(jobs.late, which, 3.0)
    assert late[0] == "late" and seconds < 12
    assert message.startswith("RuntimeError: attention: a rank of the group died, or did not come within 3 s")


def test_a_rank_that_dies(two):
    """The last test of these ranks."""
    (ok, found), (_, other) = two.outcomes(jobs.died, 100.0)
    assert ok and other == "died", (found, other)
    first, second, seconds = found
    assert seconds < 50, "the lost connection, not the time limit"
    for message in (first, second):
        assert message.startswith("RuntimeError: attention: a rank of the group died"), message
