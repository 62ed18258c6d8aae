"""The package's kernels, compiled for sm_90 by Triton as at their first call, and launched both ways: the
short way gives the driver what Triton's way gives it. The driver only writes down what it gets."""

from __future__ import annotations

import importlib
import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import families
import pytest
import torch
import triton
from chosen import with_more
from differentiated import built
from fake_driver import STREAM, cuda  # noqa: F401  (a fixture)
from triton import knobs

from attnlib import attention, node
from attnlib.kernels import decode, fp8, hopper, portable
from attnlib.kernels.common import device, direct, forward_plan, hopper_gpu
from attnlib.kernels.common.fp8 import Recipe
from attnlib.kernels.common.launcher import Launch, Launches
from attnlib.kernels.hopper.configs_backward import KEYS_96
from attnlib.params import DecodeParams, Existing, MaskWindow, Params, Varlen

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(direct.TRITON), reason="the launcher of another Triton"
)
CAUSAL, LEFT = MaskWindow(None, 0), MaskWindow(30, 7)
SIZES = {"b8": 1, "u8": 1, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8}


def sizes_of(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel, as the assembler is told."""
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)", ptx, flags=re.S)[1]
    found = re.findall(r"\.param(?: \.align \d+)? \.(\w+)[^\[,\n]*(?:\[(\d+)\])?", entry)
    return [SIZES[kind] * int(count or 1) for kind, count in found]


@pytest.fixture
def sm_90(cuda, monkeypatch):
    """A fake GPU that knows the parameters of the kernels that Triton loads."""

    def read(module, function, name, files, hash) -> None:
        [ptx] = [path for path in files.values() if str(path).endswith(".ptx")]
        cuda.sizes = sizes_of(Path(ptx).read_text())

    families.forget_launches()
    knobs.runtime.kernel_load_start_hook.add(read)
    monkeypatch.setattr(device, "capability", lambda index: (9, 0))
    monkeypatch.setattr(device, "overlaps", lambda index: True)
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    monkeypatch.setattr(forward_plan, "counter", lambda index: torch.zeros(1, dtype=torch.int32))
    yield cuda
    knobs.runtime.kernel_load_start_hook.remove(read)
    families.forget_launches()


def batch(rows: int, keys: int, head_dim: int, dtype=torch.float16):
    """(q, k, v, params)."""
    q = torch.zeros(2, 4, rows, head_dim, dtype=dtype)
    k, v = torch.zeros(2, 2, 2, keys, head_dim, dtype=dtype)
    return q, k, v, Params(CAUSAL, head_dim**-0.5, return_lse=True)


def existing(rows: int, keys: int, head_dim: int):
    """The same, merged into some rows of a result: its LSEs begin anywhere."""
    q, k, v, params = batch(rows, keys, head_dim)
    out, lse = torch.zeros(2, rows + 3, 4, head_dim).transpose(1, 2), torch.zeros(2, 4, rows + 3)
    return q, k, v, params._replace(into=Existing(out[:, :, 3:], lse[:, :, 3:]))


def keys96(rows: int, keys: int, head_dim: int):
    """The same, with 96 keys a program of the backward pass."""
    q, k, v, params = batch(rows, keys, head_dim)
    return q, k, v, params._replace(config=replace(KEYS_96, visited=2))


def varlen_keys96(rows: int, keys: int, head_dim: int):
    """The same of two sequences."""
    q, k, v, params = varlen(rows, keys, head_dim)
    return q, k, v, params._replace(config=replace(KEYS_96, early_mask=True))


def varlen(rows: int, keys: int, head_dim: int):
    """The same of two sequences, one after the other."""
    q = torch.zeros(rows, 4, head_dim, dtype=torch.float16)
    k, v = torch.zeros(2, keys, 2, head_dim, dtype=torch.float16)
    ends = [torch.tensor([0, 50, n], dtype=torch.int32) for n in (rows, keys)]
    return q, k, v, Params(LEFT, -0.1, Varlen(*ends, rows - 50, keys - 50), return_lse=True)


def cache(batch: int, room: int, head_dim: int, page: int | None = None):
    """Two new tokens for each of a batch of sequences, to caches of so many keys."""
    q = torch.zeros(batch, 4, 2, head_dim, dtype=torch.float16)
    table, size = None, (batch, 2, room, head_dim)
    if page is not None:
        table = torch.zeros(batch, room // page + 1, dtype=torch.int32)
        size = (7, 2, page, head_dim)
    k, v = torch.zeros(2, *size, dtype=torch.float16)
    lengths = torch.full((batch,), 100, dtype=torch.int32)
    return q, k, v, DecodeParams(LEFT, -0.1, lengths, table, True, "stream_k")


CALLS = {
    "batch": (batch, 64, {}),
    "float32": (batch, 64, {"dtype": torch.float32}),
    "varlen": (varlen, 128, {}),
    "two parts": (varlen, 72, {}),
    "existing": (existing, 64, {}),
    "96 keys": (keys96, 192, {}),
    "96 keys, varlen": (varlen_keys96, 192, {}),
}
DECODE_CALLS = {"cache": (cache, 64, {}), "pages": (cache, 128, {"page": 16})}
FAMILIES = {"portable": portable, "hopper": hopper}
EVERY = FAMILIES | {"decode": decode, "fp8": fp8}
LATE = {(hopper, "forward"), (portable, "forward"), (portable, "backward")}
"""Whose launches begin when the one ahead of them is done; those of others may begin before, but the first
one."""
CASES = [("fp8", "forward", "batch"), *(("decode", "forward", call) for call in DECODE_CALLS)]
CASES += [("hopper", "forward", "two parts"), ("hopper", "backward", "two parts")]
CASES += [("hopper", "backward", "96 keys"), ("hopper", "backward", "96 keys, varlen")]
CASES += [("hopper", "forward", "existing"), ("portable", "forward", "existing")]
CASES += [
    (family, direction, call)
    for family in FAMILIES
    for direction in ("forward", "backward")
    for call in CALLS
    if call not in ("two parts", "existing", "96 keys", "96 keys, varlen")
    and (family, call) != ("hopper", "float32")
]
COMPILED = with_more(
    [
        ("fp8", "forward", "batch"), ("decode", "forward", "pages"), ("portable", "backward", "varlen"),
        ("hopper", "forward", "existing"), ("hopper", "backward", "two parts"),
    ],
    CASES,
)  # fmt: skip
"""Batches of 16 bits, forward and backward, go through `node.cpp` below."""


@pytest.fixture
def triton_way(monkeypatch):
    """The launches that go Triton's way."""
    found, through_triton = [], Launch.through_triton

    def counting(launch, tensors):
        found.append(launch.kernel)
        return through_triton(launch, tensors)

    monkeypatch.setattr(Launch, "through_triton", counting)
    return found


@pytest.fixture
def called(monkeypatch):
    """(launches, tensors) of each call, so that it can be repeated with the same memory."""
    found, call = [], Launches.__call__

    def recording(launches, *tensors):
        found.append((launches, tensors))
        call(launches, *tensors)

    monkeypatch.setattr(Launches, "__call__", recording)
    return found


def run(family, direction: str, q, k, v, params: Params) -> None:
    if family is decode:
        decode.forward(q, k, v, params)
    elif family is fp8:
        fp8.quantize(v, "v", Recipe())
    elif direction == "forward":
        families.forward(family, q, k, v, params)
    else:
        lse = torch.zeros(q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0]))
        families.backward(family, q, q, k, v, q, lse, params)


@pytest.mark.parametrize("case", COMPILED, ids="-".join)
def test_both_ways_give_the_driver_the_same(case, sm_90, triton_way, called):
    """The first call of a kind goes Triton's way, the second the short way; so does the first of another
    signature of this kind, which a profiler then sends Triton's way for comparison. The same but for what the
    L2 reads for a descriptor of long rows."""
    family, direction, call = case
    family, (make, head_dim, options) = EVERY[family], (CALLS | DECODE_CALLS)[call]

    def reached(by_triton: bool = False) -> list[dict]:
        found = sm_90.driver.launches()
        early = (family, direction) not in LATE
        assert [made.attributes for made in found] == [0, *[int(early)] * (len(found) - 1)]
        assert all(made.stream == STREAM for made in found)
        return [made.described(by_triton) for made in found]

    run(family, direction, *make(100, 130, head_dim, **options))
    expected, compiled = reached(by_triton=True), list(triton_way)
    assert len(compiled) == len(expected) >= (1 if direction == "forward" else 3)
    [(launches, tensors)] = called
    launches(*tensors)
    assert reached() == expected
    assert triton_way == compiled, "the second call went Triton's way"

    run(family, direction, *make(90, 170, head_dim, **options))
    found = reached()
    assert found != expected and triton_way == compiled, "a known kind went Triton's way"
    launches, tensors = called[-1]
    knobs.runtime.launch_enter_hook.add(_listen)
    try:
        launches(*tensors)
    finally:
        knobs.runtime.launch_enter_hook.remove(_listen)
    assert reached(by_triton=True) == found and triton_way == compiled * 2


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_no_number_is_compiled_in(case, sm_90, monkeypatch):
    """A kernel that was compiled for one signature runs others: Triton must not look at numbers whether they
    are 1 or multiples of 16, nor take them for more than 32 bits."""
    family, direction, call = case
    family, (make, head_dim, options), found = EVERY[family], (CALLS | DECODE_CALLS)[call], []
    monkeypatch.setattr(Launches, "__call__", lambda launches, *tensors: found.append(launches))
    run(family, direction, *make(100, 130, head_dim, **options))
    for launch in found[0].launches:
        module, _, name = launch.kernel.rpartition(".")
        kernel = getattr(importlib.import_module(module), name)
        params = {param.name: param for param in kernel.params}
        given = {*launch.descriptors, *launch.pointers, *launch.scalars, *launch.constants}
        assert given <= set(params)
        assert all(params[name].has_default for name in set(params) - given)  # those of e4m3
        assert all(params[name].is_constexpr == (name in launch.constants) for name in params)
        for name, part in launch.pointers.items():  # those that a caller gives lie where he likes
            anywhere = part.name in ("cu_q", "cu_k", "lengths", "page_table") or name == "into_lse_ptr"
            assert not anywhere or params[name].do_not_specialize_on_alignment, name
        for name, value in launch.scalars.items():
            general = params[name].do_not_specialize or isinstance(value, float)
            general |= value is None and name in ("desc_o", "lse_ptr")  # of a result of its own
            assert general, f"{launch.kernel}: {name} is specialized"
            assert value is None or isinstance(value, float) or -(2**31) <= value < 2**31


@pytest.fixture
def node_cpp(sm_90, monkeypatch):
    """Calls on CPU tensors go to `node.cpp`, and to the kernels; what it launches reaches the fake driver."""
    module, one = built(), torch.zeros(1, dtype=torch.int32)
    module.forget()
    module.connect(sm_90.direct.launch_all, node.slowly, lambda index: one, lambda: False, knobs.runtime)
    monkeypatch.setattr(node, "keep", partial(node.learn, module))
    monkeypatch.setattr(node, "attend", partial(node.record, module))
    monkeypatch.setattr(node, "shortcut", module.attend)
    monkeypatch.setattr(portable, "unsupported", lambda *args: None)
    monkeypatch.setattr(hopper_gpu, "unsupported_here", lambda q: None)
    yield sm_90.driver
    module.forget()


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_the_second_call_launches_what_the_first_one_launched(impl, node_cpp, called):
    """In C++, forward and backward, but for the addresses of what a call allocates."""
    launches, dtype = [], torch.bfloat16  # kernels of its own: Triton keeps those of other tests
    tensors = [torch.zeros(2, heads, 128, 64, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    for _ in range(2):
        out = attention(*tensors, causal=True, impl=impl)
        forward = node_cpp.launches()
        gradients = torch.autograd.grad(out, tensors, torch.zeros_like(out))
        launches.append([*forward, *node_cpp.launches()])
        assert {x.data_ptr() for x in (*tensors, out)} <= {*map(first_word, forward[0].parameters())}
        assert [x.stride() for x in gradients] == [x.stride() for x in tensors]
    assert len(called) == 2, "the second call, or its backward pass, came to Python"
    first, second = launches
    assert len(first) == len(second) >= 4
    for a, b in zip(first, second, strict=True):
        a, b = a.described(by_triton=True), b.described()
        found = [(x, y) for x, y in zip(a.pop("parameters"), b.pop("parameters"), strict=True) if x != y]
        b["stream"] = STREAM  # a CPU has none
        assert a == b and all(x[8:] == y[8:] for x, y in found), "more than addresses differs"
        assert all(is_address(first_word(x)) for pair in found for x in pair), "a number differs"


def is_address(word: int) -> bool:
    """Whether this process may write there; the heap of some Pythons lies low, where numbers are, too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, rights, *_ = line.split()
        first, end = (int(place, 16) for place in places.split("-"))
        if "w" in rights and first <= word < end:
            return True
    return False


def first_word(parameter: bytes) -> int:
    """Of a pointer and of a descriptor, the address."""
    return struct.unpack_from("<Q", parameter)[0]


def _listen(metadata) -> None:
    pass
