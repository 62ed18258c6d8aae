"""The arguments of `attention_pooled`, checked."""

from typing import Any, NamedTuple

from attnlib.arguments.common import check_common, check_impl
from attnlib.arguments.exact import Options
from attnlib.arguments.exact import check as check_exact
from attnlib.arguments.masks import check_chosen_size

IMPLEMENTATIONS = "hopper", "triton", "reference"
_NO_OPTIONS = Options()


class PooledOptions(NamedTuple):
    """The options of `attention_pooled`, as they were given."""

    block: Any = 64
    causal: Any = False
    sm_scale: Any = None
    impl: Any = None


def check_pooled(q, k, v, options: PooledOptions) -> None:
    """TypeError or ValueError if an argument is wrong."""
    block, causal, sm_scale, impl = options
    check_exact(q, k, v, _NO_OPTIONS, False)
    check_chosen_size(block, "block")
    check_common(causal, None, sm_scale, False, False)
    check_impl(impl, IMPLEMENTATIONS)
