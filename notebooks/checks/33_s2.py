"""Checks of the exercises of chapter 33."""

from attnlib import S2Pattern
from attnlib.bench.shapes import Shape
from attnlib.book import lesson
from attnlib.book.exercises import judge_kernel


def check_hybrid_attention(hybrid_attention):
    """Against fp64 under the mask of the pattern: no dense head, one, all."""
    for heads, local, stride, dense in ((2, 1, 2, 0), (3, 1, 4, 1), (2, 2, 3, 2)):
        pattern = S2Pattern(heads, local_blocks=local, stride=stride, dense_heads=dense)
        mask = pattern.mask(300, lesson.device()).to_dense()
        answer = lambda q, k, v, how=(local, stride, dense): hybrid_attention(q, k, v, *how)  # noqa: E731
        try:
            judge_kernel(answer, Shape(1, heads, 300, 32, False), mask=mask)
        except AssertionError as wrong:
            case = f"{heads} heads, local {local}, stride {stride}, {dense} dense"
            raise AssertionError(f"{case}: {str(wrong).rpartition(': ')[2]}") from None


def check_pages_of(pages_of):
    """No page twice at a time, and no more than are held at once."""
    cases = (40, 0, 3, 4), (40, 2, 3, 4), (100, 5, 8, 16), (30, 0, 1, 1), (5, 1, 8, 2)
    for blocks, first, local, stride in cases:
        case = f"{blocks} blocks, first {first}, local {local}, stride {stride}"
        pages = list(pages_of(blocks, first, local, stride))
        assert len(pages) == blocks, f"{case}: expected {blocks} pages, got {len(pages)}"
        most = 0
        for now in range(blocks):
            held = [j for j in range(now + 1) if now - j < local or j % stride == first]
            most = max(most, len(held))
            owners = {}
            for j in held:
                told = f"blocks {owners.get(pages[j])} and {j}, both needed by block {now}, share a page"
                assert pages[j] not in owners, f"{case}: {told}"
                owners[pages[j]] = j
        assert sorted(set(pages)) == list(range(most)), (
            f"{case}: expected pages 0 to {most - 1}, as many as are held at once, got {sorted(set(pages))}"
        )


def check_longest(longest):
    """The last length that fits."""
    hybrid = S2Pattern(32, 8, stride=8, dense_heads=1)
    for pattern in (S2Pattern(8, stride=8), S2Pattern(8, dense_heads=8), hybrid):
        for budget, layers in ((16 * 10**9, 32), (3 * 10**8, 2), (10**5, 1)):
            tokens = longest(budget, layers, pattern, 128)
            case = f"{budget:,} bytes, {layers} layers, {pattern}"
            whole = tokens >= 0 and tokens % pattern.block_size == 0
            assert whole, f"{case}: expected a multiple of {pattern.block_size}, got {tokens}"
            if tokens:
                taken = layers * pattern.cache_bytes(tokens, 128)
                assert taken <= budget, f"{case}: {tokens} tokens take {taken:,} bytes"
            more = layers * pattern.cache_bytes(tokens + pattern.block_size, 128)
            assert more > budget, f"{case}: {tokens + pattern.block_size} tokens fit too, got {tokens}"
