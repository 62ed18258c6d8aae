"""S2Cache: each token that is generated attends as the pattern says, whatever was forgotten before; and the
memory is that of `S2Pattern.cached` at every length, in pages that are used again."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterable

import pytest
import torch
from cases import INTERPRETER_REMARKS, judge_forward
from mutations import Mutation, load
from s2_cases import GROUPED, HYBRID, PATTERNS, SMALL, WIDE, defined
from torch._dynamo.testing import CompileCounter

from attnlib import S2Cache, S2Pattern, attention_decode, dispatch
from attnlib.api import s2_cache
from attnlib.bench.oracle import Oracle
from attnlib.kernels import DECODERS

D = 16
pytestmark = INTERPRETER_REMARKS


@pytest.fixture
def by_reference(monkeypatch) -> None:
    """Attention of each token in PyTorch, which is faster than a kernel in the interpreter."""
    monkeypatch.setattr(dispatch, "DECODERS", {"reference": DECODERS["reference"]})


def tokens_of(pattern: S2Pattern, length: int, B: int = 2, device: str = "cpu") -> list[torch.Tensor]:
    """q, k and v of so many tokens."""
    rng, heads = torch.Generator().manual_seed(0), (pattern.heads, pattern.key_heads, pattern.key_heads)
    return [torch.randn(B, h, length, D, generator=rng).half().to(device) for h in heads]


def new(pattern: S2Pattern, room: int, B: int = 2, device: str = "cpu", kind: type = S2Cache) -> S2Cache:
    return kind(pattern, B, D, room, torch.float16, device)


def check_pages(cache: S2Cache, k: torch.Tensor, v: torch.Tensor) -> None:
    """That each key head has the keys and values of `pattern.cached`, in order, in pages of its own, and no
    page more is in use."""
    pattern, size, used = cache.pattern, cache.pattern.block_size, []
    told = cache.pages
    for sequence, length in enumerate(cache.tokens):
        for head in range(pattern.key_heads):
            row = sequence * pattern.key_heads + head
            blocks = pattern.cached(length, head) if length else []
            at = [t for block in blocks for t in range(block * size, min(block * size + size, length))]
            pages = told.page_table[row, : len(blocks)].tolist()
            assert int(told.lengths[row]) == len(at)
            for pool, x in ((told.k_cache, k), (told.v_cache, v)):
                assert torch.equal(pool[pages, 0].flatten(0, 1)[: len(at)], x[sequence, head, at])
            used += pages
    assert len(set(used)) == len(used) == cache.used
    by_formula = [pattern.cache_bytes(length, D) for length in cache.tokens if length]
    assert cache.bytes == sum(by_formula) <= cache.allocated_bytes


def generate(cache: S2Cache, q, k, v, tokens: Iterable[int], attend: Iterable[int]) -> torch.Tensor:
    """Token after token, and the attention of some."""
    attend, found = set(attend), []
    for t in tokens:
        now = [x[:, :, t : t + 1] for x in (q, k, v)]
        if t in attend:
            found.append(cache.decode(*now))
        else:
            cache.append(*now[1:])
    return torch.cat(found, 2)


def around_ends(tokens: Iterable[int]) -> list[int]:
    """Those where blocks begin and end, and one between."""
    return [t for t in tokens if t % 64 in (0, 1, 30, 63)]


def check_generating(pattern: S2Pattern, prompt: int, length: int, kind: type = S2Cache, every=False) -> None:
    q, k, v = tokens_of(pattern, length)
    cache, tokens = new(pattern, length + 64, kind=kind), range(prompt, length)
    cache.append(k[:, :, :prompt], v[:, :, :prompt])
    judged = list(tokens) if every else around_ends(tokens)
    out = generate(cache, q, k, v, tokens, judged)
    rows = defined(pattern, length)[None, :, judged].expand(2, -1, -1, -1)
    Oracle(q[:, :, judged], k, v, mask=rows).judge(out).raise_if_bad("generating")
    check_pages(cache, k, v)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize(("name", "prompt", "length"), [
    ("heads differ", 100, 900), ("heads share keys", 1, 450), ("a dense head", 128, 900),
    ("wide blocks", 191, 1000),
])  # fmt: skip
def test_tokens_attend_as_the_pattern_says(name, prompt, length, by_reference) -> None:
    assert length > 5 * PATTERNS[name].block_size
    check_generating(PATTERNS[name], prompt, length)


def test_each_token_does(by_reference) -> None:
    check_generating(SMALL, 250, 330, every=True)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_kernel_reads_it(name: str, device: str) -> None:
    """At tokens where blocks begin and end."""
    pattern = PATTERNS[name]
    q, k, v = tokens_of(pattern, 450, 1, device)
    cache, rows = new(pattern, 450, 1, device), defined(pattern, 450)[None].to(device)
    judged = 63, 64, 65, 319, 320, 384, 449
    for t in range(450):
        now = slice(t, t + 1)
        cache.append(k[:, :, now], v[:, :, now])
        if t in judged:
            oracle = Oracle(q[:, :, now], k[:, :, : t + 1], v[:, :, : t + 1], mask=rows[:, :, now, : t + 1])
            judge_forward(*cache.attend(q[:, :, now], return_lse=True), oracle, f"token {t}")
    check_pages(cache, k, v)


def test_several_new_tokens_are_taken_block_by_block(by_reference) -> None:
    """40 of them, 16 at most in one call, none of which sees two newest blocks."""
    q, k, v = tokens_of(SMALL, 600)
    one, many = (new(SMALL, 600) for _ in range(2))
    for cache in (one, many):
        cache.append(k[:, :, :300], v[:, :, :300])
    found = []
    for begin in range(300, 600, 40):
        now = slice(begin, min(begin + 40, 600))
        found.append(many.decode(q[:, :, now], k[:, :, now], v[:, :, now], sm_scale=-0.1))
    rows = defined(SMALL, 600)[None, :, 300:].expand(2, -1, -1, -1)
    oracle = Oracle(q[:, :, 300:], k, v, mask=rows, sm_scale=-0.1)
    oracle.judge(torch.cat(found, 2)).raise_if_bad("several tokens")
    for t in range(300, 600):
        one.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    check_pages(one, k, v)
    check_pages(many, k, v)


def test_newest_tokens_attend_together(by_reference) -> None:
    q, k, v = tokens_of(GROUPED, 330)
    cache = new(GROUPED, 400)
    cache.append(k, v)
    rows = defined(GROUPED, 330)[None, :, -10:].expand(2, -1, -1, -1)
    oracle = Oracle(q[:, :, -10:], k, v, mask=rows)
    judge_forward(*cache.attend(q[:, :, -10:], return_lse=True), oracle, "330 = 5 blocks and 10 tokens")


def test_sequences_of_different_lengths(by_reference) -> None:
    """A prompt of each; then all get a token at a time, and begin blocks at different ones."""
    prompts = 300, 0, 100
    q, k, v = tokens_of(SMALL, 450, 3)
    cache = new(SMALL, 450, 3)
    cache.append(k[:, :, :300], v[:, :, :300], prompts)
    assert cache.tokens == list(prompts)
    judged, found = [0, 1, 19, 20, 27, 28, 29, 63, 64, 148, 149], []
    for step in range(150):
        now = [torch.stack([x[i, :, n + step : n + step + 1] for i, n in enumerate(prompts)])
               for x in (q, k, v)]  # fmt: skip
        if step in judged:
            found.append(cache.decode(*now))
        else:
            cache.append(*now[1:])
    found = torch.cat(found, 2)
    for i, n in enumerate(prompts):
        rows, end, own = [n + step for step in judged], n + 150, slice(i, i + 1)
        seen = defined(SMALL, end)[None, :, rows]
        oracle = Oracle(q[own, :, rows], k[own, :, :end], v[own, :, :end], mask=seen)
        oracle.judge(found[own]).raise_if_bad(f"a prompt of {n} tokens")
    check_pages(cache, k, v)


def test_it_is_read_as_the_pages_of_the_pattern_are() -> None:
    """The same keys in the same order, so the same bits."""
    q, k, v = tokens_of(GROUPED, 300, 1)
    cache = new(GROUPED, 2000, 1)
    cache.append(k, v)
    pages = GROUPED.paged(k, v)
    rows = q[:, :, -1:].view(3, 2, 1, D)
    found, other = (attention_decode(rows, x.k_cache, x.v_cache, lengths=x.lengths, page_table=x.page_table,
                                     split=1) for x in (cache.pages, pages))  # fmt: skip
    assert torch.equal(found, other)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", PATTERNS)
def test_whatever_comes_at_once_the_same_is_kept(name: str) -> None:
    """Any numbers of tokens, from tensors in any order."""
    pattern, draw = PATTERNS[name], random.Random(name)
    _, k, v = tokens_of(pattern, 3000, 3)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    cache, at = new(pattern, 3000, 3), [0, 0, 0]
    while max(at) < 2300:
        n = draw.choice([1, 1, 7, 64, 100, 192, 700])
        counts = None if draw.random() < 0.3 else [draw.randint(0, n) for _ in range(3)]
        given = [torch.stack([x[i, :, begin : begin + n] for i, begin in enumerate(at)]) for x in (k, v)]
        cache.append(*given, counts)
        at = [begin + count for begin, count in zip(at, counts or [n] * 3, strict=True)]
        assert cache.tokens == at
        check_pages(cache, k, v)
    assert min(at) > 6 * pattern.block_size


def test_memory_is_what_the_formula_says() -> None:
    """The published pattern over 128 blocks: 8 near ones, and one in 16 of the others."""
    pattern = S2Pattern(heads=16)
    _, k, v = tokens_of(pattern, 64, 1)
    cache = new(pattern, 8192, 1)
    pools = [x.data_ptr() for x in (cache.pages.k_cache, cache.pages.v_cache)]
    for length in range(64, 8193, 64):
        cache.append(k, v)
        assert cache.bytes == pattern.cache_bytes(length, D)
        assert cache.full_bytes == 16 * 2 * length * D * 2
    assert [x.data_ptr() for x in (cache.pages.k_cache, cache.pages.v_cache)] == pools
    assert cache.bytes == cache.allocated_bytes and cache.full_bytes / cache.bytes > 8
    assert "tokens=[8192], room=8192, pages=248 of 248 in use" in repr(cache)


def test_all_heads_dense_keep_all() -> None:
    pattern = S2Pattern(heads=2, dense_heads=2)
    _, k, v = tokens_of(pattern, 1000)
    cache = new(pattern, 1000)
    cache.append(k, v)
    check_pages(cache, k, v)
    assert cache.bytes == cache.full_bytes == cache.allocated_bytes


def test_a_page_that_is_free_is_used_again_and_nothing_moves() -> None:
    _, k, v = tokens_of(SMALL, 600)
    cache, seen, free = new(SMALL, 600), set(), 0
    cache.append(k[:, :, :1], v[:, :, :1])
    for t in range(1, 600):
        told = cache.pages
        before, table = [x.view(torch.int16).clone() for x in told[:2]], told.page_table.clone()
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        for pool, old in zip(told[:2], before, strict=True):
            changed = (pool.view(torch.int16) != old).any(3).sum()
            assert changed <= 2 * SMALL.key_heads, "new tokens alone are written"
        if t % 64:
            assert torch.equal(told.page_table, table)
        else:
            pages = {page for row in cache._pages for page in row}
            free += len(seen - pages)  # was in use, and is not
            assert len(seen & pages) < len(pages)
            seen |= pages
    begun = 2 * SMALL.key_heads * 10
    assert cache.used == len(seen) < begun and not free, "a page that comes free is taken at once"


BUGS = [
    Mutation("a near block is free one block too early", "self.pattern.local_blocks, self.pattern.stride",
             "self.pattern.local_blocks - 1, self.pattern.stride", "SMALL", "generating"),
    Mutation("blocks of the stride are forgotten", "block % stride == first", "block % stride == first + 1",
             "SMALL", "generating"),
    Mutation("dense heads forget", "if not (dense or", "if not (", "HYBRID", "generating"),
    Mutation("a page is given back twice", "self._free.append(page)", "self._free += [page, page]", "SMALL",
             "generating"),
    Mutation("pages are never used again", "self._free.append(page)", "pass", "SMALL", "pop from empty list"),
    Mutation("the table is sent late by a page", "entries += pages[first:]",
             "entries += [*pages[first:-1], 0][-len(pages[first:]):]", "SMALL", "generating"),
    Mutation("lengths count whole blocks", "len(pages) * size - -end % size", "len(pages) * size",
             "SMALL", "generating|lengths: expected"),
    Mutation("a token is written one place late", "page * size + begin % size,",
             "page * size + begin % size + 1,", "SMALL", "generating"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_are_noticed(bug: Mutation, by_reference, tmp_path) -> None:
    planted = load(bug.of(inspect.getsource(s2_cache)), tmp_path).S2Cache
    pattern = {"SMALL": SMALL, "HYBRID": HYBRID}[bug.caught_by]
    with pytest.raises((AssertionError, IndexError, ValueError), match=bug.verdict):
        check_generating(pattern, 100, 700, planted)


# ---------------------------------------------------------------- what is wrong


def zeros(*shape: int, dtype: torch.dtype = torch.float16, **how) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, **how)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"pattern": None}, TypeError, "pattern: expected an attnlib.S2Pattern, got NoneType"),
    ({"batch": 0}, ValueError, "batch: expected 1 or more, got 0"),
    ({"batch": 2.0}, TypeError, "batch: expected an int, got float"),
    ({"head_dim": 12}, ValueError,
     "head_dim: expected a head dimension that is a multiple of 8 from 8 to 256, got 12"),
    ({"head_dim": "64"}, TypeError, "head_dim: expected an int, got str"),
    ({"room": 0}, ValueError, "room: expected 1 or more, got 0"),
    ({"dtype": "half"}, TypeError, "dtype: expected a torch.dtype, got str"),
    ({"dtype": torch.int8}, ValueError, "dtype: expected float16, bfloat16 or float32, got torch.int8"),
])  # fmt: skip
def test_what_it_is_made_with_is_checked(change, error, message) -> None:
    good = {"pattern": SMALL, "batch": 2, "head_dim": D, "room": 200, "dtype": torch.float16}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        S2Cache(**good | change)


KEYS, ONE = (2, 4, 1, D), zeros(2, 4, 1, D)
SHAPE = "expected shape (2, 4, n, 16), n at least 1, got"
WRONG = [
    ("append", (None, ONE), TypeError, "k: expected a torch.Tensor, got NoneType"),
    ("append", (ONE, [0.0]), TypeError, "v: expected a torch.Tensor, got list"),
    ("append", (zeros(2, 3, 1, D), ONE), ValueError, f"k: {SHAPE} (2, 3, 1, 16)"),
    ("append", (zeros(2, 4, 0, D), ONE), ValueError, f"k: {SHAPE} (2, 4, 0, 16)"),
    ("append", (ONE, zeros(2, 4, D)), ValueError, f"v: {SHAPE} (2, 4, 16)"),
    ("append", (ONE, zeros(2, 4, 2, D)), ValueError,
     "v: expected shape (2, 4, 1, 16) as k has, got (2, 4, 2, 16)"),
    ("append", (ONE.float(), ONE), TypeError,
     "k: expected dtype torch.float16 as the cache has, got torch.float32"),
    ("append", (ONE, ONE.to("meta")), ValueError, "v: expected device cpu as the cache has, got meta"),
    ("append", (ONE.to_sparse(), ONE), TypeError,
     "k: expected a dense tensor (layout torch.strided), got torch.sparse_coo"),
    ("append", (zeros(*KEYS, requires_grad=True), ONE), RuntimeError,
     "k: expected a tensor that does not require grad, or torch.no_grad(), got one that does: a cache has no "
     "gradient"),
    ("append", (ONE, ONE, 1), TypeError, "counts: expected a list of ints or None, got int"),
    ("append", (ONE, ONE, [1]), ValueError, "counts: expected a number for each of 2 sequences, got 1"),
    ("append", (ONE, ONE, [0, 2]), ValueError, "counts: expected ints from 0 to 1, the tokens of k, got 2"),
    ("append", (ONE, ONE, [0, 1.0]), TypeError,
     "counts: expected ints from 0 to 1, the tokens of k, got float"),
    ("append", (zeros(2, 4, 91, D), zeros(2, 4, 91, D)), ValueError,
     "k: expected at most 70 more tokens of sequence 0, for which the cache has room, got 91"),
    ("append", (zeros(2, 4, 91, D), zeros(2, 4, 91, D), [70, 91]), ValueError,
     "k: expected at most 80 more tokens of sequence 1, for which the cache has room, got 91"),
    ("attend", (zeros(2, 3, 1, D),), ValueError, f"q: {SHAPE} (2, 3, 1, 16)"),
    ("attend", (ONE.bfloat16(),), TypeError,
     "q: expected dtype torch.float16 as the cache has, got torch.bfloat16"),
    ("attend", (zeros(2, 4, 17, D),), ValueError, "q: expected 1 to 16 queries of each sequence, got 17"),
    ("attend", (zeros(2, 4, 3, D),), ValueError,
     "q: expected at most 2 queries, as many tokens as the newest block of every sequence has, got 3; decode "
     "takes tokens of several blocks"),
    ("decode", (zeros(2, 4, 2, D), ONE, ONE), ValueError,
     "q: expected 1 queries, one for each token of k, got 2"),
    ("decode", (ONE, ONE, ONE, {"sm_scale": "1"}), TypeError,
     "sm_scale: expected a number or None, got str"),
    ("decode", (ONE, ONE, ONE, {"sm_scale": 1e27}), ValueError,
     "sm_scale: expected a number from -1e26 to 1e26, got 1e+27"),
    ("decode", (ONE, ONE, zeros(2, 4, 2, D)), ValueError,
     "v: expected shape (2, 4, 1, 16) as k has, got (2, 4, 2, 16)"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "given", "error", "message"), WRONG, ids=[row[3] for row in WRONG])
def test_what_is_wrong_is_named_and_nothing_is_changed(method, given, error, message) -> None:
    cache = new(SMALL, 200)
    cache.append(zeros(2, 4, 130, D), zeros(2, 4, 130, D), [130, 120])
    cache.append(ONE, ONE, [0, 0])
    before = repr(cache), cache.pages.lengths.tolist()
    options = given[-1] if isinstance(given[-1], dict) else {}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        getattr(cache, method)(*given[: len(given) - bool(options)], **options)
    assert (repr(cache), cache.pages.lengths.tolist()) == before


def test_without_gradients_tensors_may_require_them() -> None:
    cache, given = new(WIDE, 200), zeros(2, 2, 5, D, requires_grad=True)
    with torch.no_grad():
        out = cache.decode(given, given, given)
    assert not out.requires_grad and not cache.pages.k_cache.requires_grad


@pytest.mark.parametrize("method", ["append", "decode"])
def test_a_graph_under_capture_is_refused(method: str, monkeypatch) -> None:
    """A replay would write tokens beyond the end of a page: nobody counts them."""
    cache = new(SMALL, 200)
    cache.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="^S2Cache: expected no CUDA graph under capture: the host would"):
        getattr(cache, method)(*[ONE] * {"append": 2, "decode": 3}[method])
    assert cache.tokens == [0, 0]


@pytest.mark.parametrize("way", [torch.func.vmap, lambda call: torch.jit.trace(call, (ONE[None],))],
                         ids=["torch.func", "torch.jit.trace"])  # fmt: skip
def test_what_calls_a_function_in_another_way_is_refused(way, request) -> None:
    cache, x = new(SMALL, 200), ONE[None]
    told = f"^S2Cache under {request.node.callspec.id}: not supported"
    with pytest.raises(NotImplementedError, match=told):
        way(lambda x: cache.decode(*(x.reshape(2, 4, 1, D),) * 3))(x)
    assert cache.tokens == [0, 0]


def test_inside_of_inference_mode_and_outside(by_reference) -> None:
    """Where it is made has no say in where it is used."""
    q, k, v = tokens_of(SMALL, 70)
    for inside in (True, False):
        with torch.inference_mode(inside):
            cache = new(SMALL, 70)
        for t in range(70):
            with torch.inference_mode(t % 2 == 0):
                cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert not cache.attend(q[:, :, -1:]).is_inference()
        check_pages(cache, k, v)


# ---------------------------------------------------------------- in a compiled model


def test_a_compiled_model_is_not_compiled_for_each_token(by_reference) -> None:
    """One graph before the call and one after it, however many tokens come and blocks begin."""
    q, k, v = tokens_of(SMALL, 140)
    cache, plain, counter = new(SMALL, 140), new(SMALL, 140), CompileCounter()
    torch._dynamo.reset()
    layer = torch.compile(lambda q, k, v: cache.decode(q * 2, k, v) + 1, backend=counter)
    for t in range(140):
        now = [x[:, :, t : t + 1] for x in (q, k, v)]
        assert torch.equal(layer(*now), plain.decode(now[0] * 2, *now[1:]) + 1)
    assert counter.frame_count == 2
    check_pages(cache, k, v)


# ---------------------------------------------------------------- calls that fail


@pytest.mark.parametrize("call", [
    lambda cache, q, k, v: cache.append(k, v), lambda cache, q, k, v: cache.attend(q),
    lambda cache, q, k, v: cache.decode(q, k, v),
], ids=["append", "attend", "decode"])  # fmt: skip
def test_a_cache_that_lacks_what_it_counted_is_refused(call, monkeypatch) -> None:
    """Of a prompt that memory ran out for."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    cache, (q, k, v) = new(SMALL, 200), tokens_of(SMALL, 130)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(S2Cache, "_gathered", no_memory)
        cache.append(k, v)
    assert not cache.whole
    with pytest.raises(RuntimeError, match="^S2Cache: expected a cache that has all tokens it counted; an"):
        call(cache, *(x[:, :, :1] for x in (q, k, v)))
