"""Block masks: which queries see which keys, as tiles that are full, absent, or carry a bit for each element.

`mask` has the public class, `tiles` how one is made, `lists` what kernels walk along, and `s2` the masks of
S2-Attention.
"""

from attnlib.block_mask.mask import BlockMask
from attnlib.block_mask.s2 import S2Pattern

__all__ = ["BlockMask", "S2Pattern"]
