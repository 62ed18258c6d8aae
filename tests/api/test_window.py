"""Sliding windows: the portable kernel against the oracle, and planted bugs that only a window reveals."""

from __future__ import annotations

import inspect

import pytest
import torch
from cases import INTERPRETER_REMARKS, judge_forward
from families import configured, forward
from forward_mutations import NOT_FINITE, WRONG_VALUES, Mutation, use_source  # noqa: F401  (a fixture)

from attnlib.bench.oracle import INPUTS, Oracle, make_inputs
from attnlib.bench.shapes import DTYPES, Shape
from attnlib.kernels import portable
from attnlib.kernels.common.signature import mean_keys, mean_rows
from attnlib.kernels.portable import forward_kernel
from attnlib.kernels.portable.configs import ForwardConfig
from attnlib.params import MaskWindow, Params, mask_window

pytestmark = INTERPRETER_REMARKS

# Narrower than a tile, as wide as one, just over, several; one side without a bound; wider than all.
WINDOWS = [(0, 0), (1, 0), (0, 5), (63, 0), (64, 64), (100, 3), (17, -1), (-1, 40), (130, 0), (5000, 5000)]
# Whole tiles; ends within one; more keys than queries, fewer: rows that see none, blocks of such rows.
LENGTHS = [(128, 128), (129, 129), (70, 192), (200, 17), (64, 192), (1, 100), (129, 63)]


def check_window(shape, window, *, causal=False, kind="normal", sm_scale=0.125, device="cpu", config=None):
    """AssertionError unless a call's output and LSE are what the oracle says."""
    q, k, v = make_inputs(shape, kind, device=device)
    params = Params(mask_window(causal, window), sm_scale, return_lse=True, config=config)
    out, lse = forward(portable, q, k, v, params)
    oracle = Oracle(q, k, v, causal, sm_scale, window=window)
    judge_forward(out, lse, oracle, f"{shape.label} window {window}")


# Each width at three of the lengths, each length at several widths; tests/gpu has all of both.
PAIRS = [(window, LENGTHS[(n + step) % 7]) for n, window in enumerate(WINDOWS) for step in (0, 2, 5)]


@pytest.mark.parametrize(("window", "lengths"), PAIRS, ids=str)
def test_widths_and_lengths(window, lengths, device):
    for causal in (True, False):
        check_window(Shape(1, 2, lengths[0], 32, seqlen_k=lengths[1]), window, causal=causal, device=device)


@pytest.mark.parametrize("tile", [(64, 64), (64, 32), (128, 16)], ids=str)
@pytest.mark.parametrize("order", ["two loops", "one loop", "late"])
def test_every_order_of_the_loop(order, tile, device):
    """With a left bound "late" is replaced; without one it has windows of its own."""
    config = ForwardConfig(*tile, 4, 2, order=order, q_in_registers=order == "two loops")
    windows = [(40, 3), (100, 0), (90, -1), (-1, 70)]
    for window, (queries, keys) in zip(windows, LENGTHS[:4], strict=True):
        shape = Shape(1, 4, queries, 32, heads_kv=2, seqlen_k=keys)
        check_window(shape, window, sm_scale=-0.3, device=device, config=config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_every_head_dimension_and_dtype(head_dim, dtype, device):
    shape = Shape(1, 2, 100, head_dim, dtype=dtype, heads_kv=1, seqlen_k=140)
    window = (33, 0) if head_dim % 16 else (70, 20)
    check_window(shape, window, sm_scale=head_dim**-0.5, device=device)


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_input(kind, device):
    check_window(Shape(1, 2, 200, 64), (70, 0), kind=kind, device=device)


def test_a_long_sequence_has_tiles_without_a_mask(device):
    """Three of the five or six that a block of rows visits; the first ones see fewer."""
    for order in ("two loops", "one loop"):
        config = ForwardConfig(64, 64, 4, 2, order=order)
        check_window(Shape(1, 1, 700, 32), (300, 0), device=device, config=config)


def test_a_window_that_holds_all_keys_is_none(device):
    """The same values, up to the order of the tiles."""
    q, k, v = make_inputs(Shape(1, 2, 150, 64, dtype="float32"), device=device)
    for bounds, wide in [((None, 0), (149, 0)), ((None, None), (149, 149))]:
        out, lse = forward(portable, q, k, v, Params(MaskWindow(*bounds), 0.125, return_lse=True))
        again = forward(portable, q, k, v, Params(MaskWindow(*wide), 0.125, return_lse=True))
        torch.testing.assert_close(again[0], out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(again[1], lse, rtol=1e-5, atol=1e-6)


def loads(monkeypatch, shape, seen, config):
    """How many tiles of keys and values one call loads in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    count, load = [0], InterpreterBuilder.create_descriptor_load

    def counting(*args):
        count[0] += 1
        return load(*args)

    q, k, v = make_inputs(shape, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_descriptor_load", counting)
        forward(portable, q, k, v, Params(seen, 0.125, config=config))
    return count[0] - -(-shape.seqlen // config.block_m)  # without those of Q


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts loads of the interpreter")
@pytest.mark.parametrize("order", ["two loops", "one loop"])
def test_no_tile_outside_of_the_window_is_visited(order, monkeypatch):
    config = ForwardConfig(64, 64, 4, 2, order=order)
    shape = Shape(1, 1, 640, 32)
    # A block of rows sees 2 tiles with a window of 64 or fewer, 3 with one of 65 to 128; the first ones see
    # less.
    for left, tiles in [(0, 10), (1, 19), (64, 19), (65, 27), (128, 27), (639, 55), (10**6, 55)]:
        assert loads(monkeypatch, shape, MaskWindow(left, 0), config) == 2 * tiles
    assert loads(monkeypatch, shape, MaskWindow(64, 64), config) == 2 * (10 + 9 + 9)
    assert loads(monkeypatch, shape, MaskWindow(None, 64), config) == 2 * (55 + 9)


MUTATIONS = {
    (shape, window): mutation
    for shape, window, mutation in [
        (Shape(1, 1, 200, 32), (70, 0), Mutation(
            "a query sees one key more on the left",
            "first_key = o_m + (shift - left)", "first_key = o_m + (shift - left) - 1", "", WRONG_VALUES)),
        (Shape(1, 1, 200, 32, seqlen_k=230), (70, 0), Mutation(
            "the left edge is aligned at the top left",
            "first_key = o_m + (shift - left)", "first_key = o_m - left", "", WRONG_VALUES)),
        (Shape(1, 1, 300, 32), (129, 0), Mutation(
            "the first tile in sight is skipped",
            "first = tl.maximum(start + shift - left, 0) // BLOCK_N",
            "first = tl.cdiv(tl.maximum(start + shift - left, 0), BLOCK_N)", "", WRONG_VALUES)),
        (Shape(1, 1, 300, 32), (130, 0), Mutation(
            "tiles on the left edge are not masked",
            "tl.cdiv(tl.maximum(last_row + shift - left, 0), BLOCK_N), last + 1)",
            "first, last + 1)", "", WRONG_VALUES)),
        (Shape(1, 1, 500, 32), (300, 0), Mutation(
            "the tiles in the gap are visited again",
            "gap, width = seen_by_all, tl.maximum(unmasked - seen_by_all, 0)",
            "gap, width = seen_by_all, 0", "", WRONG_VALUES)),
        (Shape(1, 1, 501, 32), (300, 0), Mutation(
            "the gap is in the wrong place",
            "gap, width = seen_by_all,", "gap, width = seen_by_all + 1,", "", WRONG_VALUES)),
        (Shape(1, 1, 129, 32), (3, 0), Mutation(
            "a row whose first tile is all masked subtracts -inf from -inf",
            "EMPTY_ROWS or left is not None", "EMPTY_ROWS", "", NOT_FINITE)),
        (Shape(1, 1, 129, 32), (3, 5), Mutation(
            "the right bound is that of causal",
            "diagonal = shift if right is None else shift + right", "diagonal = shift", "", WRONG_VALUES)),
        (Shape(1, 1, 130, 32), (40, 0), Mutation(
            "keys counted with a sign: those after the last one are seen",
            "before <= earlier.to(tl.uint32)[:, None]", "before.to(tl.int32) <= earlier[:, None]",
            "", WRONG_VALUES)),
    ]
}  # fmt: skip
TWO_LOOPS = ForwardConfig(64, 32, 4, 2, order="two loops")


@pytest.mark.parametrize("call", MUTATIONS, ids=lambda call: MUTATIONS[call].bug)
def test_a_planted_bug_is_caught(call, use_source, device):
    (shape, window), mutation = call, MUTATIONS[call]
    source = inspect.getsource(forward_kernel)
    use_source(source)
    check_window(shape, window, device=device, config=TWO_LOOPS)
    use_source(mutation.of(source))
    with pytest.raises(AssertionError, match=f"is wrong: .*{mutation.verdict}"):
        check_window(shape, window, device=device, config=TWO_LOOPS)


def configuration(q, seen):
    return configured(portable, q, q, q, Params(seen, 0.125)).config


def test_the_keys_that_a_query_sees_choose_the_configuration():
    q = torch.zeros(1, 1, 8192, 128, dtype=torch.float16, device="meta")
    narrow = mean_keys(8192, 8192, MaskWindow(256, 0))
    assert narrow == 257 and mean_keys(8192, 8192, MaskWindow(256, 10)) == 267
    assert mean_keys(8192, 8192, MaskWindow(None, 0)) == mean_keys(8192, 8192, MaskWindow(8191, 0)) == 4096
    for dense in (MaskWindow(None, None), MaskWindow(None, 100)):
        assert mean_keys(100, 8192, dense) == 8192
    assert mean_keys(8192, 100, MaskWindow(50, None)) == 100
    # More queries than keys: the first ones see none.
    assert mean_rows(4096, 512, MaskWindow(None, 0)) == mean_rows(512, 512, MaskWindow(None, 0)) == 256
    assert mean_rows(100, 50, MaskWindow(None, None)) == 100
    if not torch.cuda.is_available():
        assert configuration(q, MaskWindow(256, 0)).order == "one loop"
        assert configuration(q, MaskWindow(2048, 0)).order == "two loops"
        assert configuration(q, MaskWindow(None, 0)) == configuration(q, mask_window(True, None))
    q = torch.zeros(1, 1, 8192, 64, dtype=torch.float16, device="meta")
    if not torch.cuda.is_available():
        assert configuration(q, MaskWindow(None, 0)).order == "late"
        assert configuration(q, MaskWindow(2048, 0)).order == "two loops"
