"""attention(score=) as compilers, exporters, fake tensors and counters see it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter asks for it)
from cases import INTERPRETER_REMARKS
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnlib import BlockMask, Score, attention

pytestmark = INTERPRETER_REMARKS
FORWARD = torch.ops.attnlib.attention_scored
BACKWARD = torch.ops.attnlib.attention_scored_backward
H, D = 2, 16


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tensors(device, queries=10, keys=20, grad=True):
    """q, k, v, sinks, and a bias by head and key."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, H, queries, D), (1, 1, keys, D), (1, 1, keys, D), (H,), (H, 1, keys)
    found = [torch.randn(size, generator=generator).to(device) for size in sizes]
    return [x.requires_grad_(grad) for x in found]


def call(q, k, v, sinks, bias, impl="reference"):
    slopes = torch.full((H,), 0.1, device=q.device)
    score = Score(3.0, slopes, sinks, bias)
    return attention(q, k, v, causal=True, window=(7, -1), score=score, return_lse=True, impl=impl)


def test_opcheck(device):
    q, k, v, sinks, bias = tensors(device)
    asked = None, sinks, bias, 3.0, False, None, 7, 0, 0.3, None
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(FORWARD.default, (q, k, v, *asked, True, False, "reference"), test_utils=tests)
    with torch.no_grad():
        out, lse = FORWARD(q, k, v, *asked, True, False, "reference")
        for bias_gradient in (True, False):
            given = out, q, k, v, out, lse, *asked, bias_gradient, False, "reference"
            torch.library.opcheck(BACKWARD.default, given, test_utils=tests[::2])


def test_in_one_graph(device):
    """For all lengths, with gradients of all that has some."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for queries, keys in ((10, 20), (14, 33)):
        given = tensors(device, queries, keys)
        results = []
        for function in (compiled, call):
            out, lse = function(*given)
            results.append((out, lse, *torch.autograd.grad(out, given, torch.ones_like(out))))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert len(graphs) == 1


def test_a_table_in_one_graph_for_all_lengths(device):
    """Its gradient goes through the diagonals that the kernels take."""
    table = torch.randn(H, 9, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()

    def function(q, k, v, table):
        score = Score(relative=table)
        return attention(q, k, v, score=score, causal=True, impl="reference")

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for queries, keys in ((10, 20), (14, 33)):
        given = *tensors(device, queries, keys)[:3], table
        results = []
        for f in (compiled, function):
            out = f(*given)
            results.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        assert all(x.abs().max() > 0 for x in results[0])


def test_a_score_and_a_block_mask_from_outside_of_the_graph(device):
    """Both belong to the caller, as a model's learned bias and its mask do."""
    q, k, v, sinks, bias = tensors(device)
    score = Score(sinks=sinks, bias=bias)
    mask = BlockMask.from_function(lambda b, h, i, j: (i + j) % 3 > 0, 10, 20, device=device)

    def function(q):
        return attention(q, k, v, score=score, block_mask=mask, impl="reference")

    found, expected = (
        torch.autograd.grad(f(q).sum(), (q, sinks, bias))
        for f in (torch.compile(function, backend="aot_eager", fullgraph=True), function)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.arange(H, dtype=torch.float32, device=device))

        def forward(self, q, k, v, bias):
            return call(q, k, v, self.sinks, bias)

    layer, (q, k, v, _, bias) = Layer(), tensors(device, grad=False)
    keys, queries = torch.export.Dim("keys", max=4096), torch.export.Dim("queries", max=4096)
    shapes = {2: queries}, {2: keys}, {2: keys}, {2: keys}
    with torch.no_grad():
        program = torch.export.export(layer, (q, k, v, bias), dynamic_shapes=shapes, strict=strict)
        q, k, v, _, bias = tensors(device, 12, 30, grad=False)
        found, expected = program.module()(q, k, v, bias), layer(q, k, v, bias)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert "attnlib.attention_scored" in str(program.graph)


def test_gradients_of_a_forward_pass_without_an_lse(device):
    """As of a graph that was made where no gradient was wanted."""
    given = tensors(device)
    q, k, v, sinks, bias = given
    slopes = torch.full((H,), 0.1, device=device)
    asked = slopes, sinks, bias, 3.0, False, None, 7, 0, None, None, False, False, "reference"
    plain = FORWARD(q, k, v, *asked)[0]
    gradients = [torch.autograd.grad(x.sum(), given) for x in (plain, call(*given)[0])]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_fake_and_meta_tensors():
    with FakeTensorMode():
        fake = tensors("cpu")
        found = [call(*fake), *(torch.autograd.grad(call(*fake)[0].sum(), fake),)]
    found.append(call(*(x.to("meta") for x in tensors("cpu")), impl=None))
    q = fake[0]
    for out, lse in (found[0], found[2]):
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert [dx.shape for dx in found[1]] == [x.shape for x in fake]


def test_flops_are_those_of_the_products(device):
    """Of the window: 8 of the keys, for each query."""
    given = tensors(device)
    with FlopCounterMode(display=False) as counter:
        call(*given)[0].sum().backward()
    assert counter.get_total_flops() == 4 * H * 10 * 8 * D * 7 // 2


@triton.jit
def halved(s, i, j, h, b):
    return 0.5 * s


@triton.jit
def half(s, i, j, h, b):
    return 0.5 + 0.0 * s


OWN = Score(function=halved, derivative=half, reference=lambda s, i, j, h, b: 0.5 * s)


def test_functions_of_your_own_in_one_graph(device):
    """The graph has their number."""

    def function(q, k, v):
        return attention(q, k, v, score=OWN, impl="triton")

    given = tensors(device)[:3]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = [(out, *torch.autograd.grad(out.sum(), given)) for out in (compiled(*given), function(*given))]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    plain = attention(*given, sm_scale=0.5 * D**-0.5, impl="reference")
    torch.testing.assert_close(results[0][0], plain, rtol=1e-5, atol=1e-5)


def test_functions_that_a_graph_can_not_take(device):
    q, k, v, *_ = tensors(device, grad=False)

    def made_inside(q):
        return attention(q, k, v, score=Score(function=halved), impl="triton")

    def by_reference(q):
        return attention(q, k, v, score=OWN, impl="reference")

    with pytest.raises(Exception, match="score.function: expected None in a score that is made inside"):
        torch.compile(made_inside, backend="aot_eager", fullgraph=True)(q)
    assert made_inside(q).shape == q.shape
    compiled = torch.compile(by_reference, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), by_reference(q))
    with pytest.raises(NotImplementedError, match="the gradient of score.reference under"):
        compiled(q.requires_grad_()).sum().backward()
    with pytest.raises(ValueError, match="functions: expected those of a score .*, got number 99"):
        FORWARD(q, k, v, functions=99)


def test_what_it_does_not_do(device):
    q, k, v, sinks, bias = tensors(device)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="score.sinks: expected 2 values, one for each head of q, got 3"):
        compiled(q, k, v, torch.zeros(3, device=device), bias)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"), torch.no_grad():
        with torch.autograd.forward_ad.dual_level():
            FORWARD(torch.autograd.forward_ad.make_dual(q, q), k, v, None, sinks)
