"""Configurations of the FP8 forward kernel that can't run are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated import on_the_cpu
from emulated_fp8 import Call

from attnlib.kernels.hopper import launch_fp8
from attnlib.kernels.hopper.configs_fp8 import fp8_config

NAMED = replace(fp8_config(128), joint=False, named=True, late_wait=False, q_columns=0)


def test_a_slot_has_a_barrier_of_its_own() -> None:
    replace(NAMED, stages=8)
    with pytest.raises(ValueError, match="stages: expected at most 8 with named barriers, got 16"):
        replace(NAMED, stages=16)


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
