"""Calls that go to `node.cpp` on a CPU, as they do on a GPU: launches that compute their results here."""

from __future__ import annotations

import ctypes
from functools import cache, partial
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from triton import knobs

from attnlib import dispatch, node
from attnlib.autograd import Asked
from attnlib.dispatch import Saved
from attnlib.kernels.common import backward_plan, direct, forward_plan
from attnlib.kernels.decode import launch as decode_launch
from attnlib.params import DecodeParams

_CAPSULE = b"attnlib_direct.launch_all"
_LAUNCH_ALL = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint32,
)  # fmt: skip


@cache
def built() -> ModuleType:
    """The module of `node.cpp`, compiled here; kept with what Triton keeps, wherever a test has it keep that:
    compiling takes 20 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_CACHE_DIR", raising=False)
        return node.build()


OTHERS = "lengths", "starts", "page_table", "k_scale", "v_scale"
"""What a decoding call is given besides q, k and v."""
SCRATCH = 1000


class Layout(NamedTuple):
    """A tensor without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Layout | None:
        return None if tensor is None else cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def at(self, address: int) -> torch.Tensor:
        """The memory there as such a tensor."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = (ctypes.c_uint8 * ((last + 1) * self.dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.strides)


class Launcher:
    """`node.cpp` with a launcher that writes down what it is to launch, and computes it: a description is the
    number of the call that went through Python and left it. All calls and passes leave one where their
    tensors are such as kernels take.

    Attributes:
        forwards, backwards: what was launched, name of a tensor -> address; "device" and "stream".
        through_python: backward passes that were not.
        repeatable: whether what goes through Python leaves its launches.
        captured: whether a CUDA graph is being captured.
    """

    def __init__(self) -> None:
        self.forwards: list[dict[str, int]] = []
        self.backwards: list[dict[str, int]] = []
        self.through_python, self.counters, self.captured, self.repeatable = 0, 0, False, True
        self.counter = torch.zeros(1, dtype=torch.int32)
        self._known: list[tuple[dict[str, Layout | None], Asked | DecodeParams]] = []
        self._failure: BaseException | None = None
        self._callback = _LAUNCH_ALL(self._launch)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.capsule = new(ctypes.cast(self._callback, ctypes.c_void_p).value, _CAPSULE, None)
        module = built()
        module.forget()
        module.connect(self.capsule, self.slowly, self._counter, lambda: self.captured, knobs.runtime)

    def keep(self, tensors: tuple, options: tuple, asked: Asked | DecodeParams, out: torch.Tensor) -> None:
        """As `node.keep`."""
        if isinstance(asked, DecodeParams):
            return self._keep_decoding(tensors, options, asked, out)
        if not self.repeatable or dispatch.nothing_to_do(*tensors[:2]):
            return
        if not built().lacks(*tensors, options):
            return
        asked = node._one_object(asked)
        needed, (q, k, v) = asked.params.return_lse, tensors
        lse = torch.empty(dispatch.lse_shape(q)) if needed else None
        description = self._described(asked, q=q, k=k, v=v, out=out, lse=lse)
        built().keep(*tensors, options, out, needed, description, True, 0, asked)

    def _keep_decoding(self, tensors: tuple, options: tuple, asked: DecodeParams, out: torch.Tensor) -> None:
        if not self.repeatable or dispatch.prepared_decode(*tensors[:3], asked) is None:
            return
        if not built().lacks(*tensors, options):
            return
        q, k, v, *others = tensors
        lse = torch.empty(q.shape[:3]) if asked.return_lse else None
        named = dict(zip(OTHERS, others, strict=True))
        description = self._described(asked, q=q, k=k, v=v, out=out, lse=lse, **named)
        built().keep(*tensors, options, out, asked.return_lse, description, False, SCRATCH, None)

    def slowly(self, *args):
        """As `node.slowly`."""
        self.through_python += 1
        gradients, *_ = node.slowly(*args)
        d_out, q, k, v, out, lse, cu_q, cu_k, asked = args
        if d_out.dtype != q.dtype or dispatch.nothing_to_do(q, k) or not self.repeatable:
            return gradients, None, 0
        names = "d_out", "q", "k", "v", "out", "lse", "cu_q", "cu_k", "dq", "dk", "dv"
        description = self._described(asked, **dict(zip(names, (*args[:-1], *gradients), strict=True)))
        return gradients, description, 77

    def _described(self, asked: Asked | DecodeParams, **tensors: torch.Tensor | None) -> bytes:
        self._known.append(({name: Layout.of(x) for name, x in tensors.items()}, asked))
        return b"call %d" % (len(self._known) - 1)

    def _counter(self, index: int) -> torch.Tensor:
        self.counters += 1
        return self.counter

    def _launch(self, description, size, device, stream, addresses, count) -> int:
        try:
            with torch.no_grad():
                self._compute(description[:size], addresses[:count], {"device": device, "stream": stream})
        except BaseException as error:  # which can't go through C
            self._failure = error
        return 0

    def _compute(self, description: bytes, addresses: list[int], where: dict[str, int]) -> None:
        layouts, asked = self._known[int(description.split()[1])]
        if isinstance(asked, DecodeParams):
            return self._decode(addresses, where, layouts, asked)
        forward = len(addresses) == len(decode_launch.TENSORS)  # of which others have the first ones
        names = forward_plan.TENSORS if forward else backward_plan.TENSORS
        given = dict(zip(names, addresses, strict=not forward))
        (self.forwards if forward else self.backwards).append(given | where)
        found = {n: None if layout is None else layout.at(given[n]) for n, layout in layouts.items()}
        if forward:
            assert given["counter"] == self.counter.data_ptr()
            assert bool(given["lse"]) is asked.params.return_lse
            results = dispatch.forward(found["q"], found["k"], found["v"], asked.params)
            written = found["out"], found["lse"]
        else:
            saved = Saved(*(found[name] for name in Saved._fields))
            results = dispatch.backward(found["d_out"], saved, asked.of(found["cu_q"], found["cu_k"]))
            written = found["dq"], found["dk"], found["dv"]
        for place, result in zip(written, results, strict=True):
            if place is not None:
                place.copy_(result)

    def _decode(self, addresses: list[int], where: dict, layouts: dict, asked: DecodeParams) -> None:
        given = dict(zip(decode_launch.TENSORS, addresses, strict=True))
        self.forwards.append(given | where)
        found = {n: None if layout is None else layout.at(given[n]) for n, layout in layouts.items()}
        assert given["parts"] and not given["arrived"]
        assert all(bool(given[name]) is (found[name] is not None) for name in ("lse", *OTHERS))
        params = asked._replace(**{name: found[name] for name in OTHERS})
        results = dispatch.decode(found["q"], found["k"], found["v"], params)
        for place, result in zip((found["out"], found["lse"]), results, strict=True):
            if place is not None:
                place.copy_(result)

    def check(self) -> None:
        """Raise what went wrong in a launch."""
        if self._failure is not None:
            raise self._failure


def to_cpp(monkeypatch) -> Launcher | None:
    """Calls go to `node.cpp`: on a GPU as they always do; on a CPU with this launcher."""
    module, launcher = built(), None
    module.forget()
    if torch.cuda.is_available():
        node.connect(module, direct.build().launch_all)
        monkeypatch.setattr(node, "keep", partial(node.learn, module))
    else:
        launcher = Launcher()
        monkeypatch.setattr(node, "keep", launcher.keep)
    monkeypatch.setattr(node, "attend", partial(node.record, module))
    monkeypatch.setattr(node, "shortcut", module.attend)
    return launcher


@pytest.fixture(params=["Python", "C++"])
def backward_in(request, monkeypatch):
    """In which language calls of a known kind run, and PyTorch's engine finds their backward pass. None is
    known when a test begins."""
    node.forget()
    launcher = None
    if request.param == "C++":
        launcher = to_cpp(monkeypatch)
    else:
        monkeypatch.setattr(node, "recorder", lambda: None)
        monkeypatch.setattr(node, "shortcut", lambda *args: None)
    yield request.param
    if launcher is not None:
        launcher.check()
        built().forget()


@pytest.fixture
def launcher(monkeypatch):
    """What `node.cpp` launches, on a CPU."""
    made = to_cpp(monkeypatch)
    yield made
    made.check()
    built().forget()
