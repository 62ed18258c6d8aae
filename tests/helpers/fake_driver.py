"""A CUDA driver that writes down what it is asked for (`fake_driver.c`), between it and two callers: Triton's
own launcher and `attnlib.kernels.common.direct`. No GPU is needed, and none is used."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.build import compile_module_from_src

from attnlib.kernels.common import direct, launcher

MAX_PARAMS, MAX_LAUNCHES = 192, 64
STREAM = 0x5EA0
LIBRARY = "libfake_cuda.so"


class Encoded(ctypes.Structure):
    """A tensor map as the driver was asked for it. Innermost dimension first, strides in bytes."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        *((name, ctypes.c_uint8) for name in "dtype rank small interleave swizzle promotion fill".split()),
        ("padding", ctypes.c_uint8),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("steps", ctypes.c_uint8 * 8),
    ]


BYTES = dict(enumerate((1, 2, 4, 4, 8, 8, 2, 4, 8, 2)))
"""Of an element, by the driver's number of its dtype."""
L2_128B, L2_256B = 2, 3


def promoted(parameter: bytes) -> bytes:
    """A kernel's parameter as `direct.c` passes it, made of Triton's: the L2 reads 256 bytes for a descriptor
    of rows that have so many, where Triton always says 128."""
    made = Encoded.from_buffer_copy(parameter)
    if made.rank == 0:  # a number or a pointer, and zeros behind it
        return parameter
    assert made.promotion == L2_128B
    if made.shape[0] * BYTES[made.dtype] >= 256:
        made.promotion = L2_256B
    return bytes(made) + parameter[ctypes.sizeof(made) :]


class Launched(ctypes.Structure):
    """A launch as the driver was asked for it; the bytes of each parameter."""

    _fields_ = [
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32),
        ("params", ctypes.c_uint32),
        ("values", (ctypes.c_uint8 * 128) * MAX_PARAMS),
    ]

    def parameters(self) -> list[bytes]:
        return [bytes(value) for value in self.values[: self.params]]

    def described(self, by_triton: bool = False) -> dict:
        """All of it but the context, which a launch of either way finds as it is. by_triton: of a launch that
        Triton has made, what `direct.c` makes of it."""
        names = "function", "stream", "shared", "attributes"
        plain = {name: getattr(self, name) for name in names}
        parameters = [*map(promoted, self.parameters())] if by_triton else self.parameters()
        return plain | {"grid": [*self.grid], "block": [*self.block], "parameters": parameters}


class FakeDriver:
    """The library, and what it has written down."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LIBRARY
        headers = Path(triton.backends.nvidia.__path__[0]) / "include"
        source = Path(__file__).with_name("fake_driver.c")
        command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
        subprocess.run([*command, f"-I{headers}", "-o", str(self.path), str(source)], check=True)
        self.library = ctypes.CDLL(str(self.path))
        self._functions = 0x1000

    def forget(self) -> None:
        self.library.fake_forget()

    def kernel(self, sizes: list[int]) -> int:
        """A handle of a kernel whose parameters have these sizes in bytes."""
        self._functions += 16
        numbers = (ctypes.c_uint32 * len(sizes))(*sizes)
        assert self.library.fake_kernel(ctypes.c_uint64(self._functions), len(sizes), numbers) == 0
        return self._functions

    def fail(self, encode: int = 0, launch: int = 0) -> None:
        """What the driver's functions return from now on."""
        self.library.fake_fail(encode, launch)

    def launches(self) -> list[Launched]:
        """What was launched since they were asked for last."""
        count = ctypes.c_int.in_dll(self.library, "fake_launch_count")
        records = (Launched * MAX_LAUNCHES).in_dll(self.library, "fake_launches")
        found = [Launched.from_buffer_copy(records[n]) for n in range(count.value)]
        count.value = 0
        return found

    @property
    def version(self) -> int:
        """The CUDA version that the driver says it is for."""
        return ctypes.c_int.in_dll(self.library, "fake_version").value

    @version.setter
    def version(self, number: int) -> None:
        ctypes.c_int.in_dll(self.library, "fake_version").value = number

    @property
    def retained(self) -> int:
        """The device whose context was asked for last, -1 for none."""
        return ctypes.c_int.in_dll(self.library, "fake_retained").value


class FakeCuda:
    """Triton's driver of a GPU of compute capability 9.0, on top of a `FakeDriver`."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self, driver: FakeDriver, utils: ModuleType) -> None:
        self.driver, self.sizes = driver, []
        own = {
            "get_device_properties": lambda device: {"max_shared_mem": 232448},
            "load_binary": lambda *_: (1, driver.kernel(self.sizes), 0, 0, 1024),
            "unload_module": lambda module: None,
        }
        self.utils = SimpleNamespace(**vars(utils) | own)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


_folder = tempfile.TemporaryDirectory(prefix="fake_cuda")


@cache
def _built() -> tuple[FakeDriver, ModuleType, ModuleType]:
    """(the driver, Triton's functions in C, `direct.c`), compiled here; both call this driver."""
    driver = FakeDriver(Path(_folder.name))
    utils = _compile_for(driver, (Path(nvidia.dirname) / "driver.c").read_text(), "cuda_utils")
    module = direct.build()
    module.load(str(driver.path))
    return driver, utils, module


def _compile_for(driver: FakeDriver, src: str, name: str, **_) -> ModuleType:
    """Triton's `compile_module_from_src`, of C that would call the real driver."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # the fake driver has only what a launch needs
    try:
        return compile_module_from_src(
            src.replace("libcuda.so.1", str(driver.path)), name, library_dirs=[_folder.name],
            include_dirs=nvidia.include_dirs, libraries=[LIBRARY], ccflags=["-Wl,-z,lazy"],
        )  # fmt: skip
    finally:
        sys.setdlopenflags(flags)


@pytest.fixture
def cuda(monkeypatch):
    """Triton's driver, and that of `direct`, are fake; what was launched is in `cuda.driver.launches()`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{_folder.name}/cache")
    driver, utils, module = _built()
    driver.forget()
    module.load(str(driver.path))
    fake = FakeCuda(driver, utils)
    fake.direct = module
    monkeypatch.setattr(nvidia, "library_dirs", list)  # where the real driver is
    if hasattr(nvidia, "compile_module_from_src"):  # of triton 3.6, for each kernel's own launcher
        monkeypatch.setattr(nvidia, "compile_module_from_src", partial(_compile_for, driver))
    for name in {*vars(utils)} & {*vars(nvidia)}:  # types that Triton's driver takes from there
        if not name.startswith("__"):
            monkeypatch.setattr(nvidia, name, getattr(utils, name))
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    monkeypatch.setattr(direct, "launcher", lambda: module)
    monkeypatch.setattr(launcher, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(launcher, "_compiled", {})
    yield fake
    driver.forget()
