"""The joining kernels compiled for sm_90: rows are read and written sixteen bytes at a time."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.merge.launch import BLOCK_M
from attnlib.kernels.merge.merge_kernel import add_rows, merge_rows

ROW, LSE = ("i64", "i32", "i32", "constexpr"), ("i32", "i32", "constexpr")
"""Types of strides; the last one is 1."""


CASES = [("bf16", 64), ("bf16", 128), ("fp16", 256), ("bf16", 40), ("fp32", 128)]


@pytest.mark.parametrize("parts, D", CASES)
@pytest.mark.parametrize("kernel, result", [(merge_rows, "same"), (merge_rows, "fp32"), (add_rows, "same")])
def test_rows_are_vectors(kernel, result, parts, D):
    kind = parts if result == "same" else "fp32"
    numbers = {"D": D, "BLOCK_M": BLOCK_M, "BLOCK_D": block_d(D)}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.endswith("_stride"):
            signature[name] = LSE if "lse" in name else ROW
            constants[i, len(signature[name]) - 1] = 1
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(3) if "lse" not in name}
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if "lse" in name else f"*{kind if name == 'o_ptr' else parts}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr" if name in numbers else "i32"  # H, S, start, count
            constants |= {(i,): numbers[name]} if name in numbers else {}
    source = ASTSource(kernel, signature, constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx and ".local" not in ptx
    assert "ld.global.b16" not in ptx and "st.global.b16" not in ptx
