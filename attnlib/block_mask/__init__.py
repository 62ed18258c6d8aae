"""Block masks: which queries see which keys, as tiles that are full, absent, or carry a bit for each element.

`mask` has the public class, `tiles` how one is made, `lists` what kernels walk along.
"""

from attnlib.block_mask.mask import BlockMask

__all__ = ["BlockMask"]
