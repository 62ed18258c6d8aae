"""notebooks/features.md says what attnlib can do: each row of the table is shown by a call, yes and no alike;
and what notebooks/api.md quotes is what the package says.

The fast version of what other files test in full; a row without a check fails, and so does a check without a
row.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cases import INTERPRETER_REMARKS, judge_forward
from decode_cases import DecodeCase
from decode_cases import check as check_decode
from fake_gpu import gpu, tensor  # noqa: F401  (a fixture)
from score_cases import ScoreCase, check_scored
from sparse_cases import SparseCase
from torch._subclasses.fake_tensor import FakeTensorMode

import attnlib.hf
from attnlib import (
    BlockMask,
    S2Cache,
    S2Pattern,
    Score,
    attention,
    attention_fp8,
    attention_pooled,
    attention_varlen,
    explain,
    quantize_fp8,
)
from attnlib.arguments.common import DTYPES
from attnlib.arguments.offsets import check_offsets
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.paths import ROOT
from attnlib.bench.shapes import Shape
from attnlib.dispatch import resolve
from attnlib.kernels.common import preprocess
from attnlib.kernels.common.distr import Grouping
from attnlib.kernels.portable import backward_kernels
from attnlib.kernels.portable.configs_backward import backward_config
from attnlib.kernels.reference import bsfa as reference_bsfa
from attnlib.kernels.reference import distr as reference_distr
from attnlib.kernels.reference import entmax as reference_entmax
from attnlib.kernels.reference import monarch as reference_monarch
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import (
    BsfaParams,
    EntmaxParams,
    MaskWindow,
    MonarchParams,
    Params,
    Varlen,
    default_block,
    mask_window,
)
from attnlib.seer import SeerGate, mask_of, top

PAGE = ROOT / "notebooks" / "features.md"
API = (ROOT / "notebooks" / "api.md").read_text()
GPU_TESTS = (ROOT / "tests" / "gpu" / "test_gpu_torch.py").read_text()

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CHECKS: dict[str, Callable[..., str]] = {}
"""Row -> a check, which returns what the cell of attnlib says, or how it begins."""


def row(name: str) -> Callable:
    """The check of a row. Its arguments are fixtures."""

    def keep(check: Callable[..., str]) -> Callable[..., str]:
        assert name not in CHECKS, f"two checks of {name!r}"
        CHECKS[name] = check
        return check

    return keep


def cells() -> list[list[str]]:
    """The table, row by row, without its head."""
    table = PAGE.read_text().split("<!-- features -->")[1].split("<!-- /features -->")[0]
    lines = [line.strip().strip("|").split("|") for line in table.strip().splitlines()]
    return [[cell.strip() for cell in line] for line in lines[2:]]


OURS = {name: ours for name, ours, *_ in cells()}


def agrees(cell: str, found: str) -> bool:
    return cell == found or cell.startswith((f"{found},", f"{found};"))


@pytest.mark.parametrize("name", [*OURS, *(name for name in CHECKS if name not in OURS)])
def test_a_row_is_true(name, request):
    assert name in CHECKS, f"features.md: the row {name!r} has no check here"
    check = CHECKS[name]
    fixtures = inspect.signature(check).parameters
    found = check(**{fixture: request.getfixturevalue(fixture) for fixture in fixtures})
    assert agrees(OURS[name], found), f"features.md, {name!r}: expected {found!r}, got {OURS[name]!r}"


def test_every_check_has_a_row():
    assert set(CHECKS) == set(OURS)
    assert len(OURS) == len(cells()), "a row twice"


def test_a_wrong_cell_is_noticed():
    assert agrees("yes", "yes") and agrees("yes, in PyTorch", "yes") and agrees("no", "no")
    for cell in ("no", "yesterday", "?", "", "partly yes", "no, yes"):
        assert not agrees(cell, "yes")


def test_what_is_said_of_others_has_a_source():
    text = PAGE.read_text()
    defined = set(re.findall(r"^\[\^([\w-]+)\]:", text, flags=re.M))
    used = set()
    for name, _, *others in cells():
        assert len(others) == 4, f"features.md, {name!r}: expected 4 other columns, got {len(others)}"
        for cell in others:
            notes = re.findall(r"\[\^([\w-]+)\]", cell)
            assert notes or cell == "?", f"features.md, {name!r}: no source for {cell!r}"
            used |= set(notes)
    assert used == defined
    for note in defined:
        source = text.split(f"[^{note}]:")[1].split("\n[^")[0]
        assert re.search(r"\]\(https://|torch \d", source), f"features.md: no address in the note {note}"


# ---------------------------------------------------------------- what is not softmax attention


def other_functions() -> dict[str, list[str]]:
    """Row of the second table -> its cells."""
    table = PAGE.read_text().split("<!-- not softmax -->")[1].split("<!-- /not softmax -->")[0]
    lines = [line.strip().strip("|").split("|") for line in table.strip().splitlines()][2:]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def bsfa_of(threshold: float) -> Callable:
    params = BsfaParams(torch.full((1, 1, 1), threshold), False, 0.125)
    return lambda q, k, v: reference_bsfa.forward(q, k, v, params)[0]


def entmax_of(alpha: float) -> Callable:
    return lambda q, k, v: reference_entmax.forward(q, k, v, EntmaxParams(alpha, False, 0.125))[0]


def monarch_of(steps: int) -> Callable:
    params = MonarchParams(default_block(512), steps, 0, 0.125)
    return lambda q, k, v: reference_monarch.forward(q, k, v, params)


def distr_of(columns: int) -> Callable:
    def distr(q, k, v):
        grouped = reference_distr.group(q, k, Grouping(columns), False)
        return reference_distr.forward(grouped, v, Params(mask_window(False, None), 0.125))

    return distr


IN_FP64 = {f"`attention_bsfa`, threshold = {limit:g}": bsfa_of(limit) for limit in (4.0,)}
IN_FP64 |= {f"`attention_entmax`, alpha = {alpha:g}": entmax_of(alpha) for alpha in (1.5, 2.0)}
IN_FP64 |= {f"`attention_monarch`, steps = {steps}": monarch_of(steps) for steps in (1, 2)}
IN_FP64 |= {f"`attention_distr`, group = {columns}": distr_of(columns) for columns in (2, 4)}
"""Row -> the function in fp64."""


@pytest.mark.parametrize("name", IN_FP64)
def test_what_another_function_is_off_by(name):
    q, k, v = (x.double() for x in make_inputs(Shape(1, 1, 512, 64, False, "float32"), device="cpu"))
    softmax = attention_fp64(q, k, v)[0]
    off = (IN_FP64[name](q, k, v) - softmax).square().mean() / softmax.square().mean()
    assert other_functions()[name][1] == f"{off.sqrt().item():.1f}"


def test_every_other_function_has_a_row():
    assert set(other_functions()) == set(IN_FP64)


# ---------------------------------------------------------------- the page of the API


def test_the_operators_are_quoted_as_they_are():
    text = " ".join(API.split())
    for name in ("attention_forward", "attention_backward"):
        assert str(getattr(torch.ops.attnlib, name).default._schema) in text


def test_the_error_is_quoted_as_it_is():
    lines = API.split("    >>> ", 1)[1].split("\n\n")[0].splitlines()
    *statements, call, error = (line.strip().removeprefix(">>> ") for line in lines)
    names = {"torch": torch, "attention": attention}
    exec("\n".join(statements), names)
    kind, message = error.split(": ", 1)
    assert kind == "ValueError"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        eval(call, names)


def test_the_two_ways_to_write_a_window_are_one(device):
    """`(255, 0)` and `causal=True, window=(255, -1)`."""
    assert "`causal=True, window=(255, -1)` is the same" in API
    inputs = make_inputs(Shape(1, 1, 20, 16, seqlen_k=30), device=device)
    assert torch.equal(attention(*inputs, window=(7, 0)), attention(*inputs, causal=True, window=(7, -1)))


# ---------------------------------------------------------------- tools


def check_call(shape: Shape, device: str, impl: str | None = None, **options) -> None:
    """AssertionError unless output and LSE are what the oracle says."""
    q, k, v = make_inputs(shape, device=device)
    out, lse = attention(q, k, v, causal=shape.causal, return_lse=True, impl=impl, **options)
    judge_forward(out, lse, Oracle(q, k, v, shape.causal, **options), shape.label)


def refuses(argument: str) -> str:
    """ "no": neither function takes this argument, and Python says which one it is."""
    q = torch.zeros(1, 1, 4, 16)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'"):
        attention(q, q, q, **{argument: 1})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'"):
        attention_varlen(q[0], q[0], q[0], offsets, offsets, 4, 4, **{argument: 1})
    return "no"


def hf_refuses(mask=None, **options) -> None:
    """A model of transformers that asks for it gets an error that names it."""
    q = torch.zeros(1, 1, 4, 16)
    name = next(iter(options), "attention_mask")
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        attnlib.hf.attention_forward(SimpleNamespace(is_causal=True), q, q, q, mask, **options)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


# ---------------------------------------------------------------- shapes and dtypes


@row("dtypes")
def dtypes(device) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    for name in names:
        check_call(Shape(1, 2, 17, 16, causal=True, dtype=name), device)
    with pytest.raises(TypeError, match=f"^q: expected dtype {', '.join(names[:-1])} or {names[-1]}, got"):
        attention(*torch.zeros(3, 1, 1, 4, 16, dtype=torch.float64))
    return ", ".join(names)


@row("head dimension D")
def head_dimension(device) -> str:
    def accepted(head_dim: int) -> bool:
        try:
            attention(*torch.empty(3, 1, 1, 4, head_dim, device="meta"))
        except ValueError as error:
            assert str(error).startswith("q: expected a head dimension that is a multiple of 8")
            return False
        return True

    found = [head_dim for head_dim in range(1, 521) if accepted(head_dim)]
    step, first, last = found[1] - found[0], found[0], found[-1]
    assert found == list(range(first, last + 1, step))
    for head_dim in (first, 40, last):
        check_call(Shape(1, 1, 20, head_dim), device)
    return f"multiples of {step} from {first} to {last}"


@row("values with a head dimension of their own")
def values_of_another_width(device) -> str:
    def accepted(value_dim: int) -> bool:
        q = torch.empty(1, 1, 4, 192, device="meta")
        try:
            attention(q, q, torch.empty(1, 1, 4, value_dim, device="meta"))
        except ValueError as error:
            assert str(error).startswith("v: expected a head dimension that is a multiple of 8")
            return False
        return True

    found = [value_dim for value_dim in range(1, 521) if accepted(value_dim)]
    assert found == list(range(8, 257, 8))
    check_call(Shape(1, 2, 20, 192, heads_kv=1, head_dim_v=128), device)
    check_call(Shape(1, 1, 20, 8, head_dim_v=256), device)
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="^score: expected None beside values of head dimension 8, where q"):
        attention(q, q, q[..., :8], score=Score(soft_cap=9.0))
    return "yes, multiples of 8 from 8 to 256; not under a block mask or a score"


@row("grouped heads")
def grouped_heads(device) -> str:
    check_call(Shape(1, 6, 20, 16, heads_kv=2), device)
    return "yes"


@row("FP8")
def fp8() -> str:
    q = torch.zeros(1, 1, 4, 16).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="^q: expected dtype float16, .* got torch.float8_e4m3fn$"):
        attention(q, q, q)
    q, k, v = torch.randn(3, 1, 1, 40, 64, generator=torch.Generator().manual_seed(0))
    out = attention_fp8(q, quantize_fp8(k, "k"), v, impl="reference")
    error = (out - attention(q, k, v)).square().mean().sqrt()
    assert 1e-4 < error < 0.03
    assert (attention_fp8(q, k, v + 100, impl="reference") - 100 - out).abs().max() < 0.05
    with pytest.raises(RuntimeError, match="attention_fp8 has no gradient"):
        attention_fp8(q.requires_grad_(), k, v)
    return "forward, e4m3, by `attention_fp8` on Hopper; values centered"


# ---------------------------------------------------------------- which keys


@row("causal with Sq != Sk, aligned at the bottom right")
def bottom_right(device) -> str:
    for queries, keys in ((5, 20), (20, 5)):
        check_call(Shape(1, 1, queries, 16, causal=True, seqlen_k=keys), device)
    return "yes"


def loads(monkeypatch, length: int, window: tuple[int, int] | None, grad: bool) -> int:
    """How many tiles a call reads in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    count, load = [0], InterpreterBuilder.create_descriptor_load

    def counting(*given):
        count[0] += 1
        return load(*given)

    q, k, v = leaves(*make_inputs(Shape(1, 1, length, 16), device="cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_descriptor_load", counting)
        out = attention(q, k, v, window=window, impl="triton")
        if grad:
            count[0] = 0
            out.sum().backward()
    return count[0]


@row("sliding window at a cost that grows with its width")
def sliding_window(device, monkeypatch) -> str:
    check_call(Shape(1, 1, 100, 16), device, window=(20, 3))
    if device == "cuda":
        pytest.skip("counts loads of the interpreter")
    for grad in (False, True):
        short, long = (
            {window: loads(monkeypatch, length, window, grad) for window in ((64, 0), (128, 0), None)}
            for length in (192, 384)
        )
        # Twice the length: some twice the work in a window, some four times without one.
        assert long[64, 0] <= 2.4 * short[64, 0] and long[None] >= 3 * short[None]
        assert long[64, 0] < long[128, 0] < long[None]
    return "yes"


@row("varlen: sequences of different lengths in one call")
def packed_sequences(device) -> str:
    lengths = [0, 7, 30, 1]
    q, k, v = (x[0].transpose(0, 1) for x in make_inputs(Shape(1, 2, sum(lengths), 16), device=device))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    out, lse = attention_varlen(q, k, v, ends, ends, 30, 30, causal=True, return_lse=True)
    for begin, end in zip(ends[1:-1], ends[2:], strict=True):
        one = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v, out)]
        judge_forward(one[3], lse[None, :, begin:end], Oracle(*one[:3], True), f"{begin}:{end}")
    return "yes"


@row("any mask")
def any_mask(device) -> str:
    """Forward and backward; a tensor as it is has to become a BlockMask first."""
    q, k, v = leaves(*make_inputs(Shape(1, 2, 30, 16, causal=False, seqlen_k=40), device=device))
    seen = torch.rand(1, 2, 30, 40, generator=torch.Generator().manual_seed(0)).to(device) < 0.3
    out, lse = attention(q, k, v, block_mask=BlockMask.from_mask(seen), return_lse=True)
    judge_forward(out, lse, Oracle(q.detach(), k.detach(), v.detach(), mask=seen), "any mask")
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    oracle = GradientOracle(torch.ones_like(out), q.detach(), k.detach(), v.detach(), mask=seen)
    for verdict in oracle.judge(*gradients).values():
        verdict.raise_if_bad("any mask")
    assert refuses("attn_mask") == "no"
    return "yes"


@row("far keys shared out over the heads (S2-Attention)")
def s2(device) -> str:
    """Forward, under a mask that heads see each their part of."""
    q, k, v = make_inputs(Shape(1, 2, 200, 16), device=device)
    mask = S2Pattern(heads=2, local_blocks=1, stride=2).mask(200, device)
    oracle = Oracle(q, k, v, mask=mask.to_dense())
    oracle.judge(attention(q, k, v, block_mask=mask)).raise_if_bad("S2")
    return "yes, `S2Pattern`"


@row("blocks chosen on the GPU by a learned gate (SeerAttention)")
def seer(device) -> str:
    """Forward, under the mask of the choice."""
    q, k, v = make_inputs(Shape(1, 2, 200, 16), device=device)
    with torch.no_grad():
        blocks = top(SeerGate(2, 2, 16, block=64).to(device)(q.float(), k.float()), 2)
    mask = mask_of(blocks, 200, 64)
    oracle = Oracle(q, k, v, mask=mask.to_dense())
    oracle.judge(attention(q, k, v, block_mask=mask)).raise_if_bad("SeerAttention")
    return "yes, `attnlib.seer`"


@row("the largest weight of each block of queries and keys, beside the output")
def pooled(device) -> str:
    q, k, v = make_inputs(Shape(1, 2, 100, 16), device=device)
    out, found = attention_pooled(q, k, v)
    Oracle(q, k, v).judge(out).raise_if_bad("pooled")
    weights = torch.softmax(q.double() @ k.double().mT / 4, -1)
    wanted = torch.stack([x.amax((2, 3)) for rows in weights.split(64, 2) for x in rows.split(64, 3)], -1)
    torch.testing.assert_close(found.flatten(2).double(), wanted, rtol=1e-3, atol=1e-6)
    return "yes, `attention_pooled`"


def scored(score: str) -> str:
    """Forward and backward, beside fp64."""
    call = SparseCase(Shape(1, 2, 30, 16, causal=False, seqlen_k=40), window=(20, 5))
    check_scored(ScoreCase(call, score, block_mask=False), "cuda" if torch.cuda.is_available() else "cpu")
    return "yes"


@row("any bias")
def any_bias() -> str:
    assert refuses("bias") == "no"  # it is a part of a Score
    return scored("bias by all")


@row("soft cap on the scores")
def soft_cap(device) -> str:
    assert refuses("softcap") == "no"
    q, k, v = make_inputs(Shape(1, 1, 12, 16), device=device)
    layer = SimpleNamespace(is_causal=True)
    found, _ = attnlib.hf.attention_forward(layer, q, k, v, None, softcap=2.0)
    assert torch.equal(found.transpose(1, 2), attention(q, k, v, causal=True, score=Score(soft_cap=2.0)))
    return scored("cap 2")


@row("ALiBi")
def alibi() -> str:
    assert refuses("alibi_slopes") == "no"  # they are a part of a Score
    return scored("alibi")


@row("attention sinks, learned")
def sinks() -> str:
    """`scored` asks for the gradient of what is learned, too."""
    assert refuses("sinks") == "no"
    return scored("sinks 1")


@row("a score function of one's own")
def own_function() -> str:
    assert refuses("score_mod") == "no"
    scored("own")
    return "yes, a `@triton.jit` function and its derivative"


@row("dropout")
def dropout() -> str:
    hf_refuses(dropout=0.1)
    return refuses("dropout_p")


@row("KV cache in one piece, prefill and decoding")
def kv_cache(device) -> str:
    q, k, v = make_inputs(Shape(2, 4, 12, 16, dtype="float32", heads_kv=2), device=device)
    whole = attention(q, k, v, causal=True)
    cache = torch.full((2, *k.shape[:2], 32, 16), torch.nan, device=device)  # room for more
    cache[0, :, :, :12], cache[1, :, :, :12] = k, v
    begin = 0
    for end in (7, 8, 11, 12):
        part = attention(q[:, :, begin:end], *cache[..., :end, :], causal=True)
        torch.testing.assert_close(part, whole[:, :, begin:end], rtol=1e-5, atol=1e-5)
        begin = end
    return "yes"


@row("KV cache that forgets what no later token sees (S2-Attention), and uses its pages again")
def s2_cache(device) -> str:
    """130 tokens, the last one in a block that took another one's page."""
    pattern = S2Pattern(heads=2, local_blocks=1, stride=2)
    q, k, v = make_inputs(Shape(1, 2, 130, 16), device=device)
    cache = S2Cache(pattern, 1, 16, 130, q.dtype, device)
    cache.append(k[:, :, :129], v[:, :, :129])
    out = cache.decode(*(x[:, :, 129:] for x in (q, k, v)))
    seen = pattern.mask(130, device).to_dense()[:, :, 129:]
    Oracle(q[:, :, 129:], k, v, mask=seen).judge(out).raise_if_bad("S2Cache")
    assert cache.used == 4 and cache.bytes == 2 / 3 * cache.full_bytes
    return "yes, `S2Cache`"


@row("paged KV cache, decoding split over the keys")
def paged_cache() -> str:
    hf_refuses(cache=object())
    case = DecodeCase("two new tokens", (0, 1, 40, 300), queries=2, page=16, split="stream_k")
    check_decode(case, "cuda" if torch.cuda.is_available() else "cpu")
    return "yes"


@row("KV cache in FP8, with scales")
def fp8_cache(device) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    for page in (None, 16):
        check_decode(DecodeCase("FP8", (1, 40, 90), page=page, scales="pairs", split="stream_k"), device)
    return "yes"


# ---------------------------------------------------------------- gradients


@row("LSE returned")
def lse(device) -> str:
    q, k, v = make_inputs(Shape(1, 1, 20, 16), device=device)
    scores = q.double() @ k.double().mT / 4
    _, found = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(found.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    return "yes"


def gradients(device, **options) -> list[torch.Tensor]:
    inputs = make_inputs(Shape(1, 2, 30, 16, heads_kv=1), device=device)
    d_out = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0)).to(inputs[0])
    found = leaves(*inputs)
    attention(*found, causal=True, **options).backward(d_out)
    found = [x.grad for x in found]
    for verdict in GradientOracle(d_out, *inputs, causal=True).judge(*found).values():
        verdict.raise_if_bad("gradient")
    return found


@row("backward")
def backward_pass(device) -> str:
    gradients(device)
    return "yes"


@row("deterministic backward")
def deterministic(device, request) -> str:
    pairs = zip(*(gradients(device, deterministic=True) for _ in range(2)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # Alone that says little in the interpreter: no sum of the portable kernels is left to chance.
    for module in (backward_kernels, preprocess):
        assert "atomic_" not in inspect.getsource(module)
    assert "def test_deterministic_gradients_have_the_same_bits_in_a_hundred_runs(" in GPU_TESTS
    request.getfixturevalue("gpu")  # and the Hopper kernel, whose dQ is one, keeps its additions in order
    inputs = [tensor(1, 1, 300, 64) for _ in range(3)]
    asked = [Params(MaskWindow(None, None), 0.125, deterministic=x) for x in (False, True)]
    chosen = [resolve(*inputs, params, backward=True) for params in asked]
    assert [choice.kernel for choice in chosen] == ["hopper", "hopper"]
    assert [choice.configuration.deterministic for choice in chosen] == [False, True]
    return "yes"


@row("second derivatives")
def second_derivatives(device) -> str:
    (q,) = leaves(torch.randn(1, 1, 4, 16, device=device))
    (dq,) = torch.autograd.grad(attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="^attnlib.attention has no second derivative"):
        dq.sum().backward()
    return "no"


@row("one sequence over several GPUs")
def several_gpus(device) -> str:
    """Each rank in its own process: tests/distributed. Here that the four ways are among the arguments."""
    from attnlib.arguments.distributed import METHODS
    from attnlib.distributed import attention as over_ranks

    assert METHODS == ("ring", "all_gather", "ulysses", "auto")
    assert "hybrid" in inspect.getdoc(over_ranks)
    tests = (ROOT / "tests" / "distributed" / "test_distributed.py").read_text()
    assert all(f'"{method}"' in tests for method in METHODS) and "mesh=(1, 2)" in tests
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        over_ranks(*make_inputs(Shape(1, 1, 8, 8), device=device))
    return "yes, `attnlib.distributed`: ring, all-gather, Ulysses, hybrid"


@row("varlen sequences over several GPUs")
def varlen_over_ranks(device) -> str:
    """Two processes, forward and backward: tests/distributed/test_distributed.py and test_varlen_ranks.py.
    Here one rank."""
    import torch.distributed as dist

    from attnlib import attention_varlen
    from attnlib.distributed import attention_varlen as over_ranks

    q, k, v = (x[0].transpose(0, 1) for x in make_inputs(Shape(1, 2, 24, 8), device=device))
    ends = torch.tensor([0, 5, 24], dtype=torch.int32, device=device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = [
            over_ranks(q, k, v, ends, 19, causal=True, method=method) for method in ("ulysses", "all_gather")
        ]
    finally:
        dist.destroy_process_group()
    expected = attention_varlen(q, k, v, ends, ends, 19, 19, causal=True)
    assert all(torch.equal(out, expected) for out in found)
    return "yes, `attnlib.distributed.attention_varlen`: Ulysses, or all-gather for any number of heads"


@row("heads over several GPUs, the projection's AllReduce under the next rows' work")
def tensor_parallel(device) -> str:
    """Two processes, forward and backward: tests/distributed/test_output.py. Here one rank."""
    import torch.distributed as dist

    from attnlib.distributed import row_parallel_output

    q, k, v = make_inputs(Shape(1, 2, 24, 8), device=device)
    weight = torch.eye(16, device=device, dtype=q.dtype)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        y = row_parallel_output(q, k, v, weight, causal=True, chunks=3)
    finally:
        dist.destroy_process_group()
    expected = attention(q, k, v, causal=True).transpose(1, 2).flatten(2)
    assert (y - expected).abs().max() <= 2e-3
    return "yes, `attnlib.distributed.row_parallel_output`"


# ---------------------------------------------------------------- in PyTorch


@row("torch.compile, fullgraph, dynamic shapes")
def compiled(device) -> str:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    call = torch.compile(lambda *x: attention(*x, causal=True), fullgraph=True, dynamic=True, backend=backend)
    for queries, keys in ((20, 30), (33, 50), (5, 7)):
        inputs = make_inputs(Shape(1, 2, queries, 16, seqlen_k=keys), device=device)
        assert torch.equal(call(*inputs), attention(*inputs, causal=True))
    torch.compiler.reset()
    assert len(graphs) == 1 and "attnlib.attention_forward" in str(graphs[0].graph)
    return "yes"


@row("under PyTorch's SDPA and `context_parallel`, in the place of its FlashAttention")
def as_pytorchs_kernels(device) -> str:
    """Right: tests/api/test_sdpa.py; the ring: tests/distributed/test_distributed.py."""
    from torch.nn import attention as backends

    from attnlib import sdpa

    sdpa.register()
    assert sdpa.NAME in backends.list_flash_attention_impls()
    return "yes, `attnlib.sdpa`"


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, causal=True)


@row("torch.export, dynamic shapes")
def exported(device) -> str:
    inputs = make_inputs(Shape(2, 2, 20, 16), device=device)
    sizes = {0: torch.export.Dim("batch", max=64), 2: torch.export.Dim("seqlen", max=4096)}
    shapes = dict.fromkeys("qkv", sizes)
    program = torch.export.export(Layer(), inputs, dynamic_shapes=shapes, strict=False)
    assert "attnlib.attention_forward" in str(program.graph)
    inputs = make_inputs(Shape(3, 2, 35, 16), device=device)
    assert torch.equal(program.module()(*inputs), attention(*inputs, causal=True))
    return "yes"


@row("autocast")
def autocast(device) -> str:
    inputs = make_inputs(Shape(1, 1, 20, 16, dtype="float32"), device=device)
    with torch.autocast(device, torch.bfloat16):
        out = attention(*inputs)
    assert out.dtype == torch.bfloat16 and torch.equal(out, attention(*(x.bfloat16() for x in inputs)))
    return "yes"


@row("CUDA graphs")
def cuda_graphs(monkeypatch) -> str:
    """Capture forbids to wait for the GPU. The values of offsets are all that a call could wait for; here
    they have none, so that a look at them is an error."""
    with FakeTensorMode():
        q = torch.empty(8, 1, 16, device="cuda")
        ends = torch.empty(2, dtype=torch.int32, device="cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with pytest.raises(RuntimeError):
            check_offsets(q, q, Varlen(ends, ends, 8, 8))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        check_offsets(q, q, Varlen(ends, ends, 8, 8))
    for name in ("test_a_graph_of_forward_and_backward", "test_a_graph_of_packed_sequences"):
        assert f"def {name}(" in GPU_TESTS
    return "yes"


# ---------------------------------------------------------------- where it runs


@row("GPUs")
def gpus(gpu) -> str:
    majors = []
    for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        gpu(major, minor)
        choice = explain(*(tensor(1, 1, 80, 128) for _ in range(3)))
        assert choice.configuration is not None
        for head_dim in (64, 128, 256):
            backward_config(head_dim, "float16", (major, minor))
        if choice.kernel == "hopper":
            majors.append(major)
        else:
            assert choice.kernel == "triton"
    measured = {path.name for path in (ROOT / "figures" / "data").iterdir() if path.is_dir()}
    assert len(majors) == 1 and measured and all("h100" in name or "h200" in name for name in measured)
    return f"compute capability {majors[0]}.x"


@row("runs without a GPU")
def without_a_gpu(device) -> str:
    kernels = ["reference"] if device == "cuda" else ["reference", "triton"]
    for impl in kernels:
        check_call(Shape(1, 1, 20, 16, causal=True), "cpu", impl=impl)
    return "yes"


@row("attn_implementation in transformers")
def transformers(device) -> str:
    pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")
    from small_models import build, tokens

    attnlib.hf.register()
    ids = tokens(1, 9, device)
    with torch.no_grad():
        logits = [build("llama", name, device)(ids).logits for name in (attnlib.hf.NAME, "sdpa")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    q, k, v = make_inputs(Shape(1, 1, 12, 16), device=device)
    seen = torch.rand(1, 1, 12, 12, device=device) > 0.3
    found, _ = attnlib.hf.attention_forward(SimpleNamespace(is_causal=True), q, k, v, seen)
    assert torch.equal(found.transpose(1, 2), attention(q, k, v, block_mask=BlockMask.from_mask(seen)))
    return f'yes, "{attnlib.hf.NAME}"'
