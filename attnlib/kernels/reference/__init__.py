"""Exact attention in PyTorch, in fp64: what all other kernels are judged by."""
