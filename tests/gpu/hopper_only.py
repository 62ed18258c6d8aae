"""Whether a script of this folder can run here."""

from __future__ import annotations

import sys

import torch


def no_hopper() -> bool:
    """Says what is missing, if there is no GPU of compute capability 9.x."""
    missing = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9
    if missing:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
    return missing
