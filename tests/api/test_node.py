"""`node.cpp`: the first call of a kind and its backward pass go through Python, those after it only launch;
and what is not such a call goes through Python each time. Launches compute their results (`differentiated`),
so that a call that was taken for another one shows in them."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from differentiated import built, launcher  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from triton import knobs

from attnlib import BlockMask, attention, attention_varlen, node
from attnlib.kernels.common import direct

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches that compute on a CPU")
SHAPE = 1, 2, 16, 8
MASK = BlockMask.from_function(lambda b, h, q, k: (q + k) % 3 > 0, 16, 16)


def inputs(*shape, dtype=torch.float32, grad=True):
    return [torch.randn(shape or SHAPE).to(dtype).requires_grad_(grad) for _ in range(3)]


def attend(q, k, v, causal=True, impl="reference", **options):
    return attention(q, k, v, causal=causal, impl=impl, **options)


def gradients(out, tensors):
    return torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)


def in_python(call):
    """The same without `node.cpp`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "shortcut", lambda *args: None)
        return call()


# ---------------------------------------------------------------- the second call of a kind


def test_the_second_call_of_a_kind_only_launches(launcher):
    attend(*inputs())
    assert not launcher.forwards
    q, k, v = tensors = inputs()
    out, lse = attend(q, k, v), None
    [launched] = launcher.forwards
    assert out.grad_fn.name() == "AttentionBackward"
    assert (launched["device"], launched["stream"]) == (-1, 0)
    given = {"q": q, "k": k, "v": v, "out": out, "counter": launcher.counter}
    assert {name: launched[name] for name in given} == {name: x.data_ptr() for name, x in given.items()}
    assert launched["lse"] and not launched["cu_q"] and not launched["cu_k"]
    expected = in_python(lambda: attend(*tensors))
    assert torch.equal(out, expected) and out.stride() == expected.stride()
    for a, b in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
        assert torch.equal(a, b)
    for _ in range(3):
        out, lse = attend(*tensors, return_lse=True)  # a kind of its own
        assert out.requires_grad and not lse.requires_grad and lse.shape == SHAPE[:3]
    assert len(launcher.forwards) == 3 and launcher.counters == 1


def test_the_second_pass_of_a_kind_only_launches(launcher):
    q, k, v = tensors = inputs()
    out, lse = attend(q, k, v, return_lse=True)
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    assert (launcher.through_python, len(launcher.backwards)) == (1, 0)
    dq, dk, dv = torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    assert launcher.through_python == 1
    [launched] = launcher.backwards
    assert (launched["device"], launched["stream"]) == (-1, 0)
    given = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert {name: launched[name] for name in given} == {name: x.data_ptr() for name, x in given.items()}
    assert launched["buffer"] and not any(launched[name] for name in ("none", "cu_q", "cu_k"))
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), expected, strict=True))
    # Another call of the same kind has tensors of its own, and the same launches.
    others = inputs()
    torch.autograd.grad(attend(*others, return_lse=True)[0], others, d_out)
    assert launcher.through_python == 1 and launcher.backwards[1]["q"] == others[0].data_ptr()


def test_results_are_laid_out_as_those_of_the_first_call(launcher):
    tensors = [torch.randn(1, 16, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    outs = [attend(*tensors) for _ in range(2)]
    passes = [gradients(out, tensors) for out in outs]
    assert launcher.through_python == len(launcher.backwards) == len(launcher.forwards) == 1
    for found in (outs, *zip(*passes, strict=True)):
        assert found[0].stride() == found[1].stride() == tensors[0].stride()


ALSO_OF_THE_KIND = {
    "parameters": lambda q, k, v: attend(torch.nn.Parameter(q), k, v),
    "views": lambda q, k, v: attend(*(torch.cat([x, x])[:1] for x in (q, k, v))),
    "one that wants no gradient": lambda q, k, v: attend(q, k.detach(), v),
    "autocast to their dtype": lambda q, k, v: within(torch.autocast("cpu", torch.bfloat16), attend, q, k, v),
    "autocast of others": lambda q, k, v: within(torch.autocast("cuda", torch.float16), attend, q, k, v),
    "a checkpoint": lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False),
    "hooks on saved tensors": lambda q, k, v: within(
        torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone), attend, q, k, v
    ),
    "anomaly mode": lambda q, k, v: within(torch.autograd.detect_anomaly(False), attend, q, k, v),
    "another thread": lambda q, k, v: in_a_thread(lambda: attend(q, k, v)),
}  # fmt: skip


def within(context, function, *args, **options):
    with context:
        return function(*args, **options)


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", ALSO_OF_THE_KIND)
def test_calls_of_the_kind(name, launcher):
    attend(*inputs(dtype=torch.bfloat16))
    tensors = inputs(dtype=torch.bfloat16)
    call = ALSO_OF_THE_KIND[name]
    out, expected = call(*tensors), in_python(lambda: call(*tensors))
    assert len(launcher.forwards) == 1 and torch.equal(out, expected) and out.stride() == expected.stride()
    out.sum().backward()
    assert (tensors[0].grad is None) == (name == "parameters")
    assert (tensors[1].grad is None) == (name == "one that wants no gradient")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients(mode, launcher):
    with mode():
        attend(*inputs(grad=False))
        q, k, v = inputs()
        assert q.is_inference() == (mode is torch.inference_mode)
        out = attend(q, k, v)
        assert torch.equal(out, in_python(lambda: attend(q, k, v)))
    assert len(launcher.forwards) == 1 and not launcher.forwards[0]["lse"]
    assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)


# ---------------------------------------------------------------- what a kind is

ANOTHER_KIND = {
    "length": lambda q, k, v: attend(*inputs(1, 2, 17, 8)),
    "number of keys": lambda q, k, v: attend(q, *inputs(1, 2, 17, 8)[1:]),
    "heads of keys": lambda q, k, v: attend(q, *inputs(1, 1, 16, 8)[1:]),
    "columns of values": lambda q, k, v: attend(q, k, torch.cat([v, v], -1)),
    "dtype": lambda q, k, v: attend(q.half(), k.half(), v.half()),
    "layout of q": lambda q, k, v: attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "layout of v": lambda q, k, v: attend(q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
    "causal": lambda q, k, v: attend(q, k, v, causal=False),
    "window": lambda q, k, v: attend(q, k, v, window=(3, 0)),
    "another window": lambda q, k, v: (attend(q, k, v, window=(3, 4)), attend(q, k, v, window=(2, 4)))[1],
    "scale": lambda q, k, v: attend(q, k, v, sm_scale=0.5),
    "scale 0": lambda q, k, v: attend(q, k, v, sm_scale=0),
    "LSE": lambda q, k, v: attend(q, k, v, return_lse=True)[1],
    "deterministic": lambda q, k, v: attend(q, k, v, deterministic=True),
    "implementation": lambda q, k, v: attend(q, k, v, impl="triton"),
    "nobody wants gradients": lambda q, k, v: attend(q.detach(), k.detach(), v.detach()),
    "no_grad": lambda q, k, v: within(torch.no_grad(), attend, q, k, v),
    "no_grad, LSE": lambda q, k, v: within(torch.no_grad(), attend, q, k, v, return_lse=True)[1],
}


@pytest.mark.parametrize("name", ANOTHER_KIND)
def test_another_kind_goes_through_python_once(name, launcher):
    tensors = inputs()
    attend(*tensors)
    torch.manual_seed(0)
    first = ANOTHER_KIND[name](*tensors)
    assert not launcher.forwards
    torch.manual_seed(0)
    again = ANOTHER_KIND[name](*tensors)
    assert launcher.forwards and torch.equal(first, again)
    assert first.stride() == again.stride() and first.requires_grad == again.requires_grad


ANOTHER_PASS = {
    "length": lambda q, k, v: (attend(*inputs(1, 2, 17, 8)), torch.ones(1, 2, 17, 8)),
    "columns of values": lambda q, k, v: (attend(q, k, torch.cat([v, v], -1)), torch.ones(1, 2, 16, 16)),
    "mask": lambda q, k, v: (attend(q, k, v, causal=False), torch.ones(q.shape)),
    "layout": lambda q, k, v: (attend(q, k, v), torch.ones(1, 16, 2, 8).transpose(1, 2)),
    "gradient without memory": lambda q, k, v: (attend(q, k, v), torch.ones(1, 1, 1, 1).expand(q.shape)),
    "dtype": lambda q, k, v: (attend(*(x.half() for x in (q, k, v))), torch.ones(q.shape).half()),
    "sign": lambda q, k, v: (attend(q, k, v), torch._neg_view(torch.ones(q.shape))),
}


@pytest.mark.parametrize("name", ANOTHER_PASS)
def test_another_kind_of_backward_pass_goes_through_python(name, launcher):
    tensors = inputs()
    gradients(attend(*tensors), tensors)
    torch.autograd.backward(*ANOTHER_PASS[name](*tensors))
    assert launcher.through_python == 2 and not launcher.backwards


def test_what_is_known_is_kept_once(launcher):
    """Where calls of a known kind go through Python all the same."""
    tensors = inputs(grad=False)
    options = True, None, None, False, False, "reference"
    assert built().lacks(*tensors, options)
    attend(*tensors)
    assert not built().lacks(*tensors, options) and built().lacks(*inputs(1, 2, 17, 8), options)
    with deterministic():
        assert not built().lacks(*inputs(1, 2, 17, 8), options)


def test_kinds_are_forgotten_when_there_are_too_many(launcher):
    tensors = inputs(grad=False)
    for window in range(1024):
        attend(*tensors, window=(window, 0))
    attend(*tensors, window=(5, 0))
    assert len(launcher.forwards) == 1
    attend(*tensors, window=(2000, 0))  # one too many
    attend(*tensors, window=(5, 0))
    assert len(launcher.forwards) == 1


def test_what_cannot_be_repeated_goes_through_python_each_time(launcher):
    launcher.repeatable = False
    tensors = inputs()
    for _ in range(3):
        gradients(attend(*tensors), tensors)
    assert launcher.through_python == 3 and not launcher.forwards and not launcher.backwards


def test_nothing_to_compute_is_not_launched(launcher):
    for shape in ((1, 2, 0, 8), (0, 2, 16, 8)):
        for _ in range(2):
            tensors = inputs(*shape)
            assert attend(*tensors).sum().backward() is None and tensors[0].grad.shape == shape
    assert not launcher.forwards and not launcher.backwards


# ---------------------------------------------------------------- calls for Python


class Watcher(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    """A subclass that PyTorch hears of."""


def below_autograd(q, k, v):
    with torch._C._AutoDispatchBelowAutograd():
        return attend(q, k, v)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def observed(q, k, v):
    listener, hook = (lambda metadata: None), knobs.runtime.launch_exit_hook
    hook.add(listener)
    try:
        return attend(q, k, v)
    finally:
        hook.remove(listener)


def observed_by_a_function(q, k, v):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        return attend(q, k, v)


def without_hooks(q, k, v):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", None)
        return attend(q, k, v)


def misaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def functional(q, k, v):
    return torch.func.functionalize(attend)(q.detach(), k.detach(), v.detach())


def total(q, k, v):
    return attend(q, k, v).sum()


def fake(q, k, v):
    with FakeTensorMode() as mode:
        out = attend(*(mode.from_tensor(x) for x in (q, k, v)))
        assert type(out) is not torch.Tensor and out.shape == q.shape
    return attend(q, k, v)


FOR_PYTHON = {
    "a FLOP counter": lambda q, k, v: within(FlopCounterMode(display=False), attend, q, k, v),
    "a mode of torch functions": lambda q, k, v: within(Watcher(), attend, q, k, v),
    "a default device": lambda q, k, v: within(torch.device("cpu"), attend, q, k, v),
    "torch.func.grad": lambda q, k, v: torch.func.grad(total)(q, k, v),
    "torch.func.vjp": lambda q, k, v: torch.func.vjp(attend, q, k, v)[1](torch.ones(q.shape))[2],
    "vmap": lambda q, k, v: torch.vmap(attend)(*(x[None] for x in (q, k, v))),
    "vmap of grad": lambda q, k, v: torch.vmap(torch.func.grad(total))(*(x[None] for x in (q, k, v))),
    "functionalize": functional,
    "forward mode": lambda q, k, v: within(forward_ad.dual_level(), attend, q, k, v),
    "deterministic algorithms": lambda q, k, v: within(deterministic(), attend, q, k, v),
    "a profiler": observed,
    "a profiler's function": observed_by_a_function,
    "autocast": lambda q, k, v: within(torch.autocast("cpu", torch.bfloat16), attend, q, k, v),
    "below autograd": below_autograd,
    "a subclass": lambda q, k, v: attend(q, k.as_subclass(Sub), v),
    "a sign that is not in memory": lambda q, k, v: attend(q, torch._neg_view(k), v),
    "an address that TMA does not take": lambda q, k, v: attend(q, k, misaligned(v)),
    "torch.compile": lambda q, k, v: torch.compile(attend, fullgraph=True, backend="eager")(q, k, v),
    "a block mask": lambda q, k, v: attend(q, k, v, block_mask=MASK),
    "a window as a list": lambda q, k, v: attend(q, k, v, causal=False, window=[-1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOR_PYTHON)
def test_calls_for_python(name, launcher):
    """Each of these on tensors whose kind is known, with and without gradients, and again."""
    call = FOR_PYTHON[name]
    tensors = inputs()
    for known in (tensors, [x.detach() for x in tensors]):
        attend(*known)
        attend(*known, causal=False, window=(-1, 0))
    for given in (tensors, [x.detach() for x in tensors]):
        launcher.repeatable = False  # or the call within would leave launches
        expected = in_python(lambda given=given: call(*given))
        for _ in range(2):
            found = call(*given)
            assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
            assert found.dtype == expected.dtype and type(found) is type(expected)
    assert not launcher.forwards
    attend(*tensors)
    assert len(launcher.forwards) == 1, "the kind was not known"


def test_calls_with_a_block_mask_leave_no_kind_behind(launcher):
    """Nor passes: calls without a mask would be taken for them."""
    tensors = inputs()
    for _ in range(2):
        gradients(attend(*tensors, block_mask=MASK), tensors)
    out = attend(*tensors)
    assert not launcher.forwards and not launcher.through_python
    assert torch.equal(out, in_python(lambda: attend(*tensors)))


def test_no_hooks_at_all_are_no_profiler(launcher):
    tensors = inputs()
    attend(*tensors)
    without_hooks(*tensors)
    assert len(launcher.forwards) == 1


def test_what_has_no_values(launcher):
    tensors = inputs()
    attend(*tensors)
    assert attend(*(x.detach().to("meta") for x in tensors)).is_meta
    assert torch.equal(fake(*tensors), in_python(lambda: attend(*tensors)))
    assert len(launcher.forwards) == 1  # the one in `fake` on real tensors, when no mode is on


def test_while_a_graph_is_captured_python_does_it(launcher):
    tensors = inputs()
    attend(*tensors)
    launcher.captured = True
    attend(*tensors)
    assert not launcher.forwards
    launcher.captured = False
    attend(*tensors)
    assert len(launcher.forwards) == 1


def test_varlen_calls_have_their_backward_pass_there(launcher):
    tensors = [torch.randn(16, 2, 8, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 5, 16], dtype=torch.int32)
    found = []
    for _ in range(3):
        out = attention_varlen(*tensors, ends, ends, 11, 11, causal=True, impl="reference")
        found.append(gradients(out, tensors))
    assert launcher.through_python == 1 and len(launcher.backwards) == 2 and not launcher.forwards
    assert launcher.backwards[0]["cu_q"] == launcher.backwards[0]["cu_k"] == ends.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


WRONG = [
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"return_lse": None}, TypeError, "return_lse: expected a bool"),
    ({"deterministic": 0}, TypeError, "deterministic: expected a bool"),
    ({"window": 3}, TypeError, "window: expected None or a pair"),
    ({"window": (3,)}, ValueError, "window: expected a pair"),
    ({"window": (True, 0)}, TypeError, "window: expected a pair of ints"),
    ({"window": (2**70, -2)}, ValueError, "window: expected ints from 0 on"),
    ({"sm_scale": True}, TypeError, "sm_scale: expected a number"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a number from"),
    ({"sm_scale": 10**400}, ValueError, "sm_scale: expected a number from"),
    ({"impl": "fast"}, ValueError, "impl: expected 'decode', 'hopper'"),
    ({"impl": 1}, TypeError, "impl: expected 'decode', 'hopper'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options_are_errors_each_time(options, error, message, launcher):
    tensors = inputs()
    attend(*tensors)
    attend(*tensors, window=(1, 0))
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            attend(*tensors, **options)
    with pytest.raises(TypeError, match="^k: expected a torch.Tensor, got int"):
        attend(tensors[0], 3, tensors[2])
    with pytest.raises(ValueError, match="^v: expected shape"):
        attend(*tensors[:2], torch.randn(1, 2, 17, 8))
    assert not launcher.forwards


def test_a_window_beyond_64_bits(launcher):
    tensors = inputs()
    found = [attend(*tensors, window=(2**70, 0)) for _ in range(2)]
    assert torch.equal(*found) and torch.equal(found[0], attend(*tensors)) and not launcher.forwards


def test_tangents_are_an_error(launcher):
    tensors = inputs()
    attend(*tensors)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], torch.ones(SHAPE))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attend(dual, *tensors[1:])
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(attend, tuple(tensors), tuple(tensors))
    assert not launcher.forwards


@pytest.mark.parametrize("moment", ["deterministic", "tangents", "profiler", "second derivative", "mode"])
def test_backward_passes_for_python(moment, launcher, monkeypatch):
    tensors = inputs()
    out = attend(*tensors)
    expected = gradients(out, tensors)
    count = launcher.through_python
    if moment == "deterministic":
        found = within(deterministic(), gradients, out, tensors)
    elif moment == "profiler":
        monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: None)
        found = gradients(out, tensors)
    elif moment == "tangents":
        found = within(forward_ad.dual_level(), gradients, out, tensors)
    elif moment == "mode":
        found = within(FlopCounterMode(display=False), gradients, out, tensors)
    else:
        found = torch.autograd.grad(out, tensors, torch.ones_like(out), create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            found[0].sum().backward()
    assert launcher.through_python == count + 1 and not launcher.backwards
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------- as autograd has it


def test_a_failed_launch_is_an_error(launcher):
    tensors = inputs()
    out = attend(*tensors)
    gradients(out, tensors)
    launch_all, capturing = direct.build().launch_all, lambda: False  # "call 0" is no description
    built().connect(launch_all, node.slowly, lambda index: launcher.counter, capturing, knobs.runtime)
    error = pytest.raises(
        (RuntimeError, ValueError), match="launch: the (description|CUDA driver) is (damaged|not)"
    )
    with error:
        gradients(out, tensors)
    with error:
        attend(*tensors)


def test_a_second_pass_over_a_graph_that_was_freed_is_pytorchs_error(launcher):
    for _ in range(2):
        out = attend(*inputs())
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_a_tensor_that_was_written_to_is_pytorchs_error(which, launcher):
    for _ in range(2):
        q, k, v = (x * 1 for x in inputs())
        out = attend(q, k, v)
        {"q": q, "k": k, "v": v, "out": out}[which].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert len(launcher.forwards) == 1


def test_only_what_asks_gets_a_gradient(launcher):
    for _ in range(2):
        q, k, v = inputs()
        attend(q.detach(), k, v.detach()).sum().backward()
        assert k.grad is not None and q.grad is None and v.grad is None
    assert len(launcher.forwards) == len(launcher.backwards) == 1


def test_hooks_on_saved_tensors_see_all_of_them(launcher):
    tensors = inputs()
    attend(*tensors, return_lse=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out, lse = attend(*tensors, return_lse=True)
    assert [x.shape for x in packed] == [*(x.shape for x in tensors), out.shape, lse.shape]
    assert len(launcher.forwards) == 1
    found = gradients(out, tensors)
    again = gradients(attend(*tensors), tensors)
    assert (launcher.through_python, len(launcher.backwards)) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_nothing_of_a_graph_outlives_it(launcher):
    for _ in range(2):
        tensors = inputs()
        out = attend(*tensors)
        alive = [weakref.ref(x) for x in (out, *tensors)]
        gradients(out, tensors)
        del out, tensors
        gc.collect()
        assert not any(x() is not None for x in alive)
    assert len(launcher.forwards) == 1


# ---------------------------------------------------------------- the module


def test_until_it_is_there_python_does_it():
    assert node.shortcut(None, None, None, ()) is None


def test_without_a_compiler_python_does_it_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct, "launcher", direct.build)
    builder = node._Builder()
    with pytest.warns(RuntimeWarning, match="calls take longer, because .*no compiler"):
        builder.run()
    assert builder.module is None and node.shortcut(None, None, None, ()) is None


def test_once_it_is_there_calls_go_to_it(monkeypatch):
    monkeypatch.setattr(direct, "launcher", direct.build)
    monkeypatch.setattr(node, "shortcut", node.shortcut)  # to have it back
    builder = node._Builder()
    builder.run()
    assert builder.module is built() or builder.module.__file__ == built().__file__
    assert node.shortcut.__name__ == "attend" and node.shortcut(*inputs(), ()) is None


def test_a_source_that_does_not_compile_says_why(tmp_path):
    source = tmp_path / "node.cpp"
    source.write_text("int main( {")
    with pytest.raises(RuntimeError, match=r"can't compile node\.cpp: .*"):
        node._compile(source)


def test_arguments_of_its_functions(launcher):
    with pytest.raises(TypeError, match="record: expected 8 arguments, got 1"):
        built().record(torch.zeros(1))
    with pytest.raises(TypeError, match="attend: expected 4 or 9 arguments, got 0"):
        built().attend()
    with pytest.raises(TypeError, match="lacks: expected 4 or 9 arguments, got 0"):
        built().lacks()
    with pytest.raises(TypeError, match="keep: expected 10 or 15 arguments, got 0"):
        built().keep()
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        built().connect(object(), None, None, None, None)
