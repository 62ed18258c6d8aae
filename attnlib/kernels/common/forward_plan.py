"""What the forward passes of all families of kernels have in common: a plan of a prepared launch, and how it
runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import Made, lse_for
from attnlib.kernels.common.launcher import Launches
from attnlib.params import Params

TENSORS = "q k v out lse counter cu_q cu_k".split()
"""What launches of a forward pass call their tensors."""


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
        """(out, lse); lse is None unless it was asked for. The current device is that of the tensors."""
        out, lse = self.out.like(q), lse_for(q, params)
        cu_q, cu_k = (None, None) if params.varlen is None else params.varlen[:2]
        drawn = counter(q.get_device()) if self.counted else None
        self.launches(q, k, v, out, lse, drawn, cu_q, cu_k)
        return out, lse
