"""Nothing bad gets through: equal bits in every run, from every thread; no write outside of the outputs; what
is not finite stays in its rows; processes that share a cache do not harm each other."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import INTERPRETER_REMARKS
from families import forget_launches, forward

import attnlib
from attnlib import attention, attention_varlen, node
from attnlib.bench import tuning
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import portable
from attnlib.kernels.portable.configs import ForwardConfig
from attnlib.kernels.reference import fp8 as fp8_model
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import MaskWindow, Params, mask_window

pytestmark = INTERPRETER_REMARKS
MASKS = {
    "dense": {}, "causal": {"causal": True}, "window": {"window": (20, 9)},
    "causal window": {"causal": True, "window": (30, 0)},
}  # fmt: skip
BY_MASK = pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)


def step(inputs, **options):
    """(out, lse, dq, dk, dv) by the portable kernels."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse = attention(*inputs, impl="triton", return_lse=True, **options)
    generator = torch.Generator(out.device).manual_seed(1)
    d_out = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    return out.detach(), lse, *torch.autograd.grad(out, inputs, d_out)


# ---------------------------------------------------------------- functions without a gradient

OFFSETS = torch.tensor([0, 16], dtype=torch.int32)
WITHOUT_GRADIENT = {
    "quantize_fp8": lambda x: attnlib.quantize_fp8(x, "q"),
    "attention_fp8": lambda x: attnlib.attention_fp8(x, x, x, impl="reference"),
    "attention_fp8_varlen": lambda x: attnlib.attention_fp8_varlen(
        x, x, x, OFFSETS, OFFSETS, 16, 16, impl="reference"
    ),
    "attention_pooled": lambda x: attnlib.attention_pooled(x, x, x),
    "attention_distr": lambda x: attnlib.attention_distr(x, x, x, group=2),
    "attention_monarch": lambda x: attnlib.attention_monarch(x, x, x),
    "monarch_matrix": lambda x: attnlib.monarch_matrix(x, x),
    "bsfa_threshold": lambda x: attnlib.bsfa_threshold(x, x, kept=1),
}
OPERATORS = {
    "attention_decode": lambda x: attnlib.attention_decode(x, x, x),
    "attention_bsfa": lambda x: attnlib.attention_bsfa(x, x, x, threshold=0.1),
}


def operand(name: str) -> torch.Tensor:
    shape = (16, 1, 64) if "varlen" in name else (1, 1, 16, 64)
    return torch.ones(shape, dtype=torch.float16)


class Standing(torch.Tensor):
    """Stands for another tensor, as DTensor does, and has no memory."""

    @staticmethod
    def __new__(cls, x):
        return cls._make_wrapper_subclass(cls, x.shape, x.stride(), dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} was called")


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_tensor_without_memory_reaches_no_kernel(name):
    given = "x" if name == "quantize_fp8" else "q"
    with pytest.raises(TypeError, match=f"^{given}: expected a plain tensor, got test_robust.Standing$"):
        WITHOUT_GRADIENT[name](Standing(operand(name)))


def test_nor_does_one_beside_plain_tensors():
    """Operators ask its class; what is none refuses it."""
    x, tokens = operand(""), operand("varlen")
    numbers = Standing(torch.ones(1, dtype=torch.int32)), Standing(OFFSETS)
    with pytest.raises(NotImplementedError, match="attnlib.attention_decode.default was called"):
        attnlib.attention_decode(x, x, x, lengths=numbers[0])
    with pytest.raises(NotImplementedError, match="attnlib.attention_forward.default was called"):
        attention_varlen(tokens, tokens, tokens, OFFSETS, numbers[1], 16, 16)
    with pytest.raises(NotImplementedError, match="attnlib.attention_scored.* was called"):
        attention(x, x, x, score=attnlib.Score(sinks=Standing(torch.ones(x.shape[1]))))
    with pytest.raises(TypeError, match="^key_mask: expected a plain tensor, got test_robust.Standing$"):
        attnlib.attention_monarch(x, x, x, key_mask=Standing(torch.ones(1, 16, dtype=torch.bool)))


@pytest.mark.parametrize("name", WITHOUT_GRADIENT | OPERATORS)
def test_jit_trace_is_refused(name):
    """Its graph would hold the numbers that this call read, and none of the launches."""
    with pytest.raises(NotImplementedError, match=r"^attention\w* under torch.jit.trace: not supported; |"
                       rf"^{name} under torch.jit.trace: not supported; call it outside$"):  # fmt: skip
        torch.jit.trace((WITHOUT_GRADIENT | OPERATORS)[name], operand(name))


@pytest.mark.parametrize("name", WITHOUT_GRADIENT | OPERATORS)
def test_the_error_of_a_tangent_promises_no_backward_pass(name):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(operand(name), operand(name))
        with pytest.raises(RuntimeError, match=rf"^attnlib.{name} has no forward-mode .*forward_ad\)$"):
            (WITHOUT_GRADIENT | OPERATORS)[name](x)


def results(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = (WITHOUT_GRADIENT | OPERATORS)[name](x)
    if isinstance(found, attnlib.Fp8):
        found = found.data.float(), found.scale
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", WITHOUT_GRADIENT | OPERATORS)
def test_defaults_of_pytorch_change_nothing(name):
    """Models are loaded under a default dtype of 16 bits, and a default device."""
    x = torch.randn_like(operand(name))
    expected = results(name, x)
    fp8_model.rotation.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = results(name, x)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- repeatable


@BY_MASK
def test_every_run_gives_the_same_bits(options, device):
    inputs = make_inputs(Shape(1, 2, 70, 16, heads_kv=1), device=device)
    first = step(inputs, **options)
    for _ in range(100 if device == "cuda" else 3):
        again = step(inputs, deterministic=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_head_does_not_depend_on_its_neighbors(device):
    """Heads and batch elements that come to lie in other places of the grid."""
    q, k, v = make_inputs(Shape(3, 4, 70, 16, heads_kv=2), device=device)
    out = attention(q, k, v, impl="triton")
    assert torch.equal(attention(q[1:2], k[1:2], v[1:2], impl="triton"), out[1:2])
    assert torch.equal(attention(q[:, 2:], k[:, 1:], v[:, 1:], impl="triton"), out[:, 2:])


def test_threads_get_the_same(device):
    """Each its own shapes, so that preparations and compilations are interleaved too."""
    if device == "cpu":
        pytest.skip("Triton's interpreter patches the language while it runs a kernel: one thread at a time")
    shapes = [Shape(1, 2, 50 + 7 * n, 16, causal=n % 2 == 0) for n in range(8)]
    inputs = [make_inputs(shape, seed=n, device=device) for n, shape in enumerate(shapes)]
    forget_launches()
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda n: step(inputs[n], causal=n % 2 == 0), range(8)))
        for n, results in enumerate(found):
            alone = step(inputs[n], causal=n % 2 == 0)
            assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True)), shapes[n].label


def test_threads_by_the_reference():
    """The checks, the dispatch and autograd, which are Python, from eight threads."""
    inputs = [make_inputs(Shape(1, 2, 20 + n, 16), seed=n, device="cpu") for n in range(8)]

    def one(n):
        leaves = [x.clone().requires_grad_() for x in inputs[n]]
        out = attention(*leaves, causal=True, impl="reference")
        return out.detach(), *torch.autograd.grad(out.sum(), leaves)

    alone = [one(n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for expected, found in zip(alone * 4, pool.map(one, list(range(8)) * 4), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# ---------------------------------------------------------------- writes


class Guards:
    """Memory for tensors, each between two margins of a known pattern."""

    MARGIN, PATTERN = 4096, 0x5A

    def __init__(self, monkeypatch):
        node.forget()  # which allocates by itself what it knows
        self.buffers = []
        plain = torch._C._VariableFunctions

        def strided(shape, strides, *, dtype=None, device=None, **others):
            if str(device) == "meta":
                return plain.empty_strided(shape, strides, dtype=dtype, device=device)
            dtype = dtype or torch.get_default_dtype()
            elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            size = 0 if 0 in shape else elements * dtype.itemsize
            room = -(-size // 256) * 256
            buffer = plain.empty(self.MARGIN * 2 + room, dtype=torch.uint8, device=device)
            buffer.fill_(self.PATTERN)
            self.buffers.append((buffer, size))
            storage = buffer[self.MARGIN : self.MARGIN + size].view(dtype)
            return storage.as_strided(shape, strides)

        def empty(*shape, dtype=None, device=None, **others):
            shape = shape[0] if shape and not isinstance(shape[0], int) else shape
            return strided(shape, plain.empty(shape, device="meta").stride(), dtype=dtype, device=device)

        def like(tensor, *, dtype=None, device=None, **others):
            strides = plain.empty_like(tensor, device="meta", **others).stride()
            device = tensor.device if device is None else device
            return strided(tensor.shape, strides, dtype=dtype or tensor.dtype, device=device)

        monkeypatch.setattr(torch, "empty_strided", strided)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch, "empty_like", like)

    def check(self):
        for buffer, size in self.buffers:
            end = self.MARGIN + size
            assert (buffer[: self.MARGIN] == self.PATTERN).all(), "written before a tensor"
            assert (buffer[end:] == self.PATTERN).all(), "written behind a tensor"


# Neither rows nor keys nor columns fill their last tile; a block of rows that sees nothing.
UNEVEN = [
    Shape(1, 2, 70, 24, heads_kv=1, seqlen_k=90), Shape(2, 2, 100, 40, seqlen_k=20), Shape(1, 1, 1, 8),
    Shape(1, 2, 65, 72, dtype="float32"),
]  # fmt: skip


@BY_MASK
@pytest.mark.parametrize("shape", UNEVEN, ids=lambda shape: shape.label)
def test_nothing_is_written_beside_the_outputs(shape, options, monkeypatch, device):
    inputs = make_inputs(shape, device=device)
    before = [x.clone() for x in inputs]
    expected = step(inputs, **options)
    guards = Guards(monkeypatch)
    found = step(inputs, **options)
    addresses = {buffer.untyped_storage().data_ptr() for buffer, _ in guards.buffers}
    assert all(x.untyped_storage().data_ptr() in addresses for x in found), "an output is not guarded"
    guards.check()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input was written to"


def test_nothing_is_written_beside_varlen_outputs(monkeypatch, device):
    q, k = torch.randn(41, 2, 24, device=device).half(), torch.randn(60, 2, 24, device=device).half()
    ends = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 7, 7, 41], [0, 30, 31, 60])]
    arguments = (q, k, k, *ends, 34, 30)
    expected = attention_varlen(*arguments, causal=True, return_lse=True, impl="triton")
    guards = Guards(monkeypatch)
    found = attention_varlen(*arguments, causal=True, return_lse=True, impl="triton")
    assert len(guards.buffers) >= 2
    guards.check()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("where", [-1, "end"])
def test_guards_see_a_write(where, monkeypatch):
    guards = Guards(monkeypatch)
    tensor = torch.empty(3, 5, dtype=torch.float16)
    tensor.fill_(1)
    guards.check()
    buffer, size = guards.buffers[0]
    buffer[guards.MARGIN + (size if where == "end" else where)] = 0
    with pytest.raises(AssertionError, match="written behind" if where == "end" else "written before"):
        guards.check()


# ---------------------------------------------------------------- what is not finite


def rows_of(mask_of: MaskWindow, keys, seqlen, total):
    """Rows that see one of the keys."""
    left, right = mask_of
    place = torch.arange(seqlen) + total - seqlen
    seen = torch.zeros(seqlen, dtype=torch.bool)
    for key in keys:
        visible = torch.ones(seqlen, dtype=torch.bool)
        if right is not None:
            visible &= key <= place + right
        if left is not None:
            visible &= key >= place - left
        seen |= visible
    return seen


@BY_MASK
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_not_finite_in_q_and_k(impl, value, options, device):
    """Rows that see it are what the oracle says, which is NaN or, for a score of -inf, a weight of 0; the
    others do not change by a bit."""
    S, K = 100, 130
    q, k, v = make_inputs(Shape(1, 1, S, 16, seqlen_k=K), device=device)
    clean = attention(q, k, v, impl=impl, return_lse=True, **options)
    q, k = q.clone(), k.clone()
    q[0, 0, 5, 3] = value
    k[0, 0, 70, 0] = k[0, 0, 128, 7] = value
    out, lse = attention(q, k, v, impl=impl, return_lse=True, **options)
    truth, truth_lse = attention_fp64(q, k, v, **options)
    touched = rows_of(mask_window(options.get("causal", False), options.get("window")), (70, 128), S, K)
    touched[5] = True
    touched = touched.to(device)
    results = zip((out, lse), (truth, truth_lse), clean, strict=True)
    for found, exact, before in (tuple(x[0, 0] for x in result) for result in results):
        assert torch.equal(found[~touched], before[~touched])
        assert torch.equal(found[touched].isnan(), exact[touched].isnan())
        found, exact = (x[touched][exact[touched].isfinite()].double() for x in (found, exact))
        torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    assert touched.any()


@BY_MASK
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_in_v(value, options, device):
    """A key that a row does not see has weight 0, and 0 times a value that is not finite is NaN in a product
    of matrices. So such a value reaches at most the rows whose tile of keys it is in: rows that see it are as
    the oracle says, rows further away than a tile do not change by a bit, in between NaN may come."""
    S = 200
    q, k, v = make_inputs(Shape(1, 1, S, 16), device=device)
    config = ForwardConfig(32, 32, 4, 2)
    seen = mask_window(options.get("causal", False), options.get("window"))
    params = Params(seen, 0.25, return_lse=True, config=config)
    clean, clean_lse = forward(portable, q, k, v, params)
    v = v.clone()
    v[0, 0, 100, 3] = value
    out, lse = forward(portable, q, k, v, params)
    truth, _ = attention_fp64(q, k, v, sm_scale=0.25, **options)
    touched = rows_of(seen, (100,), S, S).to(device)
    assert torch.equal(lse, clean_lse)  # the weights do not know of the values
    column = out[0, 0, :, 3]
    others = torch.arange(16, device=device) != 3
    assert torch.equal(out[..., others], clean[..., others])
    assert torch.equal(column[touched].double(), truth[0, 0, touched, 3]) or column[touched].isnan().all()
    # Rows whose blocks have no tile in common with key 100.
    rows = torch.arange(S, device=device)
    near = touched.clone()
    for begin in range(0, S, 32):
        block = slice(begin, begin + 32)
        tiles = rows_of(seen, range(96, 128), S, S).to(device)
        near[block] |= tiles[block].any()
    assert near.sum() > touched.sum() or not options
    assert torch.equal(column[~near], clean[0, 0, ~near, 3])
    assert not column[near & ~touched].isinf().any() and rows.numel() == S


# ---------------------------------------------------------------- the cache on disk


def _tune(folder, seed):
    candidates = [f"candidate {n}" for n in range(5)]
    times = {name: 1.0 + (n - seed) % 5 for n, name in enumerate(candidates)}
    return tuning.tune(candidates, times.__getitem__, {"gpu": "test", "shape": seed % 3}, folder)


def _tune_often(folder, seed):
    for n in range(20):
        if n % 5 == seed % 5:
            for path in folder.glob("*.json"):
                path.write_bytes(os.urandom(50))  # what a crash or a full disk leaves behind
        assert _tune(folder, seed).startswith("candidate")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_processes_share_a_cache(method, tmp_path):
    """And destroy it, again and again: nobody fails, and what is left at the end is whole."""
    context = multiprocessing.get_context(method)
    count = 4 if method == "fork" else 2  # a spawned one imports PyTorch first
    processes = [context.Process(target=_tune_often, args=(tmp_path, seed)) for seed in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * count
    assert not list(tmp_path.glob(".*"))
    for seed in range(3):
        _tune(tmp_path, seed)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["best"].startswith("'candidate ")


def test_a_process_that_dies_while_it_writes(tmp_path):
    """Its draft stays, but nobody takes it for the file."""
    pid = os.fork()
    if pid == 0:
        os.replace = lambda *_: os._exit(7)  # killed before the draft becomes the file
        _tune(tmp_path, 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert list(tmp_path.glob(".*")) and not list(tmp_path.glob("*.json"))
    assert _tune(tmp_path, 0) == "candidate 0"
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_forked_child_computes_the_same(device):
    """Without a GPU, whose context no child inherits; there PyTorch says so itself."""
    if device == "cuda":
        pytest.skip("CUDA can't be used in a forked process")
    q, k, v = make_inputs(Shape(1, 1, 20, 16), device="cpu")
    expected = attention(q, k, v, impl="triton")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(attention(q, k, v, impl="triton"), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
