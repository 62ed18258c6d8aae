"""attnlib: exact attention kernels in Triton, and the helpers of the book that builds them."""

from attnlib.attention import attention, explain

__all__ = ["__version__", "attention", "explain"]
__version__ = "0.1.0"
