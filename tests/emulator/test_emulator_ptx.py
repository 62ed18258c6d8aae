"""Inline assembly in the emulator: each instruction of PTX that the kernels use."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.emulator import run
from attnlib.kernels.common.warpgroup_vote import any_in_warpgroup, prepare_vote

INTEGERS = {
    "mov.b32 $0, 7;": lambda x: 7 + 0 * x,
    "and.b32 $0, $1, 127;": lambda x: x & 127,
    "shl.b32 $0, $1, 4;": lambda x: (x << 4) & 0xFFFFFFFF,
    "bfi.b32 $0, 5, $1, 0, 8;": lambda x: (x & ~255) | 5,
    "bfi.b32 $0, 5, $1, 4, 2;": lambda x: (x & ~48) | 16,
    "{ .reg .b64 a; cvt.u64.u32 a, $1; shl.b64 a, a, 3; cvt.u32.u64 $0, a; }": lambda x: x * 8 & 0xFFFFFFFF,
    "{ .reg .pred q; setp.eq.b32 q, $1, 3; selp.b32 $0, 1, 0, q; }": lambda x: (x == 3).astype(int),
    "{ .reg .pred q; setp.ne.b32 q, $1, 3; selp.b32 $0, 1, 0, q; }": lambda x: (x != 3).astype(int),
    "{ .reg .pred q, r; setp.eq.b32 r, $1, 3; setp.ne.or.b32 q, $1, $1, r; selp.b32 $0, 1, 0, q; }":
        lambda x: (x == 3).astype(int),
    "{ .reg .pred q; mov.b32 $0, 0; setp.eq.b32 q, $1, 3; @q bra DONE; mov.b32 $0, 9; DONE: }":
        lambda x: np.where(x == 3, 0, 9),
    "{ .reg .pred q; mov.b32 $0, 0; setp.eq.b32 q, $1, 3; @!q mov.b32 $0, 9; }":
        lambda x: np.where(x == 3, 0, 9),
    "{ .reg .pred q; mov.b32 $0, $1; MORE: sub.u32 $0, $0, 5; setp.lt.u32 q, $0, 1000; @q bra MORE; }":
        lambda x: np.where(x < 1005, x % 5 - 5, x - 5) & 0xFFFFFFFF,
    "{ .reg .u32 t; mov.u32 t, %smid; mov.b32 $0, t; }": lambda x: 0 * x,
}  # fmt: skip


@gluon.jit
def elementwise(x_ptr, y_ptr, ASM: gl.constexpr, FORM: gl.constexpr, KIND: gl.constexpr):
    for i in range(8):
        x = gl.load(x_ptr + i)
        gl.store(y_ptr + i, gl.inline_asm_elementwise(ASM, FORM, [x], dtype=KIND, is_pure=False, pack=1))


@pytest.mark.parametrize("asm", INTEGERS)
def test_integer_instructions(asm: str) -> None:
    x = torch.tensor([0, 1, 3, 17, 127, 128, 1000, 2**27 + 1], dtype=torch.int32)
    y = torch.zeros(8, dtype=torch.int64)
    run(elementwise, (1,), x, y, asm, "=r,r", gl.int64)
    assert y.tolist() == INTEGERS[asm](x.long().numpy()).tolist()


def test_instructions_of_floats() -> None:
    x, y = torch.tensor([0, 1, -2, 0.5, math.nan, 3, math.inf, 8]), torch.zeros(8)
    run(elementwise, (1,), x, y, "mul.f32 $0, $1, $1;", "=f,f", gl.float32)
    torch.testing.assert_close(y, x * x, equal_nan=True)
    asm = "{ .reg .pred q; setp.nan.f32 q, $1, $1; @q pmevent 0; mov.b32 $0, $1; @q mov.b32 $0, 0; }"
    run(elementwise, (1,), x, y, asm, "=f,f", gl.float32)
    assert y.tolist() == x.nan_to_num(0.0, math.inf).tolist()
    for asm, expected in (
        ("add.f32 $0, $1, 0f3F800000;", x + 1),
        ("max.f32 $0, $1, 0f3F800000;", torch.fmax(x, torch.ones(8))),
        ("neg.f32 $0, $1;", -x),
        ("fma.rn.f32 $0, $1, $1, $1;", x * x + x),
        ("ex2.approx.ftz.f32 $0, $1;", x.exp2()),
        ("lg2.approx.ftz.f32 $0, $1;", x.log2()),
    ):
        run(elementwise, (1,), x, y, asm, "=f,f", gl.float32)
        torch.testing.assert_close(y, expected, equal_nan=True)
    above = "{ .reg .pred q; setp.gtu.f32 q, $1, 0f40000000; mov.b32 $0, 0; @q mov.b32 $0, 0f3F800000; }"
    run(elementwise, (1,), x, y, above, "=f,f", gl.float32)
    assert y.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # also where there is no number
    either = above.replace("; mov", "; setp.gtu.or.f32 q, 0f00000000, $1, q; mov", 1)
    run(elementwise, (1,), x, y, either, "=f,f", gl.float32)
    assert y.tolist() == [0, 0, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_two_numbers_in_a_word(half: torch.dtype) -> None:
    x, y = torch.tensor([0.1, 1, -2, 0.5, 70, 3, -0.0, 8]), torch.zeros(8, dtype=torch.int32)
    name = "f16" if half == torch.float16 else "bf16"
    run(elementwise, (1,), x, y, f"cvt.rn.{name}x2.f32 $0, 0f40000000, $1;", "=r,f", gl.int32)
    low, high = y.view(half).view(8, 2).T
    assert torch.equal(low, x.to(half)) and bool((high == 2).all())


def test_clocks_go_on_and_an_unknown_instruction_is_refused() -> None:
    x, y = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    asm = "{ .reg .u64 t; mov.u64 t, %globaltimer; mov.b32 $0, t; }"
    run(elementwise, (1,), x, y, asm, "=r,r", gl.int64)
    assert bool((y[1:] > y[:-1]).all())
    run(elementwise, (1,), x, y, "mov.u32 $0, %clock;", "=r,r", gl.int32)
    assert len(set(y.tolist())) == 8
    with pytest.raises(NotImplementedError, match=r"does not know popc.b32 \$0, \$1"):
        run(elementwise, (1,), x, y, "popc.b32 $0, $1;", "=r,r", gl.int64)


@gluon.jit
def vote(x_ptr, y_ptr):
    rows = gl.arange(0, 64)
    flags = gl.where(rows == gl.load(x_ptr), 1, gl.zeros([64], gl.int32))
    asm: gl.constexpr = """{ .reg .pred q; setp.ne.b32 q, $2, 0; setp.ne.or.b32 q, $3, 0, q;
        vote.sync.any.pred q, q, 0xffffffff; selp.b32 $0, 1, 0, q; mov.b32 $1, $0; }"""
    any_of_warp = gl.inline_asm_elementwise(asm, "=r,=r,r,r", [flags], dtype=gl.int32, is_pure=False, pack=2)
    gl.store(y_ptr + rows, any_of_warp)


@pytest.mark.parametrize("row", [0, 15, 16, 40, 63])
def test_a_vote_is_of_the_16_rows_of_a_warp(row: int) -> None:
    y = torch.zeros(64, dtype=torch.int32)
    run(vote, (1,), torch.tensor([row], dtype=torch.int32), y)
    assert y.nonzero().ravel().tolist() == list(range(row // 16 * 16, row // 16 * 16 + 16))


@gluon.jit
def vote_of_all(x_ptr, y_ptr, BUG: gl.constexpr):
    rows = gl.arange(0, 64)
    flags = gl.where(rows == gl.load(x_ptr), 1, gl.zeros([64], gl.int32))
    if BUG != "undeclared":
        prepare_vote(0, 12)
    if BUG == "twice":
        prepare_vote(0, 12)
    found = any_in_warpgroup(flags, 0, 12)
    gl.store(y_ptr, found + any_in_warpgroup(flags * 0, 0, 12))


@pytest.mark.parametrize(("row", "expected"), [(0, 1), (15, 1), (16, 1), (63, 1), (64, 0)])
def test_a_vote_of_a_warpgroup_is_a_number(row: int, expected: int) -> None:
    y = torch.full((1,), -1, dtype=torch.int32)
    run(vote_of_all, (1,), torch.tensor([row], dtype=torch.int32), y, "")
    assert y.tolist() == [expected]


@pytest.mark.parametrize(
    ("bug", "said"),
    [("undeclared", "reads vote_12, which nothing has declared"), ("twice", "declares vote_12 twice")],
)
def test_a_register_of_assembly_is_declared_once(bug: str, said: str) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NameError, match=said):
        run(vote_of_all, (1,), x, x.clone(), bug)


@gluon.jit
def registers(y_ptr, WRITE: gl.constexpr):
    gl.inline_asm_elementwise(".reg .b32 kept; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1)
    if WRITE:
        asm: gl.constexpr = "mov.b32 kept, $2; mov.b32 $0, 0; mov.b32 $1, 0;"
        gl.inline_asm_elementwise(asm, "=r,=r,r,r", [gl.arange(0, 64)], gl.int32, False, 2)
    gl.store(y_ptr, gl.inline_asm_elementwise("mov.b32 $0, kept;", "=r,r", [0], gl.int32, False, 1))


@pytest.mark.parametrize(
    ("write", "said"), [(True, "as a number, but its threads differ in it"), (False, "it has not written")]
)
def test_a_register_of_assembly_that_is_no_number(write: bool, said: str) -> None:
    with pytest.raises(ValueError, match=f"reads kept.* {said}"):
        run(registers, (1,), torch.zeros(1, dtype=torch.int32), write)


@gluon.jit
def exchange(y_ptr, LANES: gl.constexpr):
    rows = gl.arange(0, 64)
    asm: gl.constexpr = swap(LANES)
    found = gl.inline_asm_elementwise(asm, "=r,=r,r,r", [rows], dtype=gl.int32, is_pure=False, pack=2)
    gl.store(y_ptr + rows, found)


@gluon.constexpr_function
def swap(lanes):
    return "".join(f"shfl.sync.bfly.b32 ${i}, ${i + 2}, {lanes}, 31, 0xffffffff;" for i in (0, 1))


@pytest.mark.parametrize(("lanes", "expected"), [(1, 0), (2, 0), (4, 1), (16, 4)])
def test_an_exchange_is_of_threads(lanes: int, expected: int) -> None:
    """Four threads have a row."""
    y = torch.zeros(64, dtype=torch.int32)
    run(exchange, (1,), y, lanes)
    assert y.tolist() == [row ^ expected for row in range(64)]


@gluon.constexpr_function
def two_types():
    return gl.int32, gl.float32


@gluon.constexpr_function
def first_of_a_thread():
    """Its first register, and its number."""
    return "".join(f"mov.b32 ${i}, $16; mov.b32 ${i + 8}, ${i + 16};" for i in range(8))


@gluon.jit
def several(x_ptr, y_ptr, z_ptr):
    o = gl.arange(0, 1024).reshape([64, 4, 4])
    asm: gl.constexpr = first_of_a_thread()
    form: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f"
    x = gl.load(x_ptr + o)
    y, z = gl.inline_asm_elementwise(asm, form, [x], dtype=two_types(), is_pure=False, pack=8)
    gl.store(y_ptr + o, y)
    gl.store(z_ptr + o, z)


def test_several_results_of_all_elements_of_a_thread() -> None:
    x, y, z = torch.arange(1024.0), torch.zeros(1024, dtype=torch.int32), torch.zeros(1024)
    run(several, (1,), x, y, z)
    assert torch.equal(x, z)
    rows, columns = torch.arange(64)[:, None, None], torch.arange(4)[None, None, :]
    first = (rows - rows % 16 + rows % 8) * 16 + columns  # 8 rows further up, of the first four columns
    assert torch.equal(y.view(64, 4, 4), first.expand(64, 4, 4).int())


@gluon.constexpr_function
def addition(bits):
    """Threads are 2**bits bytes apart, 16 or more."""
    return f"""{{ .reg .pred q; .reg .b32 t; .reg .b64 a; setp.eq.b32 q, $9, 0; @q bra DONE;
        mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, {bits}; cvt.u64.u32 a, t; add.s64 a, a, $5;
        red.global.add.v4.f32 [a + 2048], {{$1, $2, $3, $4}}; DONE: mov.b32 $0, 0; }}"""


@gluon.jit
def add(x_ptr, place, wanted, BITS: gl.constexpr):
    rows, columns = gl.arange(0, 64)[:, None], gl.arange(0, 8)[None, :]
    tile = (rows * 8 + columns).to(gl.float32)
    asm: gl.constexpr = addition(BITS)
    address = (x_ptr + place).to(gl.int64)
    form: gl.constexpr = "=r,f,f,f,f,l,l,l,l,r,r,r,r"
    gl.inline_asm_elementwise(asm, form, [tile, address, wanted], dtype=gl.int8, is_pure=False, pack=4)


@pytest.mark.parametrize("apart", [4, 8])
def test_additions_of_vectors(apart: int) -> None:
    """[64, 8] as an accumulator of wgmma lies in registers, 2048 bytes further on."""
    x, bits, n = torch.zeros(600 + 128 * apart), apart.bit_length() + 1, 128 * apart
    run(add, (1,), x, 4, 0, bits)
    assert not x.any()
    run(add, (1,), x, 4, 1, bits)
    run(add, (1,), x, 4, 1, bits)
    found = x[4 + 512 : 4 + 512 + n].view(128, apart)
    assert not found[:, 4:].any()
    found = found[:, :4]
    for thread in (0, 5, 37, 127):
        row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        own = [row * 8 + column, row * 8 + column + 1, (row + 8) * 8 + column, (row + 8) * 8 + column + 1]
        assert found[thread].tolist() == [2.0 * value for value in own]
    assert not x[: 4 + 512].any() and not x[4 + 512 + n :].any()
    with pytest.raises(IndexError, match="address outside"):
        run(add, (1,), x, 256, 1, bits)
    with pytest.raises(IndexError, match="not a multiple of its size"):
        run(add, (1,), x, 1, 1, bits)
