"""A kernel goes Triton's way once for each kind of launch, and from then on the short way; always Triton's
where a profiler listens, or the short way can't be had."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from triton import knobs

from attnlib.bench import timing
from attnlib.kernels.common import direct, launcher
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part

MODULE = "a_module_of_kernels"
NAMES = "x", "out", "offsets"


class Compiled:
    """Stands for what Triton compiled."""


class World:
    """A kernel of Triton, and the short way: both write down their launches."""

    def __init__(self) -> None:
        self.by_triton: list[dict] = []
        self.directly: list[tuple] = []
        self.packed: list[tuple] = []
        self.compiles, self.can_pack = True, True
        self.device, self.devices = 0, []  # the current one, and those of launches

    def __getitem__(self, grid):
        def run(**arguments):
            self.devices.append(self.device)
            self.by_triton.append({"grid": grid, **arguments})
            return Compiled() if self.compiles else None

        return run

    def pack(self, compiled, grid, places, values):
        assert isinstance(compiled, Compiled)
        self.packed.append((grid, dict(places), dict(values)))
        return bytes([len(self.packed)]) if self.can_pack else None

    def launch(self, *arguments):
        self.devices.append(self.device)
        self.directly.append(arguments)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.by_triton), len(self.directly)


@pytest.fixture
def world(monkeypatch):
    found = World()
    module = types.ModuleType(MODULE)
    module.kernel = module.other = found
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "current_stream", lambda device: 40 + device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(torch.cuda, "device", found.on)
    monkeypatch.setattr(direct, "pack", found.pack)
    monkeypatch.setattr(direct, "launcher", lambda: found)
    return found


def launches(rows=4, device=0, kernel="kernel", block=16, **changed) -> Launches:
    """One launch; `changed` are its constants."""
    launch = Launch(
        f"{MODULE}.{kernel}",
        (rows, 1, 1),
        descriptors={"desc_x": Descriptor(Part("x"), ((rows, 16), (16, 1)), (block, 16))},
        pointers={"out_ptr": Part("out", 3), "cu": Part("offsets")},
        scalars={"rows": rows, "left": None, "scale": 0.5},
        constants={"BLOCK": block, "FLIP": False} | changed,
        options={"num_warps": 4},
    )
    return Launches([launch], device, NAMES)


X, OUT = torch.zeros(64, 16, dtype=torch.float16), torch.zeros(10)


def test_the_second_call_takes_the_short_way(world):
    call = launches()
    for _ in range(3):
        call(X, OUT, None)
    assert world.counts == (1, 2) and len(world.packed) == 1
    [arguments] = world.by_triton
    assert arguments["grid"] == (4, 1, 1) and arguments["num_warps"] == 4 and arguments["BLOCK"] == 16
    assert arguments["out_ptr"].data_ptr() == OUT[3:].data_ptr() and arguments["cu"] is None
    assert arguments["rows"] == 4 and arguments["left"] is None and arguments["scale"] == 0.5
    descriptor = arguments["desc_x"]
    assert descriptor.base is X and descriptor.shape == [4, 16] and descriptor.strides == [16, 1]
    grid, places, values = world.packed[0]
    assert grid == (4, 1, 1)
    assert places == {"desc_x": (0, 0), "out_ptr": (1, 12), "cu": (2, 0)}
    assert values == {"desc_x": ((4, 16), (16, 1)), "rows": 4, "left": None, "scale": 0.5}
    assert all(arguments == (b"\x01", 0, 40, (X, OUT, None)) for arguments in world.directly)


def test_the_device_of_a_launch_is_the_current_one(world):
    """Triton and the driver launch on the current device."""
    for device in (1, 0, 1):
        call = launches(device=device)
        call(X, OUT, None)
        call(X, OUT, None)
    assert world.devices == [1, 1, 0, 0, 1, 1] and world.device == 0
    assert [stream for _, _, stream, _ in world.directly] == [41, 40, 41, 41]


def test_a_second_signature_of_a_known_kind_never_goes_tritons_way(world):
    """Lengths and scales change from call to call: the compiled code is the same."""
    launches(4)(X, OUT, None)
    for rows in (5, 6):
        call = launches(rows)
        call(X, OUT, None)
        call(X, OUT, None)
    assert world.counts == (1, 4)
    assert [grid[0] for grid, _, _ in world.packed] == [4, 5, 6]
    assert [values["rows"] for _, _, values in world.packed] == [4, 5, 6]
    assert [arguments[0] for arguments in world.directly] == [b"\x02", b"\x02", b"\x03", b"\x03"]


OTHERS = {
    "constant": ({"FLIP": True}, X, OUT, None),
    "block": ({"block": 32}, X, OUT, None),
    "kernel": ({"kernel": "other"}, X, OUT, None),
    "device": ({"device": 1}, X, OUT, None),
    "dtype of a descriptor": ({}, X.bfloat16(), OUT, None),
    "dtype of a pointer": ({}, X, OUT.int(), None),
    "a tensor where there was none": ({}, X, OUT, OUT.int()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_is_compiled(name, world):
    changed, *tensors = OTHERS[name]
    launches()(X, OUT, None)
    launches(**changed)(*tensors)
    assert world.counts == (2, 0)
    launches(7)(X, OUT, None)
    launches(7, **changed)(*tensors)
    assert world.counts == (2, 2)


def test_a_number_where_there_was_none_is_another_kind(world):
    first, second = launches(), launches()
    second.launches[0].scalars["left"] = 3
    first(X, OUT, None)
    second(X, OUT, None)
    assert world.counts == (2, 0)


def test_a_number_of_64_bits_is_another_kind(world):
    """Triton compiles a kernel for int32 or for int64."""
    launches(2**31 - 1)(X, OUT, None)
    launches(2**31)(X, OUT, None)
    assert world.counts == (2, 0)
    launches(5)(X, OUT, None)
    launches(2**40)(X, OUT, None)
    assert world.counts == (2, 2)


def test_compiled_options_are_part_of_the_kind(world):
    first, second = launches(), launches()
    second.launches[0].options["maxnreg"] = 128
    first(X, OUT, None)
    second(X, OUT, None)
    assert world.counts == (2, 0)


def test_several_kernels_are_one_short_launch(world):
    call = Launches([*launches().launches, *launches(kernel="other").launches], 2, NAMES)
    call(X, OUT, None)
    assert world.counts == (2, 0)
    call(X, OUT, None)
    assert world.directly == [(b"\x01\x02", 2, 42, (X, OUT, None))]
    # One that is known, before one that is not: in order.
    mixed = Launches([*launches().launches, *launches(FLIP=True).launches], 2, NAMES)
    mixed(X, OUT, None)
    assert world.counts == (3, 2)


def test_compiled_kernels_are_named(world):
    launches()(X, OUT, None)
    launches(FLIP=True)(X, OUT, None)
    launches(kernel="other")(X, OUT, None)
    found = launcher.compiled_kernels()
    assert {name: len(kernels) for name, kernels in found.items()} == {"kernel": 2, "other": 1}
    assert all(isinstance(kernel, Compiled) for kernel in found["kernel"])


def test_the_tensors_of_a_call_are_counted(world):
    with pytest.raises(ValueError):
        launches()(X, OUT)
    assert world.counts == (0, 0)


# ---------------------------------------------------------------- always Triton's way


def test_in_the_interpreter(world):
    """Nothing is compiled there."""
    world.compiles = False
    call = launches()
    for _ in range(3):
        call(X, OUT, None)
    assert world.counts == (3, 0) and not world.packed and not launcher._compiled


def test_without_the_short_way(world, monkeypatch):
    """No compiler, no driver, another Triton: see test_direct."""
    monkeypatch.setattr(direct, "launcher", lambda: None)
    call = launches()
    for _ in range(3):
        call(X, OUT, None)
    launches(5)(X, OUT, None)
    assert world.counts == (4, 0) and not world.packed


def test_kernels_that_need_more(world):
    """Scratch memory, descriptors that are none of TMA: `direct.pack` has nothing to say."""
    world.can_pack = False
    call = launches()
    for _ in range(3):
        call(X, OUT, None)
    assert world.counts == (3, 0)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("known", [False, True])
def test_a_profiler_hears_of_every_launch(hook, known, world):
    call = launches()
    if known:
        call(X, OUT, None)
        call(X, OUT, None)
    before = world.counts

    def listener(metadata):
        pass

    chain = getattr(knobs.runtime, hook)
    chain.add(listener)
    try:
        call(X, OUT, None)
        call(X, OUT, None)
        launches(9)(X, OUT, None)
    finally:
        chain.remove(listener)
    assert world.counts == (before[0] + 3, before[1])
    call(X, OUT, None)
    assert world.counts == (before[0] + 3, before[1] + 1)


def test_recorded_launches_take_tritons_way(world):
    call = launches()
    call(X, OUT, None)
    with timing.launched_kernels():
        call(X, OUT, None)
    assert world.counts == (2, 0)
    call(X, OUT, None)
    assert world.counts == (2, 1)


def test_more_tensors_than_the_short_way_has_room_for():
    names = tuple(f"t{n}" for n in range(direct.LIMITS["MAX_TENSORS"] + 1))
    with pytest.raises(ValueError, match="^tensors: expected at most 64, got 65$"):
        Launches([], -1, names)
    Launches([], -1, names[1:])
