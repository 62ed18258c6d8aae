"""Which configuration of the FP8 forward kernel a call gets, and that those which can't run are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
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


def test_rows_of_varlen_sequences_are_counted() -> None:
    asked = prepared(Call(64, varlen=((40, 70), (0, 5))))
    rows = 2**30 + 1
    with pytest.raises(ValueError, match=f"q, k: expected at most 2.30 rows and keys .* got {rows} and 75"):
        launch_fp8.prepare(asked._replace(plain=asked.plain._replace(q=(rows, 2, 64))))


WIDTHS = 64, 128, 256
CALLS = {
    "dense": ({"causal": False}, "dense"), "dense, a tail of keys": ({"causal": False, "S_k": 300}, "dense"),
    "dense, LSE, another sign": ({"causal": False, "sm_scale": -0.1}, "dense"),
    "causal": ({"S_q": 256}, "causal"), "left": ({"causal": False, "window": (70, -1)}, None),
    "right": ({"causal": False, "window": (-1, 70)}, None),
    "both": ({"causal": False, "window": (70, 10)}, None),
    "varlen": ({"causal": False, "varlen": ((40, 70), (0, 5))}, None),
    "varlen, causal": ({"varlen": ((40, 70), (0, 5))}, None),
}  # fmt: skip
"""What is asked for, and the kind of call that has a configuration of its own."""
KEPT = {(64, "dense"), (128, "dense"), (128, "causal")}
"""Where shifts are kept."""


def prepared(call: Call) -> launch_fp8.Call:
    """What is launched for it, which is not run."""
    found = []
    with on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_fp8, "prepare", lambda asked: found.append(asked) or (lambda *tensors: None))
        launch_fp8.forward(*call.operands(*call.tensors()), call.params(), torch.float16)
    [asked] = found
    return asked


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [None, "dense", "causal"])
def test_where_shifts_are_kept(kind: str | None, width: int) -> None:
    config = fp8_config(width, kind)
    assert config.keep_shift == ((width, kind) in KEPT)
    assert config.late_wait == ((width, kind) != (64, "dense"))
    own = fp8_config(width, kind, own_queries=True)
    assert width == 256 or own.q_columns == width, "queries stay in registers"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets(name: str, width: int) -> None:
    """Where shifts are kept the plan keeps them, whatever else the call asks for: a wait that is chosen for
    kept shifts is not used without them."""
    options, kind = CALLS[name]
    call = Call(width, **{"H": 1, "H_kv": 1, "S_q": 200, "S_k": 256} | options)
    asked = prepared(call)
    assert asked.plain.config == fp8_config(width, kind)
    assert launch_fp8.plan_of(asked).keep_shift.value == ((width, kind) in KEPT)


def test_a_diagonal_across_blocks_keeps_no_shift() -> None:
    """Of 64 rows and 64 keys each: then two blocks of a row need a mask."""
    asked = prepared(Call(128, 1, 1, 200, 256))
    assert asked.plain.config == fp8_config(128, "causal")
    assert not launch_fp8.plan_of(asked).keep_shift.value


def test_what_a_call_brings_is_taken() -> None:
    """No choice by the mask replaces it."""
    config = replace(fp8_config(64), warpgroups=2, stages=2)
    assert prepared(Call(64, 1, 1, 200, 256, causal=False, config=config)).plain.config == config
