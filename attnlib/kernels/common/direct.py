"""The shortest way from Python to the driver: one call in C for each launch of a compiled kernel.

`compiled[grid](...)` of Triton binds and checks each argument at every call, some eighty of them for a kernel
with seven descriptors. Here a launch is packed into bytes once, and `direct.c` does the rest. It is compiled
when the first kernel is, by the compiler that Triton uses for its own launchers.
"""

import struct
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TRITON = "3.6.", "3.7.", "3.8.", "3.9."
"""The versions whose way of passing parameters to a kernel is known here. All pass them alike; from 3.7 on
descriptors of small tensors are mended (`direct.c` says how)."""
UNMENDED = "3.6."
DRIVER = "libcuda.so.1"
LIMITS = {"MAX_PARAMS": 192, "MAX_MAPS": 16, "MAX_TENSORS": 64}
"""What `direct.c` has room for: parameters and TMA descriptors of a kernel, tensors of a call."""

_HEADER, _PARAM, _MAP = struct.Struct("<Q8I8x"), struct.Struct("<II8s"), struct.Struct("<4I5II11Q")
_IMMEDIATE, _ADDRESS, _TENSOR_MAP = range(3)
_OVERLAPS, _MENDED = 1, 2
_SCALARS = {"i1": "<?7x", "i32": "<i4x", "u32": "<I4x", "i64": "<q", "u64": "<Q", "fp32": "<f4x"}
"""Type of a scalar parameter -> how it lies in 8 bytes."""


class Place(NamedTuple):
    """Where an argument of a kernel points: the number of a tensor of the call, and bytes from its start."""

    tensor: int
    offset: int = 0


def pack(
    compiled: Any, grid: tuple[int, int, int], places: Mapping[str, Place], values: Mapping[str, Any]
) -> bytes | None:
    """A launch as `direct.c` takes it; None for one that has to go through Triton.

    compiled: a kernel of Triton. places: of its parameters that are tensors, by name. values: the numbers
    among its parameters, by name, and (shape, strides) of each descriptor.
    """
    metadata = compiled.metadata
    # This property loads the kernel, which has to be done before the others are read.
    run = compiled.run
    forms = list(metadata.tensordesc_meta or [])
    if None in forms or metadata.num_ctas != 1:
        return None
    if run.global_scratch_size or run.profile_scratch_size or run.launch_cooperative_grid:
        return None
    if getattr(run, "gsan_enabled", False):  # the sanitizer of triton 3.8, which adds parameters
        return None
    params, maps = [], []
    for name, kind in compiled.src.signature.items():
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            shape, strides = values[name]
            params.append((_TENSOR_MAP, len(maps), 0, "i64"))
            maps.append(_map(places[name], forms[len(maps)], shape, strides))
            params += [(_IMMEDIATE, 0, n, "i32") for n in shape]
            params += [(_IMMEDIATE, 0, n, "i64") for n in strides]
        elif kind.startswith("*"):
            params.append((_ADDRESS, places[name].tensor, places[name].offset, "i64"))
        elif kind in _SCALARS:
            params.append((_IMMEDIATE, 0, values[name], kind))
        else:
            return None
    params += [(_IMMEDIATE, 0, 0, "i64")] * 2  # scratch memory, of which there is none
    if len(params) > LIMITS["MAX_PARAMS"] or len(maps) > LIMITS["MAX_MAPS"]:
        raise ValueError(f"{len(params)} parameters and {len(maps)} descriptors: the limits are {LIMITS}")
    threads = 32 * metadata.num_warps
    sizes = threads, metadata.shared, len(params), len(maps)
    flags = (_OVERLAPS if run.launch_pdl else 0) | (_MENDED if _mends() else 0)
    header = _HEADER.pack(compiled.function, *grid, *sizes, flags)
    packed = [
        _PARAM.pack(kind, index, struct.pack(_SCALARS[form], value)) for kind, index, value, form in params
    ]
    return b"".join([header, *packed, *maps])


def _map(place: Place, form: Mapping, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A TMA descriptor without its address. form: Triton's metadata of it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    def inwards(numbers) -> list[int]:
        """From the innermost dimension on, filled up to five."""
        return [*reversed(numbers), 0, 0, 0, 0, 0][:5]

    dtype = TMA_DTYPE_DEVICE_TO_HOST[form["elem_type"]]
    steps = [stride * form["elem_size"] for stride in strides[:-1]]
    return _MAP.pack(
        place.tensor, dtype, len(shape), form["swizzle"], *inwards(form["block_size"]), form["elem_size"],
        place.offset, *inwards(shape), *inwards(steps),
    )  # fmt: skip


@cache
def _mends() -> bool:
    import triton

    return not triton.__version__.startswith(UNMENDED)


@cache
def launcher() -> ModuleType | None:
    """The module of `direct.c`; None where it can't be built, so that launches go through Triton."""
    import triton

    if not triton.__version__.startswith(TRITON):
        return None
    try:
        module = build()
        module.load(DRIVER)
    except Exception as error:
        warnings.warn(f"attnlib: launches take longer, because {error}", RuntimeWarning, stacklevel=2)
        return None
    return module


def source() -> str:
    """`direct.c` with its limits."""
    limits = "".join(f"enum {{ {name} = {limit} }};\n" for name, limit in LIMITS.items())
    return limits + Path(__file__).with_suffix(".c").read_text(encoding="utf-8")


def build() -> ModuleType:
    """Compile `direct.c`, or take it from Triton's cache."""
    import triton.backends.nvidia
    from triton.runtime.build import compile_module_from_src

    headers = Path(triton.backends.nvidia.__path__[0]) / "include"
    return compile_module_from_src(source(), "attnlib_direct", include_dirs=[str(headers)])
