"""Lists of a block mask that chosen blocks make, on their device: no number of it is read by the host."""

from attnlib.kernels.lists.launch import lists_of_chosen, unsupported

__all__ = ["lists_of_chosen", "unsupported"]
