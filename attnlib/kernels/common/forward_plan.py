"""What the forward passes of all families of kernels have in common: a plan of a prepared launch, and how it
runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import Made, lse_for
from attnlib.kernels.common.launcher import Launches, Part
from attnlib.params import UNIT, ExistingForm, Params

TENSORS = "q k v out lse counter cu_q cu_k".split()
"""The names of tensors in launches of a forward pass."""


def pointers_of_result(into: ExistingForm | None) -> dict[str, Part]:
    """The pointers to a kernel's result; what it stores through descriptors is not among them."""
    out, lse = Part("out"), Part("lse")
    return {"lse_ptr": lse} if into is None else {"into_ptr": out, "into_lse_ptr": lse}


def numbers_of_result(into: ExistingForm | None) -> dict[str, int | None]:
    """The strides of an existing result, those of the output in units of UNIT elements; and None for the
    parameters of a new result."""
    if into is None:
        return {}
    found = {f"into_{axis}": stride // UNIT for axis, stride in zip("bhm", into.out, strict=False)}
    return found | {"into_lse_b": into.lse[0], "into_lse_h": into.lse[1], "desc_o": None, "lse_ptr": None}


class ForwardPlan(NamedTuple):
    """The launch of a call, the layout of its output, and whether its programs draw their tiles from a
    counter."""

    launches: Launches
    out: Made
    counted: bool = False
    scratch = 0  # elements of a buffer for partial results, which decoding has

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse), those of `params.into` if there are any; lse is None unless it was asked for."""
        out, lse = params.into or (self.out.like(q), lse_for(q, params))
        cu_q, cu_k = (None, None) if params.varlen is None else params.varlen[:2]
        drawn = counter(q.get_device()) if self.counted else None
        self.launches(q, k, v, out, lse, drawn, cu_q, cu_k)
        return out, lse
