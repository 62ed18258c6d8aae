"""attnlib.distributed.row_parallel_output on two processes of a CPU: equal to one process with all heads."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import output_jobs as jobs
import pytest
import torch
from output_jobs import Layer

from attnlib.distributed import output
from attnlib.distributed.output import seen_by, spans_of
from attnlib.kernels.reference.gradients import visible
from attnlib.params import MaskWindow, Params

LAYERS = [
    Layer(chunks, causal, window)
    for causal, window in ((True, None), (False, None), (True, (7, -1)), (False, (5, 3)), (False, (-1, 4)))
    for chunks in (1, 3, (25, 12, 3))
] + [
    Layer(4, keys=57), Layer(4, False, (9, 6), keys=57), Layer(3, batch=2), Layer(40, rows=40), Layer(),
    Layer(2, kv_heads=4, heads=8), Layer(2, rows=16, keys=16, kv_heads=4, impl=None),
]  # fmt: skip
EXACT = 2e-6
"""Float32 sums in another order."""


def test_equal_to_one_process(two):
    for found in two.run(jobs.errors, LAYERS):
        for layer, errors in zip(LAYERS, found, strict=True):
            assert all(error <= EXACT for error in errors), (layer, errors)


@pytest.mark.parametrize("which", ["all", "weight"])
def test_dtensors(two, which):
    for found in two.run(jobs.dtensors, which):
        assert max(found) <= 2 * EXACT, found


def test_more_chunks_than_a_message_has_room_for(two):
    assert two.run(jobs.many_chunks) == [(1, 1400, 4)] * 2


def test_without_gradients(two):
    assert two.run(jobs.without_gradients) == [0, 0]


BAD = {
    "chunks": "ValueError: chunks: expected 1 to 40, the rows of q, got 41",
    "sizes": "ValueError: chunks: expected sizes from 1 on that add up to q's 40 rows, got [30, 5]",
    "empty": "ValueError: chunks: expected sizes from 1 on that add up to q's 40 rows, got [40, 0]",
    "kind": "TypeError: chunks: expected an int, a list of ints or None, got float",
    "size": "TypeError: chunks: expected ints, got str",
    "timeout": "ValueError: timeout: expected seconds above 0, at most 1e+09, got -1",
    "mesh": "ValueError: group: expected a mesh of 1 dimension, got 2",
    "weight": "ValueError: weight: expected (outputs, 32), a column for each head and dimension of q, got "
    "shape (24, 31)",
    "flat": "ValueError: weight: expected (outputs, 32), a column for each head and dimension of q, got "
    "shape (768,)",
    "dtype": "TypeError: weight: expected dtype torch.float32 as q has, got torch.float16",
    "none": "TypeError: weight: expected a torch.Tensor, got NoneType",
    "sparse": "TypeError: weight: expected a dense tensor (layout torch.strided), got torch.sparse_coo",
    "DTensor of a batch": "TypeError: q: expected a DTensor with Shard(1) in every dimension of its mesh",
    "DTensor of outputs": "TypeError: weight: expected a DTensor with Shard(1) in every dimension of its "
    "mesh",
    "keys": "ValueError: k: expected at least the 40 rows that q has, got 39",
    "rows": "ValueError: q: expected at least 1 row, got 0",
}


def test_dtensors_of_two_meshes(two):
    for found in two.run(jobs.bad, "DTensors of two meshes"):
        assert found.startswith("ValueError: weight: expected the mesh of q, DeviceMesh(")


@pytest.mark.parametrize("what", BAD)
def test_a_mistake(two, what):
    assert two.run(jobs.bad, what) == [BAD[what]] * 2


UNLIKE = {
    "chunks": "chunks: expected the same on all ranks of the group, got [40] on rank 0 and [20, 20] on "
    "rank 1",
    "outputs": "weight: expected the same on all ranks of the group, got 24 outputs on rank 0 and 16 outputs "
    "on rank 1",
    "rows": "q: expected the same on all ranks of the group, got batch 1, 40 rows of float32 on rank 0 and "
    "batch 1, 39 rows of float32 on rank 1",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_differ_hear_the_same(two, what):
    assert two.run(jobs.unlike, what) == [f"ValueError: {UNLIKE[what]}"] * 2


def test_without_a_group():
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        output.row_parallel_output(*(torch.zeros(1, 1, 8, 8) for _ in range(3)), torch.zeros(8, 8))


def test_chunks():
    assert [len(span) for span in spans_of(3, 10)] == [3, 3, 4]
    assert spans_of((6, 4), 10) == (range(6), range(6, 10))
    assert [len(spans_of(None, rows)) for rows in (1, 1024, 3000, 1 << 20)] == [1, 1, 2, 4]


def test_room_for_the_sums(monkeypatch):
    """Attention of the chunks after the first leaves multiprocessors to NCCL if asked to, else none."""
    found, attend = [], output.dispatch.forward

    def seen(q, k, v, params):
        found.append(params.spare)
        return attend(q, k, v, params)

    monkeypatch.setattr(output.dispatch, "forward", seen)
    x, flight = torch.randn(1, 2, 12, 8), SimpleNamespace(wait=lambda: None)
    params = Params(MaskWindow(None, 0), 0.3, return_lse=True, impl="reference")
    layer = output.Layer(SimpleNamespace(sum=lambda chunk: flight), params, spans_of(3, 12))
    both = layer, layer._replace(spare=16)
    results = [output.forward(x, x, x, torch.ones(4, 16), each)[0] for each in both]
    assert found == [0, 0, 0, 0, 16, 16] and torch.equal(*results)


WINDOWS = [MaskWindow(None, 0), MaskWindow(None, None), MaskWindow(3, 0), MaskWindow(2, 4),
           MaskWindow(None, 3)]  # fmt: skip


def sound(seen_by) -> bool:
    """Whether the chunks of a sequence see what the whole sees, with each mask."""
    for rows, keys in ((12, 12), (9, 14)):
        for window in WINDOWS:
            whole = visible(rows, keys, window)
            for span in spans_of(4, rows):
                seen, inside = seen_by(span, rows, keys, window)
                if min((bound for bound in inside if bound is not None), default=0) < 0:
                    return False
                found = torch.zeros(len(span), keys, dtype=torch.bool)
                found[:, seen.start : seen.stop] = visible(len(span), len(seen), inside)
                if not torch.equal(found, whole[span.start : span.stop]):
                    return False
    return True


def test_chunks_see_what_the_whole_sees():
    assert sound(seen_by)


PLANTED = {
    "a key too few on the left": ("here.start - left)", "here.start - left + 1)"),
    "a key too few on the right": ("here.stop + right)", "here.stop + right - 1)"),
    "positions not aligned": ("span.stop + keys - rows", "span.stop"),
    "the window not shifted": ("right - beyond", "right"),
    "the left bound not shifted": ("left + beyond", "left"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_noticed(name):
    source, (old, new) = inspect.getsource(seen_by), PLANTED[name]
    assert source.count(old) == 1
    names = {"MaskWindow": MaskWindow}
    exec("from __future__ import annotations\n" + source.replace(old, new), names)
    assert not sound(names["seen_by"])
