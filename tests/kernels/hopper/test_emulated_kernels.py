"""The Hopper kernels, line by line as they are, in the emulator: results, and no race or deadlock."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn, more, with_more
from emulated import ORDERS, Call, check_backward, check_forward

from attnlib.kernels.hopper.configs import (
    M128N128,
    M192N128,
    M256N64,
    HopperConfig,
    SplitConfig,
    hopper_config,
)
from attnlib.kernels.hopper.configs_backward import (
    KEYS_96,
    BackwardKind,
    HopperBackwardConfig,
    backward_config,
    hopper_backward_config,
)
from attnlib.kernels.hopper.sharing import in_order

pytestmark = INTERPRETER_REMARKS
PLAIN_CALLS = [Call(D, causal=causal) for causal, D in product((True, False), (64, 128, 256))]


def name_of(part: Call | str) -> str | None:
    return f"{part.D}-{part.causal}" if isinstance(part, Call) else None


@pytest.mark.parametrize(("call", "order"), in_turn(PLAIN_CALLS, ORDERS), ids=name_of)
def test_forward(call: Call, order: str) -> None:
    check_forward(call, order)


@pytest.mark.parametrize(("call", "order"), in_turn(PLAIN_CALLS, ORDERS), ids=name_of)
def test_backward(call: Call, order: str) -> None:
    check_backward(call, order)


# ---------------------------------------------------------------- what a call may ask for

PLAIN = HopperConfig(64, 2, 2, 64)
UNEVEN = replace(PLAIN, diagonal_bytes=1, last_waves=0.04)  # one head, one, one, three


def kept(config: HopperConfig) -> HopperConfig:
    return replace(config, keep_shift=True)


FORWARD = {
    "grouped heads, batches": Call(64, 4, 2, 70, 90, B=2),
    "bfloat16": Call(128, 2, 1, dtype=torch.bfloat16),
    "no LSE": Call(128, return_lse=False),
    "a negative scale": Call(64, sm_scale=-0.1),
    "a negative scale, 256 columns": Call(256, 1, 1, 70, 150, sm_scale=-0.1, causal=False),
    "one row, one key": Call(64, 1, 1, 1, 1),
    "one row": Call(128, 2, 1, 1, 333),
    "one key": Call(64, 2, 1, 200, 1),
    "rows that see nothing": Call(128, 1, 1, 300, 100),
    "many tiles": Call(64, 6, 2, 300, 150),
    "a large last section": Call(64, 6, 6, 200, 200, config=UNEVEN),
    "a head dimension between the widths": Call(40, 2, 1, 150, 170),
    "a head dimension of 200": Call(200, 1, 1, 100, 150),
    "80 columns, many tiles": Call(80, 6, 2, 300, 150),
    "96 columns, bfloat16": Call(96, 2, 1, dtype=torch.bfloat16),
    "96 columns, dense": Call(96, 2, 1, causal=False),
    "192 columns": Call(192, 1, 1),
    "72 of 80 columns, a negative scale": Call(72, 2, 1, 100, 150, sm_scale=-0.1, causal=False),
    "136 of 192 columns, windows on both sides": Call(136, 1, 1, 100, 200, causal=False, window=(70, 33)),
    "96 columns, varlen": Call(96, 2, 1, varlen=((40, 70), (0, 5), (300, 90), (1, 300))),
    "72 of 80 columns, varlen, a window": Call(72, 1, 1, varlen=((140, 170), (200, 90)), window=(50, -1)),
    "192 columns, values of 128": Call(192, 2, 1, D_v=128),
    "192 columns, values of 128, a window": Call(192, 1, 1, causal=False, window=(70, 33), D_v=128),
    "192 columns, values of 128, varlen": Call(192, 2, 1, varlen=((40, 70), (0, 5), (300, 90)), D_v=128),
    "136 of 192 columns, values of 120 of 128": Call(136, 4, 2, 70, 90, B=2, D_v=120, causal=False),
    "128 columns, values of 64": Call(128, 2, 1, 200, 230, D_v=64),
    "64 columns, values of 128": Call(64, 6, 2, 300, 150, D_v=128, dtype=torch.bfloat16),
    "64 columns, values of 256": Call(64, 2, 1, sm_scale=-0.1, D_v=256),
    "40 of 64 columns, values of 64": Call(40, 2, 1, 200, 230, D_v=64),
    "192 columns, values of 64": Call(192, 1, 1, 70, 333, D_v=64),
    "192 columns, values of 256": Call(192, 1, 1, 150, 90, D_v=256),
    "256 columns, values of 64": Call(256, 1, 1, 130, 130, D_v=64),
    "256 columns, values of 128": Call(256, 1, 1, 130, 130, D_v=128, causal=False),
    "128 columns, values of 256": Call(128, 1, 1, 100, 150, D_v=256, return_lse=False),
    "96 of 128 columns, values of 128": Call(96, 1, 1, 100, 150, D_v=128),
    "200 of 256 columns, values of 256": Call(200, 1, 1, 100, 150, D_v=256),
    "nobody shares a tile's keys": Call(64, 3, 1, 129, 129, config=M128N128),
    "window": Call(64, 2, 1, 200, 300, causal=True, window=(100, -1)),
    "window on both sides": Call(128, 1, 1, 200, 300, causal=False, window=(70, 33)),
    "window on the right": Call(64, 1, 1, 200, 300, causal=False, window=(-1, 40)),
    "window on the left": Call(256, 1, 1, 100, 300, causal=False, window=(70, -1)),
    "window of one key": Call(64, 1, 1, 150, 150, causal=True, window=(0, 0)),
    "window over few rows": Call(64, 1, 1, 150, 300, window=(90, -1), config=M128N128),
    "window in tiles of 192 rows": Call(64, 1, 1, 200, 300, window=(100, -1), config=M192N128),
    "shifts kept": Call(64, 3, 1, 320, 448, sm_scale=1.0, config=kept(M256N64)),
    "shifts kept, tiles of 192 rows": Call(64, 2, 1, 150, 230, False, sm_scale=-1.0, config=kept(M192N128)),
    "shifts kept, 128 columns, bfloat16": Call(
        128, 2, 1, 128, 320, sm_scale=0.5, dtype=torch.bfloat16, config=kept(hopper_config(128))
    ),
    "shifts kept, 256 columns": Call(256, 1, 1, 128, 192, sm_scale=0.5, config=kept(hopper_config(256))),
    "shifts kept, two parts": Call(96, 2, 1, 64, 256, sm_scale=1.0, config=kept(hopper_config(96))),
    "shifts kept, varlen": Call(
        64, 1, 1, causal=False, sm_scale=1.0, varlen=((40, 70), (150, 300)), config=kept(M256N64)
    ),
    "shifts kept where no mask is needed": Call(64, 1, 1, 150, 230, sm_scale=1.0, config=kept(M256N64)),
    "shifts kept, a window": Call(64, 1, 1, 200, 300, sm_scale=1.0, window=(70, -1), config=kept(M192N128)),
    "shifts kept, rows that see nothing": Call(64, 1, 1, 320, 128, sm_scale=1.0, config=kept(PLAIN)),
    "varlen": Call(64, 2, 1, varlen=((40, 70), (0, 5), (300, 90), (1, 300))),
    "varlen, dense": Call(128, 1, 1, varlen=((40, 70), (150, 0), (130, 129)), causal=False),
    "varlen, 256 columns": Call(256, 1, 1, varlen=((70, 70), (100, 130))),
    "varlen, tiles of 192 rows": Call(64, 2, 1, varlen=((40, 70), (300, 290)), causal=False, config=M192N128),
    "varlen, a window": Call(64, 1, 1, varlen=((140, 170), (200, 90)), window=(50, -1), config=M128N128),
}


@pytest.mark.parametrize(("name", "order"), in_turn(FORWARD, ("late", "random")))
def test_forward_calls(name: str, order: str) -> None:
    check_forward(FORWARD[name], order, seed=1)


FLAGS = [
    {"joint": True}, {"named": True}, {"joint": True, "named": True}, {"late_wait": True},
    {"late_wait": True, "pin": True}, {"pin": True}, {"block_n": 128}, {"keep_shift": True},
    {"keep_shift": True, "late_wait": True, "pin": True, "q_columns": 32},
    {"o_columns": 32}, {"q_columns": 32}, {"stages": 4, "q_columns": 48}, {"stages": 1}, {"stages": 8},
    {"warpgroups": 3, "stages": 4, "joint": True, "block_n": 128},
    {"warpgroups": 4}, {"warpgroups": 4, "joint": True, "named": True, "late_wait": True, "block_n": 128},
]  # fmt: skip


@pytest.mark.parametrize(("flags", "causal"), in_turn(FLAGS, (True, False)), ids=str)
def test_forward_configurations(flags: dict, causal: bool) -> None:
    check_forward(Call(64, 2, 1, 150, 230, causal, config=replace(PLAIN, **flags)), seed=2)


BACKWARD = {
    "grouped heads, batches": Call(64, 4, 2, 70, 90, B=2),
    "bfloat16": Call(128, 2, 1, dtype=torch.bfloat16),
    "bfloat16, 256 columns": Call(256, 1, 1, 70, 70, dtype=torch.bfloat16),
    "a negative scale": Call(64, 1, 1, sm_scale=-0.1),
    "one row, one key": Call(64, 1, 1, 1, 1),
    "one row, one key, 256 columns": Call(256, 1, 1, 1, 1),
    "one row": Call(128, 1, 1, 1, 333),
    "one key": Call(64, 1, 1, 200, 1),
    "rows that see nothing": Call(128, 1, 1, 200, 70),
    "keys that nobody sees after a tile": Call(64, 1, 1, 63, 129, causal=False),
    "a head dimension between the widths": Call(40, 2, 1, 150, 170),
    "a head dimension of 200": Call(200, 2, 1, 100, 150),
    "window": Call(64, 2, 1, 300, 400, window=(60, -1)),
    "window on both sides": Call(128, 1, 1, 150, 300, causal=False, window=(30, 20)),
    "window, 256 columns": Call(256, 2, 1, 100, 230, causal=False, window=(30, 20)),
    "keys that nobody sees": Call(64, 1, 1, 100, 400, window=(30, -1)),
    "keys that nobody sees, 256 columns": Call(256, 1, 1, 60, 200, window=(30, -1)),
    "varlen": Call(64, 2, 1, varlen=((40, 70), (300, 90), (1, 200))),
    "varlen, dense": Call(128, 1, 1, varlen=((40, 170), (150, 70)), causal=False),
    "varlen, 256 columns": Call(256, 2, 1, varlen=((40, 70), (150, 90))),
    "80 columns": Call(80, 2, 1, 100, 150),
    "72 of 80 columns, dense, bfloat16": Call(72, 1, 1, 70, 70, causal=False, dtype=torch.bfloat16),
    "96 columns, grouped heads, batches": Call(96, 4, 2, 70, 90, B=2),
    "88 of 96 columns, keys that nobody sees": Call(88, 1, 1, 60, 200, window=(30, 20), causal=False),
    "160 columns, dense": Call(160, 1, 1, 70, 100, causal=False),
    "192 columns": Call(192, 2, 1, 70, 100),
    "136 of 160 columns, varlen": Call(136, 1, 1, varlen=((40, 70), (150, 90))),
    "192 columns, keys that nobody sees": Call(192, 1, 1, 60, 150, window=(30, -1)),
    "96 columns, varlen": Call(96, 1, 1, varlen=((40, 170), (150, 70))),
    "192 columns, values of 128": Call(192, 2, 1, 70, 100, D_v=128),
    "192 columns, values of 128, dense, bfloat16": Call(
        192, 4, 2, 70, 90, B=2, D_v=128, causal=False, dtype=torch.bfloat16
    ),
    "136 of 192 columns, values of 72 of 128": Call(136, 1, 1, 63, 129, causal=False, sm_scale=-0.1, D_v=72),
    "192 columns, values of 128, one row, one key": Call(192, 1, 1, 1, 1, D_v=128),
    "192 columns, values of 128, keys that nobody sees": Call(192, 1, 1, 60, 200, window=(30, -1), D_v=128),
    "192 columns, values of 128, varlen": Call(192, 2, 1, varlen=((40, 70), (150, 90), (0, 9)), D_v=128),
    "64 columns, values of 128": Call(64, 2, 1, 70, 100, D_v=128, sm_scale=-0.1),
    "128 columns, values of 64, varlen": Call(128, 1, 1, varlen=((40, 70), (70, 70)), D_v=64),
    "40 of 64 columns, values of 256": Call(40, 1, 1, 63, 70, causal=False, D_v=256),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_calls(name: str) -> None:
    check_backward(BACKWARD[name], seed=1)


# ---------------------------------------------------------------- consumers that alternate


ALTERNATING = {
    "64 columns": Call(64, 2, 1, 300, 400),
    "72 of 80 columns": Call(72, 1, 1, 150, 170, causal=False),
    "128 columns": Call(128, 2, 1, 150, 40, causal=False),
    "a window": Call(128, 1, 1, 150, 400, window=(60, -1)),
}


@pytest.mark.parametrize(("case", "order"), in_turn(product(ALTERNATING, (False, True)), ORDERS), ids=str)
def test_consumers_that_alternate(case: tuple[str, bool], order: str) -> None:
    name, deterministic = case
    call = ALTERNATING[name]
    config = replace(hopper_backward_config(call.D, deterministic), alternate=True)
    report = check_backward(replace(call, config=config, deterministic=deterministic), order).reports[-1]
    assert report.unwaited == ()


# ---------------------------------------------------------------- other forms of a step

FORMS = {
    "64 columns": Call(64, 2, 1, 300, 400),
    "72 of 80 columns, dense": Call(72, 1, 1, 150, 170, causal=False),
    "96 columns, programs share a key head": Call(96, 4, 2, 70, 200),
    "128 columns, a window": Call(128, 1, 1, 150, 400, causal=False, window=(60, 20)),
    "64 columns, keys that nobody sees": Call(64, 1, 1, 100, 400, window=(30, -1)),
    "96 columns, varlen": Call(96, 2, 1, varlen=((40, 170), (300, 90), (1, 200))),
    "128 columns, a negative scale": Call(128, 1, 1, 150, 150, sm_scale=-0.1),
}


@pytest.mark.parametrize(("name", "order"), in_turn(FORMS, ORDERS))
def test_forms_of_a_step(name: str, order: str) -> None:
    call = FORMS[name]
    config = replace(hopper_backward_config(call.D), bulk=True, early_mask=True, masked_stagger=600)
    config = replace(config, visited=1 if "share" in name else None)
    assert check_backward(replace(call, config=config), order).reports[-1].unwaited == ()


@pytest.mark.parametrize(("D", "option"), [(192, "early_mask"), (256, "early_mask"), (256, "pause_every")])
def test_options_of_the_wide_kernel(D: int, option: str) -> None:
    config = replace(hopper_backward_config(D), **{option: 4})
    check_backward(Call(D, 1, 1, 100, 150, causal=False, window=(40, 10), config=config), "random")


# ---------------------------------------------------------------- 96 keys a program

OF_96_KEYS = {
    "grouped heads": Call(192, 2, 1, 150, 200),
    "dense, fewer keys than queries, bfloat16": Call(192, 1, 1, 200, 150, False, dtype=torch.bfloat16),
    "one row, one key": Call(192, 1, 1, 1, 1),
    "no keys in the last 32 of a block, batches": Call(136, 1, 1, 70, 150, causal=False, B=2),
    "rows that see nothing": Call(176, 1, 1, 300, 150),
    "a window": Call(192, 2, 1, 150, 400, causal=False, window=(60, 20)),
    "no right bound": Call(192, 1, 1, 150, 170, causal=False, window=(60, -1)),
    "keys that nobody sees": Call(192, 1, 1, 100, 400, window=(30, -1)),
    "a negative scale": Call(192, 1, 1, 150, 150, sm_scale=-0.1),
    "varlen": Call(192, 2, 1, varlen=((40, 170), (0, 5), (150, 70))),
    "varlen, dense": Call(192, 1, 1, varlen=((40, 97), (150, 192)), causal=False),
    "varlen, a window": Call(192, 1, 1, varlen=((140, 170), (200, 90)), window=(50, -1)),
}
OF_96_KEYS |= {
    "values of 128": Call(192, 2, 1, 150, 200, D_v=128),
    "values of 72, dense, bfloat16": Call(136, 4, 2, 70, 190, False, B=2, dtype=torch.bfloat16, D_v=72),
    "values of 128, keys that nobody sees": Call(192, 1, 1, 60, 200, window=(30, -1), D_v=128),
    "values of 128, varlen": Call(192, 2, 1, varlen=((40, 70), (150, 90), (0, 9)), D_v=128),
}
SHARED_OF_96_KEYS = {
    "values of 128, added": Call(192, 4, 2, 70, 200, D_v=128),
    "values of 104, apart": Call(192, 2, 1, 70, 200, causal=False, D_v=104),
    "added": Call(192, 4, 2, 70, 200),
    "apart, dense": Call(192, 2, 1, 150, 200, causal=False),
    "136 columns, batches, bfloat16": Call(136, 8, 2, 70, 100, B=2, dtype=torch.bfloat16),
    "apart, keys that nobody sees": Call(192, 2, 1, 100, 400, window=(30, -1)),
    "varlen": Call(192, 2, 1, varlen=((40, 170), (150, 70))),
}


OF_160_COLUMNS = {
    "grouped heads": Call(160, 2, 1, 150, 200),
    "dense, fewer keys than queries, bfloat16": Call(160, 1, 1, 200, 150, False, dtype=torch.bfloat16),
    "no keys in the last 32 of a block, batches": Call(136, 1, 1, 70, 150, causal=False, B=2),
    "rows that see nothing": Call(152, 1, 1, 300, 150),
    "a window": Call(160, 2, 1, 150, 400, causal=False, window=(60, 20)),
    "varlen": Call(160, 2, 1, varlen=((40, 170), (0, 5), (150, 70))),
    "values of 128": Call(160, 2, 1, 150, 200, D_v=128),
    "added": Call(160, 4, 2, 70, 200),
    "added, values of 72, dense": Call(136, 4, 2, 70, 200, False, D_v=72),
    "apart, batches": Call(136, 4, 2, 70, 100, B=2),
}


def of_96_keys(call: Call, query_columns: int = 192) -> HopperBackwardConfig:
    value_columns = query_columns if call.D_v is None else 128
    return replace(KEYS_96, query_columns=query_columns, value_columns=value_columns)


@pytest.mark.parametrize(("name", "order"), in_turn(OF_96_KEYS, ORDERS))
def test_96_keys_a_program(name: str, order: str) -> None:
    config = replace(of_96_keys(OF_96_KEYS[name]), early_mask=order == "late")
    assert check_backward(replace(OF_96_KEYS[name], config=config), order).reports[-1].unwaited == ()


FIRST_OF_160 = in_turn(("grouped heads", "varlen", "values of 128", "added", "apart, batches"), ORDERS)
FIRST_OF_160 += more(case for case in product(OF_160_COLUMNS, ORDERS) if case not in FIRST_OF_160)
"""The kernel is that of 192 columns, of which all calls are tested above."""


@pytest.mark.parametrize(("name", "order"), FIRST_OF_160)
def test_96_keys_of_160_columns(name: str, order: str) -> None:
    call = OF_160_COLUMNS[name]
    config = replace(of_96_keys(call, 160), early_mask=order == "late")
    if "added" in name or "apart" in name:
        config = replace(config, visited=1, added="added" in name)
    assert check_backward(replace(call, config=config), order).reports[-1].unwaited == ()


@pytest.mark.parametrize(("name", "order"), in_turn(SHARED_OF_96_KEYS, ("late", "random")))
def test_programs_of_96_keys_that_share_a_key_head(name: str, order: str) -> None:
    call = SHARED_OF_96_KEYS[name]
    visited = 2 if order == "late" and call.H // call.H_kv == 4 else 1
    config = replace(of_96_keys(call), visited=visited, added="apart" not in name)
    assert check_backward(replace(call, config=config), order).reports[-1].unwaited == ()


# ---------------------------------------------------------------- programs that stay on their SM

TILES = {
    "64 columns": Call(64, 2, 2, 300, 400),
    "64 columns, tiles of one block": Call(64, 1, 1, 200, 300, B=2),
    "72 of 80 columns, dense": Call(72, 2, 2, 150, 170, causal=False),
    "96 columns, bulk": Call(96, 1, 1, 150, 500, causal=False),
    "128 columns, grouped heads": Call(128, 4, 2, 70, 300),
    "128 columns, a window": Call(128, 1, 1, 150, 500, causal=False, window=(60, 20)),
    "64 columns, bulk, keys that nobody sees": Call(64, 1, 1, 150, 400, window=(30, -1)),
    "128 columns, rows that see nothing": Call(128, 1, 1, 300, 150),
    "128 columns, fewer tiles than SMs": Call(128, 1, 1, 150, 40),
    "64 columns, one step, not persistent": Call(64, 1, 1, 100, 400, causal=False),
    "64 columns, varlen, in order, not persistent": Call(
        64, 1, 1, varlen=((40, 170), (300, 90)), deterministic=True
    ),
    "64 columns, varlen": Call(64, 2, 2, varlen=((40, 170), (0, 5), (300, 90), (1, 200))),
    "64 columns, varlen, bulk, dense": Call(
        64, 2, 1, varlen=((40, 70), (0, 300), (150, 130), (128, 128)), causal=False
    ),
    "96 columns, varlen": Call(96, 2, 1, varlen=((40, 170), (300, 90), (1, 200))),
    "72 of 80 columns, varlen, dense": Call(72, 1, 1, varlen=((40, 70), (140, 170)), causal=False),
    "128 columns, varlen, dense": Call(128, 1, 1, varlen=((40, 170), (150, 40), (129, 70)), causal=False),
    "128 columns, varlen, a window": Call(128, 1, 1, varlen=((140, 170), (200, 90)), window=(50, -1)),
    "64 columns, varlen, bulk, a window on both sides": Call(
        64, 2, 2, varlen=((200, 300), (300, 100), (70, 70)), window=(140, 10), causal=False
    ),
    "64 columns, varlen, bulk, a program without a tile": Call(64, 1, 1, varlen=((30, 40), (0, 0), (0, 0))),
    "128 columns, varlen, many sequences": Call(128, 1, 1, varlen=((3, 5),) * 40),
}


SHARED_TILES = {
    "64 columns": Call(64, 4, 2, 200, 300),
    "64 columns, bulk, dense, batches": Call(64, 4, 1, 150, 170, causal=False, B=2),
    "96 columns": Call(96, 4, 2, 150, 200),
    "128 columns, a window": Call(128, 2, 1, 150, 300, causal=False, window=(60, 20)),
    "128 columns, rows that see nothing": Call(128, 2, 1, 300, 150),
    "72 of 80 columns, bulk, apart": Call(72, 2, 1, 150, 300),
    "64 columns, varlen, bulk": Call(64, 4, 2, varlen=((40, 170), (0, 5), (300, 90))),
    "128 columns, varlen, apart": Call(128, 2, 1, varlen=((150, 170), (0, 50), (90, 90))),
}


SMS = {"eager": 1, "late": 3, "random": 2}


@pytest.mark.parametrize(("name", "order"), in_turn(SHARED_TILES, ORDERS))
def test_programs_that_stay_and_share_a_key_head(name: str, order: str) -> None:
    call, sms = SHARED_TILES[name], SMS[order]
    config = replace(hopper_backward_config(call.D), persistent=True, bulk="bulk" in name)
    visited = 2 if order == "late" and call.H // call.H_kv == 4 else 1
    config = replace(config, visited=visited, added="apart" not in name, early_mask=order == "late")
    kernel = check_backward(replace(call, config=config), order, sms=sms)
    assert kernel.reports[-1].unwaited == () and kernel.programs <= sms


@pytest.mark.parametrize(("name", "order"), in_turn(TILES, ORDERS))
def test_programs_that_stay_on_their_sm(name: str, order: str) -> None:
    call, sms = TILES[name], SMS[order]
    chosen = hopper_backward_config(call.D, call.deterministic)
    config = replace(chosen, persistent=True, bulk="bulk" in name, added=not call.deterministic)
    config = replace(config, visited=call.H // call.H_kv, early_mask=order == "late", masked_stagger=600)
    kernel = check_backward(replace(call, config=config), order, sms=sms)
    assert kernel.reports[-1].unwaited == ()
    assert (kernel.programs <= sms) == ("not persistent" not in name)


ALTERNATING_TILES = {
    "64 columns": Call(64, 2, 2, 300, 400),
    "72 of 80 columns, bulk, batches": Call(72, 1, 1, 150, 170, causal=False, B=2),
    "64 columns, bulk": Call(64, 1, 1, 300, 300, causal=False),
    "96 columns, grouped heads": Call(96, 4, 2, 70, 300),
    "128 columns, a window": Call(128, 1, 1, 150, 500, causal=False, window=(60, 20)),
    "128 columns, rows that see nothing": Call(128, 1, 1, 300, 150),
    "128 columns, programs share a key head": Call(128, 2, 1, 150, 300, causal=False),
    "64 columns, varlen, bulk": Call(64, 2, 2, varlen=((40, 170), (0, 5), (300, 90), (1, 200))),
    "128 columns, varlen, dense": Call(128, 1, 1, varlen=((40, 170), (150, 40), (129, 70)), causal=False),
}


@pytest.mark.parametrize(("name", "order"), in_turn(ALTERNATING_TILES, ORDERS))
def test_consumers_that_alternate_in_programs_that_stay(name: str, order: str) -> None:
    call, sms = ALTERNATING_TILES[name], SMS[order]
    visited = 1 if "share" in name else call.H // call.H_kv
    config = replace(hopper_backward_config(call.D), persistent=True, alternate=True, visited=visited)
    config = replace(config, bulk="bulk" in name)
    kernel = check_backward(replace(call, config=config), order, sms=sms)
    assert kernel.reports[-1].unwaited == () and kernel.programs <= sms


TAILS = {
    "64 columns, varlen, bulk, bfloat16": Call(
        64, 2, 1, varlen=((40, 70), (0, 300), (150, 130), (128, 128)), causal=False, dtype=torch.bfloat16
    ),
    "96 columns": Call(96, 2, 1, 150, 200, causal=False),
    "96 columns, one key of the last block": Call(96, 1, 1, 200, 257, causal=False),
    "128 columns, all keys exist": Call(128, 1, 1, 150, 256, causal=False),
    "72 of 80 columns, grouped heads, batches": Call(72, 2, 1, 70, 190, causal=False, B=2),
    "64 columns, programs share a key head": Call(64, 2, 1, 150, 70, causal=False),
    "96 columns, not persistent": Call(96, 1, 1, 150, 200, causal=False),
}


@pytest.mark.parametrize(("name", "order"), in_turn(TAILS, ORDERS))
def test_steps_that_see_no_tail(name: str, order: str) -> None:
    call, stays = TAILS[name], "not persistent" not in name
    visited = 1 if "share" in name else call.H // call.H_kv
    config = replace(hopper_backward_config(call.D), tail_apart=True, visited=visited, alternate=stays)
    config = replace(config, persistent=stays, bulk="bulk" in name, half_p=False)
    assert check_backward(replace(call, config=config), order, sms=SMS[order]).reports[-1].unwaited == ()


ROTATED = {
    "64 columns, stays, bulk": Call(64, 2, 1, 300, 400, causal=False),
    "128 columns, stays": Call(128, 3, 1, 330, 256, causal=False, dtype=torch.bfloat16),
    "128 columns, stays, more keys than queries": Call(128, 1, 1, 130, 600, causal=False, B=2),
    "72 of 80 columns, stays": Call(72, 2, 2, 200, 300, causal=False, B=2),
    "96 columns, varlen, stays": Call(
        96, 2, 1, varlen=((40, 70), (0, 300), (150, 130), (128, 1), (200, 300)), causal=False
    ),
    "64 columns, varlen, stays, bulk": Call(64, 1, 1, varlen=((40, 170), (190, 300)), causal=False),
    "128 columns, varlen": Call(128, 1, 1, varlen=((40, 170), (0, 20), (190, 300)), causal=False),
    "112 columns": Call(112, 1, 1, 200, 300, causal=False),
    "64 columns, values of 128, stays": Call(64, 2, 1, 200, 300, D_v=128, causal=False),
    "128 columns, a diagonal, stays": Call(128, 1, 1, 300, 300),
}


@pytest.mark.parametrize(("name", "order"), in_turn(ROTATED, ORDERS))
def test_programs_that_begin_at_different_queries(name: str, order: str) -> None:
    """Where all of them visit all queries: under a diagonal the option changes nothing."""
    call = ROTATED[name]
    config = replace(backward_config(call.D, call.D_v or call.D), rotated=True, visited=1)
    if "stays" in name:
        config = replace(config, persistent=True, alternate=True, bulk="bulk" in name)
    assert check_backward(replace(call, config=config), order, sms=SMS[order]).reports[-1].unwaited == ()


# ---------------------------------------------------------------- the same bits


def sums_apart(D: int, D_v: int | None = None, varlen: bool = False) -> HopperBackwardConfig:
    """What grouped heads with many rows get under a diagonal, in groups of 8."""
    kind = BackwardKind(masked=True, alone=False, varlen=varlen)
    if D_v is not None:
        return in_order(backward_config(D, D_v, True, kind), 192, 8, 512, kind)
    return in_order(hopper_backward_config(D, True, D <= 128, kind), D, 8, 512, kind)


IN_ORDER = {
    "causal": Call(64, 2, 1, 300, 400),
    "dense": Call(64, 2, 1, 150, 400, causal=False),
    "128 columns, batches": Call(128, 1, 1, 150, 300, B=2),
    "256 columns": Call(256, 2, 1, 100, 200),
    "256 columns, dense": Call(256, 1, 1, 70, 200, causal=False),
    "80 columns": Call(80, 1, 1, 100, 300),
    "80 columns, dense": Call(72, 1, 1, 70, 300, causal=False),
    "96 columns": Call(96, 1, 1, 100, 300),
    "192 columns": Call(192, 1, 1, 100, 200),
    "160 columns, dense": Call(160, 1, 1, 70, 200, causal=False),
    "window": Call(64, 1, 1, 400, 500, window=(200, -1)),
    "window on both sides": Call(128, 1, 1, 300, 400, causal=False, window=(150, 90)),
    "no right bound": Call(64, 1, 1, 400, 300, causal=False, window=(130, -1)),
    "varlen": Call(64, 2, 1, varlen=((40, 170), (0, 50), (300, 290), (1, 200))),
    "varlen, 256 columns, dense": Call(256, 1, 1, varlen=((70, 150), (40, 130)), causal=False),
    "varlen window": Call(128, 1, 1, varlen=((200, 300), (150, 290)), window=(140, 10), causal=False),
    "192 columns, values of 128": Call(192, 1, 1, 100, 200, D_v=128),
    "64 columns, sums apart": Call(64, 4, 2, 150, 300, config=sums_apart(64)),
    "96 columns, sums apart": Call(72, 2, 1, 150, 300, config=sums_apart(72)),
    "128 columns, sums apart": Call(128, 4, 2, 150, 300, config=sums_apart(128)),
    "160 columns, sums apart": Call(160, 2, 1, 100, 200, config=sums_apart(160)),
    "values of 128, sums apart": Call(192, 2, 1, 100, 200, D_v=128, config=sums_apart(192, 128)),
    "256 columns, sums apart": Call(256, 3, 1, 70, 140, config=sums_apart(256)),
    "varlen, sums apart": Call(
        128, 2, 1, varlen=((150, 170), (0, 50), (90, 90)), config=sums_apart(128, varlen=True)
    ),
    "varlen, 192 columns, sums apart": Call(
        192, 2, 1, varlen=((70, 100), (90, 90)), config=sums_apart(192, varlen=True)
    ),
}


def bits_of_runs(call: Call) -> set[bytes]:
    """What memory holds after several runs, in orders and numbers of SMs of all kinds; the first one's
    gradients are right."""
    kernel = check_backward(call, "random", sms=3)
    found = set()
    orders = zip((*ORDERS, "random"), (1, 2, 5, 2), strict=True)
    for seed, (order, sms) in enumerate(orders):
        kernel.options["sms"] = sms
        kernel.repeat(order, seed)
        found.add(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in kernel.tensors))
    return found


ORDERED = with_more(
    ["dense", "128 columns, batches", "256 columns", "80 columns", "varlen", "window on both sides",
     "192 columns, values of 128", "64 columns, sums apart", "128 columns, sums apart", "varlen, sums apart"],
    IN_ORDER,
)  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_dq_has_the_same_bits_in_every_order(name: str) -> None:
    assert len(bits_of_runs(replace(IN_ORDER[name], deterministic=True))) == 1


TURNS = {"alternate": True, "early_mask": True, "half_p": False}
WAYS = {"bulk": {"bulk": True}, "bulk, alternate": {"bulk": True} | TURNS}
WAYS |= {f"{name}, stays": form | {"persistent": True} for name, form in WAYS.items()}
STAYS = {"bulk": False, "persistent": True}
WAYS |= {"stays": STAYS, "alternate, stays": TURNS | STAYS}
VARIED = [(name, form) for name, call in IN_ORDER.items() if call.D in (64, 96, 128) for form in WAYS]
VARIED_FIRST = [
    ("no right bound", "bulk, alternate"), ("96 columns", "bulk"), ("varlen window", "bulk, alternate"),
    ("causal", "bulk, alternate, stays"), ("window", "bulk, stays"),
]  # fmt: skip


@pytest.mark.parametrize("case", with_more(VARIED_FIRST, VARIED), ids=", ".join)
def test_dq_has_the_same_bits_in_other_forms(case: tuple[str, str]) -> None:
    name, form = case
    config = replace(hopper_backward_config(IN_ORDER[name].D, True), **WAYS[form])
    assert len(bits_of_runs(replace(IN_ORDER[name], config=config, deterministic=True))) == 1


@pytest.mark.parametrize("name", ["256 columns", *more(["causal", "80 columns"])])
def test_without_turns_bits_differ(name: str) -> None:
    """So the test above can fail."""
    assert len(bits_of_runs(IN_ORDER[name])) > 1


# ---------------------------------------------------------------- what nobody waits for


@pytest.mark.parametrize("name", ["no LSE", "many tiles", "varlen", "window"])
def test_forward_leaves_releases(name: str) -> None:
    """compute-sanitizer's synccheck stops at a phase that nobody waits for if another one follows."""
    for report in check_forward(FORWARD[name], "late").reports:
        assert all("_free" in barrier for _, barrier, _ in report.unwaited)


@pytest.mark.parametrize("name", ["grouped heads, batches", "varlen", "window, 256 columns"])
def test_backward_waits_for_every_phase(name: str) -> None:
    assert all(report.unwaited == () for report in check_backward(BACKWARD[name], "late").reports)


# ---------------------------------------------------------------- many orders

# More blocks than there are slots, or steps than there are buffers, in two tiles or heads.
TINY = {
    "joint": Call(64, 2, 1, 60, 130, config=HopperConfig(64, 4, 2, 64, joint=True)),
    "apart": Call(64, 2, 1, 70, 130, config=PLAIN),
    "named": Call(64, 2, 1, 70, 130, config=replace(PLAIN, named=True, late_wait=True, q_columns=32)),
    "two parts": Call(72, 2, 1, 70, 130, config=SplitConfig(64, 2, 2, 32, named=True, columns=(64, 16))),
    "varlen": Call(64, 1, 1, varlen=((20, 130), (0, 5), (70, 100)), config=PLAIN),
    "window": Call(64, 2, 1, 70, 150, window=(60, -1), config=PLAIN),
    "backward, 64 columns": Call(64, 3, 1, 30, 40, config=replace(hopper_backward_config(64), visited=3)),
    "backward, bulk": Call(
        96, 1, 1, 150, 40, causal=False, config=replace(hopper_backward_config(96), bulk=True)
    ),
    "backward, persistent": Call(
        128, 1, 1, 150, 260, config=replace(hopper_backward_config(128), persistent=True, visited=1)
    ),
    "backward, persistent, bulk": Call(
        96, 1, 1, 150, 260, config=replace(hopper_backward_config(96), persistent=True, bulk=True, visited=1)
    ),
    "backward, shared": Call(64, 2, 1, 150, 40, config=replace(hopper_backward_config(64), visited=1)),
    "backward, 128 columns": Call(128, 1, 1, 150, 40, causal=False),
    "backward, 256 columns": Call(256, 1, 1, 150, 40, causal=False),
    "backward, varlen": Call(64, 2, 1, varlen=((30, 40), (140, 20))),
    "backward, a window": Call(256, 1, 1, 150, 70, window=(50, -1)),
    "backward, 72 of 80 columns": Call(72, 1, 1, 150, 40, causal=False),
    "backward, 136 of 160 columns": Call(136, 1, 1, 150, 40, causal=False),
}


RUNS = dict.fromkeys(TINY, 25)
RUNS |= {"backward, 256 columns": 40, "backward, varlen": 20, "backward, a window": 20}
RUNS |= {"backward, persistent": 20, "backward, persistent, bulk": 20}
RUNS |= {"backward, shared": 10, "backward, 72 of 80 columns": 10, "backward, 136 of 160 columns": 10}


SEEDS = [(kind, range(5)) for kind in TINY] + more((kind, range(5, RUNS[kind])) for kind in TINY)


@pytest.mark.parametrize(("kind", "seeds"), SEEDS, ids=str)
def test_many_orders(kind: str, seeds: range) -> None:
    """Results are checked once, then memory has to be the same after each run."""
    check = check_backward if kind.startswith("backward") else check_forward
    kernel = check(TINY[kind], "eager", sms=1)
    for seed in seeds:
        kernel.repeat("random", seed)
