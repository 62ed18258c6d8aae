"""Varlen sequences of any length: the portable kernel against the oracle, and nothing of a neighbor."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from cases import INTERPRETER_REMARKS
from families import forward, fresh_launches  # noqa: F401  (a fixture)
from forward_mutations import NOT_FINITE, WRONG_VALUES, Mutation, use_source  # noqa: F401  (a fixture)

from attnlib import attention_varlen
from attnlib.bench.oracle import Oracle
from attnlib.bench.shapes import DTYPES
from attnlib.kernels import portable
from attnlib.kernels.common.descriptors import varlen_window
from attnlib.kernels.common.signature import VARLEN_ROWS, Lengths, signature
from attnlib.kernels.portable import forward_kernel, launch
from attnlib.kernels.portable.configs import ForwardConfig
from attnlib.params import MaskWindow, Params, Varlen, mask_window

pytestmark = INTERPRETER_REMARKS

# Queries and keys of each sequence. Empty ones at both ends and between; a row alone; ends within a tile and
# at its edge; more keys than queries and fewer; queries without keys, keys without queries.
LENGTHS = {
    "equal": [(70, 70), (70, 70)],
    "many": [(0, 0), (1, 1), (17, 17), (64, 64), (0, 0), (129, 129), (0, 0)],
    "cross": [(1, 129), (129, 1), (17, 64), (64, 17), (5, 0), (0, 5), (100, 140)],
    "one": [(33, 90)],
}
WINDOWS = [
    (False, None), (True, None), (False, (20, 0)), (False, (64, 7)), (True, (40, -1)), (False, (-1, 9))
]  # fmt: skip


CAUSAL = Params(MaskWindow(None, 0), 0.2, return_lse=True)


def varlen_inputs(lengths, heads=2, kv_heads=1, head_dim=32, dtype=torch.float16, device="cpu", seed=0):
    """(q, k, v), Varlen."""
    generator = torch.Generator(device).manual_seed(seed)
    columns = [list(column) for column in zip(*lengths, strict=True)]
    ends = [torch.tensor([0, *column]).cumsum(0).to(device, torch.int32) for column in columns]
    sizes = [(sum(columns[0]), heads), (sum(columns[1]), kv_heads), (sum(columns[1]), kv_heads)]
    tensors = [torch.randn(*size, head_dim, generator=generator, device=device).to(dtype) for size in sizes]
    return tensors, Varlen(*ends, *map(max, columns))


def check_varlen(lengths, causal=False, window=None, sm_scale=0.2, config=None, **arguments):
    """AssertionError unless a call's output and LSE are what the oracle says."""
    tensors, varlen = varlen_inputs(lengths, **arguments)
    params = Params(mask_window(causal, window), sm_scale, varlen, return_lse=True, config=config)
    out, lse = forward(portable, *tensors, params)
    assert out.shape == tensors[0].shape and out.dtype == tensors[0].dtype
    oracle = Oracle(*tensors, causal, sm_scale, window=window, cu_seqlens=varlen[:2])
    oracle.judge(out, lse).raise_if_bad(f"{lengths} window {window}")
    out = out.transpose(0, 1)  # [H, Tq, D], as the LSE
    assert not out[oracle.lse == -math.inf].any(), f"{lengths} is wrong: a row that sees no key is not 0"


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "window"), WINDOWS, ids=str)
def test_every_length_and_window(lengths, causal, window, device):
    check_varlen(LENGTHS[lengths], causal, window, device=device)


@pytest.mark.parametrize("order", ["two loops", "one loop", "late"])
@pytest.mark.parametrize("tile", [(64, 64), (64, 16)], ids=str)
def test_every_order_of_the_loop(order, tile, device):
    config = ForwardConfig(*tile, 4, 2, order=order, q_in_registers=order == "two loops", heads_per_section=2)
    for causal, window in WINDOWS[1:3]:
        check_varlen(LENGTHS["cross"], causal, window, -0.3, config, heads=4, kv_heads=2, device=device)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_every_head_dimension_and_dtype(head_dim, dtype, device):
    causal, window = (True, None) if head_dim % 16 else (False, (30, 5))
    check_varlen(
        [(70, 70), (0, 3), (33, 100)], causal, window, head_dim**-0.5, heads=3, kv_heads=3,
        head_dim=head_dim, dtype=dtype, device=device,
    )  # fmt: skip


def test_equal_lengths_are_a_batch(device):
    """Bit by bit, in the same configuration."""
    (q, k, v), varlen = varlen_inputs([(150, 150)] * 3, heads=4, kv_heads=2, device=device)
    config = ForwardConfig(64, 64, 4, 2, order="two loops")
    params = CAUSAL._replace(config=config)
    out, lse = forward(portable, q, k, v, params._replace(varlen=varlen))
    q, k, v = (x.unflatten(0, (3, 150)).transpose(1, 2) for x in (q, k, v))
    want, want_lse = forward(portable, q, k, v, params)
    assert torch.equal(out, want.transpose(1, 2).flatten(0, 1))
    assert torch.equal(lse, want_lse.transpose(0, 1).flatten(1))


def check_neighbors(causal, window, bad, device):
    """AssertionError if a sequence of values that are not finite changes a bit of another."""
    lengths = [(70, 70), (40, 50), (1, 9), (17, 64), (129, 129)]
    (q, k, v), varlen = varlen_inputs(lengths, device=device)
    params = Params(mask_window(causal, window), 0.2, varlen, return_lse=True)
    out, lse = forward(portable, q, k, v, params)
    for b in range(len(lengths)):
        rows, keys = (slice(*ends[b : b + 2].tolist()) for ends in varlen[:2])
        poisoned = [x.clone() for x in (q, k, v)]
        for x, part in zip(poisoned, (rows, keys, keys), strict=True):
            x[part] = bad
        found, found_lse = forward(portable, *poisoned, params)
        others = torch.ones(len(q), dtype=torch.bool, device=device)
        others[rows] = False
        same = torch.equal(found[others], out[others]) and torch.equal(found_lse[:, others], lse[:, others])
        assert same, f"sequence {b} reaches another"
        assert not found[rows].isfinite().any()


@pytest.mark.parametrize(
    ("causal", "window", "bad"),
    [(*mask, bad) for mask, bad in zip(WINDOWS[:4], (math.nan, math.inf) * 2, strict=True)],
    ids=str,
)
def test_a_neighbor_that_is_not_finite_changes_no_bit(causal, window, bad, device):
    """Its rows lie before and after in memory, where a tile of a sequence goes on."""
    check_neighbors(causal, window, bad, device)


def test_memory_around_the_rows_is_left_alone(device):
    """The output is one block of memory; a sequence writes its own rows, and every row is written."""
    (q, k, v), varlen = varlen_inputs(LENGTHS["many"], device=device)
    q, k, v = (torch.cat([x.new_full((64, *x.shape[1:]), math.nan), x])[64:] for x in (q, k, v))
    params = CAUSAL._replace(varlen=varlen)
    out, lse = forward(portable, q, k, v, params)  # poisoned with NaN by conftest
    assert out.isfinite().all() and lse.isfinite().all()


def test_layouts(device):
    """Heads before rows, one projection of q, k and v, and what a descriptor can't express."""
    (q, k, v), varlen = varlen_inputs([(70, 70), (33, 33)], kv_heads=2, device=device)
    params = CAUSAL._replace(varlen=varlen)
    want, want_lse = forward(portable, q, k, v, params)
    qkv = torch.stack([q, k, v], 1).unbind(1)
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    apart = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]
    for tensors in (qkv, swapped, apart):
        assert not any(x.is_contiguous() for x in tensors)
        out, lse = forward(portable, *tensors, params)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_more_sequences_than_a_grid_has_rows(monkeypatch, fresh_launches, device):
    monkeypatch.setattr(launch, "GRID_YZ", 1)
    config = ForwardConfig(64, 32, 4, 2, heads_per_section=2)
    check_varlen(LENGTHS["cross"], True, heads=4, kv_heads=2, config=config, device=device)


def test_a_launch_depends_on_the_longest_lengths_and_no_other():
    """So that a captured graph can be replayed with other lengths, and no number is read from the device."""
    (q, k, v), varlen = varlen_inputs([(40, 60), (60, 40)])
    hidden = varlen._replace(
        cu_seqlens_q=varlen.cu_seqlens_q.to("meta"), cu_seqlens_k=varlen.cu_seqlens_k.to("meta")
    )
    calls = [signature(CAUSAL._replace(varlen=x), q, k, q, k, v) for x in (hidden, varlen)]
    assert calls[0] == calls[1] and calls[0].lengths == (2, 60, 60)


@pytest.mark.parametrize("longest", [2**31 - 1, 2**62])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_longest_length_beyond_all_tokens(impl, longest, device):
    """It bounds nothing, and nothing is launched for rows that are not there."""
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(9, 2, 16, device=device, requires_grad=True) for _ in range(3))
    found, expected = (
        attention_varlen(q, k, v, offsets, offsets, most, most, causal=True, impl=impl)
        for most in (longest, 5)
    )
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("side", ["q", "k"])
def test_too_many_varlen_rows(side):
    (q, k, v), varlen = varlen_inputs([(1, 1)])
    call = signature(CAUSAL._replace(varlen=varlen), q, k, q, k, v)
    assert call.lengths == Lengths(1, 1, 1) and call.dimensions() == (1, 2, 1, 1, 1)
    call = call._replace(**{side: (VARLEN_ROWS + 1, 1, 8)})
    with pytest.raises(ValueError, match=r"^q, k: expected at most 2\^30 rows and keys of varlen sequences"):
        call.dimensions()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_addresses_of_a_varlen_window(itemsize):
    """In 64 bits every row of a sequence is where it lies, and the first one beyond it is out of bounds."""
    tokens, heads, head_dim = 1000, 3, 64
    row, head = heads * head_dim, head_dim
    shape, strides = varlen_window((tokens, heads, head_dim), (row, head, 1))
    assert all(stride * itemsize in range(16, 2**40, 16) for stride in strides[:-1])
    assert all(0 < size < 2**31 for size in shape)
    for begin, end in [(0, 1), (10, 10), (200, 777), (999, 1000)]:
        for i in range(end - begin + 1):
            place = [VARLEN_ROWS, end, 2, VARLEN_ROWS - (end - begin) + i, 5]
            inside = all(0 <= x < size for x, size in zip(place, shape, strict=True))
            assert inside == (i < end - begin)
            address = sum(x * stride for x, stride in zip(place, strides, strict=True)) * itemsize % 2**64
            assert address == ((begin + i) * row + 2 * head + 5) * itemsize


MUTATIONS = [
    Mutation("keys are those of the sequence before", "end_k - tl.load(cu_k + i_b)",
             "end_k - tl.load(cu_k + tl.maximum(i_b - 1, 0))", "", WRONG_VALUES),
    Mutation("the diagonal is that of the longest sequence",
             "shift = S_k - S_q", "shift = tl.load(cu_k + 1) - tl.load(cu_q + 1)", "", WRONG_VALUES),
    Mutation("rows are stored one too far", "tl.sub(VARLEN_ROWS, S_q) + start, 0]",
             "tl.sub(VARLEN_ROWS, S_q) + start + 1, 0]", "", NOT_FINITE),
    Mutation("the LSE of every sequence is that of the first", "T_q + (end_q - S_q)", "T_q", "", "LSE: "),
]  # fmt: skip
THREE = [(70, 70), (33, 100), (140, 150)]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug)
def test_a_planted_bug_is_caught(mutation, use_source, device):
    source = inspect.getsource(forward_kernel)
    use_source(source)
    check_varlen(THREE, True, device=device)
    use_source(mutation.of(source))
    with pytest.raises(AssertionError, match=f"is wrong: .*{mutation.verdict}"):
        check_varlen(THREE, True, device=device)


def test_keys_of_the_next_sequence_would_be_seen(use_source, device):
    """The mask hides their scores, and their weights are 0; but 0 times NaN is NaN."""
    source, right = inspect.getsource(forward_kernel), "end_k, i_kv, tl.sub(VARLEN_ROWS, S_k)"
    wrong = "tl.load(cu_k + 5), i_kv, tl.sub(VARLEN_ROWS, tl.load(cu_k + 5) - end_k + S_k)"
    assert source.count(right) == 1
    use_source(source.replace(right, wrong))
    check_varlen(LENGTHS["many"][1:6], True, device=device)
    with pytest.raises(AssertionError, match="reaches another"):
        check_neighbors(True, None, math.nan, device)
