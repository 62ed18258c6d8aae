"""Configurations: every call has a configuration, it fits the GPU, and the arguments alone decide it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from itertools import product
from typing import get_args

import pytest

from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.portable import configs
from attnlib.kernels.portable.configs import SHORT, ForwardConfig, forward_config

HEAD_DIMS = range(8, 257, 8)
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
# Compute capability -> bytes of shared memory that one program may have (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"). None, the interpreter, has no limit; Hopper's is given.
SHARED_MEMORY = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
    None: 227 * 1024,
}
KEYS = [1, SHORT, SHORT + 1, 1 << 20]
CALLS = list(product(HEAD_DIMS, ITEMSIZE, SHARED_MEMORY, KEYS))


def shared_bytes(config: ForwardConfig, head_dim: int, itemsize: int) -> int:
    """Shared memory of one program, as the compiler lays it out.

    In the loop: Q (unless in registers), the key and value tiles in flight, and one tile more where P V is a
    step late. After it: the output on its way out, in the place of the rest. The barriers of the loads take
    less than a hundred bytes.
    """
    row = block_d(head_dim) * itemsize
    q = 0 if config.q_in_registers else config.block_m * row
    tiles = (2 * config.num_stages + (config.order == "late")) * config.block_n * row
    return max(q + tiles, config.block_m * row) + 100


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("arch", SHARED_MEMORY, ids=str)
def test_every_head_dimension_has_a_configuration_that_fits(arch, dtype):
    for head_dim, keys in product(HEAD_DIMS, KEYS):
        config = forward_config(head_dim, dtype, arch, keys)
        assert config.order in get_args(configs.Order)
        assert is_power_of_two(config.block_m) and is_power_of_two(config.block_n)
        assert 16 <= config.block_n <= config.block_m <= 256  # 16: the smallest dot; 256: the tallest TMA box
        assert config.num_warps in (4, 8)
        assert config.num_stages >= 1 and config.heads_per_section >= 1
        assert config.max_registers is None or 64 <= config.max_registers <= 255
        need = shared_bytes(config, head_dim, ITEMSIZE[dtype])
        assert need <= SHARED_MEMORY[arch], f"D={head_dim}: {config} needs {need} bytes"


def test_a_configuration_that_does_not_fit_is_noticed():
    """Two stages of this one fit Hopper and nothing smaller; three, or Q of twice the bytes, fit nothing."""
    config = ForwardConfig(128, 64, num_warps=8, num_stages=2)
    assert SHARED_MEMORY[8, 0] < shared_bytes(config, 256, 2) <= SHARED_MEMORY[9, 0]
    assert shared_bytes(dataclasses.replace(config, num_stages=3), 256, 2) > SHARED_MEMORY[9, 0]
    assert shared_bytes(config, 256, 4) > SHARED_MEMORY[9, 0]


@pytest.mark.parametrize(("head_dim", "width"), [(1, 16), (8, 16), (16, 16), (17, 32), (72, 128), (256, 256)])
def test_tile_width_is_the_next_power_of_two(head_dim, width):
    assert block_d(head_dim) == width


def test_every_tile_width_holds_its_head_dimension():
    for head_dim in range(1, 257):
        width = block_d(head_dim)
        assert is_power_of_two(width) and width >= max(16, head_dim) and (width < 2 * head_dim or width == 16)


def test_configurations_are_frozen_and_can_be_keys():
    config = forward_config(64)
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 1)
    assert {config: 1}[dataclasses.replace(config)] == 1


def test_the_choice_needs_no_gpu_no_torch_and_no_triton(monkeypatch):
    """The module alone, in a process where neither can be imported, chooses the same."""
    here = [dataclasses.astuple(forward_config(*call)) for call in CALLS]
    for name in ("torch", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("configs_alone", configs.__file__)
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "configs_alone", alone)
    spec.loader.exec_module(alone)
    for name in ("torch", "triton"):
        with pytest.raises(ImportError):
            importlib.import_module(name)
    assert [dataclasses.astuple(alone.forward_config(*call)) for call in CALLS] == here


def test_the_choice_depends_on_the_arguments_alone(monkeypatch):
    """The same call gives the same choice, whatever was chosen before and whatever the environment says."""
    first = {call: forward_config(*call) for call in CALLS}
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "ATTNLIB_REPLAY", "ATTNLIB_CACHE"):
        monkeypatch.setenv(name, "1")
    assert {call: forward_config(*call) for call in reversed(CALLS)} == first
    for (head_dim, dtype, arch, keys), config in first.items():
        assert forward_config(dtype=dtype, arch=arch, head_dim=block_d(head_dim), keys=keys) == config
        if dtype == "bfloat16":  # as many bytes, as many products per clock
            assert config == first[head_dim, "float16", arch, keys]


def test_defaults_are_half_precision_on_hopper_and_the_interpreter_runs_those():
    for head_dim in HEAD_DIMS:
        hopper = forward_config(head_dim, "float16", (9, 0))
        assert forward_config(head_dim) == hopper == forward_config(head_dim, arch=None)


def test_short_sequences_have_configurations_of_their_own():
    """Where that was measured: half precision on Hopper, D above 64."""
    for head_dim, dtype, arch in product(HEAD_DIMS, ITEMSIZE, SHARED_MEMORY):
        one, short, longer, many = (forward_config(head_dim, dtype, arch, keys) for keys in KEYS)
        assert one == short and longer == many == forward_config(head_dim, dtype, arch)
        differs = dtype != "float32" and arch in (None, (9, 0)) and head_dim > 64
        assert (short != many) == differs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "head_dim: expected 1 to 256, got 0"),
        ((-8,), "head_dim: expected 1 to 256, got -8"),
        ((257,), "head_dim: expected 1 to 256, got 257"),
        ((64, "float64"), "dtype: expected 'float16', 'bfloat16' or 'float32', got 'float64'"),
        ((64, "fp16"), "dtype: expected 'float16', 'bfloat16' or 'float32', got 'fp16'"),
        ((64, None), "dtype: expected 'float16', 'bfloat16' or 'float32', got None"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError) as raised:
        forward_config(*arguments)
    assert str(raised.value) == message
