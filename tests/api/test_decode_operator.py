"""attention_decode as compilers, exporters, fake tensors and FLOP counters see it."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from decode_cases import DecodeCase, judge, make
from layouts import LAYOUTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnlib import attention_decode

pytestmark = INTERPRETER_REMARKS
DECODE = torch.ops.attnlib.attention_decode
CASES = {
    "lengths": DecodeCase("lengths", (7, 40)),
    "full": DecodeCase("full", None, room=40, batch=2, queries=3),
    "pages": DecodeCase("pages", (7, 40), page=16),
    "window": DecodeCase("window", (7, 40), window=(9, 0), split="fixed"),
    "FP8": DecodeCase("FP8", (7, 40), scales="pairs"),
    "FP8 pages": DecodeCase("FP8 pages", (7, 40), page=16, scales="pairs"),
}


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def options_of(case: DecodeCase, inputs) -> dict:
    scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    more = {"window": case.window, "split": case.split}
    return {"lengths": inputs.lengths, "page_table": inputs.table} | more | scales


@pytest.mark.parametrize(("name", "lse"), in_turn(CASES, [False, True]))
def test_opcheck(name, lse, device):
    case = CASES[name]
    inputs = make(case, device)
    left, right = case.window or (None, 0)
    k, v = (x.float().nan_to_num().to(x.dtype) for x in inputs[1:3])
    arguments = inputs.q, k, v, inputs.lengths, inputs.table, left, right, None, lse, case.split
    scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # The first one compares inputs before and after, which PyTorch can't for FP8; `decode_cases.check` does.
    torch.library.opcheck(DECODE.default, arguments, scales, test_utils=checks[case.scales is not None :])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_opcheck_of_layouts(layout, device):
    inputs = make(CASES["full"], device)
    torch.library.opcheck(DECODE.default, tuple(layout(x) for x in inputs[:3]), {"split": "3"})


@pytest.mark.parametrize(("name", "dynamic"), in_turn(CASES, (None, True)))
def test_in_one_graph(name, dynamic, device):
    """Lengths, and with dynamic shapes batches, that the graph was not made for."""
    case = CASES[name]

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def compiled(q, k, v, **options):
        out, lse = attention_decode(q * 1, k, v, return_lse=True, **options)
        return out * 1, lse

    inputs = make(case, device)
    judge(case, inputs, *compiled(*inputs[:3], **options_of(case, inputs)))
    if case.lengths is None:
        other = DecodeCase("full", None, room=90, batch=3, queries=3)
    else:
        other = DecodeCase(name, (90, 0, 33), page=case.page, window=case.window, split=case.split,
                           scales=case.scales)  # fmt: skip
    inputs = make(other, device)
    judge(other, inputs, *compiled(*inputs[:3], **options_of(other, inputs)))


def test_export(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, lengths):
            return attention_decode(q, k, v, lengths=lengths)

    inputs = make(CASES["lengths"], device)[:4]
    exported = torch.export.export(Layer(), inputs)
    assert "attnlib.attention_decode" in exported.graph_module.code
    assert torch.equal(exported.module()(*inputs), attention_decode(*inputs[:3], lengths=inputs[3]))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_batch_that_is_a_symbol(strict, device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, lengths, starts, table):
            return attention_decode(q, k, v, lengths=lengths, starts=starts, page_table=table)

    inputs = make(CASES["pages"], device)
    given = *inputs[:4], inputs.lengths // 2, inputs.table
    batch, pages = torch.export.Dim("batch", min=1), torch.export.Dim("pages", min=1)
    shapes = {0: batch}, {0: pages}, {0: pages}, {0: batch}, {0: batch}, {0: batch}
    exported = torch.export.export(Layer(), given, dynamic_shapes=shapes, strict=strict)
    more = tuple(x if i in (1, 2) else torch.cat([x, x, x]) for i, x in enumerate(given))
    assert torch.equal(exported.module()(*more), Layer()(*more))


def test_without_memory(device):
    """Meta tensors, and fake ones, have the form of real ones."""
    q, k, v, lengths, *_ = make(CASES["lengths"], device)
    expected = attention_decode(q, k, v, lengths=lengths, return_lse=True)
    meta = [x.to("meta") for x in (q, k, v, lengths)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, lengths)]
        faked = attention_decode(*fake[:3], lengths=fake[3], return_lse=True)
    found = attention_decode(*meta[:3], lengths=meta[3], return_lse=True)
    for results in (found, faked):
        for x, y in zip(results, expected, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_fake_tensors_outside_of_their_mode(device):
    """Their values are not looked at."""
    mode, inputs = FakeTensorMode(), make(CASES["pages"], device)
    q, k, v, lengths, table = (mode.from_tensor(x) for x in (*inputs[:4], inputs.table))
    assert attention_decode(q, k, v, lengths=lengths, page_table=table).shape == q.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="values on a GPU are not looked at")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": torch.tensor([7, 49]).int()}, "lengths: expected 0 to 48, which the cache has room for"),
        ({"starts": torch.tensor([-1, 0]).int()}, "starts: expected 0 to 48, which the cache has room for"),
        ({"page_table": torch.full((2, 3), -1).int()}, "page_table: expected pages from 0 to"),
    ],
)
def test_values_are_checked_when_the_call_runs(wrong, message):
    """A compiler has none, and under a dispatch mode a tensor may have none: page -1 would be the last."""
    inputs = make(CASES["pages"], "cpu")
    options = options_of(CASES["pages"], inputs) | wrong
    compiled = torch.compile(attention_decode, backend="eager", fullgraph=True)
    for call in (attention_decode, compiled, lambda *x, **y: flops(lambda: attention_decode(*x, **y))):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(*inputs[:3], **options)


def test_a_number_of_splits_that_a_graph_has_a_symbol_for(device):
    q, k, v, lengths, *_ = make(CASES["lengths"], device)
    compiled = torch.compile(attention_decode, backend="eager", fullgraph=True, dynamic=True)
    for split in (2, 3, 10**20):
        out = compiled(q, k, v, lengths=lengths, split=split)
        assert torch.equal(out, attention_decode(q, k, v, lengths=lengths, split=split))


def test_wrong_arguments_in_a_graph(device):
    q, k, v, lengths, *_ = make(CASES["lengths"], device)
    compiled = torch.compile(attention_decode, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="lengths: expected batch size 2 as q has, got 1"):
        compiled(q, k, v, lengths=lengths[:1])
    with pytest.raises(RuntimeError, match="attention_decode has no gradient"):
        DECODE(q.clone().requires_grad_(), k, v)[0].sum().backward()


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops(device):
    q, k, v, lengths, *_ = make(CASES["lengths"], device)
    per_key = 4 * 4 * 64
    assert flops(lambda: attention_decode(q, k, v, lengths=lengths)) == per_key * 47
    assert flops(lambda: attention_decode(q, k, v)) == per_key * 80
    assert flops(lambda: attention_decode(q, k, v, lengths=lengths, window=(9, 0))) == per_key * 17
    starts = torch.tensor([3, 39], dtype=torch.int32, device=device)  # keys that are hidden and not read
    assert flops(lambda: attention_decode(q, k, v, lengths=lengths, starts=starts)) == per_key * (4 + 1)
    assert flops(lambda: attention_decode(q, k, v, starts=starts)) == per_key * (37 + 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, lengths)]
        assert flops(lambda: attention_decode(*fake[:3], lengths=fake[3])) == per_key * 80


def test_a_scale_with_a_tangent_is_refused() -> None:
    q, scale = torch.zeros(1, 2, 1, 64, dtype=torch.float16), torch.ones(1, 2)
    cache = torch.zeros(1, 2, 8, 64, dtype=torch.float8_e4m3fn)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scale, torch.ones_like(scale))
        for scales in ({"k_scale": dual}, {"v_scale": dual}):
            with pytest.raises(RuntimeError, match="attention_decode has no forward-mode derivative"):
                attention_decode(q, cache, cache, **scales)
