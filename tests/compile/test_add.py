"""The kernel that adds gradients, compiled for sm_90: rows are read and written sixteen bytes at a time."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnlib.kernels.add.add_kernel import add_rows
from attnlib.kernels.add.launch import BLOCK_M
from attnlib.kernels.common.tiles import block_d

ROW = "i64", "i32", "i32", "constexpr"
"""Types of strides; the last one is 1."""


CASES = [("bf16", 64), ("bf16", 128), ("fp16", 256), ("bf16", 40), ("fp32", 128)]


def source(parts: str, D: int) -> ASTSource:
    numbers = {"D": D, "BLOCK_M": BLOCK_M, "BLOCK_D": block_d(D)}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(add_rows.arg_names):
        if name.endswith("_stride"):
            signature[name] = ROW
            constants[i, len(ROW) - 1] = 1
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        elif name.endswith("_ptr"):
            signature[name] = f"*{parts}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr" if name in numbers else "i32"  # H, S, start, count
            constants |= {(i,): numbers[name]} if name in numbers else {}
    return ASTSource(add_rows, signature, constants, attributes)


@pytest.mark.parametrize("parts, D", CASES)
def test_rows_are_vectors(parts, D):
    made = triton.compile(source(parts, D), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = made.asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx and ".local" not in ptx
    assert "ld.global.b16" not in ptx and "st.global.b16" not in ptx
