"""Backward passes through `node.cpp`: the first of a kind goes through Python, those after it only launch."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch
from differentiated import built

from attnlib import node
from attnlib.autograd import Asked
from attnlib.kernels.common import direct
from attnlib.kernels.common.backward_plan import TENSORS
from attnlib.params import MaskWindow, Params

STREAM, ELEMENTS = 0x5EA0, 77
CAPSULE = b"attnlib_direct.launch_all"
LAUNCH = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint32,
)  # fmt: skip
NUMBER = {name: number for number, name in enumerate(TENSORS)}


class Backward:
    """`node.cpp` with a launcher that writes down what it is to launch, and the passes through Python."""

    def __init__(self) -> None:
        self.launched: list[dict] = []
        self.through_python = 0
        self.description: bytes | None = b"three kernels"
        self.stream: int | None = STREAM
        self._callback = LAUNCH(self._launch)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        capsule = new(ctypes.cast(self._callback, ctypes.c_void_p).value, CAPSULE, None)
        built().forget()
        built().connect(capsule, self._slowly, lambda index: self.stream)

    def _launch(self, description, size, device, stream, addresses, count):
        found = {"device": device, "stream": stream, "addresses": addresses[:count]}
        self.launched.append(found | {"description": description[:size]})
        return 0

    def _slowly(self, *args):
        self.through_python += 1
        gradients, *_ = node.slowly(*args)
        return gradients, self.description, ELEMENTS

    @property
    def counts(self) -> tuple[int, int]:
        return self.through_python, len(self.launched)


@pytest.fixture
def backward():
    yield Backward()
    built().forget()


def recorded(q, k, v, causal=True, **options):
    window = MaskWindow(None, 0 if causal else None)
    asked = Asked(Params(window, q.shape[-1] ** -0.5, None, True, False, "reference"), None)
    return node.record(built(), q, k, v, None, None, asked, **options)


def inputs(*shape, strides=None):
    found = [torch.randn(shape or (1, 2, 16, 8)) for _ in range(3)]
    return [x.requires_grad_() for x in found]


def test_the_second_pass_of_a_kind_only_launches(backward):
    q, k, v = tensors = inputs()
    out, lse = recorded(q, k, v)
    assert out.grad_fn.name() == "AttentionBackward" and not lse.requires_grad
    d_out = torch.randn_like(out)
    torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    assert backward.counts == (1, 0)
    dq, dk, dv = torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    assert backward.counts == (1, 1)
    launched = backward.launched[0]
    assert launched["description"] == b"three kernels"
    assert (launched["device"], launched["stream"]) == (-1, STREAM)
    addresses = launched["addresses"]
    assert len(addresses) == len(TENSORS)
    given = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    found = {name: addresses[NUMBER[name]] for name in given}
    assert found == {name: x.data_ptr() for name, x in given.items()}
    assert addresses[NUMBER["buffer"]]
    assert not any(addresses[NUMBER[name]] for name in ("none", "cu_q", "cu_k"))
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in tensors]
    # Another call of the same kind has tensors of its own, and the same launches.
    others = inputs()
    torch.autograd.grad(recorded(*others)[0], others, d_out)
    assert backward.counts == (1, 2)
    assert backward.launched[1]["addresses"][NUMBER["q"]] == others[0].data_ptr()


def test_gradients_are_laid_out_as_those_of_the_first_pass(backward):
    tensors = [torch.randn(1, 16, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    out, _ = recorded(*tensors)
    passes = [torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True) for _ in range(2)]
    assert backward.counts == (1, 1)
    assert [x.stride() for x in passes[0]] == [x.stride() for x in passes[1]] == [x.stride() for x in tensors]


ANOTHER_KIND = {
    "length": lambda q, k, v: (recorded(*inputs(1, 2, 17, 8))[0], torch.ones(1, 2, 17, 8)),
    "mask": lambda q, k, v: (recorded(q, k, v, causal=False)[0], torch.ones(q.shape)),
    "layout": lambda q, k, v: (recorded(q, k, v)[0], torch.ones(1, 16, 2, 8).transpose(1, 2)),
    "gradient without memory": lambda q, k, v: (recorded(q, k, v)[0], torch.ones(1, 1, 1, 1).expand(q.shape)),
    "dtype": lambda q, k, v: (recorded(*(x.half() for x in (q, k, v)))[0], torch.ones(q.shape).half()),
    "sign": lambda q, k, v: (recorded(q, k, v)[0], torch._neg_view(torch.ones(q.shape))),
}


@pytest.mark.parametrize("name", ANOTHER_KIND)
def test_another_kind_goes_through_python(name, backward):
    tensors = inputs()
    out, _ = recorded(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    torch.autograd.backward(*ANOTHER_KIND[name](*tensors))
    assert backward.counts == (2, 0)


def test_an_address_that_tma_cannot_take_goes_through_python(backward):
    tensors = inputs()
    out, _ = recorded(*tensors)
    d_out = torch.ones(out.numel() + 1)[1:].view(out.shape)
    for _ in range(2):
        torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    assert backward.counts == (2, 0)


def test_what_cannot_be_repeated_goes_through_python_each_time(backward):
    backward.description = None
    tensors = inputs()
    out, _ = recorded(*tensors)
    for _ in range(3):
        torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    assert backward.counts == (3, 0)


def test_a_moment_that_wants_python_gets_it(backward):
    tensors = inputs()
    out, _ = recorded(*tensors)
    for backward.stream in (STREAM, None, STREAM):
        torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    assert backward.counts == (2, 1)


@pytest.mark.parametrize("switch", ["deterministic", "tangents", "profiler"])
def test_such_moments(switch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "current_stream", lambda index: STREAM + index)
        assert node.stream_of(1) == STREAM + 1
        if switch == "deterministic":
            patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        elif switch == "profiler":
            patch.setattr(node, "observed", lambda: True)
        else:
            with torch.autograd.forward_ad.dual_level():
                assert node.stream_of(1) is None
            return
        assert node.stream_of(1) is None


def test_a_failed_launch_is_an_error(backward):
    tensors = inputs()
    out, _ = recorded(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    built().connect(direct.build().launch_all, node.slowly, lambda index: STREAM)  # "three kernels" are none
    with pytest.raises(
        (RuntimeError, ValueError), match="launch: the (description|CUDA driver) is (damaged|not)"
    ):
        torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)


def test_a_second_pass_over_a_graph_that_was_freed_is_pytorchs_error(backward):
    tensors = inputs()
    out, _ = recorded(*tensors)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_only_what_asks_gets_a_gradient(backward):
    q, k, v = inputs()
    out, _ = recorded(q.detach(), k, v.detach())
    out.sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_hooks_on_saved_tensors_see_all_of_them(backward):
    packed = []
    tensors = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out, lse = recorded(*tensors)
    assert [x.shape for x in packed] == [*(x.shape for x in tensors), out.shape, lse.shape]
    found = torch.autograd.grad(out, tensors, torch.ones_like(out))
    again = torch.autograd.grad(recorded(*tensors)[0], tensors, torch.ones_like(out))
    assert backward.counts == (1, 1) and [x.shape for x in found] == [x.shape for x in again]


def test_nothing_of_a_graph_outlives_it(backward):
    tensors = inputs()
    out, _ = recorded(*tensors)
    alive = weakref.ref(out)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    del out
    gc.collect()
    assert alive() is None


def test_without_a_compiler_python_does_it_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct, "launcher", direct.build)
    builder = node._Builder()
    with pytest.warns(RuntimeWarning, match="backward passes take longer, because .*no compiler"):
        builder.run()
    assert builder.module is None


def test_a_source_that_does_not_compile_says_why(monkeypatch, tmp_path):
    source = tmp_path / "node.cpp"
    source.write_text("int main( {")
    with pytest.raises(RuntimeError, match=r"can't compile node\.cpp: .*"):
        node._compile(source)


def test_arguments_of_record(backward):
    with pytest.raises(TypeError, match="record: expected 8 arguments, got 1"):
        built().record(torch.zeros(1))
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        built().connect(object(), None, None)
