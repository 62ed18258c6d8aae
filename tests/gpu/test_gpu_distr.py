"""attention_distr() on a GPU: random calls against the model, both products; equal bits in every run,
streams, CUDA graphs, tensors of more than 2^31 elements.

Each draw belongs to one of `DISTR`, so that a worker compiles few kernels: 14 kinds of 40 draws, about 20
seconds with 12 workers.
"""

from __future__ import annotations

import pytest
import torch
from beyond_draws import DISTR, DistrForm, distr_of
from distr_cases import DistrCase, check, check_product

from attnlib import attention, attention_distr
from attnlib.bench.oracle import make_inputs, poisoned_empty
from attnlib.bench.shapes import Shape
from attnlib.kernels import distr
from attnlib.kernels.common.distr import Grouping

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
DEVICE = "cuda"
DRAWS = 40


@pytest.mark.parametrize("form", DISTR, ids=lambda form: "-".join(map(str, form)))
def test_draws(form: DistrForm) -> None:
    for number in range(DRAWS):
        with poisoned_empty():
            check(distr_of(form, number), DEVICE, impl=form.impl)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("hashed, rows", [("k", None), ("q", 1024)])
def test_full_size(D: int, hashed: str, rows: int | None) -> None:
    """Judged on a head: the groups of a head depend on no other."""
    case = DistrCase(8192, Grouping(2, hashed, rows), D, 8, 4, dtype="bfloat16")
    q, k, v = case.tensors(DEVICE)
    out = attention_distr(q, k, v, group=2, causal=True, hashed=hashed, rows=rows)
    for head in (0, 7):
        one = DistrCase(8192, case.grouping, D, 1, 1, dtype="bfloat16")
        alone = [x[:, i : i + 1] for x, i in ((q, head), (k, head // 2), (v, head // 2))]
        made = distr.group(*alone[:2], one.grouping, True)
        check_product(one, made, *alone, out[:, head : head + 1])


def test_groups_of_one_are_attention() -> None:
    q, k, v = make_inputs(Shape(2, 8, 2048, 128, dtype="bfloat16"), device=DEVICE)
    torch.testing.assert_close(
        attention_distr(q, k, v, group=1, causal=True), attention(q, k, v, causal=True), atol=1e-2, rtol=1e-2
    )


@pytest.mark.parametrize("D", [64, 128])
def test_same_bits_every_time(D: int) -> None:
    q, k, v = make_inputs(Shape(2, 8, 2000, D), device=DEVICE)
    for hashed, rows in (("k", None), ("q", 128)):
        first = attention_distr(q, k, v, group=2, causal=True, hashed=hashed, rows=rows)
        for _ in range(10):
            again = attention_distr(q, k, v, group=2, causal=True, hashed=hashed, rows=rows)
            assert torch.equal(again, first)


def test_streams_and_graphs() -> None:
    q, k, v = make_inputs(Shape(1, 4, 1024, 128), device=DEVICE)
    expected = attention_distr(q, k, v, group=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention_distr(q, k, v, group=2)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_distr(q, k, v, group=2)
    q.copy_(torch.randn_like(q))
    k.copy_(torch.randn_like(k))
    graph.replay()
    assert torch.equal(out, attention_distr(q, k, v, group=2))


def test_more_than_2_31_elements() -> None:
    """q, and the keys of blocks of queries; the last head is like one alone."""
    q, k, v = make_inputs(Shape(1, 260, 66000, 128, False, "bfloat16", 1, 130), device=DEVICE)
    assert q.numel() > 2**31
    out = attention_distr(q, k, v, group=2)
    assert torch.equal(out[:, -1:], attention_distr(q[:, -1:], k, v, group=2))
    del out
    q = q[:, :2, :33024].contiguous()
    k, v = (torch.randn(1, 2, 33024, 128, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
    options = {"group": 1, "hashed": "q", "rows": 256}  # 129 blocks of 33024 x 128 keys for each of 2 heads
    out = attention_distr(q, k, v, **options)
    last = attention_distr(q[:, 1:], k[:, 1:], v[:, 1:], **options)
    torch.testing.assert_close(out[:, 1:], last, atol=0, rtol=0)
    del out, last
