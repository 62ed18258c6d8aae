"""SeerAttention (arXiv 2410.13276): a learned gate that says which blocks of keys a block of queries needs.

`gate` has the module, `choose` what becomes of its scores: a block mask for `attnlib.attention`, pages for
`attnlib.attention_decode`.
"""

from attnlib.seer.choose import above, decode_chosen, mask_of, top, top_of_density
from attnlib.seer.gate import SeerGate

__all__ = ["SeerGate", "above", "decode_chosen", "mask_of", "top", "top_of_density"]
