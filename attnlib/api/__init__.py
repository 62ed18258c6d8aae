"""The public functions. Each checks its arguments, then runs, differentiably and for compilers."""

from attnlib.api.bsfa import attention_bsfa, bsfa_threshold
from attnlib.api.decode import attention_decode
from attnlib.api.distr import attention_distr
from attnlib.api.entmax import attention_entmax, attention_entmax_varlen
from attnlib.api.exact import Choice, attention, attention_varlen, explain
from attnlib.api.fp8 import Fp8, attention_fp8, attention_fp8_varlen, quantize_fp8
from attnlib.api.monarch import attention_monarch, monarch_matrix
from attnlib.api.pooled import attention_pooled
from attnlib.api.s2_cache import S2Cache

__all__ = [
    "Choice", "Fp8", "S2Cache", "attention", "attention_bsfa", "attention_decode", "attention_distr",
    "attention_entmax", "attention_entmax_varlen", "attention_fp8", "attention_fp8_varlen",
    "attention_monarch", "attention_pooled", "attention_varlen", "bsfa_threshold",
    "explain", "monarch_matrix", "quantize_fp8",
]  # fmt: skip
