"""What reaches the driver by `direct.c` is what Triton's own launcher passes, byte by byte, but for what
the L2 reads for long rows (`fake_driver.promoted`); and its errors.

Both are compiled here and call a driver that writes down what it gets. tests/compile/test_direct_launch.py
does the same with the package's kernels.
"""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from fake_driver import L2_128B, L2_256B, STREAM, Encoded, cuda  # noqa: F401  (a fixture)
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.build import compile_module_from_src
from triton.tools.tensor_descriptor import TensorDescriptor

from attnlib.kernels.common import direct
from attnlib.kernels.common.descriptors import varlen_window
from attnlib.kernels.common.direct import Place

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(direct.TRITON), reason="the launcher of another Triton"
)
UNMENDED = triton.__version__.startswith(direct.UNMENDED)
BYTES = {"i1": 1, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4}
GRID = (12, 3, 2)


def form(*block, elem_size=2, elem_type=6, swizzle=3):
    """What Triton says of a descriptor: elem_type is the device's number of a dtype."""
    return {
        "swizzle": swizzle, "elem_size": elem_size, "elem_type": elem_type, "block_size": list(block),
        "fp4_padded": False,
    }  # fmt: skip


class Kernel:
    """A compiled kernel as Triton has it: a signature, the forms of its descriptors, and a launcher in C."""

    def __init__(self, cuda, signature, forms=(), **metadata):
        self.cuda = cuda
        self.src = SimpleNamespace(signature=signature, constants={})
        self.metadata = SimpleNamespace(
            **{
                "num_warps": 8, "num_ctas": 1, "shared": 101_376, "tensordesc_meta": list(forms) or None,
                "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
                "profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": False,
            } | metadata
        )  # fmt: skip
        self.run = nvidia.CudaLauncher(self.src, self.metadata)
        self.function = cuda.driver.kernel(self.sizes())

    def sizes(self) -> list[int]:
        """Of its parameters: descriptors are passed whole, and so are their shapes and strides."""
        found = []
        for kind in self.src.signature.values():
            if kind.startswith("tensordesc"):
                rank = kind.count(",") + 1
                found += [128, *[4] * rank, *[8] * rank]
            elif kind != "constexpr":
                found.append(8 if kind.startswith("*") else BYTES[kind])
        return [*found, 8, 8]  # and two pointers to scratch memory

    def by_triton(self, arguments: dict) -> dict:
        """The launch that Triton makes of the arguments, as `CompiledKernel.__getitem__` does, but for what
        `direct.c` does otherwise."""
        metadata = self.metadata.num_warps, self.metadata.num_ctas, self.metadata.shared
        in_order = [arguments[name] for name in self.src.signature]
        self.run(*GRID, STREAM, self.function, metadata, None, None, None, *in_order)
        [launched] = self.cuda.driver.launches()
        return launched.described(by_triton=True)

    def directly(self, places: dict, values: dict, tensors: tuple) -> dict:
        """The same by `direct`."""
        packed = direct.pack(self, GRID, places, values)
        assert self.cuda.direct.launch(packed, 0, STREAM, tensors) is None
        [launched] = self.cuda.driver.launches()
        return launched.described()


def test_every_kind_of_parameter(cuda):
    """Pointers with and without an offset, absent ones, negative and large numbers, constants between."""
    signature = {
        "first": "*fp32", "BLOCK": "constexpr", "absent": "*i32", "later": "*fp32", "absent_later": "*fp32",
        "negative": "i32", "flag": "i1", "large": "i64", "unsigned": "u32", "widest": "u64", "scale": "fp32",
        "TAIL": "constexpr", "small": "fp32",
    }  # fmt: skip
    kernel = Kernel(cuda, signature)
    tensor = torch.zeros(100)
    values = {
        "negative": -7, "flag": True, "large": -(2**40), "unsigned": 2**32 - 1, "widest": 2**64 - 1,
        "scale": -0.1275, "small": 2.0**-126,
    }  # fmt: skip
    given = {"first": tensor, "BLOCK": 64, "absent": None, "later": tensor[13:], "absent_later": None}
    expected = kernel.by_triton(given | values | {"TAIL": None})
    places = {
        "first": Place(0), "absent": Place(1), "later": Place(0, 13 * 4), "absent_later": Place(1, 52),
    }  # fmt: skip
    found = kernel.directly(places, values, (tensor, None))
    assert found == expected
    pointers = [struct.unpack_from("<Q", x)[0] for x in found["parameters"][:4]]
    assert pointers == [tensor.data_ptr(), 0, tensor.data_ptr() + 52, 0]
    assert (found["grid"], found["block"], found["shared"]) == ([*GRID], [256, 1, 1], 101_376)
    assert found["attributes"] == 0 and found["stream"] == STREAM and found["function"] == kernel.function


def test_a_launch_that_may_begin_before_the_one_ahead_is_done(cuda):
    kernel = Kernel(cuda, {"n": "i32"}, launch_pdl=True)
    found = kernel.directly({}, {"n": 5}, ())
    assert found == kernel.by_triton({"n": 5}) and found["attributes"] == 1


# name -> (type, form, shape, strides, element that it begins with), of a tensor of enough elements
DESCRIPTORS = {
    "batch": ("fp16[1, 1, 64, 64]", form(1, 1, 64, 64), (1, 2, 70, 64), (8960, 4480, 64, 1), 0),
    "rows of 256 bytes": (
        "fp16[1, 1, 64, 64]", form(1, 1, 64, 64), (1, 2, 70, 128), (17920, 128, 256, 1), 0
    ),
    "bfloat16": ("bf16[1, 1, 64, 64]", form(1, 1, 64, 64, elem_type=10), (2, 1, 9, 64), (640, 640, 64, 1), 0),
    "float32": (
        "fp32[1, 1, 16]", form(1, 1, 16, elem_size=4, elem_type=7, swizzle=0), (2, 3, 128), (384, 128, 1), 256
    ),
    "varlen": (
        "fp16[1, 1, 1, 64, 64]", form(1, 1, 1, 64, 64),
        *varlen_window((70, 2, 64), (128, 64, 1)), 0,
    ),
    "large": ("fp16[64, 64]", form(64, 64), (1025, 64), (64, 1), 0),  # more than 128 KiB
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors(name, cuda):
    """Of batches, of varlen sequences with a stride of 2^34 less a row, of a part of a buffer."""
    kind, meta, shape, strides, start = DESCRIPTORS[name]
    kernel = Kernel(cuda, {"before": "i32", "desc": f"tensordesc<{kind}>", "after": "*fp32"}, [meta])
    dtype = torch.float32 if meta["elem_size"] == 4 else torch.float16
    buffer = torch.zeros(20000, dtype=dtype)
    block = meta["block_size"]
    descriptor = TensorDescriptor(buffer[start:], list(shape), list(strides), block)
    expected = kernel.by_triton({"before": 3, "desc": descriptor, "after": buffer})
    places = {"desc": Place(1, start * dtype.itemsize), "after": Place(1)}
    found = kernel.directly(places, {"before": 3, "desc": (shape, strides)}, (None, buffer))
    assert found == expected
    made = Encoded.from_buffer_copy(found["parameters"][1])
    rank = len(shape)
    assert made.address == buffer.data_ptr() + start * dtype.itemsize and made.rank == rank
    assert [*made.shape][:rank] == [*reversed(shape)]
    assert [*made.strides][: rank - 1] == [stride * dtype.itemsize for stride in reversed(strides[:-1])]
    if name == "varlen":
        assert made.strides[3] == 2 * (2**34 - 128)
    assert [*made.box][:rank] == [*reversed(meta["block_size"])] and set(made.steps[:rank]) == {1}
    assert made.dtype == nvidia.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    assert (made.swizzle, made.interleave, made.fill) == (meta["swizzle"], 0, 0)
    assert made.promotion == (L2_256B if name in ("rows of 256 bytes", "float32") else L2_128B)
    assert bool(made.small) == (UNMENDED or name == "large")


def test_a_driver_that_needs_no_mending(cuda, monkeypatch):
    monkeypatch.setattr(cuda.driver, "version", 13020)
    cuda.direct.load(str(cuda.driver.path))
    kernel = Kernel(cuda, {"desc": "tensordesc<fp16[16, 16]>"}, [form(16, 16)])
    buffer = torch.zeros(256, dtype=torch.float16)
    found = kernel.directly({"desc": Place(0)}, {"desc": ((16, 16), (16, 1))}, (buffer,))
    assert found == kernel.by_triton({"desc": TensorDescriptor(buffer, [16, 16], [16, 1], [16, 16])})
    assert Encoded.from_buffer_copy(found["parameters"][0]).small


@pytest.mark.parametrize("seed", range(4))
def test_any_signature(seed, cuda):
    """Parameters of all kinds, in any order."""
    rng = random.Random(f"signature {seed}")
    buffer, other = torch.zeros(5000, dtype=torch.float16), torch.zeros(300)
    signature, forms, arguments, places, values = {}, [], {}, {}, {}
    limits = {"i32": 2**31, "i64": 2**63}
    for n in range(rng.randint(5, 25)):
        kind = rng.choice(["tensordesc", "*fp32", "none", "fp32", "constexpr", *limits])
        name = f"argument_{n}"
        if kind == "tensordesc":
            rank, columns = rng.randint(2, 5), rng.choice((16, 64))
            shape = [rng.randint(1, 9) for _ in range(rank - 1)] + [columns]
            strides = [8 * rng.randint(1, 2**30) for _ in range(rank - 1)] + [1]
            start = 8 * rng.randint(0, 100)
            block = [1] * (rank - 2) + [rng.choice((16, 64)), columns]
            signature[name] = f"tensordesc<fp16{block}>"
            forms.append(form(*block, swizzle=rng.choice((0, 1, 2, 3))))
            arguments[name] = TensorDescriptor(buffer[start:], shape, strides, block)
            places[name], values[name] = Place(0, 2 * start), (tuple(shape), tuple(strides))
        elif kind in ("*fp32", "none"):
            start = rng.randint(0, 200)
            signature[name] = "*fp32"
            arguments[name] = None if kind == "none" else other[start:]
            places[name] = Place(1 if kind == "none" else 2, 4 * start)
        elif kind == "constexpr":
            signature[name], arguments[name] = kind, rng.randint(0, 9)
        else:
            limit = limits.get(kind)
            value = rng.uniform(-10, 10) if limit is None else rng.randint(-limit, limit - 1)
            signature[name], arguments[name], values[name] = kind, value, value
    kernel = Kernel(cuda, signature, forms, num_warps=rng.choice((4, 8, 12)), shared=rng.randint(0, 232448))
    assert kernel.directly(places, values, (buffer, None, other)) == kernel.by_triton(arguments)


FAULTS = {
    "an absent tensor is an offset": ("address ? address + param->value : 0", "address + param->value"),
    "a part of a buffer begins with the buffer": ("address + param->value : 0", "address : 0"),
    "a descriptor's begins so too": ("addresses[map->tensor] + map->offset", "addresses[map->tensor]"),
    "the grid is turned": ("grid[1], grid[2], header->threads", "grid[2], grid[1], header->threads"),
    "no shared memory": ("header->threads, 1, 1, header->shared_bytes", "header->threads, 1, 1, 0"),
    "another promotion": ("PROMOTION_L2_128B", "PROMOTION_NONE"),
    "all rows are long": ("map->element < 256", "map->element < 32"),
    "no swizzling": ("(CUtensorMapSwizzle)map->swizzle", "CU_TENSOR_MAP_SWIZZLE_NONE"),
    "numbers begin with their upper half": ("(void *)&param->value", "(char *)&param->value + 4"),
    "the stream is the default one": ("shared_bytes, stream,", "shared_bytes, 0,"),
}  # fmt: skip
if not UNMENDED:
    FAULTS["descriptors stay as they are"] = "if ((int32_t)reach < 128 * 1024)", "if (0)"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, cuda):
    """What is compared above differs if `direct.c` is wrong."""
    source, (right, wrong) = direct.source(), FAULTS[fault]
    assert source.count(right) == 1, f"expected once in direct.c: {right}"
    kernel = Kernel(
        cuda, {"desc": "tensordesc<fp16[16, 16]>", "later": "*fp32", "absent": "*fp32", "n": "i32"},
        [form(16, 16)],
    )  # fmt: skip
    half, full = torch.zeros(300, dtype=torch.float16), torch.zeros(20)
    window, values = ((16, 16), (16, 1)), {"n": -5}
    descriptor = TensorDescriptor(half[16:], *map(list, window), [16, 16])
    expected = kernel.by_triton({"desc": descriptor, "later": full[3:], "absent": None} | values)
    places = {"desc": Place(0, 32), "later": Place(1, 12), "absent": Place(2, 12)}
    arguments = places, values | {"desc": window}, (half, full, None)
    assert kernel.directly(*arguments) == expected
    headers = Path(nvidia.dirname) / "include"
    broken = source.replace(right, wrong)
    cuda.direct = compile_module_from_src(broken, "attnlib_direct", include_dirs=[str(headers)])
    cuda.direct.load(str(cuda.driver.path))
    assert kernel.directly(*arguments) != expected


@pytest.mark.parametrize(
    "other",
    [
        {"num_ctas": 2}, {"global_scratch_size": 128}, {"profile_scratch_size": 128},
        {"launch_cooperative_grid": True},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_what_only_tritons_way_can_launch(other, cuda):
    """Clusters, scratch memory, launch attributes; descriptors in memory; types that are not known here."""
    assert direct.pack(Kernel(cuda, {"n": "i32"}), GRID, {}, {"n": 1}) is not None
    assert direct.pack(Kernel(cuda, {"n": "i32"}, **other), GRID, {}, {"n": 1}) is None


def test_a_sanitizer_that_adds_parameters(cuda):
    kernel = Kernel(cuda, {"n": "i32"})
    kernel.run.gsan_enabled = True
    assert direct.pack(kernel, GRID, {}, {"n": 1}) is None


def test_types_that_only_tritons_way_can_pass(cuda):
    assert direct.pack(Kernel(cuda, {"n": "i32"}), GRID, {}, {"n": 2**31 - 1})
    for kind in ("fp64", "i8"):
        BYTES[kind] = 8
        try:
            assert direct.pack(Kernel(cuda, {"n": kind}), GRID, {}, {"n": 1}) is None
        finally:
            del BYTES[kind]
    in_memory = SimpleNamespace(**vars(Kernel(cuda, {"desc": "*fp16"})))
    in_memory.metadata.tensordesc_meta = [None]
    assert direct.pack(in_memory, GRID, {"desc": Place(0)}, {}) is None


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 0.5])
def test_a_number_that_is_no_int32(value, cuda):
    with pytest.raises(struct.error):
        direct.pack(Kernel(cuda, {"n": "i32"}), GRID, {}, {"n": value})


def test_several_in_one_call(cuda):
    """In order, each with its own grid and parameters, on the stream that is given."""
    kernels = [Kernel(cuda, {"x": "*fp32", "n": "i32"}) for _ in range(3)]
    x = torch.zeros(4)
    packed = [direct.pack(k, (n + 1, 1, 1), {"x": Place(0)}, {"n": n}) for n, k in enumerate(kernels)]
    cuda.direct.launch(b"".join(packed), 0, 77, (x,))
    launched = cuda.driver.launches()
    assert [x.function for x in launched] == [x.function for x in kernels]
    assert [x.grid[0] for x in launched] == [1, 2, 3] and {x.stream for x in launched} == {77}
    assert [struct.unpack_from("<i", x.parameters()[1])[0] for x in launched] == [0, 1, 2]


# ---------------------------------------------------------------- errors


def packed_pointer(cuda) -> bytes:
    kernel = Kernel(cuda, {"desc": "tensordesc<fp16[16, 16]>", "x": "*fp32"}, [form(16, 16)])
    return direct.pack(kernel, GRID, {"desc": Place(0), "x": Place(1)}, {"desc": ((16, 16), (16, 1))})


TENSORS = torch.zeros(256, dtype=torch.float16), torch.zeros(16)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ([*TENSORS], r"tensors: expected a tuple, got \["),
        (TENSORS * 33, "tensors: expected at most 64, got 66"),
        ((), "tensors: expected more than 0"),
        (TENSORS[:1], "tensors: expected more than 1"),
        (None, "tensors: expected a tuple, got None"),
    ],
    ids=["list", "too many", "none", "too few", "None"],
)
def test_wrong_tensors(tensors, error, cuda):
    with pytest.raises(TypeError, match=error):
        cuda.direct.launch(packed_pointer(cuda), 0, STREAM, tensors)
    assert not cuda.driver.launches()


def test_what_is_no_tensor(cuda):
    with pytest.raises(AttributeError, match="data_ptr"):
        cuda.direct.launch(packed_pointer(cuda), 0, STREAM, (TENSORS[0], 5))
    wrong = SimpleNamespace(data_ptr=lambda: "here")
    with pytest.raises(TypeError):
        cuda.direct.launch(packed_pointer(cuda), 0, STREAM, (TENSORS[0], wrong))
    assert not cuda.driver.launches()


@pytest.mark.parametrize(
    "arguments",
    [(), (b"",), ("text", 0, STREAM, ()), (b"", 0, STREAM), (b"", 0, STREAM, (), 1)],
    ids=["none", "one", "text", "three", "five"],
)
def test_wrong_arguments(arguments, cuda):
    with pytest.raises(TypeError, match="launch: expected bytes, a device, a stream and a tuple of tensors"):
        cuda.direct.launch(*arguments)


@pytest.mark.parametrize("where", [1, 8, 47, 48, 100, -1])
def test_a_damaged_description(where, cuda):
    packed = packed_pointer(cuda)
    with pytest.raises(ValueError, match="^launch: the description is damaged$"):
        cuda.direct.launch(packed[:where], 0, STREAM, TENSORS)
    with pytest.raises(ValueError, match="^launch: the description is damaged$"):
        cuda.direct.launch(packed + packed[:where], 0, STREAM, TENSORS)
    assert len(cuda.driver.launches()) == 1  # the whole one before it


@pytest.mark.parametrize("at", [28, 32], ids=["parameters", "descriptors"])
def test_counts_beyond_what_a_launch_may_have(at, cuda):
    packed = bytearray(packed_pointer(cuda) + bytes(100_000))
    for count in (193, 2**32 - 1):
        packed[at : at + 4] = struct.pack("<I", count)
        with pytest.raises(ValueError, match="^launch: the description is damaged$"):
            cuda.direct.launch(bytes(packed), 0, STREAM, TENSORS)
    assert not cuda.driver.launches()


ERRORS = [(700, "an illegal memory access was encountered"), (1, "unknown")]


@pytest.mark.parametrize(("code", "reason"), ERRORS)
@pytest.mark.parametrize("function", ["cuTensorMapEncodeTiled", "cuLaunchKernel"])
def test_an_error_of_the_driver(function, code, reason, cuda):
    packed = packed_pointer(cuda)
    cuda.driver.fail(**{"encode" if function.startswith("cuTensor") else "launch": code})
    with pytest.raises(RuntimeError) as raised:
        cuda.direct.launch(packed, 0, STREAM, TENSORS)
    assert str(raised.value) == f"{function} failed: {reason} (CUDA error {code})"
    cuda.driver.fail()
    cuda.direct.launch(packed, 0, STREAM, TENSORS)
    assert len(cuda.driver.launches()) == 1


def test_a_thread_without_a_context_gets_that_of_the_device(cuda):
    packed, failures = packed_pointer(cuda), []

    def launch(device):
        try:
            cuda.direct.launch(packed, device, STREAM, TENSORS)
            cuda.direct.launch(packed, 5, STREAM, TENSORS)  # it has one now, and keeps it
        except Exception as error:
            failures.append(error)

    for device in (0, 3):
        thread = threading.Thread(target=launch, args=(device,))
        thread.start()
        thread.join()
        assert cuda.driver.retained == device
        assert [x.context for x in cuda.driver.launches()] == [0xC0 + device] * 2
    assert not failures
    thread = threading.Thread(target=launch, args=(9,))
    thread.start()
    thread.join()
    assert str(failures[0]) == "setting the CUDA context failed: unknown (CUDA error 101)"
    assert not cuda.driver.launches()


# ---------------------------------------------------------------- where the short way can't be had


@pytest.fixture
def launcher_anew():
    find_compiler = getattr(build, "_find_compiler", None)  # triton 3.8 remembers what it has found
    found = [direct.launcher, *([find_compiler] if find_compiler else [])]
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


@pytest.mark.filterwarnings("error")
def test_a_driver_that_is_not_there(launcher_anew, monkeypatch):
    """One warning, and from then on Triton's way."""
    monkeypatch.setattr(direct, "DRIVER", "libnothing_of_this_name.so.1")
    with pytest.warns(RuntimeWarning, match="launches take longer, because libnothing_of_.* can't be opened"):
        assert direct.launcher() is None
    assert direct.launcher() is None


def test_a_driver_that_lacks_a_function(launcher_anew, monkeypatch):
    monkeypatch.setattr(direct, "DRIVER", "libc.so.6")
    with pytest.warns(RuntimeWarning, match="the CUDA driver has no function cuTensorMapEncodeTiled"):
        assert direct.launcher() is None


@pytest.mark.filterwarnings("error")
def test_no_compiler(launcher_anew, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no_such_compiler"))
    with pytest.warns(RuntimeWarning, match="launches take longer, because .*no_such_compiler"):
        assert direct.launcher() is None
    assert direct.launcher() is None


@pytest.mark.filterwarnings("error")
def test_another_triton_passes_parameters_its_own_way(launcher_anew, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert direct.launcher() is None


def test_a_module_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = direct.build()
    with pytest.raises(RuntimeError, match="^launch: the CUDA driver is not loaded$"):
        module.launch(b"", 0, 0, ())
    with pytest.raises(ImportError, match="nothing.so can't be opened"):
        module.load("nothing.so")
    with pytest.raises(TypeError):
        module.load(5)
