"""Pooled attention maps: the largest weight of each block of queries and keys, in plain Triton. From scores
that are computed anew, or from what a forward pass has kept of them."""

from attnlib.kernels.pool.launch import of_maxima, of_scores, too_many_keys, unsupported

__all__ = ["of_maxima", "of_scores", "too_many_keys", "unsupported"]
