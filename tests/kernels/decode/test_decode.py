"""attention_decode against fp64: lengths, pages, splits, windows, layouts; and what it promises besides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn, with_more
from decode_cases import CASES, ODD, DecodeCase, check, judge, make, params_of, run
from families import forget_launches
from torch.autograd import forward_ad

from attnlib import attention, attention_decode
from attnlib.kernels import decode
from attnlib.kernels.common import device as kernel_device
from attnlib.kernels.common.signature import signature
from attnlib.kernels.decode import few_queries, launch, line
from attnlib.kernels.decode.launch import call_of
from attnlib.kernels.reference.decode import held
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import DecodeParams, Params, mask_window

pytestmark = INTERPRETER_REMARKS


WIDTHS, DTYPES = (8, 40, 128, 256), ("float16", "bfloat16", "float32")
KINDS, SCALES = ("large", "outlier", "constant", "sink"), ("nothing", "all", "heads", "pairs")
PAIRED = [f"{kind} {dtype}" for kind, dtype in in_turn(KINDS, DTYPES)]
PAIRED += [f"D {width} {dtype}" for width, dtype in in_turn(WIDTHS, DTYPES)]
PAIRED += [f"FP8, D {width} {dtype}" for width, dtype in in_turn(WIDTHS, DTYPES[:2])]
PAIRED += [f"FP8{paged}, scales of {scales}" for scales, paged in in_turn(SCALES, ("", " paged"))]
PAIRS = {f"{x} {dtype}" for x in (*KINDS, *(f"D {d}" for d in WIDTHS)) for dtype in DTYPES}
PAIRS |= {f"FP8, D {width} {dtype}" for width in WIDTHS for dtype in DTYPES[:2]}
PAIRS |= {f"FP8{paged}, scales of {scales}" for scales in SCALES for paged in ("", " paged")}
OTHERS = [name for name in CASES if name not in PAIRS]
SEVEN = [name for name in OTHERS if ", 7" in name and name != "odd lengths, 7"]
"""Splits into 7 parts, as into 2."""


@pytest.mark.parametrize("name", PAIRED + with_more((x for x in OTHERS if x not in SEVEN), SEVEN))
def test_case(name, device):
    check(CASES[name], device)


def test_cases_are_named_apart():
    from decode_cases import _cases

    assert len(_cases()) == len(CASES)
    assert PAIRS <= set(CASES)


@pytest.mark.parametrize("split", ["fixed", "stream_k", 3])
def test_equal_calls_have_equal_bits_wherever_they_are_merged(split, device):
    case = DecodeCase("bits", (700, 33), split=split)
    inputs = make(case, device)
    out, lse = run(case, inputs)
    for again in (case, DecodeCase("bits", (700, 33), split=split, same_launch=True)):
        for found, expected in zip(run(again, inputs), (out, lse), strict=True):
            assert torch.equal(found, expected)


def test_splits_agree(device):
    case = DecodeCase("splits", ODD)
    inputs = make(case, device)
    splits = ("none", "fixed", "stream_k", 5)
    outs = [run(DecodeCase("split", ODD, split=split), inputs)[0] for split in splits]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=2e-3)


def test_one_query_to_a_full_cache_is_attention(device):
    q, k, v, *_ = make(DecodeCase("full", None, room=200, batch=2), device)
    torch.testing.assert_close(attention_decode(q, k, v), attention(q, k, v, causal=True), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in CASES if "stream_k" in name or "D 40" in name])
def test_the_reference(name, monkeypatch):
    """What runs on a CPU without Triton's interpreter."""
    monkeypatch.setattr(kernel_device, "interpreted", lambda: False)
    monkeypatch.setattr(decode, "forward", None)
    case = replace(CASES[name], same_launch=False)
    inputs = make(case, "cpu")
    judge(case, inputs, *run(case, inputs))


# ---------------------------------------------------------------- layouts


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in other layouts."""
    B, H, S, D = x.shape
    apart = x.new_zeros(B, H, S, D, 2)
    apart[..., 0] = x
    shifted = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    return {
        "rows before heads": x.transpose(1, 2).contiguous().transpose(1, 2),
        "elements apart": apart[..., 0],
        "an odd address": shifted.copy_(x),
        "odd strides": x.new_zeros(B, H, S, D + 1)[..., :D].copy_(x),
        "values before all": x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    }


LAYOUTS = ["rows before heads", "elements apart", "an odd address", "odd strides", "values before all"]


@pytest.mark.parametrize(("layout", "page"), in_turn(LAYOUTS, [None, 16]))
def test_layouts(layout, page, device):
    case = DecodeCase(layout, (0, 17, 150), page=page, split="stream_k")
    inputs = make(case, device)
    q, k, v = (views(x)[layout] for x in inputs[:3])
    judge(case, inputs, *run(case, inputs._replace(q=q, k=k, v=v)))
    judge(case, inputs, *run(case, inputs._replace(v=v)))  # k and v need not be laid out alike


def test_an_expanded_cache_and_a_table_apart(device):
    case = DecodeCase("expanded", None, room=100, batch=3, split="stream_k")
    q, k, v, *_ = make(case, device)
    one = attention_decode(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1))
    assert torch.equal(one[0], attention_decode(q[:1], k[:1], v[:1])[0])
    case = DecodeCase("table", (17, 150), page=16, split="stream_k")
    inputs = make(case, device)
    table = torch.stack([inputs.table, inputs.table], -1)[..., 0]
    wide = torch.stack([inputs.lengths, inputs.lengths], -1)[..., 0]
    judge(case, inputs, *run(case, inputs._replace(table=table, lengths=wide)))


def test_queries_that_overlap(device):
    """PyTorch lays out a tensor like them with columns apart; the kernels write rows in one piece."""
    q, k, v, *_ = make(DecodeCase("overlap", None, room=100, batch=2, queries=3, head_dim=16), device)
    q = torch.randn(2, 4, 18, device=device).half().unfold(2, 16, 1)
    assert q.stride() == (72, 18, 1, 1) and torch.empty_like(q).stride(-1) != 1
    for split in ("none", "fixed"):
        expected = attention_decode(q.contiguous(), k, v, split=split)
        assert torch.equal(attention_decode(q, k, v, split=split), expected)
    assert torch.equal(attention(q, k, v, impl="decode"), attention(q.contiguous(), k, v, impl="decode"))


# ---------------------------------------------------------------- caches in FP8


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_any_value(dtype, page, device):
    """Not powers of two, and from page to page a thousand times larger or smaller; against fp64."""
    case = DecodeCase("scales", (70, 33), dtype=dtype, page=page, scales="pairs", split="fixed")
    inputs = make(case, device)
    q, k, v, lengths, table, *_ = inputs
    k_scale, v_scale = (torch.rand(k.shape[:2], device=device) * 0.1 for _ in range(2))
    v_scale[::2] *= 1000
    params = DecodeParams(mask_window(True, None), 64**-0.5, lengths, table, k_scale=k_scale, v_scale=v_scale)
    named = {"lengths": lengths, "page_table": table, "k_scale": k_scale, "v_scale": v_scale}
    out, lse = attention_decode(q, k, v, **named, return_lse=True)
    for i_b, (keys, values) in enumerate(held(k, v, params, len(q))):
        expected, expected_lse = attention_fp64(q[i_b][None].double(), keys[None], values[None])
        largest = expected.abs().amax().item()
        error = (out[i_b] - expected[0]).abs().max().item()
        assert error <= 4 * torch.finfo(q.dtype).eps * largest
        torch.testing.assert_close(lse[i_b].double(), expected_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("largest", [1e-25, 1.0, 1e30, 0.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_any_size_become_float16(largest, dtype, device):
    """Rows of bfloat16 beyond float16's range, and rows with numbers 10^6 times as large as others."""
    if dtype == "float16" and largest not in (0.0, 1.0):
        largest = 1e4 if largest > 1 else 1e-4
    q, k, v = (torch.randn(2, heads, S, 64, device=device) for heads, S in ((4, 1), (2, 70), (2, 70)))
    q, k, v = (q.double() * largest).to(getattr(torch, dtype)), *(x.to(torch.float8_e4m3fn) for x in (k, v))
    q[..., ::7] = (q[..., ::7].double() * 1e-6).to(q.dtype)
    one = torch.ones(k.shape[:2], device=device)
    scale = 1e-38 if largest == 0 else 0.1 / max(largest, 1e-25)
    out, lse = attention_decode(q, k, v, k_scale=one, v_scale=one, sm_scale=scale, return_lse=True)
    for i_b in range(len(q)):
        cache = (x[i_b, None].double() for x in (k, v))
        expected, expected_lse = attention_fp64(q[i_b, None].double(), *cache, sm_scale=scale)
        error = (out[i_b] - expected[0]).abs().max().item()
        assert error <= 4 * torch.finfo(q.dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(lse[i_b].double(), expected_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", ["none", "stream_k"])
def test_small_weights_of_many_keys_in_fp8_are_kept(split, device):
    """4095 weights of 2^-26 beside one of 1, whose value is 0: in float16 they would be 0."""
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 4096, 64), torch.ones(1, 1, 4096, 64)
    q[..., 0], k[..., 7, 0], v[..., 7, :] = 1, 16, 0
    q, (k, v) = q.to(device, torch.bfloat16), (x.to(device, torch.float8_e4m3fn) for x in (k, v))
    one = torch.ones(1, 1, device=device)
    out = attention_decode(q, k, v, k_scale=one, v_scale=one, sm_scale=26 * math.log(2) / 16, split=split)
    torch.testing.assert_close(out.float(), torch.full_like(out, 4095 * 2.0**-26).float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("sm_scale", [2e5, 6e5, -3e6])
@pytest.mark.parametrize("split", ["none", "stream_k"])
def test_scores_from_which_float32_takes_no_15(split, sm_scale, device):
    """What is left of the maximum is rounded there, and a weight must not become 2^16: float16 has none."""
    q, k, v = (torch.randn(4, heads, S, 64, device=device) for heads, S in ((2, 1), (2, 300), (2, 300)))
    q, (k, v) = q.bfloat16(), (x.to(torch.float8_e4m3fn) for x in (k, v))
    out = attention_decode(q, k, v, sm_scale=sm_scale, split=split)
    expected, _ = attention_fp64(q.double(), k.double(), v.double(), sm_scale=sm_scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("what", ["at an odd byte", "with odd strides", "of columns apart"])
def test_caches_in_fp8_whose_columns_are_no_pairs(what, device):
    """They are read number by number: two neighbors are no element of 16 bits."""
    D = 32
    q, k, v = (torch.randn(2, heads, S, D, device=device) for heads, S in ((4, 1), (2, 70), (2, 70)))
    q, k, v = q.half(), *(x.to(torch.float8_e4m3fn) for x in (k, v))
    one = torch.ones(k.shape[:2], device=device)
    expected = attention_decode(q, k, v, k_scale=one, v_scale=one)

    def moved(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(*x.shape[:3], 2 * D + 1, dtype=torch.uint8, device=device)
        if what == "at an odd byte":
            places = torch.zeros(x.numel() + 1, dtype=torch.uint8, device=device)[1:].view(x.shape)
        else:
            places = wide[..., : 2 * D : 2] if what == "of columns apart" else wide[..., :D]
        return places.copy_(x.view(torch.uint8)).view(x.dtype)

    out = attention_decode(q, moved(k), moved(v), k_scale=one, v_scale=one)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)


def test_a_gpu_without_fp8_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel_device, "interpreted", lambda: False)
    monkeypatch.setattr(kernel_device, "capability", lambda index: (8, 0))
    q, cache = torch.zeros(1, 2, 1, 64).half(), torch.zeros(1, 2, 16, 64).to(torch.float8_e4m3fn)
    params = DecodeParams(mask_window(True, None), 1.0)
    message = "^k_cache: torch.float8_e4m3fn needs a GPU of compute capability 8.9 or more, got 8.0$"
    with pytest.raises(ValueError, match=message):
        decode.forward(q, cache, cache, params)


# ---------------------------------------------------------------- what is read, and what is written


def test_lengths_beyond_the_cache_count_as_full(device, monkeypatch):
    """On a GPU nobody looks at them before; a kernel must not read beyond the cache."""
    monkeypatch.setattr("attnlib.dispatch.check_decode_values", lambda *_: None)
    q, k, v, *_ = make(DecodeCase("full", None, room=64, batch=2), device)
    lengths = torch.tensor([1000, -5], dtype=torch.int32, device=device)
    out, lse = attention_decode(q, k, v, lengths=lengths, return_lse=True, split="stream_k")
    torch.testing.assert_close(out[0], attention_decode(q, k, v)[0], rtol=0, atol=1e-3)
    assert not out[1].any() and (lse[1] == -math.inf).all()


def test_no_room_and_no_row(device):
    q = torch.randn(2, 4, 3, 16, device=device).half()
    out, lse = attention_decode(q, q[:, :2, :0], q[:, :2, :0], return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert attention_decode(q[:0], q[:0], q[:0]).shape == (0, 4, 3, 16)
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    pages = q.new_zeros(0, 2, 16, 16)
    assert not attention_decode(q, pages, pages, page_table=table).any()


def test_a_value_out_of_sight_reaches_nobody(device):
    """Keys before the window hold NaN."""
    case = DecodeCase("hidden", (400,), window=(100, 0), split="stream_k")
    inputs = make(case, device)
    for cache in (inputs.k, inputs.v):
        cache[:, :, :299] = math.nan
    judge(case, inputs, *run(case, inputs))


@pytest.mark.parametrize("grad", ["q", "k_cache", "v_cache"])
def test_gradients_are_refused(grad, device):
    q, k, v, *_ = make(DecodeCase("grad", None, room=20, batch=1), device)
    tensors = {"q": q, "k_cache": k, "v_cache": v}
    tensors[grad].requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{grad}: expected a tensor that does not require grad"):
        attention_decode(**tensors)
    with torch.no_grad():
        assert not attention_decode(**tensors).requires_grad


def test_who_looks_on_is_told_no(device):
    q, k, v, *_ = make(DecodeCase("looked at", None, room=20, batch=1), device)
    with pytest.raises(NotImplementedError, match="attention_decode under torch.func: not supported"):
        torch.vmap(attention_decode)(q[None], k[None], v[None])
    with pytest.raises(RuntimeError, match="no forward-mode derivative"), forward_ad.dual_level():
        attention_decode(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize(("pages", "wide"), [((1 << 24) - 2, False), (1 << 24, True)])
def test_when_places_need_more_than_31_bits(pages, wide):
    """A page of 16 keys has 128 units of 8 numbers: 2^24 pages have 2^31."""
    strides = (256, 64, 64, 1), (1024, 1024, 64, 1), (1024, 1024, 64, 1)
    call = launch.Call(
        torch.Size((1, 4, 1, 64)), torch.Size((pages, 1, 16, 64)), strides, torch.Size((1, 4)), 4, True,
        False, (True, True), torch.float16, -1, mask_window(True, None), 0.1, False, "none", None,
    )  # fmt: skip
    constants = launch.prepare(call).launches.launches[0].constants
    assert constants["WIDE"] == wide and constants["ALIKE"]


@pytest.mark.parametrize("pages", [(1 << 17) - 1, 1 << 17])
def test_room_for_as_many_keys_as_have_numbers(pages):
    """A page may be used often: 2^17 times one of 2^14 keys are 2^31."""
    strides = (256, 64, 64, 1), (1 << 20, 1 << 20, 64, 1), (1 << 20, 1 << 20, 64, 1)
    call = launch.Call(
        torch.Size((1, 4, 1, 64)), torch.Size((1, 1, 1 << 14, 64)), strides, torch.Size((1, pages)), pages,
        True, False, (True, True), torch.float16, -1, mask_window(True, None), 0.1, False, "none", None,
    )  # fmt: skip
    if pages << 14 < 1 << 31:
        assert launch.prepare(call).launches.launches[0].scalars["S"] == pages << 14
        return
    message = "^k_cache: expected room for at most 2147483392 keys of a sequence, got 2147483648$"
    with pytest.raises(ValueError, match=message):
        launch.prepare(call)


def test_launches_that_count_are_not_prepared_for_others(device):
    """`node.cpp` has no counters for them."""
    q, k, v, *_ = make(DecodeCase("counted", None, room=300, batch=1, kv_heads=1), device)
    params = DecodeParams(mask_window(False, None), 0.1, split=2)
    config = launch.configuration(launch.call_of(q, k, v, None, params))
    for same_launch in (False, True):
        own = replace(config, same_launch=same_launch)
        found = decode.prepared(q, k, v, params._replace(config=own))
        asked = signature(Params(params.window, 0.1, config=own), q, k, q, k, v)
        assert (found is None) == (few_queries.prepare(asked) is None) == same_launch


@pytest.mark.parametrize("page", [None, 16, 128])
def test_places_of_63_bits(page, device, monkeypatch):
    """As in caches that are too large for this test."""
    monkeypatch.setattr(launch, "_reach", lambda *call: 1 << 40)
    forget_launches()
    for unlike in (False, True):
        check(DecodeCase("far", (17, 290), page=page, unlike=unlike, split="stream_k"), device)
    forget_launches()


def test_which_sequences_are_known_to_be_equal(device):
    """Those without lengths, and one alone; of pages none, as their programs have other registers."""
    q, k = torch.zeros(2, 4, 1, 64, device=device), torch.zeros(2, 2, 96, 64, device=device)
    lengths = torch.tensor([96, 96], dtype=torch.int32, device=device)
    table = torch.zeros(2, 6, dtype=torch.int32, device=device)

    def equal(batch: int, lengths=None, table=None) -> bool:
        cache = k[:batch] if table is None else torch.zeros(6, 2, 16, 64, device=device)
        params = DecodeParams(mask_window(True, None), 0.1, lengths, table, False, None)
        return launch.work_of(launch.call_of(q[:batch], cache, cache, table, params)).equal

    assert equal(2) and equal(1) and equal(1, lengths[:1])
    assert not equal(2, lengths) and not equal(1, lengths[:1], table[:1])


@pytest.mark.parametrize(("short", "in_parts"), [(0, False), (1, False), (3, False), (4, True), (20, False)])
@pytest.mark.parametrize("page", [None, 16])
def test_pairs_that_fill_the_gpu_are_split_where_some_are_longer(short, in_parts, page, device, monkeypatch):
    """20 multiprocessors. Pairs have three tiles of 256 keys, or two: 60 tiles less one for each short pair,
    and 19 of the longest have 57."""
    monkeypatch.setattr(launch, "sms_of", lambda index: 20)
    forget_launches()
    lengths = (300,) * short + (600 if short < 20 else 300,) * (20 - short)
    check(DecodeCase("filling", lengths, heads=1, kv_heads=1, room=600, page=page, in_parts=in_parts), device)
    forget_launches()


@pytest.mark.parametrize(("shares", "whole"), [(3, 0), (4, 4), (5, 4)])
def test_no_pair_is_left_to_nobody(shares, whole, device):
    """With fewer programs than pairs a configuration that asks for whole ones is not followed."""
    case = DecodeCase("four pairs", (300, 290), split="stream_k", whole=4, shares=shares)
    inputs = make(case, device)
    call = call_of(*inputs[:3], None, params_of(case, inputs))
    kernels = launch.prepare(call).launches.launches
    assert [kernel.constants["WHOLE"] for kernel in kernels] == [whole, whole]


# ---------------------------------------------------------------- the schedule, in numbers


@pytest.mark.parametrize("total", [1, 2, 5, 31, 64, 1000])
@pytest.mark.parametrize("programs", [1, 2, 3, 31, 132])
def test_each_tile_has_one_owner_and_shares_are_equal(total, programs):
    """`share_of` and `owner_of` as they are in the kernels, on numbers."""
    fewer, longer = divmod(total, programs)
    begins = [program * fewer + min(program, longer) for program in range(programs + 1)]
    sizes = [end - begin for begin, end in zip(begins, begins[1:], strict=False)]
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    for tile in range(total):
        ahead = longer * (fewer + 1)
        owner = tile // (fewer + 1) if tile < ahead else longer + (tile - ahead) // max(fewer, 1)
        assert begins[owner] <= tile < begins[owner + 1]


def test_the_numbers_above_are_those_of_the_kernels():
    import inspect

    source = inspect.getsource(line)
    assert "program * (total // programs) + tl.minimum(program, total % programs)" in source
    assert "return total // WHOLE >= longest" in source
    assert "tile // (fewer + 1), longer + (tile - ahead) // tl.maximum(fewer, 1))" in source
