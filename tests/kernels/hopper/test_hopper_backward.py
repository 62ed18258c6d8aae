"""Around the Hopper backward kernel: the conversion of dQ, in the interpreter, and what it refuses.

The kernel itself runs in test_emulated_kernels, and on a GPU in tests/gpu."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from attnlib.kernels import hopper
from attnlib.kernels.common import hopper_gpu
from attnlib.kernels.common.launch_preprocess import preprocess
from attnlib.kernels.common.launcher import Launches
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.hopper import launch_backward
from attnlib.kernels.hopper.configs_backward import hopper_backward_config
from attnlib.params import MaskWindow, Params

SCALE = 0.3


def in_registers(x: np.ndarray) -> np.ndarray:
    """[64, C] as the accumulator lies in a warpgroup's registers, the order in memory. The other way round
    from the conversion kernel: from the rows and columns that each of 128 threads has."""
    t, i = np.arange(128)[None, :, None], np.arange(x.shape[1] // 8)[:, None, None]
    four = np.arange(4)[None, None, :]
    rows = 16 * (t // 32) + t % 32 // 4 + 8 * (four // 2)
    return x[rows + 0 * i, 8 * i + 2 * (t % 4) + four % 2].reshape(-1)


def test_conversion_keeps_to_the_rows_and_columns_of_dq(device: str) -> None:
    """A head dimension between the widths, memory with more around it."""
    if device != "cpu":
        pytest.skip("the conversion runs in the interpreter")
    more = torch.full((1, 2, 134, 48), 7.0)
    dq = more[:, :, 2:132, 4:44]
    shape, config = (1, 2, 130, 40), hopper_backward_config(40)
    window = shape, more.stride()
    call = Signature(
        shape, shape, (more.stride(),) * 5, torch.float32, -1, MaskWindow(None, 0), SCALE, None, False, config
    )
    rows = preprocess(call, window, window, config.block_m, 64)
    sums = torch.arange(rows.elements, dtype=torch.float32)
    launches = [launch_backward.postprocess(call, window, rows, 64)]
    Launches(launches, -1, ("buffer", "dq", "cu_q"))(sums, dq, None)
    sums = sums[: rows.rows.start]
    blocks = sums.numpy().reshape(2, -1, 64 * 64) * np.float32(SCALE)
    for h, i in ((0, 0), (1, 1), (1, 2)):
        rows = dq[0, h, 64 * i : 64 * i + 64].numpy()
        full = np.zeros((64, 64), np.float32)
        numbers = in_registers(np.arange(4096).reshape(64, 64))  # which element lies at each place
        full.reshape(-1)[numbers] = blocks[h, i]
        np.testing.assert_array_equal(rows, full[: len(rows), :40])
    dq.fill_(7.0)
    assert bool((more == 7.0).all()), "written outside of dq"


@pytest.mark.parametrize(("width", "clocks"), [(64, 1200), (128, 0)])
def test_the_second_consumer_begins_later_where_no_diagonal_ends_the_keys(width: int, clocks: int) -> None:
    config = hopper_backward_config(width)
    for causal, left in product((False, True), repeat=2):
        mask = {"causal": causal, "shifted": False, "left": left, "tail": True}
        plan = launch_backward.make_plan(width, config, mask, varlen=False)
        assert plan.delay.value == (0 if causal or left else clocks)


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "reason"),
    [
        (64, True, "adds up dq in an order that changes; deterministic=True is asked for"),
        (256, True, "adds up dq in an order that changes; deterministic=True is asked for"),
        (256, False, None),
    ],
)
def test_what_it_cannot_run(head_dim, deterministic, reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_gpu, "unsupported_here", lambda q: None)
    q = torch.zeros(1, 1, 4, head_dim, dtype=torch.float16)
    params = Params(MaskWindow(None, None), SCALE, deterministic=deterministic)
    assert hopper.unsupported(q, q, q, params, backward=True) == reason


@pytest.mark.parametrize("head_dim", [0, 264])
def test_a_head_dimension_out_of_range_has_no_configuration(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"^head_dim: expected 1 to 256, got {head_dim}$"):
        hopper_backward_config(head_dim)


def test_a_cpu_is_refused_as_by_the_forward() -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    params = Params(MaskWindow(None, None), SCALE)
    for backward in (False, True):
        assert hopper.unsupported(q, q, q, params, backward) == "needs CUDA tensors; q is on cpu"
