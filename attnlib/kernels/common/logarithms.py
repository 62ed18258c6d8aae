"""What turns logarithms to base 2 into natural ones and back, for kernels in Triton and in Gluon; launchers
have the same numbers from `signature`."""

import triton.language as tl

from attnlib.kernels.common import signature

LN2 = tl.constexpr(signature.LN2)
LOG2_E = tl.constexpr(signature.LOG2_E)
