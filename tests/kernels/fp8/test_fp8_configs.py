"""Configurations of the FP8 forward kernel that can't run are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated import on_the_cpu
from emulated_fp8 import Call

from attnlib.kernels.hopper import launch_fp8
from attnlib.kernels.hopper.configs_fp8 import fp8_config

NAMED = replace(fp8_config(128), joint=False, named=True, late_wait=False, q_columns=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": True, "stages": 8}, "stages: expected at most 4 with named barriers and turns, .* got 8"),
        ({"stages": 16}, "stages: expected at most 8 with named barriers, which are 16 in all, got 16"),
        ({"ones": True, "late_wait": True}, "ones: expected False with late_wait, got True"),
    ],
)
def test_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NAMED, **changes)


@pytest.mark.parametrize("changes", [{"turns": True, "stages": 4}, {"stages": 8}, {"ones": True}])
def test_accepted(changes: dict) -> None:
    replace(NAMED, **changes)


@pytest.mark.parametrize(("scaling", "refused"), [("block", True), ("head", False), ("tensor", False)])
def test_a_block_has_one_scale(scaling: str, refused: bool) -> None:
    config = replace(fp8_config(64), block_n=256, warpgroups=2, stages=2)
    call = Call(64, 1, 1, 70, 300, scaling=scaling, config=config)
    operands = call.operands(*call.tensors())
    with on_the_cpu():
        if refused:
            with pytest.raises(ValueError, match="config: expected blocks of at most 128 keys, .* got 256"):
                launch_fp8.forward(*operands, call.params(), call.out_dtype)
        else:
            launch_fp8.forward(*operands, call.params(), call.out_dtype)
