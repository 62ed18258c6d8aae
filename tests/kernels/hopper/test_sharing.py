"""Grouped heads, backward: programs that share a key head, in the emulator, and when they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from emulated import Call, check_backward

from attnlib.kernels.common import device
from attnlib.kernels.common.signature import Lengths, Signature
from attnlib.kernels.hopper import launch_backward, sharing
from attnlib.kernels.hopper.configs_backward import (
    BackwardKind,
    HopperBackwardConfig,
    backward_config,
    hopper_backward_config,
)
from attnlib.params import MaskWindow

pytestmark = INTERPRETER_REMARKS

CALLS = {
    "64 columns": Call(64, 4, 1, 150, 200),
    "128 columns, batches, dense": Call(128, 4, 2, 150, 201, B=2, causal=False),
    "256 columns, batches": Call(256, 4, 2, 147, 201, B=2),
    "80 columns": Call(80, 2, 1, 70, 100),
    "96 columns, bfloat16": Call(96, 2, 1, 70, 100, dtype=torch.bfloat16),
    "136 of 160 columns, a negative scale": Call(136, 2, 1, 70, 100, sm_scale=-0.1),
    "192 columns": Call(192, 2, 1, 70, 99),
    "192 columns, values of 128": Call(192, 4, 2, 70, 100, D_v=128),
    "keys that nobody sees": Call(64, 2, 1, 100, 400, window=(30, -1)),
    "keys that nobody sees, 256 columns": Call(256, 2, 1, 60, 200, window=(30, -1)),
    "varlen": Call(64, 4, 2, varlen=((40, 70), (300, 90), (1, 200))),
    "varlen, 256 columns": Call(256, 4, 2, varlen=((40, 70), (150, 90), (5, 9))),
}


def config_of(call: Call, **changes) -> HopperBackwardConfig:
    own = call.D, call.deterministic
    config = hopper_backward_config(*own)
    if call.D_v is not None:
        config = backward_config(call.D, call.D_v, call.deterministic)
    return replace(config, **changes)


@pytest.mark.parametrize(("name", "added"), in_turn(CALLS, (True, False)))
def test_programs_share_a_key_head(name: str, added: bool) -> None:
    """With one for each group, which shares nothing, test_emulated_kernels runs calls of all widths."""
    call = CALLS[name]
    kernel = check_backward(replace(call, config=config_of(call, visited=1, added=added)), seed=1)
    assert all(report.unwaited == () for report in kernel.reports)


@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
@pytest.mark.parametrize("D", [64, 256])
def test_a_program_visits_some_of_the_query_heads(D: int, added: bool) -> None:
    call = Call(D, 8, 2, 70, 90)
    check_backward(replace(call, config=config_of(call, visited=2, added=added)), "late")


@pytest.mark.parametrize("D", [64, 256])
def test_sums_apart_have_the_same_bits_in_every_order(D: int) -> None:
    call = Call(D, 2, 1, 130, 150, deterministic=True)
    call = replace(call, config=config_of(call, visited=1, added=False))
    kernel, found = check_backward(call, sms=3), set()
    for seed, (order, sms) in enumerate((("eager", 1), ("late", 2), ("random", 5), ("random", 2))):
        kernel.options["sms"] = sms
        kernel.repeat(order, seed)
        found.add(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in kernel.tensors))
    assert len(found) == 1


def test_a_fixed_order_has_sums_apart() -> None:
    with pytest.raises(ValueError, match="^added: expected False with deterministic=True and visited=1, got"):
        replace(hopper_backward_config(64, deterministic=True), visited=1)


@pytest.mark.parametrize("visited", [0, 3, 8])
def test_what_a_program_visits_divides_the_group(visited: int) -> None:
    config = replace(hopper_backward_config(64), visited=visited)
    expected = f"^visited: expected a divisor of the group of 4 query heads, got {visited}$"
    with pytest.raises(ValueError, match=expected):
        sharing.query_heads(signature(64, 1, 8, 2, 300, config))


# ---------------------------------------------------------------- memory and launches


def signature(
    D: int, B: int, H: int, H_kv: int, S: int, config: HopperBackwardConfig, **more
) -> Signature:
    q, k = (B, H, S, D), (B, H_kv, S, D)
    strides = tuple(torch.empty(shape, device="meta").stride() for shape in (q, q, k, k, q))
    window, lengths = more.get("window", MaskWindow(None, 0)), None
    if more.get("varlen"):
        q, k, lengths = (B * S, H, D), (B * S, H_kv, D), Lengths(B, S, S)
        strides = tuple(torch.empty(shape, device="meta").stride() for shape in (q, q, k, k, q))
    return Signature(q, k, strides, torch.float16, -1, window, 0.1, lengths, False, config)


def test_sections_of_varlen_sequences() -> None:
    """Without a mask as many heads as in a batch of the mean length, or of half of the longest; under one as
    the longest sequence says, and so beyond 128 columns and where sums have an order."""

    def heads(D: int, longest: int, window: MaskWindow, deterministic: bool = False) -> int:
        kind = BackwardKind(masked=window.right == 0, varlen=True, float16=True)
        config = hopper_backward_config(D, deterministic, stays=True, kind=kind)
        call = signature(D, 4, 16, 16, 4096, config, varlen=True, window=window)
        return sharing.sections(call._replace(lengths=Lengths(4, longest, longest)), 1).size

    dense, causal = MaskWindow(None, None), MaskWindow(None, 0)
    batch = signature(128, 4, 16, 16, 4096, hopper_backward_config(128, stays=True), window=dense)
    assert heads(128, 4096, dense) == heads(128, 8192, dense) == sharing.sections(batch, 1).size == 2
    assert heads(64, 4096, dense) == heads(64, 8192, dense) == 4
    assert [heads(128, 16384, dense), heads(64, 16384, dense)] == [1, 2]
    assert [heads(128, longest, dense, True) for longest in (4096, 8192)] == [4, 2]
    assert [heads(128, longest, causal) for longest in (4096, 8192)] == [4, 2]
    assert [heads(256, longest, dense) for longest in (4096, 8192)] == [2, 1]


def test_what_a_row_takes_of_l2() -> None:
    """Q and dQ have the columns of queries, dO those of values; in varlen calls, too."""
    widths = ((64, 64), (64, 128), (128, 64), (192, 128), (64, 256), (128, 256), (256, 256))
    assert [sharing.row_bytes(*pair) for pair in widths] == [512, 640, 1024, 1536, 896, 1280, 2048]
    kind = BackwardKind(masked=True, varlen=True)
    call = signature(64, 4, 16, 16, 4096, backward_config(64, 256, kind=kind), varlen=True)
    assert sharing.sections(call._replace(own_value_dim=256), 1).size == 4  # of 3.5 MiB each


@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "varlen"])
@pytest.mark.parametrize("D", [80, 256])
def test_the_sums_are_in_the_buffer_of_the_call(D: int, varlen: bool) -> None:
    """One allocation, three launches or five, no other tensor: what replays from a CUDA graph."""
    config, (B, H, H_kv, S) = hopper_backward_config(D), (3, 8, 2, 300)
    blocks = B * S // config.block_n + B if varlen else -(-S // config.block_n)
    keys = (H_kv if varlen else B * H_kv) * blocks * config.block_n
    sizes = {}
    for visited, added in ((4, True), (2, True), (1, True), (2, False), (1, False)):
        own = replace(config, visited=visited, added=added)
        plan = launch_backward.prepare(signature(D, B, H, H_kv, S, own, varlen=varlen))
        sizes[visited, added] = plan.elements
        assert len(plan.launches.launches) == (3 if visited == 4 else 5)
        zeros = plan.launches.launches[0].scalars["more"]
        assert zeros == (keys * 2 * config.width(D) // 1024 if visited < 4 and added else None)
        assert plan.launches.launches[1].grid[0] == blocks * (H_kv if varlen else B * H_kv) * 4 // visited
    one = keys * 2 * config.width(D)
    more = {case: size - sizes[4, True] for case, size in sizes.items()}
    assert more == {
        (4, True): 0, (2, True): one, (1, True): one, (2, False): 2 * one, (1, False): 4 * one
    }  # fmt: skip


@pytest.mark.parametrize(("visited", "added", "chunks"), [(4, True, 1), (1, True, 1 + 96), (1, False, 1)])
def test_what_is_set_to_zero_where_programs_stay(monkeypatch, visited: int, added: bool, chunks: int) -> None:
    """The counter of tiles, and sums that programs add to, not those that each stores: of two heads 3 blocks
    of 128 keys, 64 columns of dK and of dV, are 96 chunks of 1024."""
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    config = replace(hopper_backward_config(64), persistent=True, visited=visited, added=added)
    plan = launch_backward.prepare(signature(64, 1, 8, 2, 300, config))
    first, launch, *_ = plan.launches.launches
    counter = launch.pointers["counter_ptr"]
    assert first.pointers["more_ptr"] == counter
    assert first.scalars["more"] == chunks
    if visited < 4:
        assert launch.pointers["keys_ptr"] == counter._replace(start=counter.start + 1024)


# ---------------------------------------------------------------- when


def chosen(D: int, B: int, H: int, H_kv: int, S: int, **more) -> int:
    window = more.get("window", MaskWindow(None, 0))
    how = {"masked": window.right is not None, "left_bound": window.left is not None}
    kind = BackwardKind(**how, varlen=bool(more.get("varlen")))
    config = hopper_backward_config(D, more.pop("deterministic", False), kind=kind)
    return sharing.query_heads(signature(D, B, H, H_kv, S, config, **more))


@pytest.mark.parametrize("S", [1024, 4096, 16384])
@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize("window", [MaskWindow(None, 0), MaskWindow(None, None)], ids=["causal", "dense"])
def test_heads_of_their_own_have_programs_of_their_own(window: MaskWindow, D: int, S: int) -> None:
    assert chosen(D, 16384 // S, 8, 8, S, window=window) == 1
    call = signature(D, 1, 8, 8, S, hopper_backward_config(D), window=window)
    assert launch_backward.prepare(call).launches.launches[1].constants["plan"].shared.value is False


CHOICES = {  # causal; columns, group -> query heads of a program at 1024, 2048, 4096, 16384 of 16384 tokens
    (64, 8): (8, 8, 8, 8), (64, 4): (4, 4, 4, 4), (128, 4): (4, 4, 4, 4), (128, 8): (8, 8, 8, 8),
    (160, 4): (2, 2, 2, 2), (160, 8): (2, 2, 2, 2), (192, 4): (2, 2, 2, 2), (192, 8): (2, 2, 2, 2),
    (256, 4): (4, 4, 2, 2), (256, 8): (2, 2, 2, 2),
}  # fmt: skip


@pytest.mark.parametrize(("D", "group"), CHOICES)
def test_which_calls_share(D: int, group: int) -> None:
    heads = 16 if D <= 128 else 8
    found = [chosen(D, 16384 // S, heads, heads // group, S) for S in (1024, 2048, 4096, 16384)]
    assert tuple(found) == CHOICES[D, group]


@pytest.mark.parametrize(("bandwidth", "visited"), [(device.H200_BANDWIDTH, (1, 2, 2)), (25.4, (1, 1, 2))])
@pytest.mark.parametrize("D", [160, 192])
def test_short_rows_of_96_keys_are_shorter_where_memory_is_fast(D, bandwidth, visited, monkeypatch) -> None:
    monkeypatch.setattr(device, "bandwidth", lambda index: bandwidth)
    assert tuple(chosen(D, 16384 // S, 8, 1, S) for S in (512, 1024, 2048)) == visited


@pytest.mark.parametrize(
    ("S", "group", "window", "visited"),
    [
        (256, 8, (None, 0), 1), (766, 8, (None, 0), 1), (768, 4, (None, 0), 2), (1128, 8, (None, 0), 2),
        (3616, 4, (None, 0), 2), (3616, 7, (None, 0), 1), (3616, 3, (None, 0), 3), (3616, 8, (None, None), 8),
    ],
)  # fmt: skip
def test_grouped_varlen_sequences_of_96_keys_share(S, group, window, visited) -> None:
    """By their mean length, under a diagonal, as batches of such a length."""
    how = {"window": MaskWindow(*window), "varlen": True}
    assert chosen(192, 8, group, 1, S, **how) == chosen(160, 8, group, 1, S, **how) == visited


@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_of_few_key_heads_many_programs_are_made(D: int) -> None:
    """Eight query heads of one key head, dense: fewer blocks of keys than SMs."""
    assert chosen(D, 1, 8, 1, 4096, window=MaskWindow(None, None)) < 8


@pytest.mark.parametrize(
    "more",
    [{"varlen": True}, {"window": MaskWindow(500, 0)}, {"deterministic": True}],
    ids=["varlen", "a left bound", "deterministic"],
)
def test_what_the_model_does_not_know_stays_as_it_was(more: dict) -> None:
    assert chosen(256, 4, 8, 1, 4096) < 8
    assert chosen(256, 4, 8, 1, 4096, **more) == 8
