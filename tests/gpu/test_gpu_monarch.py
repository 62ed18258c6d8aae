"""MonarchAttention on a GPU: the kernels against the model in random calls and at full size, equal bits,
streams, CUDA graphs, memory, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from monarch_cases import FAMILIES, MonarchCase, check, draw, make, run

from attnlib import attention, attention_monarch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = "cuda"
DRAWS = 528


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls(family: int) -> None:
    for number in range(family, DRAWS, FAMILIES):
        check(draw(number), DEVICE, number)


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 16384])
def test_full_size(tokens: int) -> None:
    block = round(tokens**0.5)
    for steps in (1, 3):
        check(MonarchCase(f"N {tokens}, {steps}", tokens, block, steps, heads=4, kv_heads=4), DEVICE)


@pytest.mark.parametrize("block", [1, 1000])
def test_exact_softmax(block: int) -> None:
    tensors, _ = make(MonarchCase("exact", 1000, block, dtype="bfloat16"), DEVICE)
    expected = attention(*tensors, impl="reference").float()
    out = attention_monarch(*tensors, block=block, steps=2).float()
    assert (out - expected).abs().max() < 0.02


def test_same_bits_every_time() -> None:
    case = MonarchCase("bits", 5000, 64, 3, "pre", heads=8)
    tensors, _ = make(case, DEVICE)
    first = run(case, tensors, None)
    assert all(torch.equal(run(case, tensors, None), first) for _ in range(20))


def test_streams_and_graphs() -> None:
    case = MonarchCase("graphs", 1024, 32, 3, heads=12, kv_heads=12)
    tensors, _ = make(case, DEVICE)
    expected = run(case, tensors, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = run(case, tensors, None)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, tensors, None)
    for _ in range(20):  # one after the other: a launch may begin before the one ahead of it is done
        tensors[0].copy_(torch.randn_like(tensors[0]))
        graph.replay()
        assert torch.equal(out, run(case, tensors, None))


def test_memory_grows_with_the_number_of_tokens() -> None:
    """Mean keys and values, and the output: three times the queries, and some for the entropies."""
    case = MonarchCase("memory", 16384, 128, 3, heads=12, kv_heads=12)
    tensors, _ = make(case, DEVICE)
    run(case, tensors, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(case, tensors, None)
    assert torch.cuda.max_memory_allocated() - before < 3.2 * tensors[0].nbytes


def test_more_than_2_31_elements() -> None:
    """The last head of a tensor whose heads lie 2^31 elements apart, and rows of one head that do."""
    whole = torch.zeros(2, (1 << 31) + 4096 * 64, dtype=torch.float16, device=DEVICE)
    far = whole.flatten().as_strided((1, 2, 4096, 64), (0, (1 << 31) + 64 * 64, 64, 1))
    far.copy_(torch.randn(1, 2, 4096, 64, device=DEVICE))
    near = far.contiguous()
    assert torch.equal(
        attention_monarch(far, far, far, steps=2), attention_monarch(near, near, near, steps=2)
    )
    rows = whole.flatten().as_strided((1, 1, 512, 64), (0, 0, 1 << 23, 1))
    rows.copy_(torch.randn(1, 1, 512, 64, device=DEVICE))
    near = rows.contiguous()
    assert torch.equal(
        attention_monarch(rows, rows, rows, steps=2), attention_monarch(near, near, near, steps=2)
    )
