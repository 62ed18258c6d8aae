"""Triton kernels, one family a file: kernels only, no policy, nothing imported from the rest of the package."""
