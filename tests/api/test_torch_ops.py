"""attention() under a compiler, an exporter or a dispatch mode: the same, by one operator."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from inductor import can_run_inductor
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attnlib import BlockMask, Score, attention, attention_entmax_varlen, attention_varlen
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]
OPERATORS = torch.ops.attnlib
BACKEND = "aot_eager"
"""Traces as "eager" does, then forward and backward into one graph each: both, in half the time of both."""


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def small(seqlen=20, keys=None, batch=1, dtype="float16", device=None):
    return make_inputs(Shape(batch, 4, seqlen, 16, dtype=dtype, heads_kv=2, seqlen_k=keys), device=device)


def offsets(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def varlen(device, dtype=torch.float16):
    q = torch.randn(20, 4, 16, device=device, dtype=dtype)
    k, v = torch.randn(2, 30, 2, 16, device=device, dtype=dtype)
    return q, k, v, offsets(0, 7, 20, device=device), offsets(0, 30, 30, device=device), 13, 30


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic, device):
    def block(x, weight):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.transpose(1, 2).flatten(2), lse

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=BACKEND)
    weight = torch.randn(32, 96, device=device)
    for batch, seqlen in ((2, 20), (3, 33), (1, 7)):
        x = torch.randn(batch, seqlen, 32, device=device)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, weight), block(x, weight), strict=True))
        # and with gradients
        results = []
        for function in (compiled, block):
            weights = weight.clone().requires_grad_()
            function(x, weights)[0].square().sum().backward()
            results.append(weights.grad)
        torch.testing.assert_close(*results)


class Counting:
    """A backend that counts graphs and keeps the last."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph


def test_lengths_that_change_are_not_compiled_again(device):
    backend = Counting()
    compiled = torch.compile(
        lambda *x: attention(*x, causal=True), fullgraph=True, dynamic=True, backend=backend
    )
    for seqlen, keys in ((20, 30), (21, 40), (50, 50), (3, 4)):
        inputs = small(seqlen, keys, device=device)
        assert torch.equal(compiled(*inputs), attention(*inputs, causal=True))
    assert len(backend.graphs) == 1
    called = [str(node.target) for node in backend.graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in called if "attnlib" in name] == ["attnlib.attention_forward.default"]


def test_options_are_part_of_the_graph(device):
    inputs = small(device=device)
    for options in (
        {"causal": True},
        {"window": (3, 2)},
        {"sm_scale": 0.3, "window": (4, -1), "causal": True},
        {"impl": "reference", "deterministic": True},
        {"impl": "triton"},
    ):
        compiled = torch.compile(
            lambda *x, options=options: attention(*x, **options), fullgraph=True, backend=BACKEND
        )
        assert torch.equal(compiled(*inputs), attention(*inputs, **options))


def test_varlen_sequences_compiled(device):
    def call(q, k, v, cu_q, cu_k, longest_q, longest_k):
        return attention_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=BACKEND)
    q, k, v, *sequences = varlen(device)
    found, expected = leaves(q, k, v), leaves(q, k, v)
    outs = compiled(*found, *sequences), call(*expected, *sequences)
    assert torch.equal(*outs)
    for out in outs:
        out.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(found, expected, strict=True))


def test_a_longest_sequence_computed_in_the_graph(device):
    def call(q, k, v, cu_q, cu_k, add=0):
        longest_q, longest_k = ((x.diff().max() + add).item() for x in (cu_q, cu_k))
        return attention_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, fullgraph=True, backend=BACKEND)
        arguments = varlen(device)[:-2]
        assert torch.equal(compiled(*arguments), call(*arguments))
        with pytest.raises(ValueError, match="^max_seqlen_q: expected 0 or more, got -87"):
            compiled(*arguments, -100)


def test_a_scale_or_a_window_computed_in_the_graph(device):
    """An operator takes no such scale, and what -1 means for a window is known before: errors by name.
    Without fullgraph the graph ends before the call."""
    q, k, v = small(device=device)
    scale = torch.tensor(0.5)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = torch.compile(lambda q, scale: attention(q, k, v, sm_scale=scale.item()), backend=BACKEND)
        assert torch.equal(call(q, scale), attention(q, k, v, sm_scale=0.5))
        torch.compiler.reset()
        call = torch.compile(call, backend=BACKEND, fullgraph=True)
        with pytest.raises(Exception, match="sm_scale: expected a number from -1e26 to 1e26, got"):
            call(q, scale)
        torch.compiler.reset()
        call = torch.compile(
            lambda q, x: attention(q, k, v, window=(x.sum().item(), 0)), backend=BACKEND, fullgraph=True
        )
        with pytest.raises(Exception, match="window: expected ints from 0 on, or -1 for no bound, got"):
            call(q, torch.tensor([1, 2]))


def test_a_window_computed_in_the_graph_whose_sign_is_said(device):
    q, k, v = small(device=device)

    def call(q, x):
        left = x.sum().item()
        torch._check(left >= 0)
        return attention(q, k, v, window=(left, 0))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, backend=BACKEND, fullgraph=True)
        for bounds in ((1, 2), (2, 6)):
            assert torch.equal(compiled(q, torch.tensor(bounds)), attention(q, k, v, window=(sum(bounds), 0)))


def test_a_longest_sequence_computed_in_an_exported_graph(device):
    class VarlenModule(torch.nn.Module):
        def forward(self, q, k, v, cu_q, cu_k):
            return attention_varlen(q, k, v, cu_q, cu_k, cu_q.diff().max().item(), cu_k.diff().max().item())

    arguments = varlen(device)
    exported = torch.export.export(VarlenModule(), arguments[:-2])
    assert torch.equal(exported.module()(*arguments[:-2]), attention_varlen(*arguments))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_any_number_of_sequences(strict, device):
    class VarlenModule(torch.nn.Module):
        def forward(self, *tensors):
            return attention_varlen(*tensors, 30, 30, causal=True)

    q, k, v, cu_q, cu_k, _, _ = varlen(device)
    number = torch.export.Dim("number", min=2)
    shapes = (({}, {}, {}, {0: number}, {0: number}),)
    given = q, k, v, cu_q, cu_k
    exported = torch.export.export(VarlenModule(), given, dynamic_shapes=shapes, strict=strict)
    more = q, k, v, offsets(0, 3, 3, 11, 20, device=device), offsets(0, 0, 9, 10, 30, device=device)
    assert torch.equal(exported.module()(*more), VarlenModule()(*more))


@pytest.mark.skipif(torch.cuda.is_available(), reason="offsets on a GPU are not read in a graph")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": offsets(0, 21, 20)}, "cu_seqlens_q: expected values that never go down, got 20"),
        ({"cu_seqlens_k": offsets(0, 30, 99)}, "cu_seqlens_k: expected to end at k's number of tokens, 30"),
        ({"max_seqlen_q": 5}, "max_seqlen_q: expected at least 13, the longest sequence in cu_seqlens_q"),
    ],
)
def test_offsets_are_checked_when_a_graph_runs(change, message):
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    good = dict(zip(names, varlen("cpu"), strict=True))
    for function in (attention_varlen, attention_entmax_varlen):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert torch.equal(compiled(**good), function(**good))
        with pytest.raises(ValueError, match=f"^{message}"):
            compiled(**good | change)


def test_jit_trace_says_what_to_use(device):
    with pytest.raises(NotImplementedError, match="^attention under torch.jit.trace: not supported; use"):
        torch.jit.trace(lambda *x: attention(*x), small(device=device))
    with pytest.raises(NotImplementedError, match="torch.jit.trace"):
        torch.jit.trace(lambda *x: attention_varlen(*x, 13, 30), varlen(device)[:-2])


def test_autocast_compiled(device):
    inputs = small(dtype="float32", device=device)

    def call(*inputs):
        with torch.autocast(device, torch.bfloat16):
            return attention(*inputs, causal=True)

    out = torch.compile(call, fullgraph=True, backend=BACKEND)(*inputs)
    assert out.dtype == torch.bfloat16 and torch.equal(out, call(*inputs))


def test_wrong_arguments_are_named_when_compiled(device):
    q, k, v = small(device=device)
    compiled = torch.compile(lambda *x: attention(*x), backend="eager")
    with pytest.raises(Exception, match="k: expected head dimension 16 as q has, got 8"):
        compiled(q, k[..., :8], v[..., :8])


def test_tangents_are_an_error_for_the_operators_too(device):
    """PyTorch drops those of custom operators."""
    q, k, v = small(dtype="float32", device=device)
    out, lse = OPERATORS.attention_forward(q, k, v)
    compiled = torch.compile(attention, fullgraph=True, backend=BACKEND)
    compiled(q, k, v)
    error = pytest.raises(RuntimeError, match="no forward-mode derivative")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with error:
            OPERATORS.attention_forward(dual, k, v)
        with error:
            OPERATORS.attention_backward(dual, q, k, v, out, lse)
        with error:
            compiled(dual, k, v)
        with error, FlopCounterMode(display=False):
            attention(dual, k, v)
        with error:
            attention(*(x.to("meta") for x in (dual, k, v)))
    for backend in ("eager", BACKEND):
        torch.compiler.reset()
        jvp = torch.compile(
            lambda q: torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,)),
            fullgraph=True, backend=backend,
        )  # fmt: skip
        # With torch 2.14 PyTorch itself refuses an operator within a transformation that it compiles.
        with pytest.raises(RuntimeError, match="no forward-mode derivative|with functorch transforms"):
            jvp(q)


def test_torch_func_within_a_compiler_or_a_mode_is_an_error(device):
    """PyTorch's own speaks of a method that is missing."""
    q, k, v = small(dtype="float32", device=device)
    derivative = torch.func.grad(lambda q: attention(q, k, v).sum())
    message = "^attention under torch.func.grad or vjp within torch.compile, make_fx or a dispatch mode: "
    with pytest.raises(RuntimeError, match=message), FlopCounterMode(display=False):
        derivative(q)
    with pytest.raises(RuntimeError, match=message):
        make_fx(derivative)(q)
    with pytest.raises(RuntimeError, match=message.strip("^")):
        torch.compile(derivative, fullgraph=True, backend="eager")(q)
    assert flops(lambda: torch.vmap(lambda q: attention(q[None], k[:1], v[:1]))(q)) > 0  # no derivative


def test_a_second_derivative_of_an_operator_is_an_error(device):
    q, k, v = leaves(*small(dtype="float32", device=device))
    out, _ = OPERATORS.attention_forward(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_a_graph_made_without_gradients_can_give_them(device):
    """The LSE, which it did not keep, is computed once more."""
    q, k, v = leaves(*small(device=device))
    out, lse = OPERATORS.attention_forward(q, k, v, right=0, lse=False)
    assert lse.numel() == 0
    found = torch.autograd.grad(out.sum(), (q, k, v))
    expected = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_inductor(device, monkeypatch):
    if device == "cpu" and not can_run_inductor():
        pytest.skip("inductor needs a C++ compiler")
    # Processes that import PyTorch, to compile in and to find out which vectors run here, take half a minute.
    monkeypatch.setattr(inductor_config, "compile_threads", 1)
    monkeypatch.setattr(inductor_config.cpp, "vec_isa_ok", False)
    monkeypatch.setattr(inductor_config, "cpp_cache_precompile_headers", False)

    def call(q, k, v):
        return attention(q, k, v * 2, causal=True)

    compiled = torch.compile(call, fullgraph=True)
    inputs = small(dtype="float32", device=device)
    found, expected = leaves(*inputs), leaves(*inputs)
    outs = compiled(*found), call(*expected)
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)  # sums in another order


# ---------------------------------------------------------------- the operators by PyTorch's own tests


def as_it_is(x):
    return x


def rows_before_heads(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def expanded(x):
    return x[:, :1].expand(x.shape)


def columns_apart(x):
    return torch.stack([x, x], -1)[..., 0]


def one_of_three(x):
    return torch.stack([x, x, x], 3).flatten(3)[..., : x.shape[-1]]


LAYOUTS = [as_it_is, rows_before_heads, expanded, columns_apart, one_of_three]


@pytest.mark.parametrize(("case", "grad"), in_turn(product(LAYOUTS, [None, "reference"]), [True, False]))
def test_opcheck_forward(case, grad, device):
    layout, impl = case
    inputs = [layout(x).detach().requires_grad_(grad) for x in small(device=device)]
    options = {"right": 0, "sm_scale": 0.5, "lse": grad, "impl": impl}
    torch.library.opcheck(OPERATORS.attention_forward.default, tuple(inputs), options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_opcheck_backward(layout, device):
    q, k, v = (layout(x) for x in small(device=device))
    out, lse = OPERATORS.attention_forward(q, k, v, right=0)
    d_out = layout(torch.randn(out.shape, device=device).to(out.dtype))
    arguments = (d_out, q, k, v, out, lse)
    torch.library.opcheck(OPERATORS.attention_backward.default, arguments, {"right": 0})


def test_opcheck_varlen(device):
    q, k, v, *sequences = varlen(device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(OPERATORS.attention_forward.default, (*inputs, *sequences), {"left": 3, "right": 0})


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_fake_tensors_have_the_form_of_real_ones(layout, device):
    """opcheck compares strides too, but not where a dimension has size 1."""
    empty = [x[:, :, :n] for x, n in zip(small(device=device), (0, 5, 5), strict=True)]
    for inputs in (small(device=device), small(1, 1, device=device), empty):
        real = [layout(x).detach().requires_grad_() for x in inputs]
        results = *attention(*real, return_lse=True), *OPERATORS.attention_forward(*real)
        results += torch.autograd.grad(results[2].sum(), real)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in real]
            faked = *attention(*fake, return_lse=True), *OPERATORS.attention_forward(*fake)
            faked += torch.autograd.grad(faked[2].sum(), fake)
        for number, (a, b) in enumerate(zip(results, faked, strict=True)):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            if number >= 2 and a.numel():  # eagerly the kernel's own layout will do
                assert a.stride() == b.stride()


def test_meta_tensors_give_shapes():
    """More memory than any machine has."""
    q = torch.empty(2**20, 8, 2**20, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2**20, 2, 2**20, 128, dtype=torch.bfloat16, device="meta")
    out, lse = attention(q, k, k, causal=True, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == q.shape[:3]
    with pytest.raises(ValueError, match="^k: expected batch size"):
        attention(q, k[1:], k[1:])


# ---------------------------------------------------------------- export


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 64)

    def forward(self, x):
        qkv = self.project(x)
        q, k, v = qkv.split((32, 16, 16), -1)
        q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in (q, k, v))
        return attention(q, k, v, causal=True, window=(9, 0)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_shapes(strict, device, tmp_path):
    layer = Layer().to(device)
    x = torch.randn(2, 20, 32, device=device)
    dims = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", max=4096)}}
    with torch.no_grad():
        exported = torch.export.export(layer, (x,), dynamic_shapes=dims, strict=strict)
        assert "attnlib.attention_forward" in str(exported.graph)
        torch.export.save(exported, tmp_path / "layer.pt2")
        loaded = torch.export.load(tmp_path / "layer.pt2").module()
        for batch, seqlen in ((2, 20), (3, 33), (5, 2)):
            x = torch.randn(batch, seqlen, 32, device=device)
            torch.testing.assert_close(loaded(x), layer(x))


# ---------------------------------------------------------------- FLOPs


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
def test_flops_are_counted_as_for_pytorchs_own_attention(causal):
    """Which it does for its fused kernels; as meta tensors it has them everywhere."""
    B, H, S, D = 2, 4, 20, 16
    q, k, v = make_inputs(Shape(B, H, S, D), device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        own = flops(lambda: torch.ops.aten._scaled_dot_product_flash_attention(
            *(torch.empty(B, H, S, D, device="cuda", dtype=torch.float16) for _ in range(3)), 0.0, causal
        ))  # fmt: skip
    assert flops(lambda: attention(q, k, v, causal=causal)) == own == 4 * B * H * S * S * D

    def step():
        inputs = leaves(q, k, v)
        attention(*inputs, causal=causal).sum().backward()

    assert flops(step) == own * 7 // 2  # 2 products forward, 5 backward
    inputs = leaves(q, k, v)
    out = attention(*inputs, causal=causal)
    assert flops(out.sum().backward) == own * 5 // 2  # the backward pass alone
    expected = torch.autograd.grad(attention(*inputs, causal=causal).sum(), inputs)
    assert all(torch.equal(x.grad, dx) for x, dx in zip(inputs, expected, strict=True))


def test_flops_of_a_backward_pass_alone(device):
    """Of a call that no counter saw: of varlen sequences, under a block mask, with a score."""
    arguments = varlen(device)
    inputs = leaves(*arguments[:3])
    out = attention_varlen(*inputs, *arguments[3:])
    assert flops(out.sum().backward) == 10 * 4 * (7 * 30 + 13 * 0) * 16
    mask = BlockMask.from_function(lambda b, h, i, j: j < 30, 20, 50, device=device)
    score = Score(soft_cap=3.0, sinks=torch.zeros(4, device=device, requires_grad=True))
    for options in ({"block_mask": mask}, {"score": score}, {"block_mask": mask, "score": score}):
        given = leaves(*small(20, 50, device=device))
        out = attention(*given, **options)
        counted = flops(partial(attention, *given, **options))
        assert flops(out.sum().backward) == counted * 5 // 2 > 0
        expected = torch.autograd.grad(attention(*given, **options).sum(), given)
        assert all(torch.equal(x.grad, dx) for x, dx in zip(given, expected, strict=True))


def test_offsets_are_read_under_a_dispatch_mode(device):
    """The mode is not told, and a right call is not hindered; a compiler's mode has nothing to read."""
    q, k, v, cu_q, cu_k, *longest = varlen(device)
    wrong = offsets(0, 7, 21, device=device)
    with FlopCounterMode(display=False) as counter:
        for call in (attention_varlen, partial(attention_entmax_varlen, alpha=1.5)):
            with pytest.raises(ValueError, match="^cu_seqlens_q: expected to end at q's number of tokens"):
                call(q, k, v, wrong, cu_k, *longest)
            assert counter.get_total_flops() == 0
        attention_varlen(q, k, v, cu_q, cu_k, *longest)
        assert counter.get_total_flops() > 0


def test_flops_of_grouped_heads_windows_and_varlen_sequences(device):
    q, k, v = small(20, 50, device=device)
    assert flops(lambda: attention(q, k, v)) == 4 * 4 * 20 * 50 * 16
    assert flops(lambda: attention(q, k, v, causal=True, window=(7, 0))) == 4 * 4 * 20 * 8 * 16
    assert flops(lambda: attention(q, k, v, window=(7, -1))) == 4 * 4 * 20 * 50 * 16
    arguments = varlen(device)
    pairs = 7 * 30 + 13 * 0
    assert flops(lambda: attention_varlen(*arguments)) == 4 * 4 * pairs * 16

    def step():
        inputs = leaves(*arguments[:3])
        attention_varlen(*inputs, *arguments[3:]).sum().backward()

    assert flops(step) == 14 * 4 * pairs * 16


def test_a_counted_call_gives_the_same_result(device):
    inputs = small(device=device)
    with FlopCounterMode(display=False):
        counted = attention(*inputs, causal=True)
    assert torch.equal(counted, attention(*inputs, causal=True))


# ---------------------------------------------------------------- checkpointing policies


def test_selective_checkpointing_keeps_attention(monkeypatch, device):
    """A policy can say that the result of attention is kept: then it runs once, not twice."""
    from attnlib import dispatch, node

    calls = []
    forward = dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *a: calls.append(1) or forward(*a))
    monkeypatch.setattr(node, "shortcut", lambda *args: None)  # which runs known kinds without a word

    def policy(context, operator, *args, **kwargs):
        keep = operator is OPERATORS.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return attention(q * 2, k, v, causal=True).sin()

    expected = leaves(*small(device=device))
    block(*expected).sum().backward()
    for options, runs in (({}, 2), ({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 1)):
        calls.clear()
        inputs = leaves(*expected)
        with warnings.catch_warnings(action="ignore"):
            checkpoint(block, *inputs, use_reentrant=False, **options).sum().backward()
        assert len(calls) == runs
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, expected, strict=True))


def test_plain_calls_go_past_the_operator(monkeypatch, device):
    """They take less host time that way."""
    from attnlib import torch_ops

    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(torch_ops, "attention_forward", broken)
    inputs = leaves(*small(device=device))
    attention(*inputs).sum().backward()
    attention(*inputs, impl="reference")
    attention_varlen(*varlen(device))
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="broken"):
        attention(*inputs)
