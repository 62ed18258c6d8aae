"""Exact attention in plain Triton, for every GPU that Triton knows, and for its interpreter."""
