"""The public functions. Each checks its arguments, then runs, differentiably and for compilers."""

from attnlib.api.decode import attention_decode
from attnlib.api.exact import Choice, attention, attention_varlen, explain
from attnlib.api.fp8 import Fp8, attention_fp8, attention_fp8_varlen, quantize_fp8

__all__ = [
    "Choice", "Fp8", "attention", "attention_decode", "attention_fp8", "attention_fp8_varlen",
    "attention_varlen", "explain", "quantize_fp8",
]  # fmt: skip
