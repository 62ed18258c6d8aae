"""What a call would launch on a Hopper GPU, as jobs for the compiler: no GPU, and no launch.

The launchers of the package and of the notebooks decide everything that a kernel is compiled with: tile
sizes, flags, warps, stages. So they are called, on small CPU tensors, with each of their kernels replaced
by an object that writes down its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from triton.experimental.gluon.nvidia import hopper
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from attnlib.bench.inspect_sm90 import Job, gluon_descriptor

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
TYPES |= {torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int8: "i8"}
ABSENT = object()


def jobs_of(modules: ModuleType | tuple[ModuleType, ...], call: Callable[[], object]) -> list[Job]:
    """The kernels of these modules that `call()` launches, in order, as the launcher would compile them."""
    jobs: list[Job] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules if isinstance(modules, tuple) else (modules,):
            for name, kernel in vars(module).items():
                if isinstance(kernel, JITFunction):
                    patch.setitem(vars(module), name, _Recorder(module.__file__, kernel, jobs))
        call()
    return jobs


class _Recorder:
    def __init__(self, file: str, kernel: JITFunction, jobs: list[Job]) -> None:
        self.file, self.kernel, self.jobs = file, kernel, jobs

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(
        self,
        *args: object,
        num_warps: int = 4,
        num_stages: int = 3,
        maxnreg: int | None = None,
        launch_pdl: bool = False,  # says how to launch, not what
        enable_fp_fusion: bool = True,  # as `inspect_sm90` compiles
        **kwargs: object,
    ) -> None:
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        signature: dict[str, str] = {}
        constexprs: dict[str, object] = {}
        for parameter in self.kernel.params:
            value = values.pop(parameter.name, parameter.default if parameter.has_default else ABSENT)
            assert value is not ABSENT, f"{self.kernel.__name__}: no argument {parameter.name}"
            kind = None if parameter.is_constexpr else _type(value, parameter.do_not_specialize)
            if kind is None:
                constexprs[parameter.name] = value
            else:
                signature[parameter.name] = kind
        assert not values, f"{self.kernel.__name__}: unknown arguments {', '.join(values)}"
        name = self.kernel.__name__
        self.jobs.append(Job(self.file, name, signature, constexprs, num_warps, num_stages, maxnreg))


def _type(value: object, general: bool) -> str | None:
    """The type that Triton's launcher finds for an argument; None: the value itself is compiled in."""
    if isinstance(value, hopper.TensorDescriptor):
        return gluon_descriptor(value.block_shape, TYPES[value.base.dtype])
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}:16"  # PyTorch aligns what it allocates
    if isinstance(value, float):
        return "fp32"
    if value is None or (value == 1 and not general):
        return None
    return "i32:16" if value % 16 == 0 and not general else "i32"
