"""`attnlib.emulator.interpreter`: Triton's interpreter does less, and computes the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from attnlib.emulator.interpreter import TRITON, save_work

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not triton.__version__.startswith(TRITON),
    reason="kernels are compiled, or it is the interpreter of another Triton",
)


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def _row(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    return tl.load(x_ptr + at, mask=at < n, other=0)


@triton.jit
def _kernel(x_ptr, sum_ptr, n, CALLS: tl.constexpr, FAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Calls functions of its own, which call the language, and tl.sum, which is a jit function elsewhere."""
    x = _row(x_ptr, n, BLOCK)
    for _ in range(CALLS):
        x = _larger(x, _row(x_ptr, n, BLOCK) + 1)
    tl.static_assert(not FAIL)
    tl.store(sum_ptr, tl.sum(x.to(tl.float32), 0))


def launch(dtype: torch.dtype, fail: bool = False, calls: int = 3) -> float:
    x, total = torch.arange(5).to(dtype), torch.zeros(1)
    _kernel[(1,)](x, total, 5, calls, fail, 8)
    return total.item()


@pytest.fixture
def patched(monkeypatch) -> list[object]:
    """Where the interpreter puts its functions, place by place."""
    found, patch = [], interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda place, *args: (found.append(place), patch(place, *args))
    )
    return found


def test_once_a_launch(patched) -> None:
    """However many calls there are in a kernel."""
    assert save_work()
    launch(torch.float32)
    counts = []
    for calls in (1, 1, 5):
        patched.clear()
        assert launch(torch.float32, calls=calls) == 18
        counts.append(len(patched))
    assert counts[0] == counts[1] == counts[2] > 0


def test_the_language_is_as_it_was(patched) -> None:
    """After a launch, after one that fails, and for the launch after that."""
    names = ("load", "store", "arange", "range", "static_assert")
    before = [getattr(tl, name) for name in names]
    launch(torch.float32)
    assert [getattr(tl, name) for name in names] == before and "__index__" not in vars(tl.tensor)
    with pytest.raises(interpreter.InterpreterError):
        launch(torch.float32, fail=True)
    assert [getattr(tl, name) for name in names] == before
    patched.clear()
    assert launch(torch.float32) == 18 and tl in patched


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.int64])
def test_types_are_not_mixed_up(dtype) -> None:
    """With 0 for what lies beyond the end, to which 1 is added."""
    assert launch(dtype) == 18


def test_types_are_those_of_triton() -> None:
    original = interpreter._get_np_dtype.__wrapped__
    kinds = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32]
    kinds += [tl.float8e4nv]
    kinds += [tl.pointer_type(kind) for kind in kinds]
    kinds += [tl.block_type(kind, [4, 8]) for kind in kinds]
    for _ in range(2):
        assert [interpreter._get_np_dtype(kind) for kind in kinds] == [original(kind) for kind in kinds]


SHAPES = [[4], [4, 8], [tl.constexpr(4), 8], tl.tuple([4, 8]), tl.tuple([tl.constexpr(1), tl.constexpr(2)])]


def described(kind: object) -> tuple:
    return str(kind), kind.shape, kind.numel, [type(n) for n in kind.shape], kind.scalar


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_are_those_of_triton(shape) -> None:
    """The first time and again, for types of two elements, and for a tensor of each type."""
    of_type, of_tensor = tl.block_type.__init__.__wrapped__, tl.tensor.__init__.__wrapped__
    for element in (tl.float16, tl.pointer_type(tl.float32), tl.float16):
        kind, expected = tl.block_type(element, shape), object.__new__(tl.block_type)
        of_type(expected, element, shape)
        assert described(kind) == described(expected) and kind == expected
        x, y = tl.tensor(None, kind), object.__new__(tl.tensor)
        of_tensor(y, None, expected)
        assert vars(x).keys() == vars(y).keys()
        assert (str(x), x.numel.value, x.shape) == (str(y), y.numel.value, y.shape)
        assert [type(n) for n in x.shape] == [tl.constexpr] * len(shape)
    assert tl.tensor(None, tl.int32).shape.values == [] and tl.tensor(None, tl.int32).numel.value == 1


@pytest.mark.parametrize(
    ("shape", "error"), [([3], ValueError), ([4.0], TypeError), ([], TypeError), ((4,), AssertionError)]
)
def test_a_shape_that_triton_refuses_is_refused(shape, error) -> None:
    tl.block_type(tl.float16, [4])  # 4.0 is no length, though it is equal to one
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.float16, shape)


@triton.jit
def _integers(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x * y + (x - y))
    tl.store(out_ptr + BLOCK + at, tl.sum(x[:, None] + y[None, :], 1))


@pytest.mark.parametrize("sanitize", [True, False])
def test_an_overflow_is_not_looked_at_either_way(sanitize, monkeypatch) -> None:
    """Triton's interpreter computes whether there is one, and asserts it in debug mode only."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug and not builder.options.sanitize_overflow
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=sanitize))
    x, y = torch.tensor([2**31 - 1, 5, -7, 2**30], dtype=torch.int32), torch.tensor([3, -2, 9, 4]).int()
    out = torch.zeros(8, dtype=torch.int32)
    _integers[(1,)](x, y, out, 4)
    assert out[:4].tolist() == (x * y + (x - y)).tolist()
    assert out[4:].tolist() == (x[:, None] + y).sum(1).int().tolist()


KINDS = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32]
NUMBERS = [0, 3, -5, 2**31, 2**40, 0.0, -0.0, 1.5, -2.5, True, float("inf")]


def block(kind: tl.dtype, shape: list[int]) -> tl.tensor:
    values = np.arange(1, 9).reshape(-1)[: int(np.prod(shape or [1]))].reshape(shape or [1])
    if isinstance(kind, tl.pointer_type):
        values = values.astype(np.uint64)
    handle = interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(kind)), kind)
    return tl.tensor(handle, tl.block_type(kind, shape) if shape else kind)


def outcome(check, lhs: object, rhs: object, options: dict) -> list | str:
    """Types and contents of both operands, or the error."""
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    try:
        found = check(semantic, lhs, rhs, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [
        (str(x.type), str(x.dtype), x.shape.values, x.handle.data.dtype, x.handle.data.tobytes())
        for x in found
    ]


@pytest.fixture
def in_a_kernel():
    """What the interpreter changes for a launch."""
    scope = interpreter._patch_lang(_kernel.fn)
    yield
    scope.restore()


POINTERS = {"allow_lhs_ptr": True, "allow_rhs_ptr": True}
OPTIONS = [{}, {"div_or_mod": True}, POINTERS, POINTERS | {"arithmetic_check": False}]


CASES = [(kind, options) for kind in KINDS for options in OPTIONS]
CASES += [(tl.pointer_type(tl.float16), options) for options in OPTIONS[2:]]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_operands_are_those_of_triton(kind, options, in_a_kernel) -> None:
    """Of all types, shapes and numbers: the same types, contents and errors."""
    check = interpreter.TritonSemantic.binary_op_type_checking_impl
    others = [block(other, shape) for other in KINDS for shape in ([], [1, 4], [2, 4])]
    computed = 0
    for other in [*others, *NUMBERS]:
        for x in (block(kind, []), block(kind, [2, 4])):
            for pair in ((x, other), (other, x)):
                expected = outcome(check.__wrapped__, *pair, options)
                assert outcome(check, *pair, options) == expected, (pair, options)
                computed += isinstance(expected, list)
    assert computed > 50


@pytest.mark.parametrize("x", [3, tl.constexpr(3), [tl.constexpr(3), 4], (tl.constexpr(3), 4), "a"], ids=str)
def test_constants_are_unwrapped_as_in_triton(x) -> None:
    unwrap = tl.core._unwrap_if_constexpr
    assert unwrap(x) == unwrap.__wrapped__(x) and type(unwrap(x)) is type(unwrap.__wrapped__(x))
