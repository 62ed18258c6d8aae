"""The Hopper backward kernel on a Hopper GPU: gradients against fp64, CUDA graphs, hundreds of launches."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import draws
import families
import pytest
import torch
from backward_cases import BackwardCase, check_backward, exact_forward
from draws import Draw
from layouts import LAYOUTS

from attnlib import attention_varlen
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import hopper
from attnlib.kernels.hopper.configs_backward import KEYS_96, HopperBackwardConfig, hopper_backward_config
from attnlib.params import Params, Varlen, mask_window

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])


def backward(*arguments):
    """(dq, dk, dv) of (d_out, q, k, v, out, lse, params)."""
    return families.backward(hopper, *arguments)


def check(shape: Shape, sm_scale: float | None = None, window: tuple[int, int] | None = None) -> None:
    case = BackwardCase(shape, sm_scale=sm_scale, window=window)
    check_backward(case, "cuda", backward)


def arguments(shape: Shape, seed: int = 0) -> tuple:
    q, k, v = make_inputs(shape, seed=seed, device="cuda")
    window, scale = mask_window(shape.causal, None), shape.head_dim**-0.5
    return torch.randn_like(q), q, k, v, *exact_forward(q, k, v, window, scale), Params(window, scale)


@MASKS
@DIMS
@pytest.mark.parametrize("seqlen, keys", [(1, 1), (63, 63), (1000, 1000), (129, 700), (700, 129), (17, 1)])
def test_lengths(seqlen, keys, head_dim, causal):
    check(Shape(1, 2, seqlen, head_dim, causal, seqlen_k=keys))


@MASKS
@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 136, 200])
def test_head_dimensions_between_the_widths_of_a_tile(head_dim, causal):
    check(Shape(2, 3, 300, head_dim, causal))


@DIMS
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_in_bfloat16(kv_heads, head_dim):
    check(Shape(2, 6, 500, head_dim, kv_heads == 1, "bfloat16", kv_heads))


@DIMS
@pytest.mark.parametrize("sm_scale", [-0.1, 0.0, 0.5])
def test_scales(sm_scale, head_dim):
    check(Shape(1, 2, 257, head_dim, seqlen_k=511), sm_scale)


@DIMS
@pytest.mark.parametrize("window", [(0, 0), (63, 0), (127, 5), (300, -1), (-1, 70), (200, 100)], ids=str)
def test_windows(window, head_dim):
    for seqlen, keys in [(1000, 1000), (300, 900), (700, 200)]:
        check(Shape(1, 4, seqlen, head_dim, window[1] == 0, heads_kv=2, seqlen_k=keys), window=window)


@DIMS
@pytest.mark.parametrize("window", [None, (100, 0), (64, 33), (-1, 9)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_varlen_sequences(dtype, window, head_dim):
    """Empty ones, ones without keys, and neighbors of all lengths; forward and backward."""
    lengths = ((0, 0), (1, 1), (17, 17), (129, 129), (0, 5), (5, 0), (300, 500), (700, 300), (1000, 1000))
    for causal, group in product((True, False), (1, 2)):
        call = Draw(
            lengths=lengths, varlen=True, batch=1, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype,
            causal=causal, window=window, sm_scale=None, layouts=(0, 0, 0, 0), seed=0,
        )  # fmt: skip
        draws.check(call, "cuda", "hopper")


@DIMS
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.__name__.strip("_"))
def test_layouts(layout, head_dim):
    d_out, q, k, v, out, lse, params = arguments(Shape(1, 4, 300, head_dim, heads_kv=2))
    found = backward(*(layout(x) for x in (d_out, q, k, v, out)), lse, params)
    for verdict in GradientOracle(d_out, q, k, v, causal=True).judge(*found).values():
        verdict.raise_if_bad(layout.__name__)


MIXED = [
    Shape(1, 2, 128, 64), Shape(2, 3, 700, 64), Shape(1, 4, 300, 64, False), Shape(1, 2, 17, 128),
    Shape(2, 5, 1000, 128), Shape(1, 4, 100, 128, False, seqlen_k=900), Shape(1, 2, 333, 128, seqlen_k=20),
    Shape(2, 3, 700, 256), Shape(1, 2, 100, 256, False, seqlen_k=900), Shape(1, 4, 1500, 192, heads_kv=2),
]  # fmt: skip


def test_two_hundred_launches():
    """dk and dv have the same bits each time, dq up to the order of a sum."""
    calls = [arguments(shape) for shape in MIXED]
    want = [backward(*call) for call in calls]
    rng, wrong = random.Random(0), torch.zeros((), device="cuda")
    for _ in range(200):
        i = rng.randrange(len(calls))
        dq, dk, dv = backward(*calls[i])
        wrong += (dk != want[i][1]).any() | (dv != want[i][2]).any()
        wrong += ((dq - want[i][0]).abs().max() > 0.01 * want[i][0].abs().max()).float()
    assert wrong.item() == 0


def sharing(call: tuple, visited: int, added: bool = True) -> tuple:
    """The call with programs that visit so many query heads of a group."""
    *rest, params = call
    config = hopper_backward_config(rest[1].shape[-1], params.deterministic)
    return *rest, params._replace(config=replace(config, visited=visited, added=added))


@MASKS
@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
@pytest.mark.parametrize("visited", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_programs_share_a_key_head(head_dim, visited, added, causal):
    for shape in (Shape(2, 8, 700, head_dim, causal, "bfloat16", 2), Shape(1, 4, 300, head_dim, causal,
                  heads_kv=1, seqlen_k=555)):  # fmt: skip
        check_backward(
            BackwardCase(shape), "cuda", lambda *call: backward(*sharing(call, visited, added))
        )


# ---------------------------------------------------------------- 96 keys a program


OF_96_KEYS = [
    BackwardCase(Shape(2, 3, 1000, 192, True, "bfloat16")),
    BackwardCase(Shape(1, 4, 700, 192, False, heads_kv=2)),
    BackwardCase(Shape(1, 2, 1, 192, seqlen_k=1)),
    BackwardCase(Shape(1, 2, 129, 192, False, seqlen_k=700)),
    BackwardCase(Shape(1, 2, 700, 136, seqlen_k=129)),
    BackwardCase(Shape(1, 2, 257, 176, seqlen_k=511), sm_scale=-0.1),
    BackwardCase(Shape(1, 4, 700, 192, False, heads_kv=2, seqlen_k=900), window=(200, 100)),
    BackwardCase(Shape(1, 2, 300, 192, seqlen_k=900), window=(127, 0)),
    BackwardCase(Shape(1, 2, 700, 192, False), window=(300, -1)),
    BackwardCase(Shape(2, 4, 700, 192, True, "bfloat16", 2, head_dim_v=128)),
    BackwardCase(Shape(1, 2, 300, 136, False, seqlen_k=500, head_dim_v=72)),
]


OF_96_KEYS += [
    BackwardCase(Shape(2, 3, 1000, 160, True, "bfloat16")),
    BackwardCase(Shape(1, 4, 700, 160, False, heads_kv=2)),
    BackwardCase(Shape(1, 2, 129, 136, False, seqlen_k=700)),
    BackwardCase(Shape(1, 2, 257, 152, seqlen_k=511), sm_scale=-0.1),
    BackwardCase(Shape(1, 4, 700, 160, False, heads_kv=2, seqlen_k=900), window=(200, 100)),
    BackwardCase(Shape(2, 4, 700, 160, True, "bfloat16", 2, head_dim_v=128)),
]


def with_96_keys(*call, columns: int = 192, **changes):
    *rest, params = call
    values = columns if rest[3].shape == rest[2].shape else 128
    config = replace(KEYS_96, query_columns=columns, value_columns=values, **changes)
    return backward(*rest, params._replace(config=config))


def tiles_of(head_dim: int) -> tuple[int, ...]:
    """Columns of a tile that holds them."""
    return (160, 192) if head_dim <= 160 else (192,)


@pytest.mark.parametrize("pause_every", [0, 2, 4])
@pytest.mark.parametrize("case", OF_96_KEYS, ids=lambda case: case.label)
def test_96_keys_a_program(case, pause_every):
    changes = {"pause_every": pause_every, "early_mask": pause_every == 4}
    for changes["columns"] in tiles_of(case.shape.head_dim):
        check_backward(case, "cuda", lambda *call: with_96_keys(*call, **changes))


@MASKS
@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
@pytest.mark.parametrize("visited", [1, 2, 4])
def test_programs_of_96_keys_share_a_key_head(visited, added, causal):
    changes = {"visited": visited, "added": added}
    for shape in (
        Shape(2, 8, 700, 192, causal, "bfloat16", 2),
        Shape(1, 4, 300, 136, causal, heads_kv=1, seqlen_k=555),
    ):
        for changes["columns"] in tiles_of(shape.head_dim):
            check_backward(BackwardCase(shape), "cuda", lambda *call: with_96_keys(*call, **changes))


@MASKS
@pytest.mark.parametrize("head_dim", [160, 192])
def test_a_hundred_launches_with_96_keys(head_dim, causal):
    """dk and dv have the same bits each time, dq up to the order of a sum."""
    call, how = arguments(Shape(2, 8, 2000, head_dim, causal, "bfloat16", 4)), {"columns": head_dim}
    first, wrong = with_96_keys(*call, **how), torch.zeros((), device="cuda")
    for _ in range(100):
        dq, dk, dv = with_96_keys(*call, **how)
        wrong += (dk != first[1]).any() | (dv != first[2]).any()
        wrong += ((dq - first[0]).abs().max() > 0.01 * first[0].abs().max()).float()
    assert wrong.item() == 0


VARLEN = (0, 0), (1, 1), (17, 17), (129, 129), (0, 5), (5, 0), (300, 500), (700, 300), (1000, 1000)
"""(queries, keys) of sequences: empty ones, ones without keys, and neighbors of all lengths."""


def check_varlen(call: Draw, config: HopperBackwardConfig) -> None:
    """Gradients of each sequence, by the kernel of this configuration."""
    q, k, v, d_out = draws.tensors(call, "cuda")
    sides = [list(side) for side in zip(*call.lengths, strict=True)]
    ends = [torch.tensor([0, *side], device="cuda").cumsum(0).int() for side in sides]
    window = mask_window(call.causal, call.window)
    params = Params(window, call.head_dim**-0.5, Varlen(*ends, *map(max, sides)), return_lse=True)
    out, lse = hopper.forward(q, k, v, params._replace(config=hopper.configuration(q, k, v, params)))
    found = hopper.backward(d_out, q, k, v, out, lse, params._replace(config=config))
    for parts in draws.sequences(call, (d_out, q, k, v), found):
        for verdict in GradientOracle(*parts[:4], **call.options).judge(*parts[4:]).values():
            draws.raise_if_bad(verdict, draws.SLACK, str(call))


@pytest.mark.parametrize("window", [None, (100, 0), (64, 33), (-1, 9), (300, -1)], ids=str)
@pytest.mark.parametrize("early, visited", [(False, None), (False, 2), (True, 1)])
@pytest.mark.parametrize(
    "head_dim, value_dim", [(192, None), (136, None), (160, None), (192, 128), (136, 72)]
)
def test_varlen_sequences_of_96_keys_a_program(head_dim, value_dim, early, visited, window):
    changes = {"early_mask": early, "visited": visited}
    for columns in tiles_of(head_dim):
        values = columns if value_dim is None else 128
        config = replace(KEYS_96, query_columns=columns, value_columns=values, **changes)
        for causal, dtype in ((True, "bfloat16"), (False, "float16")):
            call = Draw(
                lengths=VARLEN, varlen=True, batch=1, kv_heads=2, group=2, head_dim=head_dim, dtype=dtype,
                causal=causal, window=window, sm_scale=None, layouts=(0, 0, 0, 0), seed=0,
                value_dim=value_dim,
            )  # fmt: skip
            check_varlen(call, config)


@DIMS
def test_few_key_heads_are_shared_unasked(head_dim):
    """Eight query heads, one key head: by the model of the launch, which takes fewer than all."""
    check(Shape(1, 8, 3000, head_dim, False, "bfloat16", 1))
    check(Shape(1, 8, 3000, head_dim, True, heads_kv=1))


@pytest.mark.parametrize("visited", [None, 1], ids=["alone", "shared"])
@DIMS
def test_cuda_graph(head_dim, visited):
    """Captured once, replayed on other numbers: the sums of dQ, and of dK and dV, begin at 0 each time."""
    shape = Shape(1, 4, 500, head_dim, heads_kv=visited)
    call = arguments(shape)
    if visited is not None:
        call = sharing(call, visited)
    backward(*call)  # compiles, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward(*call)
    for seed in (1, 2):
        for old, new in zip(call[:6], arguments(shape, seed)[:6], strict=True):
            old.copy_(new)
        graph.replay()
        for verdict in GradientOracle(*call[:4], causal=True).judge(*found).values():
            verdict.raise_if_bad("a replayed graph")


# ---------------------------------------------------------------- the same bits


ALL_DIMS = pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
IN_ORDER = [  # shape, window
    ((2, 4, 1000, 1000), None), ((1, 8, 2048, 2048), None), ((1, 2, 300, 1500), None),
    ((1, 2, 1500, 300), None), ((1, 4, 1500, 1500), (300, -1)), ((1, 4, 1500, 1500), (200, 100)),
    ((1, 4, 700, 1500), (500, 0)),
]  # fmt: skip


def deterministic(call: tuple) -> tuple:
    return *call[:6], call[6]._replace(deterministic=True)


@pytest.fixture
def other_work():
    """Launches on another stream, each time more: programs of a kernel then come to SMs at other times."""
    stream, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)

    def start(amount: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(amount):
                torch.mm(x[: 256 * (1 + amount % 8)], x)

    yield start
    torch.cuda.synchronize()


def check_bits(call: tuple, other_work, runs: int = 20) -> tuple[torch.Tensor, ...]:
    """Prints of each gradient that differs, by runs: how many elements, how far at most, and where the first
    and the last of them are. Nothing waits for the GPU before all runs are over."""
    first = backward(*call)
    off = torch.zeros(3, runs, device="cuda", dtype=torch.int64)
    worst = torch.zeros(3, runs, device="cuda")
    ends = torch.zeros(3, runs, 2, device="cuda", dtype=torch.int64)
    for run in range(runs):
        other_work(run)
        for i, (found, expected) in enumerate(zip(backward(*call), first, strict=True)):
            differs = (found != expected).reshape(-1)
            off[i, run] = differs.sum()
            worst[i, run] = (found.float() - expected.float()).abs().max()
            ends[i, run, 0] = differs.to(torch.int8).argmax()
            ends[i, run, 1] = differs.numel() - 1 - differs.flip(0).to(torch.int8).argmax()
    for i, run in off.nonzero().tolist():
        shape = first[i].shape
        places = [tuple(x.item() for x in torch.unravel_index(end, shape)) for end in ends[i, run]]
        print(f"d{'qkv'[i]}, run {run}: {off[i, run]} of {first[i].numel()}, {worst[i, run]:.3g}, {places}")
    assert off.sum().item() == 0
    return first


@MASKS
@ALL_DIMS
@pytest.mark.parametrize("lengths, window", IN_ORDER, ids=str)
def test_the_same_bits(lengths, window, head_dim, causal, other_work):
    """In runs beside other work, and within the budget."""
    batch, heads, seqlen, keys = lengths
    shape = Shape(batch, heads, seqlen, head_dim, causal, heads_kv=heads // 2, seqlen_k=keys)
    q, k, v = make_inputs(shape, device="cuda")
    bounds, scale = mask_window(causal, window), head_dim**-0.5
    saved = torch.randn_like(q), q, k, v, *exact_forward(q, k, v, bounds, scale)
    gradients = check_bits((*saved, Params(bounds, scale, deterministic=True)), other_work)
    for verdict in GradientOracle(*saved[:4], causal, window).judge(*gradients).values():
        verdict.raise_if_bad(shape.label)


@ALL_DIMS
def test_the_same_bits_of_varlen_sequences(head_dim, other_work):
    lengths = ((0, 0), (1, 1), (17, 700), (129, 129), (0, 5), (5, 0), (700, 300), (1500, 1500))
    for window in (None, (200, 100), (300, -1)):
        call = Draw(
            lengths=lengths, varlen=True, batch=1, kv_heads=2, group=2, head_dim=head_dim, dtype="bfloat16",
            causal=window is None, window=window, sm_scale=None, layouts=(0, 0, 0, 0), seed=0,
        )  # fmt: skip
        draws.check(call, "cuda", "hopper", deterministic=True)
        *leaves, d_out = draws.tensors(call, "cuda")
        leaves = [x.requires_grad_() for x in leaves]
        sides = [list(side) for side in zip(*lengths, strict=True)]
        ends = [torch.tensor([0, *side], device="cuda").cumsum(0).int() for side in sides]
        options = call.options | {"deterministic": True, "impl": "hopper"}
        out = attention_varlen(*leaves, *ends, *map(max, sides), **options)
        first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        for run in range(20):
            other_work(run)
            again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
            assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@DIMS
def test_the_same_bits_of_more_programs_than_fit(head_dim, other_work):
    """Long heads: programs wait for each other in one that is not on the GPU at once."""
    for causal in (True, False):
        check_bits(deterministic(arguments(Shape(1, 2, 16384, head_dim, causal))), other_work)


@DIMS
def test_without_turns_bits_differ(head_dim):
    """So the tests above can fail."""
    call = arguments(Shape(1, 8, 2048, head_dim, False))
    first = backward(*call)[0]
    assert any(not torch.equal(backward(*call)[0], first) for _ in range(50))
