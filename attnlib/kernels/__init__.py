"""Triton kernels, one family a file: kernels only, no policy, no import from the rest of the package."""
