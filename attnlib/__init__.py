"""attnlib: exact attention kernels in Triton, and the helpers of the book that builds them."""

from attnlib.api import (
    Fp8,
    attention,
    attention_decode,
    attention_fp8,
    attention_fp8_varlen,
    attention_varlen,
    explain,
    quantize_fp8,
)  # fmt: skip

__all__ = [
    "Fp8", "__version__", "attention", "attention_decode", "attention_fp8", "attention_fp8_varlen",
    "attention_varlen", "explain", "quantize_fp8",
]  # fmt: skip
__version__ = "0.1.0"
