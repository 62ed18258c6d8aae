"""attnlib: exact attention kernels in Triton, and the helpers of the book that builds them."""

from attnlib.api import attention, attention_decode, attention_varlen, explain
from attnlib.block_mask import BlockMask

__all__ = ["BlockMask", "__version__", "attention", "attention_decode", "attention_varlen", "explain"]
__version__ = "0.1.0"
