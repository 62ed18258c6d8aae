"""The public functions. Each checks its arguments, then runs, differentiably and for compilers."""

from attnlib.api.decode import attention_decode
from attnlib.api.exact import Choice, attention, attention_varlen, explain

__all__ = ["Choice", "attention", "attention_decode", "attention_varlen", "explain"]
