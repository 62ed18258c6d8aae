"""What tests/gpu/time_decode.py times on a GPU: its calls, their bytes, and that wrong ones are refused."""

from __future__ import annotations

import pytest
import time_decode
import torch
from time_decode import Call

SMALL = {
    "batch": Call((40, 40), 4, 2, 16),
    "ragged": Call((40, 7, 100), 4, 2, 16),
}


def test_calls_are_named_apart():
    calls = [*time_decode.CALLS, *time_decode.PAIRS]
    assert len({call.label for call in calls}) == len(calls)
    assert [len(call.lengths) * call.kv_heads for call in time_decode.PAIRS] == [1, 8, 56, 132, 133, 200]


def test_bytes_are_those_of_keys_and_values():
    assert Call((8192,)).bytes == 2 * 8192 * 8 * 128 * 2
    assert SMALL["ragged"].bytes == 2 * 147 * 2 * 16 * 2
    assert Call((8192,)).label == "B1 H32/8 S1x8192 D128"
    assert SMALL["ragged"].label == "B3 H4/2 S1x100 D16 ragged"


@pytest.mark.parametrize("name", SMALL)
def test_right_outputs_pass_and_wrong_ones_do_not(name, device):
    call = SMALL[name]
    inputs = time_decode.make_inputs(call, device)
    judge = time_decode.Judge(call, inputs)
    made = time_decode.implementations(inputs)
    ours = [impl for impl in made if impl.startswith("attnlib")]
    assert len(ours) == 5
    for impl in ours:
        out = made[impl]()()
        judge.judge(out).raise_if_bad(impl)
        assert not judge.judge(out * 1.1).ok
    if name == "ragged":
        with pytest.raises(ValueError, match="SDPA knows no lengths"):
            made["cudnn"]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu(capsys):
    assert time_decode.main([]) == 2
    assert "compute capability 9.x" in capsys.readouterr().err
