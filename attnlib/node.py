"""Calls whose kind is known go to `node.cpp`, and PyTorch's engine finds their backward pass there too.

It is compiled once for each version of PyTorch, which takes some twenty seconds, and no call waits for it.
Until it is done, and where there is no C++ compiler, `attnlib.api` and `attnlib.autograd` do the same in
Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

import torch

from attnlib import autograd, dispatch
from attnlib.autograd import Asked, Attention
from attnlib.dispatch import Saved
from attnlib.kernels.common import direct
from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.signature import PREPARED
from attnlib.params import DecodeParams

NAME = "attnlib_node"


def shortcut(*arguments):
    """Run a call of `attention` or `attention_decode` in C++ and return its results, if `node.cpp` knows how
    calls like it are launched; else return None and do nothing.

    arguments: the tensors q, k and v, in a decoding call also lengths, starts, page_table, k_scale and
    v_scale; then one tuple of options as the caller gave them: causal, window, sm_scale, return_lse,
    deterministic (False in a decoding call) and impl (in a decoding call its split). They need not have been
    checked. A call with a block mask or a score does not come here.

    This function knows no calls. That of `node.cpp` replaces it when it has been compiled.
    """


def keep(tensors: tuple, options: tuple, asked: Asked | DecodeParams, out: torch.Tensor) -> None:
    """Let `shortcut` run calls like this one from now on. It is no varlen call, and went through Python, with
    this output. tensors, options: the arguments of `shortcut`."""
    module = recorder() if tensors[0].is_cuda else None
    if module is not None:
        learn(module, tensors, options, asked, out)


def learn(module: ModuleType, *args) -> None:
    """The same as `keep`, with its arguments, for a given module of `node.cpp` and on any device."""
    tensors, options, asked, out = args
    tensors = tuple([x if x is None else _living(x) for x in tensors])
    if not module.lacks(*tensors, options):
        return
    if isinstance(asked, DecodeParams):
        params, kept, plan = asked, None, dispatch.prepared_decode(*tensors[:3], asked)
    else:
        params, kept = asked.params, _one_object(asked)
        plan = dispatch.prepared_forward(*tensors, params)
    if plan is not None and plan.launches.packed is not None:
        sizes = plan.counted, plan.scratch
        module.keep(*tensors, options, out, params.return_lse, plan.launches.packed, *sizes, kept)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    asked: Asked,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of a call that autograd differentiates, outside of all transformations of `torch.func`."""
    node = recorder() if q.is_cuda else None
    if node is None:
        return Attention.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    return record(node, q, k, v, cu_seqlens_q, cu_seqlens_k, asked)


def record(node: ModuleType, *args) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `attend`, with its arguments, through a given module of `node.cpp` and on any device."""
    q, k, v = map(_living, args[:3])
    cu_seqlens_q, cu_seqlens_k, asked = args[3:]
    torch._C._set_grad_enabled(False)
    try:
        out, lse = dispatch.forward(q, k, v, asked.of(cu_seqlens_q, cu_seqlens_k))
    finally:
        torch._C._set_grad_enabled(True)
    node.record(out, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, _one_object(asked))
    return out, lse


_living = torch._C._functorch.unwrap_if_dead
"""A tensor without the wrapper of a transformation of `torch.func` that has ended."""


@lru_cache(PREPARED)
def _one_object(asked: Asked) -> Asked:
    """One object for all that are equal: `node.cpp` compares addresses."""
    return asked


def slowly(*args) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], bytes | None, int]:
    """Compute a backward pass whose launches `node.cpp` does not know yet. Arguments: those of
    `AttentionGradient.forward`. Returns the gradients; the bytes from which `direct` launches all such
    passes, None if each of them has to come here; and the elements of their buffer."""
    gradients = autograd.AttentionGradient.within_backward(*args)
    d_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, asked = args
    plan = None
    if not torch.is_grad_enabled():
        params = asked.of(cu_seqlens_q, cu_seqlens_k)
        plan = dispatch.prepared_backward(d_out, Saved(q, k, v, out, lse), params)
    return (gradients, None, 0) if plan is None else (gradients, plan.launches.packed, plan.elements)


def recorder() -> ModuleType | None:
    """The module of `node.cpp`; None while it is being compiled, and where it can't be."""
    return _builder().module


def wait() -> ModuleType | None:
    """Wait until the module is compiled or can't be, then return `recorder()`. For measurements and tests."""
    _builder().join()
    return recorder()


def forget() -> None:
    """Forget all kinds of calls: the next one of each, and its backward pass, go through Python."""
    if _builder.cache_info().currsize and (module := recorder()) is not None:  # else it knows none
        module.forget()


class _Builder(threading.Thread):
    module: ModuleType | None = None

    def run(self) -> None:
        launcher = direct.launcher()
        if launcher is None:  # it has warned
            return
        try:
            module = build()
        except Exception as error:
            warnings.warn(
                f"attnlib: calls take longer, because {error}", RuntimeWarning, stacklevel=2
            )
            return
        connect(module, launcher.launch_all)
        self.module = module
        global shortcut
        shortcut = module.attend


def connect(module: ModuleType, launch_all) -> None:
    """Give the module of `node.cpp` the functions that it calls. launch_all: that of `direct.c`."""
    from triton import knobs

    module.connect(launch_all, slowly, counter, torch._C._cuda_isCurrentStreamCapturing, knobs.runtime)


@cache
def _builder() -> _Builder:
    builder = _Builder(name=NAME, daemon=True)
    builder.start()
    return builder


def build() -> ModuleType:
    """Compile `node.cpp`, or take it from Triton's cache. RuntimeError that says why it can't be done."""
    from triton.runtime.cache import get_cache_manager

    source = Path(__file__).with_suffix(".cpp")
    version = (
        f"{torch.__version__} {sys.implementation.cache_tag} {platform.machine()} {_OPTIONS} {_LIBRARIES}"
    )
    key = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()
    manager, file = get_cache_manager(key), NAME + sysconfig.get_config_var("EXT_SUFFIX")
    path = manager.get_file(file) or manager.put(_compile(source), file, binary=True)
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_OPTIONS = "-O2", "-std=c++20", "-shared", "-fPIC", "-w"
_LIBRARIES = "-lc10", "-ltorch_cpu", "-ltorch_python"


def _compile(source: Path) -> bytes:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++, clang++, or the one that CXX names)")
    torch_folder = Path(torch.__file__).parent
    headers = torch_folder / "include"
    include = headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / NAME
        command = [compiler, *_OPTIONS, *(f"-I{path}" for path in include), str(source), "-o", str(made)]
        command += [f"-L{torch_folder / 'lib'}", *_LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.splitlines()
            why = next((line for line in lines if "error" in line), "no word of why")
            raise RuntimeError(f"{compiler} can't compile {source.name}: {why}")
        return made.read_bytes()
