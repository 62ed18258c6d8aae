"""Values centered and quantized in one launch: what three launches make of them, and what they leave behind
for the next one."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from cases import INTERPRETER_REMARKS
from families import fresh_launches  # noqa: F401  (a fixture)
from fp8_cases import QuantizeCase, check_quantize
from mutations import Mutation, load

from attnlib.kernels import fp8
from attnlib.kernels.common.fp8 import Recipe
from attnlib.kernels.common.launcher import Launches
from attnlib.kernels.fp8 import launch_quantize, values_kernel
from attnlib.kernels.fp8.launch_quantize import ONE_LAUNCH, Centering

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.usefixtures("fresh_launches")]

SMALL = replace(ONE_LAUNCH, task=1)
"""Tasks as small as they can be."""


def asked(monkeypatch: pytest.MonkeyPatch, one: Centering) -> list[torch.Tensor]:
    """From now on it is one launch; returns the counters of each."""
    monkeypatch.setattr(launch_quantize, "CENTERING", one)
    seen, call = [], Launches.__call__

    def observed(self, *tensors):
        call(self, *tensors)
        if tensors[-1] is not None:
            seen.append(tensors[-1])

    monkeypatch.setattr(Launches, "__call__", observed)
    return seen


CASES = {
    str(case): case
    for case in [
        QuantizeCase("v"), QuantizeCase("v", mean=100.0), QuantizeCase("v", infinite=True),
        QuantizeCase("v", Recipe(), 40, 700, 1, 1, torch.bfloat16, mean=-3.0),
        QuantizeCase("v", Recipe(), 128, 513, 2, 3, mean=5.0), QuantizeCase("v", Recipe(), 72, 33),
        QuantizeCase("v", Recipe(), 256, 300, 1, 5, mean=2.0), QuantizeCase("v", Recipe(), 256, 16),
        QuantizeCase("v", transposed=True), QuantizeCase("v", Recipe(), 64, 4100, 1, 1),
        QuantizeCase("v", Recipe("head"), 64, 1, 3, 2), QuantizeCase("v", S=150, dtype=torch.float32),
    ]
}  # fmt: skip


@pytest.mark.parametrize("one", [SMALL, ONE_LAUNCH, replace(SMALL, parts=2, extra=0)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_is_the_model(case: QuantizeCase, one: Centering, device: str, monkeypatch) -> None:
    states = asked(monkeypatch, one)
    check_quantize(case, device)
    assert len(states) == 1 and len(states[0]) >= 1 + case.B * case.H
    assert not states[0].any(), "counters are not 0 for the next launch"


def test_the_same_as_of_three_launches(device: str, monkeypatch) -> None:
    """Where a part is all of a head, sums are taken in the same order."""
    x = QuantizeCase("v", D=128, S=60, mean=7.0).tensors(device)[0]
    three = fp8.quantize(x, "v", Recipe())
    asked(monkeypatch, ONE_LAUNCH)
    one = fp8.quantize(x, "v", Recipe())
    assert torch.equal(one.data.view(torch.uint8), three.data.view(torch.uint8))
    assert torch.equal(one.scale, three.scale) and torch.equal(one.mean, three.mean)


@pytest.mark.parametrize(
    "case",
    [QuantizeCase("v", Recipe("tensor")), QuantizeCase("v", lengths=(15, 0, 133)),
     QuantizeCase("v", Recipe(center=False)), QuantizeCase("k"), QuantizeCase("v", S=400),
     QuantizeCase("v", S=0), QuantizeCase("v", Recipe(), 128, 301)],
    ids=str,
)  # fmt: skip
def test_calls_that_take_several_or_none(case: QuantizeCase, device: str, monkeypatch) -> None:
    """A scale that heads share, sequences of their own lengths, values as they are, heads that are large, and
    none at all."""
    states = asked(monkeypatch, replace(SMALL, one_launch=300 * 64 * 2))
    check_quantize(case, device)
    assert not states


WRONG = "is wrong: (mean|data|scale)"
LATE = "counters are not 0"
MUTATIONS = [
    Mutation("the first sum is taken for all", "== parts - 1:", "== 0:", "", WRONG),
    Mutation("the first part alone is joined", "joined(parts_ptr, first, parts,",
             "joined(parts_ptr, first, 1,", "", WRONG),
    Mutation("parts are those of the first head", "sum_part(x_ptr, parts_ptr, first,",
             "sum_part(x_ptr, parts_ptr, 0 * first,", "", WRONG),
    Mutation("heads of the first batch", "i_b, i_h, first = head // H,", "i_b, i_h, first = 0 * head,", "",
             WRONG),
    Mutation("the mean of the first columns", "tl.load(mean_ptr + head.to(tl.int64) * WIDTH + o_c)",
             "tl.load(mean_ptr + head.to(tl.int64) * WIDTH + o_c % CHUNK)", "", WRONG),
    Mutation("a task quantizes its first block", "tl.minimum(begin + each, blocks)",
             "tl.minimum(begin + 1, blocks)", "", WRONG),
    Mutation("the magnitude of the head before", "tl.load(amax_ptr + head)",
             "tl.load(amax_ptr + tl.maximum(head - 1, 0))", "", WRONG),
    Mutation("tasks drawn are not forgotten", "tl.store(state, 0)  #", "tl.store(state, number)  #", "",
             LATE),
    Mutation("a head's number is not forgotten", "tl.store(state + 1 + head, 0)  #",
             "tl.store(state + 1 + head, 1)  #", "", LATE),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_planted_bug_is_found(mutation: Mutation, device: str, tmp_path, monkeypatch) -> None:
    case = QuantizeCase("v", Recipe(), 128, 700, 2, 2, mean=5.0)
    states = asked(monkeypatch, replace(ONE_LAUNCH, task=40000))
    mutant = load(mutation.of(inspect.getsource(values_kernel)), tmp_path)
    monkeypatch.setattr(values_kernel, "center_values", mutant.center_values)
    with pytest.raises(AssertionError, match=mutation.verdict):
        check_quantize(case, device)
        assert not states[0].any(), "counters are not 0 for the next launch"


def test_many_programs_sum_up(device: str, monkeypatch) -> None:
    monkeypatch.setattr(launch_quantize, "CENTERING", Centering(waves=5))
    for about in ({"D": 128, "S": 700}, {"lengths": (300, 0, 133)}):
        check_quantize(QuantizeCase("v", mean=5.0, **about), device)
