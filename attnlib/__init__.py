"""attnlib: attention kernels in Triton: exact (`attention`, `attention_varlen`, `attention_decode`), in FP8,
and functions that are not softmax attention (bsfa, distr, entmax, monarch)."""

from attnlib.api import (
    Fp8,
    S2Cache,
    attention,
    attention_bsfa,
    attention_decode,
    attention_distr,
    attention_entmax,
    attention_entmax_varlen,
    attention_fp8,
    attention_fp8_varlen,
    attention_monarch,
    attention_pooled,
    attention_varlen,
    bsfa_threshold,
    explain,
    monarch_matrix,
    quantize_fp8,
)  # fmt: skip
from attnlib.block_mask import BlockMask, S2Pattern
from attnlib.scores import Score

__all__ = [
    "BlockMask", "Fp8", "S2Cache", "S2Pattern", "Score", "__version__", "attention", "attention_bsfa",
    "attention_decode", "attention_distr", "attention_entmax", "attention_entmax_varlen", "attention_fp8",
    "attention_fp8_varlen", "attention_monarch", "attention_pooled", "attention_varlen", "bsfa_threshold",
    "explain", "monarch_matrix", "quantize_fp8",
]  # fmt: skip
__version__ = "0.1.0"
