"""The short way to launch a compiled kernel gives the driver what Triton's own way gives it."""

from __future__ import annotations

import types

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel

from attnlib.bench import timing
from attnlib.kernels.common import launcher
from attnlib.kernels.common.launcher import Launcher

META = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [1, 1, 64, 64], "fp4_padded": False}
SIGNATURE = {"q": "tensordesc<fp16[1, 1, 64, 64]>", "k": "tensordesc<fp16[1, 1, 64, 64]>", "n": "i32"}


class Compiled:
    """A compiled kernel of Triton whose function in C is `calls.append`."""

    launch_metadata = CompiledKernel.launch_metadata

    def __init__(self, calls: list, meta=META, scratch: int = 0) -> None:
        self.name, self.src, self.function, self.packed_metadata = "kernel", None, 77, (4, 1, 1000)
        self.metadata = types.SimpleNamespace(tensordesc_meta=[meta, meta])
        self.run = types.SimpleNamespace(
            launch=nvidia.wrap_handle_tensordesc(lambda *args: calls.append(args), SIGNATURE, [meta, meta]),
            launch_cooperative_grid=0, launch_pdl=0, global_scratch_size=scratch, profile_scratch_size=0,
        )  # fmt: skip
        self.gone_through_triton = 0

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid):
        """Triton's launch, of which CudaLauncher.__call__ is a part."""
        self.gone_through_triton += 1

        def run(x, y, z, stream, function, *rest):
            self.run.launch(x, y, z, stream, function, 0, 0, None, None, *rest)

        stand_in = types.SimpleNamespace(**vars(self) | {"run": run}, _init_handles=self._init_handles)
        stand_in.launch_metadata = lambda *args: CompiledKernel.launch_metadata(stand_in, *args)
        return CompiledKernel.__getitem__(stand_in, grid)


@pytest.fixture
def calls(monkeypatch):
    """What reaches the function in C, launch after launch, on a GPU that is not there."""
    utils = types.SimpleNamespace(fill_tma_descriptor=lambda *args: ("map", *map(_plain, args)))
    stream = {"get_current_stream": lambda device: 5, "get_current_device": lambda: 0}
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(utils=utils, **stream))
    monkeypatch.setattr(launcher, "current_stream", lambda device: 5)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return []


def _plain(value):
    return list(value) if isinstance(value, list | tuple) else value


def launch(compiled) -> None:
    q, k = torch.zeros(1, 2, 64, 64, dtype=torch.float16), torch.zeros(1, 1, 96, 64, dtype=torch.float16)
    launch.kept = q, k
    windows = (tuple(q.shape), q.stride()), (tuple(k.shape), k.stride())
    Launcher(compiled).launch((12, 1, 1), 0, (q, k), windows, (64,))


def addresses_aside(call: tuple) -> list:
    base, hooks, arguments = call[:10], call[10:13], call[13:]
    assert len(hooks) == 3
    return [*base, *[a[:1] + a[2:] if isinstance(a, tuple) else a for a in arguments]]


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the launcher of triton 3.6")
def test_what_reaches_the_driver_is_what_triton_passes(calls, monkeypatch):
    compiled = Compiled(calls)
    launch(compiled)
    assert compiled.gone_through_triton == 0
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    launch(compiled)
    assert compiled.gone_through_triton == 1
    short, own = calls
    assert addresses_aside(short) == addresses_aside(own)
    assert short[10:13] == (None, None, None), "no hooks"
    assert short[13] == ("map", short[13][1], 3, 2, nvidia.TMA_DTYPE_DEVICE_TO_HOST[8], [1, 1, 64, 64],
                         [1, 2, 64, 64], [8192, 4096, 64, 1], 0)  # fmt: skip


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_hears_of_every_launch(calls, hook):
    compiled = Compiled(calls)

    def listener(metadata):
        pass

    chain = getattr(knobs.runtime, hook)
    chain.add(listener)
    try:
        launch(compiled)
    finally:
        chain.remove(listener)
    assert compiled.gone_through_triton == 1
    launch(compiled)
    assert compiled.gone_through_triton == 1


def test_recorded_launches_take_tritons_way(calls):
    compiled = Compiled(calls)
    with timing.launched_kernels():
        launch(compiled)
    assert compiled.gone_through_triton == 1
    launch(compiled)
    assert compiled.gone_through_triton == 1


@pytest.mark.parametrize("other", [{"meta": None}, {"scratch": 128}])
def test_kernels_that_need_more_take_tritons_way(calls, other):
    compiled = Compiled(calls, **other)
    launch(compiled)
    assert compiled.gone_through_triton == 1
