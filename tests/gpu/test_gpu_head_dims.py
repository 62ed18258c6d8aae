"""Head dimensions in two parts of columns on a Hopper GPU, forward and backward, and values with a head
dimension of their own: against dense attention in fp64, in every mask, layout and length, equal bits in every
run, CUDA graphs and what a launch uses.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cases import Case, check_forward, judge_forward
from compiled_ahead import compile_ahead
from draws import Draw, check
from layouts import LAYOUTS

from attnlib import attention, attention_varlen, dispatch, explain
from attnlib.bench import timing
from attnlib.bench.backward import make_gradient
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import INPUTS, Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.hopper import configs_backward
from attnlib.kernels.hopper.configs import OWN_VALUES, SPLIT, hopper_config, own_values_config
from attnlib.params import Params, mask_window

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
DIMS = pytest.mark.parametrize("head_dim", [72, 80, 88, 96, 136, 160, 192])
WIDTHS = pytest.mark.parametrize("head_dim", list(SPLIT))
PAIRS = pytest.mark.parametrize("pair", list(OWN_VALUES), ids=str)
NATIVE = [(192, 128), (128, 64), (64, 128), (64, 256), (128, 256)]
"""Columns of queries and of values that backward kernels are for."""
FILLED = [(256, 128), (192, 256), (128, 192), (96, 128), (96, 72)]
"""Where copies fill the narrower one up."""
WIDTHS_BACKWARD = pytest.mark.parametrize("head_dim", list(configs_backward.SPLIT))


def call(q, k, v, causal=True, **options):
    return attention(q, k, v, causal=causal, impl="hopper", **options)


# ---------------------------------------------------------------- compiled once, by several processes


def _kinds() -> list[tuple[Shape, bool]]:
    """One small call for each kind of kernel that most tests below run: (shape, varlen)."""
    kinds = []
    for head_dim in sorted({*SPLIT, *configs_backward.SPLIT}):
        for dtype in ("float16", "bfloat16"):
            for causal, keys in ((True, 128), (True, 133), (False, 128), (False, 133)):
                kinds.append((Shape(1, 1, 128, head_dim, causal, dtype, seqlen_k=keys), False))
                kinds.append((Shape(1, 1, 130, head_dim, causal, dtype, seqlen_k=keys), False))
            kinds.append((Shape(1, 1, 128, head_dim, True, dtype), True))
    for pair in OWN_VALUES:
        for causal, keys in ((True, 128), (True, 133), (False, 128), (False, 133)):
            shape = of_pair(pair, 1, 1, 128, causal, seqlen_k=keys)
            kinds += [(shape, False), (replace(shape, seqlen=130), False)]
    return kinds


def of_pair(pair: tuple[int, int], batch: int, heads: int, seqlen: int, causal: bool, **others) -> Shape:
    """Values of another width, in tiles of these widths."""
    head_dim = pair[0] - 8 * (pair[0] == pair[1])
    return Shape(batch, heads, seqlen, head_dim, causal, head_dim_v=pair[1], **others)


def _compile(kind: tuple[Shape, bool]) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    shape, varlen = kind
    q, k, v = make_inputs(shape, device="cuda")
    if varlen:
        ends = torch.tensor([0, shape.seqlen], dtype=torch.int32, device="cuda")
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        attention_varlen(q, k, v, ends, ends, shape.seqlen, shape.seqlen, causal=True, impl="hopper")
    else:
        gradients = shape.head_dim_v is None
        q, k, v = (x.requires_grad_(gradients) for x in (q, k, v))
        out, _ = call(q, k, v, shape.causal, return_lse=True)
        if gradients:
            out.sum().backward()
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_ahead(_compile, _kinds())


# ---------------------------------------------------------------- right results


def check_shape(shape: Shape, kind: str = "normal", sm_scale: float | None = None) -> None:
    check_forward(Case(shape, kind, sm_scale), "cuda", impl="hopper")


@DIMS
@MASKS
def test_a_long_sequence(head_dim, causal):
    check_shape(Shape(2, 4, 4096, head_dim, causal))
    check_shape(Shape(1, 6, 2113, head_dim, causal, "bfloat16", heads_kv=2))


@WIDTHS
@MASKS
@pytest.mark.parametrize("seqlen", [1, 17, 63, 128, 129, 193, 1000])
def test_odd_lengths(seqlen, head_dim, causal):
    check_shape(Shape(2, 3, seqlen, head_dim, causal))


@WIDTHS
@pytest.mark.parametrize("seqlen, keys", [(1, 4097), (1000, 3000), (64, 1), (3000, 1000), (200, 17)])
def test_queries_and_keys_differ_in_number(seqlen, keys, head_dim):
    for causal in (True, False):
        check_shape(Shape(1, 4, seqlen, head_dim, causal, seqlen_k=keys))


@WIDTHS
@pytest.mark.parametrize("kind", INPUTS)
def test_unkind_inputs(kind, head_dim):
    """Large ones among them: the maxima of rows grow, and both parts of the output are rescaled."""
    check_shape(Shape(1, 4, 2048, head_dim), kind)
    check_shape(Shape(1, 4, 1024, head_dim, False, "bfloat16"), kind)


@WIDTHS
@pytest.mark.parametrize("sm_scale", [-0.1, 0.0, 2.0])
def test_scales(sm_scale, head_dim):
    check_shape(Shape(1, 2, 300, head_dim), sm_scale=sm_scale)


@pytest.mark.parametrize("number", range(48))
def test_random_calls(number):
    """Batches and varlen sequences, windows, grouped heads, layouts; with gradients."""
    rng = random.Random(number)
    varlen, head_dim = rng.random() < 0.4, rng.choice((72, 80, 88, 96, 136, 160, 176, 192))
    count = rng.randint(2, 5) if varlen else 1
    lengths = [tuple(int(2 ** rng.uniform(0, 10)) for _ in range(2)) for _ in range(count)]
    if rng.random() < 0.4:
        lengths = [(rows, rows) for rows, _ in lengths]
    window = None
    if rng.random() < 0.4:
        window = tuple(-1 if rng.random() < 0.3 else int(2 ** rng.uniform(0, 10)) - 1 for _ in range(2))
    draw = Draw(
        tuple(lengths), varlen, 1 if varlen else rng.choice((1, 2)), rng.choice((1, 2)),
        rng.choice((1, 3)), head_dim, rng.choice(("float16", "bfloat16")), rng.random() < 0.5, window,
        rng.choice((None, None, 0.05)), tuple(rng.choice((0, 0, 1, 2)) for _ in range(4)), number,
    )  # fmt: skip
    check(draw, "cuda", "hopper", backward=True)


@WIDTHS
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_parts_of_a_tensor_that_is_not_contiguous(layout, head_dim):
    """The second part begins in the middle of rows that lie apart."""
    contiguous = make_inputs(Shape(2, 4, 333, head_dim), device="cuda")
    q, k, v = map(layout, contiguous)
    judge_forward(*call(q, k, v, return_lse=True), Oracle(*contiguous, True), layout.__name__)
    wide = torch.randn(2, 4, 333, 2 * head_dim, device="cuda", dtype=torch.float16)
    left = wide[..., :head_dim]  # beside other columns, which have to stay what they are, and unseen
    judge_forward(*call(left, k, v, return_lse=True), Oracle(left, *contiguous[1:], True), "a slice")


# ---------------------------------------------------------------- launches


@DIMS
def test_the_choice(head_dim):
    q, k, v = make_inputs(Shape(1, 8, 1024, head_dim), device="cuda")
    choice = explain(q, k, v, causal=True)
    assert choice.kernel == "hopper" and choice.configuration == hopper_config(head_dim)
    assert choice.configuration.columns[0] < head_dim <= sum(choice.configuration.columns)


@WIDTHS
def test_the_same_bits_every_time(head_dim):
    q, k, v = make_inputs(Shape(2, 40, 1500, head_dim), device="cuda")
    first = call(q, k, v, return_lse=True)
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, call(q, k, v, return_lse=True), strict=True))


@WIDTHS
def test_what_a_launch_uses(head_dim):
    q, k, v = make_inputs(Shape(1, 8, 1024, head_dim), device="cuda")
    with timing.launched_kernels() as kernels:
        call(q, k, v)
    found = timing.resources(kernels)
    assert found["registers"] == hopper_config(head_dim).max_registers and found["spills"] == 0


@WIDTHS
def test_cuda_graphs(head_dim):
    shape = Shape(1, 6, 900, head_dim)
    q, k, v = make_inputs(shape, device="cuda")
    call(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(q, k, v, return_lse=True)
    for seed in (1, 2):
        for old, new in zip((q, k, v), make_inputs(shape, seed=seed, device="cuda"), strict=True):
            old.copy_(new)
        graph.replay()
        judge_forward(out, lse, Oracle(q, k, v, causal=True), "a replayed graph")


# ---------------------------------------------------------------- values of another head dimension


@PAIRS
@MASKS
def test_values_of_another_width(pair, causal):
    check_shape(of_pair(pair, 2, 4, 2048, causal))
    check_shape(Shape(1, 6, 1113, pair[0] - 16, causal, "bfloat16", 2, 1500, pair[1]))
    check_shape(Shape(1, 2, 130, pair[0] - 8, causal, seqlen_k=70, head_dim_v=pair[1]))


@pytest.mark.parametrize("kind", INPUTS)
def test_unkind_inputs_beside_values_of_another_width(kind):
    check_shape(Shape(1, 4, 2048, 192, head_dim_v=128), kind)
    check_shape(Shape(1, 4, 1024, 128, False, "bfloat16", head_dim_v=64), kind)


@pytest.mark.parametrize("number", range(32))
def test_random_calls_with_values_of_another_width(number):
    """Forward and backward on Hopper."""
    rng = random.Random(number)
    varlen = rng.random() < 0.5
    lengths = [tuple(int(2 ** rng.uniform(0, 10)) for _ in range(2)) for _ in range(3 if varlen else 1)]
    window = None
    if rng.random() < 0.4:
        window = tuple(-1 if rng.random() < 0.3 else int(2 ** rng.uniform(0, 10)) - 1 for _ in range(2))
    head_dim, values = rng.choice((
        (192, 128), (192, 128), (160, 120), (128, 64), (64, 128), (64, 256), (48, 112), (64, 96), (80, 64),
        (128, 256),
    ))  # fmt: skip
    draw = Draw(
        tuple(lengths), varlen, 1 if varlen else rng.choice((1, 2)), rng.choice((1, 2)),
        rng.choice((1, 3)), head_dim, rng.choice(("float16", "bfloat16")), rng.random() < 0.5, window,
        rng.choice((None, None, 0.05)), tuple(rng.choice((0, 0, 1, 2)) for _ in range(4)), number, values,
    )  # fmt: skip
    check(draw, "cuda", "hopper", backward=False)
    check(draw, "cuda", None)


@PAIRS
def test_what_runs_beside_values_of_another_width(pair):
    shape = of_pair(pair, 1, 8, 1024, True)
    q, k, v = make_inputs(shape, device="cuda")
    choice = explain(q, k, v, causal=True)
    assert choice.kernel == "hopper"
    assert choice.configuration == own_values_config(shape.head_dim, shape.value_dim) == OWN_VALUES[pair]
    with timing.launched_kernels() as kernels:
        first = call(q, k, v, return_lse=True)
    found = timing.resources(kernels)
    assert [kernel.name for kernel in kernels] == ["attention_forward_hopper"]
    assert found["registers"] == choice.configuration.max_registers and found["spills"] <= 2
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, call(q, k, v, return_lse=True), strict=True))


# ---------------------------------------------------------------- gradients


def check_gradients(shape: Shape, impl: str | None = "hopper") -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs(shape, device="cuda"))
    d_out = make_gradient(shape, device="cuda")
    found = torch.autograd.grad(attention(q, k, v, causal=shape.causal, impl=impl), (q, k, v), d_out)
    verdicts = GradientOracle(d_out, *(x.detach() for x in (q, k, v)), shape.causal).judge(*found)
    for name, verdict in verdicts.items():
        verdict.raise_if_bad(f"{shape.label}, {name}")


@DIMS
@MASKS
def test_gradients(head_dim, causal):
    check_gradients(Shape(2, 4, 1000, head_dim, causal))
    check_gradients(Shape(1, 6, 777, head_dim, causal, "bfloat16", heads_kv=2, seqlen_k=1100))


@MASKS
@pytest.mark.parametrize("pair", NATIVE + FILLED, ids=str)
def test_gradients_with_values_of_another_width(pair, causal):
    """And of a few columns less of each, grouped and at odd lengths."""
    head_dim, values = pair
    whole = Shape(2, 4, 1000, head_dim, causal, head_dim_v=values)
    grouped = Shape(1, 6, 777, head_dim - 16, causal, "bfloat16", 2, 1100, values - 24)
    for shape in (whole, grouped, Shape(1, 2, 300, head_dim - 8, causal, seqlen_k=129, head_dim_v=values)):
        check_gradients(shape)


@MASKS
@pytest.mark.parametrize("pair", NATIVE, ids=str)
def test_gradients_of_long_sequences_with_values_of_another_width(pair, causal):
    check_gradients(Shape(1, 2, 8192, pair[0], causal, head_dim_v=pair[1]))


@pytest.mark.parametrize("pair", NATIVE, ids=str)
def test_the_backward_choice_beside_values_of_another_width(pair):
    """No column is padded."""
    q, v = (torch.empty(1, 8, 1024, columns, device="cuda", dtype=torch.float16) for columns in pair)
    choice = dispatch.resolve(q, q, v, Params(mask_window(True, None), 1.0), backward=True)
    assert choice.kernel == "hopper" and choice.configuration.widths(*pair) == pair


@pytest.mark.parametrize("pair", NATIVE, ids=str)
def test_the_same_bits_beside_values_of_another_width(pair):
    """With `deterministic=True` all gradients, else dK and dV."""
    shape = Shape(2, 20, 1500, pair[0], head_dim_v=pair[1])
    d_out = make_gradient(shape, device="cuda")
    for deterministic in (True, False):
        q, k, v = (x.requires_grad_() for x in make_inputs(shape, device="cuda"))
        out = call(q, k, v, deterministic=deterministic)
        first = torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
        for _ in range(20):
            found = torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
            same = [torch.equal(x, y) for x, y in zip(found, first, strict=True)]
            assert all(same[0 if deterministic else 1 :]), same


@WIDTHS_BACKWARD
@MASKS
@pytest.mark.parametrize("seqlen, keys", [(1, 1), (17, 200), (63, 64), (129, 129), (1000, 300), (64, 3000)])
def test_gradients_at_odd_lengths(seqlen, keys, head_dim, causal):
    check_gradients(Shape(2, 3, seqlen, head_dim, causal, seqlen_k=keys))


@WIDTHS_BACKWARD
def test_gradients_of_a_long_sequence(head_dim):
    check_gradients(Shape(1, 2, 8192, head_dim))


@WIDTHS_BACKWARD
def test_the_backward_choice(head_dim):
    """No column is padded."""
    q = torch.empty(1, 8, 1024, head_dim, device="cuda", dtype=torch.float16)
    choice = dispatch.resolve(q, q, q, Params(mask_window(True, None), 1.0), backward=True)
    assert choice.kernel == "hopper" and choice.configuration.width(head_dim) == head_dim


@WIDTHS_BACKWARD
def test_the_same_bits_of_dk_and_dv_every_time(head_dim):
    """And dQ, whose sums have no order, within their rounding."""
    shape = Shape(2, 20, 1500, head_dim)
    q, k, v = (x.requires_grad_() for x in make_inputs(shape, device="cuda"))
    out, d_out = call(q, k, v), make_gradient(shape, device="cuda")
    first = torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
    for _ in range(20):
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
        assert torch.equal(dk, first[1]) and torch.equal(dv, first[2])
        torch.testing.assert_close(dq, first[0], rtol=2e-3, atol=2e-3)


@WIDTHS_BACKWARD
def test_gradients_beside_other_columns(head_dim):
    """q, k and v are parts of one tensor: what is beside their columns is not read, and stays."""
    wide = torch.randn(1, 3, 300, 2 * head_dim, device="cuda", dtype=torch.float16, requires_grad=True)
    q, k, v = (wide[..., :head_dim] for _ in range(3))
    d_out = torch.randn(q.shape, device="cuda").half()
    (found,) = torch.autograd.grad(call(q, k, v), wide, d_out)
    parts = torch.autograd.grad(
        call(*(own := [q.detach().clone().requires_grad_() for _ in range(3)])), own, d_out
    )
    assert bool((found[..., head_dim:] == 0).all())
    torch.testing.assert_close(found[..., :head_dim], sum(parts), rtol=1e-2, atol=1e-2)
