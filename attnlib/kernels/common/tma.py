"""Copies by TMA, under the names that Gluon has for them in triton 3.6 and that the book teaches.

Triton 3.8 calls two of them otherwise, and in 3.9 the old names only raise an error. Arguments are the same.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    async_copy_global_to_shared = tma.async_load
    async_copy_shared_to_global = tma.async_store
else:
    async_copy_global_to_shared = tma.async_copy_global_to_shared
    async_copy_shared_to_global = tma.async_copy_shared_to_global
store_wait = tma.store_wait
