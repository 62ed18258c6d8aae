"""`explain` says what runs: the kernel and the configuration that a call's launch really has."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from draws import LAYOUTS, as_it_is, columns_apart, misaligned, part_of_more, rows_before_heads
from fake_gpu import OnGpu, gpu  # noqa: F401  (a fixture)
from families import fresh_launches  # noqa: F401  (a fixture)

from attnlib import BlockMask, Score, attention, explain
from attnlib.kernels import FAMILIES, MASKED, decode
from attnlib.kernels.common import device as devices
from attnlib.kernels.common.descriptors import readable
from attnlib.kernels.common.signature import signature
from attnlib.params import DecodeParams

LENGTHS = (1, 17, 64, 65, 128, 129, 257, 300, 640)
MANY = 2048, 3000, 5000
"""Keys, of a part of the calls with few queries."""
WINDOWS = (None, None, (4095, 0), (127, 0), (126, 0), (-1, 7), (30, -1), (5000, 5000), (0, 0), (64, 64))
MACHINES = {"hopper": (9, 0), "ampere": (8, 0), "blackwell": (10, 0), "interpreter": None}
DRAWS = {"hopper": 500, "ampere": 150, "blackwell": 150, "interpreter": 500}
MASKED_DRAWS = {"hopper": 200, "interpreter": 100}


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch, fresh_launches):
    """(name, whether tensors are on its GPU) of a machine, as far as the choice can tell."""
    arch = MACHINES[request.param]
    if arch is None:
        monkeypatch.setattr(devices, "interpreted", lambda: True)
    else:
        request.getfixturevalue("gpu")(*arch)
    return request.param, arch is not None


@pytest.fixture
def ran(monkeypatch):
    """Family by family, the params that its `forward` is called with. Nothing is computed."""
    calls = []

    def stand_in(name):
        def forward(q, k, v, params):
            calls.append((name, params))
            return q, None

        return forward

    for name, family in (*FAMILIES.items(), *MASKED.items()):
        monkeypatch.setattr(family, "forward", stand_in(name))
    return calls


ZEROS = torch.from_numpy(np.zeros(1 << 31, np.uint8))
"""Memory that all tensors here share. None of it is read or written, so that it costs nothing: only layouts
count."""


def laid_out(layout, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    like = layout(torch.empty(shape, dtype=dtype, device="meta"))
    return ZEROS.view(dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def draw(rng: random.Random, on_gpu: bool) -> tuple[tuple[torch.Tensor, ...], dict]:
    """(q, k, v) and the options of a call."""
    kv_heads, head_dim = rng.choice((1, 2)), rng.choice((8, 64, 64, 72, 96, 128, 128, 192, 256))
    value_dim = rng.choice((64, 128)) if rng.random() < 0.2 else head_dim
    rows = rng.choice(LENGTHS)
    keys = rows if rng.random() < 0.6 else rng.choice(LENGTHS)
    if rng.random() < 0.25:
        rows, keys = rng.choice((1, 4, 16, 17)), rng.choice(MANY)
    dtype = rng.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32))
    layouts = (as_it_is, as_it_is, as_it_is, rows_before_heads, part_of_more, misaligned, columns_apart)
    assert set(layouts) <= set(LAYOUTS)
    batch, group = rng.choice((1, 2)), rng.choice((1, 3))
    shapes = [(batch, kv_heads * group, rows, head_dim)]
    shapes += [(batch, kv_heads, keys, columns) for columns in (head_dim, value_dim)]
    tensors = (laid_out(rng.choice(layouts), shape, dtype) for shape in shapes)
    tensors = tuple(x.as_subclass(OnGpu) if on_gpu else x for x in tensors)
    return tensors, {
        "causal": rng.random() < 0.5,
        "window": rng.choice(WINDOWS),
        "sm_scale": rng.choice((None, 0.3, -0.3)),
        "return_lse": rng.random() < 0.5,
        "deterministic": rng.random() < 0.2,
        "impl": rng.choice((None, None, None, "decode", "hopper", "triton", "reference")),
    }


MASK = BlockMask.from_blocks(torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) < 0.5, 300, 290)
ON_GPU = BlockMask.from_blocks(torch.ones(3, 3, dtype=torch.bool), 300, 290)
ON_GPU.device = torch.device("cuda", 0)  # as `OnGpu`


def draw_masked(rng: random.Random, on_gpu: bool) -> tuple[tuple[torch.Tensor, ...], dict]:
    """The same with a block mask, a score or both."""
    head_dim, dtype = rng.choice((64, 128, 256)), rng.choice((torch.float16, torch.float16, torch.float32))
    layouts = rng.choices((as_it_is, as_it_is, rows_before_heads, misaligned), k=3)
    shapes = (2, 4, 300, head_dim), *[(2, 2, 290, head_dim)] * 2
    tensors = [laid_out(layout, shape, dtype) for layout, shape in zip(layouts, shapes, strict=True)]
    parts = {"soft_cap": 30.0, "alibi": torch.ones(4), "sinks": torch.zeros(4), "bias": torch.zeros(300, 290)}
    parts = {name: part for name, part in parts.items() if rng.random() < 0.3}
    options = {
        "causal": rng.random() < 0.5, "window": rng.choice((None, None, (100, 0), (4095, -1))),
        "impl": rng.choice((None, None, "hopper", "triton", "reference")),
        "block_mask": ON_GPU if on_gpu else MASK if rng.random() < 0.7 or not parts else None,
    }  # fmt: skip
    if on_gpu:
        tensors = [x.as_subclass(OnGpu) for x in tensors]
        parts = {name: x if name == "soft_cap" else x.as_subclass(OnGpu) for name, x in parts.items()}
    return tuple(tensors), options | ({"score": Score(**parts)} if parts else {})


def launched(name: str, tensors: tuple[torch.Tensor, ...], params):
    """The launch of a call that a family's `forward` gets; None if it has none."""
    if name == "reference":
        assert params.plan is None
        return None
    plan = params.plan
    if plan is None and name == "decode":  # q is copied first, or a cache begins at an odd address
        q, k, v = tensors
        q = q.clone(memory_format=torch.contiguous_format) if q.stride(-1) != 1 else q
        asked = DecodeParams(params.window, params.sm_scale, config=params.config)
        plan = decode.launch.prepare(decode.launch.call_of(q, k, v, None, asked))
    elif plan is None:  # an input is copied first
        q, k, v = map(readable, tensors)
        family = (FAMILIES if params.block_mask is None else MASKED)[name]
        plan = family.prepare(signature(params, q, k, q, k, v))
    launch, *merge = plan.launches.launches
    assert len(merge) == (name == "decode" and params.config.split != "none")
    return launch


def agrees(choice, name: str, launch) -> bool:
    """Whether a launch is compiled as `explain` says."""
    config = choice.configuration
    if name == "reference":
        return config is None
    if name == "decode":
        constants, tile = launch.constants, (config.block_m, config.block_n)
        stages = constants["NUM_STAGES"], launch.options["num_stages"]
        return (
            (constants["BLOCK_M"], constants["BLOCK_N"]) == tile
            and constants["STREAM_K"] == (config.split == "stream_k")
            and stages == (config.num_stages, config.num_stages)
            and launch.scalars["shares"] == config.shares
            and launch.options["num_warps"] == config.num_warps
        )
    rows, keys = (launch.descriptors[tensor].block[-2] for tensor in ("desc_q", "desc_k"))
    if name == "hopper":
        return (64, config.block_n) == (rows, keys) and launch.options["maxnreg"] == config.max_registers
    constants, options = launch.constants, launch.options
    if "starts_ptr" in launch.pointers:  # the lists of a block mask
        return (rows, keys, options["num_warps"], options["num_stages"]) == (
            config.block_m, config.block_n, config.num_warps, config.num_stages
        )  # fmt: skip
    return (rows, keys) == (config.block_m, config.block_n) and all(
        (
            constants["ORDER"] == config.order,
            constants["Q_IN_REGISTERS"] == config.q_in_registers,
            constants["BLOCK_M"] == config.block_m,
            constants["BLOCK_N"] == config.block_n,
            constants["NUM_STAGES"] == options["num_stages"] == config.num_stages,
            options["num_warps"] == config.num_warps,
            options.get("maxnreg") == config.max_registers,
        )
    )


def compare(calls, ran) -> Counter:
    """How many calls each kernel ran, or refused. AssertionError if `explain` says otherwise of one."""
    seen = Counter()
    for tensors, options in calls:
        call = f"{[(tuple(x.shape), x.stride(), x.dtype) for x in tensors]} {options}"
        try:
            choice = explain(*tensors, **options)
        except ValueError as error:
            with pytest.raises(ValueError) as raised:
                attention(*tensors, **options)
            assert str(raised.value) == str(error) and str(error).startswith("impl: '"), call
            seen[str(error).split("'")[1] + " refused"] += 1
            continue
        attention(*tensors, **options)
        kernel, params = ran.pop()
        assert not ran, call
        launch = launched(kernel, tensors, params)
        assert (kernel, params.config, params.window) == (choice.kernel, choice.configuration, choice.window)
        assert agrees(choice, kernel, launch), f"{call}: {choice}, but {launch}"
        seen[kernel] += 1
        if kernel == "triton" and params.block_mask is None:
            seen[params.config.order] += 1
        if tensors[2].shape[3] != tensors[0].shape[3]:
            seen[f"{kernel}, values of their own width"] += 1
    return seen


def test_what_explain_says_is_what_runs(machine, ran):
    name, on_gpu = machine
    rng = random.Random(f"explain {name}")
    seen = compare((draw(rng, on_gpu) for _ in range(DRAWS[name])), ran)
    expected = {"triton", "reference", "decode", "decode refused", "late", "two loops"}
    expected |= {"hopper", "hopper refused"} if name == "hopper" else {"hopper refused"}
    expected.add(f"{'hopper' if name == 'hopper' else 'triton'}, values of their own width")
    assert all(seen[what] >= 5 for what in expected), seen


@pytest.mark.parametrize("machine", MASKED_DRAWS, indirect=True)
def test_what_explain_says_runs_under_a_block_mask(machine, ran):
    name, on_gpu = machine
    rng = random.Random(f"explain {name}, masked")
    seen = compare((draw_masked(rng, on_gpu) for _ in range(MASKED_DRAWS[name])), ran)
    expected = {"triton", "reference", "hopper refused"} | ({"hopper"} if name == "hopper" else set())
    assert all(seen[what] >= 5 for what in expected), seen


@pytest.mark.parametrize("window", [(4095, 0), (127, 0), None], ids=str)
def test_a_bound_that_no_row_reaches_changes_nothing(window, ran, monkeypatch, fresh_launches):
    """At D = 64 the fastest order has no form with a left bound, and needs none here."""
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    q = torch.zeros(1, 2, 128, 64, dtype=torch.float16)
    choice = explain(q, q, q, causal=True, window=window, impl="triton")
    attention(q, q, q, causal=True, window=window, impl="triton")
    [(kernel, params)] = ran
    assert choice.configuration == params.config and kernel == "triton"
    assert launched(kernel, (q, q, q), params).constants["ORDER"] == choice.configuration.order == "late"
    narrower = explain(q, q, q, causal=True, window=(126, 0), impl="triton")
    assert narrower.configuration.order == "two loops"


def test_a_launch_that_differs_is_noticed(ran, monkeypatch, fresh_launches):
    """What `explain` used to say of this call: the configuration for the window as it was given."""
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    q = torch.zeros(1, 2, 128, 64, dtype=torch.float16)
    attention(q, q, q, window=(4095, 0), impl="triton")
    [(kernel, params)] = ran
    wrong = explain(q, q, q, window=(126, 0), impl="triton")
    assert not agrees(wrong, kernel, launched(kernel, (q, q, q), params))
