"""Which kernel a call runs, and what `explain` says about it: decided without a GPU, on tensors that say they
are on one."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
import triton
from fake_gpu import OnGpu, gpu, tensor  # noqa: F401  (a fixture)
from families import configured, forget_launches, fresh_launches  # noqa: F401  (a fixture)
from torch._subclasses.fake_tensor import FakeTensorMode

from attnlib import Score, attention, dispatch, explain, node
from attnlib.api import Choice
from attnlib.dispatch import resolve
from attnlib.kernels import hopper, portable
from attnlib.kernels.common import device as devices
from attnlib.kernels.common import hopper_gpu
from attnlib.kernels.common.signature import mean_keys, signature
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.hopper import configs_backward
from attnlib.kernels.hopper import launch as launch_hopper
from attnlib.kernels.hopper.configs import (
    M128N128,
    M192N128,
    M256N64,
    OWN_VALUES,
    SPLIT,
    hopper_config,
    own_values_config,
)
from attnlib.kernels.portable.configs import forward_config
from attnlib.params import MaskWindow, Params, Varlen, mask_window


@pytest.fixture
def launched(monkeypatch):
    """The launchers, replaced; a call appends the name of the one that it reaches."""
    names = []

    def stand_in(name):
        def forward(q, k, v, params):
            names.append(name)
            return torch.empty(0), torch.empty(0)

        return forward

    monkeypatch.setattr(portable, "forward", stand_in("triton"))
    monkeypatch.setattr(hopper, "forward", stand_in("hopper"))
    monkeypatch.setattr(node, "shortcut", lambda *args: None)
    monkeypatch.setattr(node, "keep", lambda *args: None)
    return names


DENSE = MaskWindow(None, None)


def chosen_for(call, varlen, impl=None, deterministic=False, backward=True):
    """(kernel, reason)."""
    params = Params(DENSE, 0.125, varlen, deterministic=deterministic, impl=impl)
    choice = resolve(*call, params, backward)
    return choice.kernel, choice.reason


def lengths_of(rows, keys):
    """One varlen sequence, of whose offsets nobody reads the values."""
    offsets = torch.zeros(2, dtype=torch.int32)
    return Varlen(offsets, offsets, rows, keys)


LAYOUT = (
    "needs layouts that TMA can read (last dimension contiguous, the address and other strides positive "
    "multiples of 16 bytes); {} has strides {} and address 0 mod 16"
)


def calls():
    good = tensor(1, 2, 72, 64)
    apart = tensor(1, 2, 72, 64, strides=(0, 0, 0, 0))
    rows = tensor(1, 1, 2, 8, strides=(24, 24, 12, 1))
    return {
        "half": ((9, 0), (good,) * 3, None),
        "bfloat16": ((9, 0), (tensor(1, 2, 72, 72, dtype=torch.bfloat16),) * 3, None),
        "rows before heads": ((9, 0), (tensor(1, 2, 72, 64, strides=(4096, 64, 128, 1)),) * 3, None),
        "ampere": ((8, 0), (good,) * 3, "needs a GPU of compute capability 9.x; cuda:0 has 8.0"),
        "blackwell": ((10, 0), (good,) * 3, "needs a GPU of compute capability 9.x; cuda:0 has 10.0"),
        "float32": (
            (9, 0), (tensor(1, 2, 72, 64, dtype=torch.float32),) * 3,
            "needs float16 or bfloat16; q is float32",
        ),
        "expanded keys": ((9, 0), (good, apart, good), LAYOUT.format("k", (0, 0, 0, 0))),
        "odd rows": ((9, 0), (rows,) * 3, LAYOUT.format("q", (24, 24, 12, 1))),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_the_choice_and_its_reason(name, gpu, launched):
    arch, (q, k, v), lacks = calls()[name]
    gpu(*arch)
    choice = explain(q, k, v)
    attention(q, k, v)
    head_dim, dtype = q.shape[-1], str(q.dtype).removeprefix("torch.")
    if lacks is None:
        reason = "compute capability 9.x, a half precision, layouts that TMA can read"
        rows, keys = q.shape[2], k.shape[2]
        config = hopper_config(head_dim, rows, q.shape[0] * q.shape[1], keys=keys)
        assert choice == Choice("hopper", config, reason, DENSE)
        assert explain(q, k, v, impl="hopper") == Choice("hopper", config, "asked for", DENSE)
        attention(q, k, v, impl="hopper")
        assert launched == ["hopper", "hopper"]
    else:
        config = forward_config(head_dim, dtype, arch, keys=k.shape[2])
        assert choice == Choice("triton", config, f"hopper {lacks}", DENSE)
        for call in (attention, explain):
            with pytest.raises(ValueError) as raised:
                call(q, k, v, impl="hopper")
            assert str(raised.value) == f"impl: 'hopper' {lacks}"
        assert launched == ["triton"]
    # Asked for by name, the portable kernel runs wherever a GPU is.
    assert explain(q, k, v, impl="triton").reason == "asked for"
    attention(q, k, v, impl="triton")
    assert launched[-1] == "triton"


BACKWARD = {
    "narrow": (64, False),
    "wide": (256, False),
    "deterministic": (64, True),
}


@pytest.mark.parametrize("varlen", [None, lengths_of(264, 264)], ids=["batch", "varlen"])
@pytest.mark.parametrize("name", BACKWARD)
def test_the_choice_of_the_backward_pass(name, varlen, gpu):
    head_dim, deterministic = BACKWARD[name]
    q = tensor(1, 1, 264, head_dim) if varlen is None else tensor(264, 1, head_dim)
    call = q, q, q
    kernel, reason = chosen_for(call, varlen, None, deterministic)
    assert kernel == "hopper" and reason == hopper.FITS
    assert chosen_for(call, varlen, "hopper", deterministic) == ("hopper", "asked for")
    for impl in ("triton", "reference"):
        assert chosen_for(call, varlen, impl, deterministic) == (impl, "asked for")
    gpu(8)
    assert chosen_for(call, varlen, None, deterministic)[0] == "triton"


@pytest.mark.parametrize(
    ("rows", "keys", "head_dim", "forward", "backward", "of_varlen"),
    [
        (64, 64, 8, "triton", "triton", "triton"),
        (64, 64, 64, "triton", "triton", "triton"),
        (1, 64, 128, "triton", "triton", "triton"),
        (65, 64, 64, "hopper", "triton", "hopper"),
        (128, 128, 64, "hopper", "triton", "hopper"),
        (129, 1, 64, "hopper", "hopper", "hopper"),
        (1, 129, 64, "hopper", "hopper", "hopper"),
        (64, 65, 128, "hopper", "triton", "hopper"),
        (128, 128, 72, "hopper", "triton", "hopper"),
        (1, 129, 72, "hopper", "hopper", "hopper"),
        (64, 64, 136, "hopper", "hopper", "hopper"),
    ],
)
def test_short_sequences_are_for_the_portable_kernels(
    rows, keys, head_dim, forward, backward, of_varlen, gpu
):
    q, k = tensor(1, 1, rows, head_dim), tensor(1, 1, keys, head_dim)
    tokens = tensor(260, 1, head_dim)
    lengths = lengths_of(rows, keys)
    for call, varlen, last in (((q, k, k), None, backward), ((tokens,) * 3, lengths, of_varlen)):
        limits = 64, 128 if varlen is None else 64
        chosen = [chosen_for(call, varlen, backward=x) for x in (False, True)]
        for (kernel, reason), expected, limit in zip(chosen, (forward, last), limits, strict=True):
            assert kernel == expected
            assert ("at most" in reason) == (expected == "triton")
            assert expected == "hopper" or f"slower for sequences of at most {limit} rows and keys" in reason
        for x in (False, True):
            assert chosen_for(call, varlen, "hopper", backward=x) == ("hopper", "asked for")


def few(batch, heads, kv_heads, rows, keys, head_dim=128, dtype=torch.float16):
    """q and k of a call, without memory."""
    shapes = (batch, heads, rows, head_dim), (batch, kv_heads, keys, head_dim)
    return [torch.empty(shape, dtype=dtype, device="meta").as_subclass(OnGpu) for shape in shapes]


@pytest.mark.parametrize(
    ("call", "window", "kernel"),
    [
        ((1, 32, 8, 1, 8192), DENSE, "decode"),
        ((1, 32, 8, 1, 512), DENSE, "hopper"),  # nothing to split
        ((16, 32, 8, 1, 8192), DENSE, "decode"),  # each of four heads would read the same keys
        ((4, 32, 32, 1, 32768, 64), DENSE, "hopper"),  # 128 heads fill 132 SMs, at the speed of memory
        ((4, 33, 33, 1, 32768), DENSE, "hopper"),  # 132 do
        ((133, 1, 1, 1, 32768), DENSE, "decode"),  # and one is left
        ((200, 1, 1, 1, 32768), DENSE, "hopper"),
        ((7, 8, 8, 1, 40000), DENSE, "decode"),
        ((1, 32, 8, 16, 8192), MaskWindow(None, 0), "decode"),
        ((1, 32, 8, 17, 8192), MaskWindow(None, 0), "hopper"),
        ((1, 32, 8, 1, 131072), MaskWindow(255, 0), "hopper"),  # few keys in sight
        ((1, 32, 8, 1, 131072), MaskWindow(32767, 0), "decode"),
        ((1, 32, 8, 1, 8192, 72), DENSE, "decode"),
        ((1, 32, 8, 1, 8192, 128, torch.float32), DENSE, "decode"),
        ((1, 1, 1, 16, 4096, 256), DENSE, "decode"),
    ],
    ids=str,
)
def test_few_queries_to_many_keys_are_split(call, window, kernel, gpu):
    q, k = few(*call)
    params = Params(window, 0.1)
    choice = resolve(q, k, k, params)
    assert choice.kernel == kernel
    if kernel == "decode":
        assert choice.reason == "few queries, whose keys all multiprocessors read"
        full = call[:3] == (16, 32, 8)  # 128 pairs of equal length
        assert choice.configuration.split == ("none" if full else "stream_k")
        assert resolve(q, k, k, params, backward=True).kernel in ("hopper", "triton")
    elif call[3] <= 16:
        heads, keys = call[0] * call[1], min(call[4], (window.left or call[4]) + call[3])
        assert choice.reason == f"decode is slower for {heads} heads of {keys} keys on 132 multiprocessors"
        assert resolve(q, k, k, params._replace(impl="decode")).reason == "asked for"
    else:
        assert choice.reason == hopper.FITS
    gpu(8)
    assert (resolve(q, k, k, params).kernel == "decode") == (kernel == "decode")


def test_a_longest_length_beyond_all_tokens_bounds_nothing():
    """A place plus a window of nearly as many keys would be beyond int32."""
    tokens, longest = torch.zeros(8, 1, 64), 2**31 - 1
    for given, window in (((5, longest - 2), (5, None)), ((longest - 2, 0), (None, 0)), ((6, 6), (6, 6))):
        params = Params(MaskWindow(*given), 0.1, lengths_of(longest, longest))
        assert resolve(tokens, tokens, tokens, params).window == MaskWindow(*window)


def test_decode_by_name_says_what_it_needs(gpu):
    q, k = few(1, 8, 8, 17, 4096)
    with pytest.raises(ValueError, match="^impl: 'decode' needs 1 to 16 queries; q has 17$"):
        resolve(q, k, k, Params(DENSE, 0.1, impl="decode"))
    with pytest.raises(ValueError, match="^impl: 'decode' has no backward pass; leave impl out, or call it"):
        resolve(q[:, :, :1], k, k, Params(DENSE, 0.1, impl="decode"), backward=True)
    tokens = tensor(260, 1, 64)
    with pytest.raises(ValueError, match="^impl: 'decode' needs sequences in one batch; attention_decode ta"):
        chosen_for((tokens,) * 3, lengths_of(1, 260), "decode", backward=False)
    q = torch.zeros(1, 1, 1, 64)  # on a CPU
    with pytest.raises(ValueError, match="^impl: 'decode' needs CUDA tensors, or TRITON_INTERPRET=1 set"):
        attention(q, q, q, impl="decode")


def test_hopper_by_name_where_there_is_no_gpu(monkeypatch, fresh_launches):
    q = torch.zeros(1, 1, 8, 64)
    with pytest.raises(ValueError) as raised:
        attention(q, q, q, impl="hopper")
    assert str(raised.value) == "impl: 'hopper' needs CUDA tensors; q is on cpu"
    monkeypatch.setattr(devices, "interpreted", lambda: False)
    assert explain(q, q, q).kernel == "reference"
    assert explain(q, q, q).configuration is None
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    forget_launches()
    assert explain(q, q, q).reason == "hopper needs CUDA tensors; q is on cpu"
    assert explain(q, q, q).kernel == "triton"


def test_kernels_in_the_interpreter_on_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    q = tensor(1, 1, 8, 64)
    with pytest.raises(ValueError, match="^impl: 'hopper' needs compiled kernels; TRITON_INTERPRET=1 is set"):
        attention(q, q, q, impl="hopper")
    assert explain(q, q, q).kernel == "triton"


def test_another_triton_has_another_gluon(monkeypatch):
    hopper_gpu._gluon_amiss.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert hopper_gpu._gluon_amiss() == "needs the Gluon of triton 3.6.x to 3.9.x; this is triton 3.10.0"
    hopper_gpu._gluon_amiss.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert hopper_gpu._gluon_amiss() is None
    hopper_gpu._gluon_amiss.cache_clear()


def test_explain_reads_well_and_is_frozen(gpu):
    q = tensor(1, 1, 80, 128)
    choice = explain(q, q, q, causal=True, sm_scale=0.1, return_lse=True)
    first, second = str(choice).splitlines()
    assert first == "hopper: compute capability 9.x, a half precision, layouts that TMA can read"
    assert second.startswith("  with HopperConfig(block_n=128, warpgroups=2, ")
    assert str(explain(q, q, q, impl="reference")) == "reference: asked for"
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.kernel = "triton"
    empty = tensor(1, 1, 0, 128)
    assert explain(empty, q, q).reason.endswith("; nothing to compute, so nothing is launched")


@pytest.mark.parametrize("score", [None, Score(soft_cap=3.0)], ids=["no score", "soft cap"])
def test_tensors_without_memory_run_nowhere(score):
    q = torch.zeros(1, 2, 64, 64, device="meta")
    with pytest.raises(ValueError, match="^q: expected a device on which kernels run, got meta$"):
        explain(q, q, q, score=score)


def test_explain_under_autocast(monkeypatch):
    """Of the dtype that a call gets there."""
    asked, choice = [], Choice("none", None, "", DENSE)
    monkeypatch.setattr(dispatch, "resolve", lambda q, *rest: asked.append(q.dtype) or choice)
    q = torch.zeros(1, 2, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        explain(q, q, q)
    explain(q, q, q)
    assert asked == [torch.bfloat16, torch.float32]


def test_explain_checks_as_attention_does():
    q = torch.zeros(1, 1, 8, 64)
    with pytest.raises(ValueError, match="^impl: expected 'decode', 'hopper', 'triton', 'reference' or None"):
        explain(q, q, q, impl="flash")
    with pytest.raises(TypeError, match="^causal: expected a bool"):
        explain(q, q, q, causal=1)
    with pytest.raises(TypeError):
        explain(q, q, q, True)
    with pytest.raises(ValueError, match="^q: expected a device on which kernels run, got .*FakeTensor$"):
        with FakeTensorMode():
            fake = torch.zeros(1, 1, 8, 64)
        explain(fake, fake, fake)
    one = torch.zeros(1, 1, 1, 64, requires_grad=True)
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
        with pytest.raises(ValueError, match="^impl: 'decode' has no backward pass"):
            explain(one, q, q, impl="decode")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="explain under torch.compile: not supported"):
        torch.compile(explain, fullgraph=True, backend="eager")(q, q, q)


# ---------------------------------------------------------------- configurations of the Hopper kernel


def shared_bytes(config, width):
    """Buffers of Q, K, V and the output; barriers take less than a kilobyte."""
    o_columns = config.o_columns + sum(config.columns[1:])
    q, o = 64 * config.warpgroups * width, 64 * config.warpgroups * o_columns
    return 2 * (q + o + 2 * config.stages * config.block_n * width) + 1024


@pytest.mark.parametrize("head_dim", [1, 8, 40, 64, 72, 96, 104, 128, 136, 200, 256])
def test_hopper_configurations_fit(head_dim):
    config = hopper_config(head_dim)
    width = config.width(head_dim)
    assert config == hopper_config(width) and width <= max(64, block_d(head_dim))
    for tile in (M256N64, M192N128, M128N128) if width == 64 else (config,):
        fits(tile, width)


def test_head_dimensions_in_two_parts():
    """The smallest width that holds one, in parts where that is no power of two; padded without its line."""
    widths = {D: hopper_config(D).width(D) for D in range(8, 257, 8)}
    assert {D for D, width in widths.items() if width == 80} == {72, 80}
    assert {D for D, width in widths.items() if width == 96} == {88, 96}
    assert {D for D, width in widths.items() if width == 192} == set(range(136, 193, 8))
    assert set(widths.values()) == {64, 128, 256} | set(SPLIT)
    for width, config in SPLIT.items():
        left, right = config.columns
        assert left + right == width and hopper_config(width, keys=100) == config
        assert left & (left - 1) == right & (right - 1) == 0 and right >= 16
        with pytest.raises(ValueError, match=f"^config: expected columns .* for head dimension {left}, got"):
            config.width(left)


def test_a_width_is_off_without_its_line(monkeypatch):
    monkeypatch.delitem(SPLIT, 192)
    monkeypatch.delitem(SPLIT, 80)
    assert hopper_config(136) == hopper_config(256) and hopper_config(72) == hopper_config(96)


def fits(config, width):
    assert shared_bytes(config, width) <= 227 * 1024
    assert config.stages & (config.stages - 1) == 0 and config.warpgroups in (2, 3, 4)
    assert config.block_n in (64, 128) and config.q_columns < width
    first = config.columns[0] if config.columns else width
    assert config.o_columns in (first, first // 2)
    warpgroups = config.warpgroups + 1
    assert 128 * warpgroups * config.max_registers <= 65536
    shared_out = config.warpgroups * config.consumer_registers + config.producer_registers
    assert shared_out <= warpgroups * config.max_registers
    assert config.max_registers % 8 == config.consumer_registers % 8 == config.producer_registers % 8 == 0


def bytes_beside_values(config):
    """As `shared_bytes`, for values of another width."""
    rows, queries, values = 64 * config.warpgroups, sum(config.query_columns), config.value_columns
    keys = config.stages * config.block_n
    return 2 * (rows * (queries + config.o_columns) + keys * (queries + values)) + 1024


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_configurations_beside_values_of_another_width(head_dim):
    """Queries in as many columns as without them; values in a power of two."""
    for values in (n for n in range(8, 257, 8) if n != head_dim):
        config = own_values_config(head_dim, values)
        assert config in OWN_VALUES.values() and config.width(head_dim) == max(64, block_d(values))
        width = sum(config.query_columns)
        assert width == (192 if 128 < head_dim <= 192 else max(64, block_d(head_dim)))
        assert bytes_beside_values(config) <= 227 * 1024
        assert config.q_columns <= config.query_columns[0] and config.o_columns <= config.value_columns
        warpgroups = config.warpgroups + 1
        later = config.warpgroups * config.consumer_registers + config.producer_registers
        assert 128 * warpgroups * config.max_registers <= 65536
        assert later <= warpgroups * config.max_registers
        if width < 256:
            with pytest.raises(ValueError, match="^config: expected query_columns for .* 257, got"):
                config.width(257)
    for given in ((head_dim, 257), (0, head_dim)):
        with pytest.raises(ValueError, match="expected 1 to 256, got"):
            own_values_config(*given)


def test_sections_of_values_of_another_width():
    """As of both widths' mean."""
    config = own_values_config(192, 128)
    for heads in (16, 128):
        section = config.heads_per_section(heads, 1, 4096, config.width(192))
        assert section == hopper_config(128).heads_per_section(heads, 1, 4096, 160)


def test_a_configuration_for_other_values_is_refused():
    q, k, v = (torch.zeros(1, 1, 70, n).half() for n in (192, 192, 128))
    for values, config in ((v, hopper_config(192)), (k, own_values_config(192, 128))):
        params = Params(mask_window(True, None), 0.1, config=config)
        call = signature(params, q, k, q, k, values)
        with pytest.raises(ValueError, match="^config: expected one for values of [0-9]+ columns, got"):
            launch_hopper.prepare(call)


def test_what_computes_values_of_another_width(gpu):
    call = tensor(1, 1, 300, 192), tensor(1, 1, 300, 192), tensor(1, 1, 300, 128)
    choice = explain(*call, causal=True)
    assert choice.kernel == "hopper" and choice.configuration == own_values_config(192, 128)
    params = Params(DENSE, 0.125)
    for own, values in ((192, 128), (136, 72), (192, 64), (128, 120), (64, 128), (96, 104)):
        pair = [x[..., :columns] for x, columns in zip(call, (own, own, values), strict=True)]
        choice = resolve(*pair, params, True)
        how = {"kind": configs_backward.BackwardKind(short=True, tail=True, float16=True), "stays": True}
        expected = configs_backward.backward_config(own, values, **how)
        assert choice.kernel == "hopper" and choice.configuration == expected
    in_order = resolve(*call, params._replace(deterministic=True), True)
    assert in_order.kernel == "hopper"
    assert in_order.configuration == configs_backward.backward_config(192, 128, deterministic=True)
    gpu(8)
    assert explain(*call).kernel == "triton"
    assert explain(*call).reason == "hopper needs a GPU of compute capability 9.x; cuda:0 has 8.0"


@pytest.mark.parametrize("head_dim", [0, -8, 257])
def test_hopper_configuration_of_a_wrong_head_dimension(head_dim):
    with pytest.raises(ValueError, match=f"^head_dim: expected 1 to 256, got {head_dim}$"):
        hopper_config(head_dim)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("keys", [1, 4096, 16384, 10**6])
def test_sections_hold_whole_groups_and_fit_l2(keys, group):
    config = hopper_config(128)
    for heads in (group, 4 * group, 64 * group):
        section = config.heads_per_section(heads, group, keys, 128)
        assert section % group == 0 and group <= section <= heads
        assert section == group or section // group * keys * 4 * 128 <= config.l2_bytes


def test_masks_where_the_diagonal_runs():
    """(blocks to mask, rows of a tile end in different blocks), for Sq and Sk."""
    tall, square = hopper_config(64), hopper_config(128)  # tiles of 256 x 64 and 128 x 128
    assert launch_hopper._masks(0, 512, 512, tall) == (1, True)
    assert launch_hopper._masks(0, 512, 512, square) == (1, False)
    assert launch_hopper._masks(0, 512, 576, square) == (1, True)
    assert launch_hopper._masks(64, 512, 512, square) == (1, True)
    assert launch_hopper._masks(0, 512, 600, square) == (2, True)
    assert launch_hopper._masks(88, 512, 512, square) == (2, True)
    assert launch_hopper._masks(None, 512, 512, square) == (0, False)
    assert launch_hopper._masks(None, 512, 600, square) == (1, False)
    # 64 of 256 rows in the last tile, or 200: three warpgroups have none, or all have some
    assert launch_hopper._masks(None, 576, 512, tall) == (0, True)
    assert launch_hopper._masks(None, 456, 512, tall) == (0, False)
    assert launch_hopper._masks(None, 600, 600, square) == (1, False)


def chosen(*shapes, causal):
    """Tiles at D = 64 of calls with 32 heads: (batch, rows) each."""
    bounds = mask_window(causal, None)
    return [hopper_config(64, S, 32 * B, 132, S, mean_keys(S, S, bounds)) for B, S in shapes]


def test_the_tile_that_leaves_no_sm_idle():
    """At D = 64: what was fastest on an H200 (docs/lab/hopper.md)."""
    waves = (1, 512), (1, 1024), (1, 1536), (1, 2048), (16, 1024), (8, 2048), (1, 65536)
    assert chosen(*waves, causal=False) == [M128N128, M256N64, M192N128, M256N64, M256N64, M192N128, M192N128]
    assert chosen(*waves, causal=True) == [M128N128, M128N128, M192N128, M256N64, M256N64, M256N64, M192N128]
    # One row more than whole tiles of 256 rows: a tile nearly empty.
    assert chosen((4, 4096), (4, 4097), causal=True) == [M256N64, M192N128]
    assert chosen((128, 128), (64, 256), causal=True) == [M128N128, M256N64]


def test_tiles_of_windows_and_varlen_sequences(gpu):
    """Windows: small where tall ones would not give every SM one, or be half empty. Varlen: as a batch."""
    assert hopper_config(64, rows=512, heads=32) == M128N128
    assert hopper_config(64, rows=256, heads=132) == M128N128
    assert hopper_config(64, rows=257, heads=67) == M256N64
    assert hopper_config(64, rows=512, heads=32, sms=60) == M256N64
    assert hopper_config(40, rows=1, heads=1) == M128N128

    def configuration(q, left, right, varlen=None):
        return configured(hopper, q, q, q, Params(MaskWindow(left, right), 0.125, varlen)).config

    q, tokens = tensor(1, 32, 16384, 64, strides=(0, 0, 0, 1)), tensor(16384, 32, 64, strides=(0, 0, 1))
    bounds = (None, None, M192N128), (None, 0, M192N128), (100, 0, M256N64), (None, 5, M256N64)
    for left, right, tile in bounds:
        assert configuration(q, left, right) == tile
    sequences = (2, 8192, 0, M192N128), (4, 4096, 0, M256N64), (4, 4096, None, M192N128)
    for count, longest, right, tile in sequences:
        offsets = torch.zeros(count + 1, dtype=torch.int32)
        varlen = Varlen(offsets, offsets, longest, longest)
        assert configuration(tokens, None, right, varlen) == tile
        assert configuration(tokens, 9, 0, varlen) == M256N64


def test_other_head_dimensions_have_one_tile():
    for head_dim in (104, 128, 256):
        for keys in (1, 2048, 2049):
            config, default = hopper_config(head_dim, rows=1, heads=1, keys=keys), hopper_config(head_dim)
            assert dataclasses.replace(config, l2_bytes=0) == dataclasses.replace(default, l2_bytes=0)
            assert config.l2_bytes == (8 << 20 if head_dim <= 128 and keys <= 2048 else default.l2_bytes)
