"""Run the kernels of one family as `dispatch` does, in the configuration of `params` or in the family's."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from attnlib import dispatch, node
from attnlib.kernels import decode, hopper, monarch, portable
from attnlib.kernels.bsfa import launch as launch_bsfa
from attnlib.kernels.bsfa import launch_hopper as launch_bsfa_hopper
from attnlib.kernels.common import launcher
from attnlib.kernels.distr import launch_group
from attnlib.kernels.fp8 import launch_quantize
from attnlib.kernels.hopper import launch_fp8, pooled
from attnlib.kernels.sparse import (
    launch_backward,
    launch_forward,
    launch_hopper,
    launch_hopper_backward,
)
from attnlib.params import Params


def forward(
    family: ModuleType, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of a family of `attnlib.kernels`."""
    return family.forward(q, k, v, configured(family, q, k, v, params))


def backward(family: ModuleType, d_out, q, k, v, out, lse, params: Params) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of a family of `attnlib.kernels`."""
    return family.backward(d_out, q, k, v, out, lse, configured(family, q, k, v, params, backward=True))


def configured(family: ModuleType, q, k, v, params: Params, backward: bool = False) -> Params:
    """The same with the family's configuration for the call, unless `params` has one."""
    if params.config is not None:
        return params
    return params._replace(config=family.configuration(q, k, v, params, backward))


def forget_launches() -> None:
    """Empty every cache of choices, launches and compiled kernels. The next call decides anew."""
    dispatch._roads.clear()
    node.forget()
    launcher._compiled.clear()
    launch_fp8.prepare.cache_clear()
    pooled.prepare.cache_clear()
    decode.launch.prepare.cache_clear()
    monarch.launch.prepare.cache_clear()
    for family in (portable, hopper):
        family.launch.prepare.cache_clear()
        family.launch_backward.prepare.cache_clear()
    launch_quantize.prepare.cache_clear()
    launch_group.prepare.cache_clear()
    launch_bsfa.prepare_maxima.cache_clear()
    for module in (launch_bsfa, launch_bsfa_hopper):
        module.prepare.cache_clear()
    for module in (launch_forward, launch_backward, launch_hopper, launch_hopper_backward):
        module.prepare.cache_clear()


@pytest.fixture
def fresh_launches():
    """For tests that replace a kernel, a limit or a device: caches begin and end empty."""
    forget_launches()
    yield
    forget_launches()
