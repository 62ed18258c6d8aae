"""The Hopper kernels through their launchers, on the CPU: `attnlib.emulator` in place of the GPU."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import families
import pytest
import torch
from mutations import Mutation

from attnlib.bench import sources
from attnlib.emulator import Emulated, Report
from attnlib.kernels import hopper
from attnlib.kernels.bsfa import hopper_kernel as bsfa_kernel
from attnlib.kernels.common import counters, device, forward_plan, hopper_gpu
from attnlib.kernels.hopper import (
    backward_kernel,
    backward_keys96_kernel,
    backward_wide_kernel,
    forward_kernel,
    launch_fp8,
    narrow,
    pooled,
)
from attnlib.kernels.hopper.configs import HopperConfig
from attnlib.kernels.hopper.configs_backward import HopperBackwardConfig
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import gradient_fp64
from attnlib.kernels.sparse import (
    hopper_backward_kernel,
    hopper_backward_wide_kernel,
    hopper_bias_kernel,
    hopper_kernel,
)
from attnlib.params import Params, Varlen, mask_window

ORDERS = "eager", "late", "random"
KERNELS = {
    "attention_forward_hopper": forward_kernel,
    "attention_backward_hopper": backward_kernel,
    "attention_bsfa_forward_hopper": bsfa_kernel,
    "attention_backward_hopper_wide": backward_wide_kernel,
    "attention_backward_hopper_keys96": backward_keys96_kernel,
    "attention_sparse_forward_hopper": hopper_kernel,
    "attention_sparse_backward_hopper": hopper_backward_kernel,
    "attention_sparse_backward_hopper_wide": hopper_backward_wide_kernel,
    "attention_sparse_bias_gradient_hopper": hopper_bias_kernel,
}

IMPORT = re.compile(r"^from (attnlib\.kernels[\w.]*) import (\([^)]*\)|.+)", re.MULTILINE)


class Recorded(Emulated):
    """Can repeat its last launch in other orders."""

    def __getitem__(self, grid: tuple[int, ...]):
        launch = super().__getitem__(grid)

        def record(*args, **kwargs) -> None:
            given = (*args, *kwargs.values())
            tensors = [x if isinstance(x, torch.Tensor) else getattr(x, "base", None) for x in given]
            self.tensors = [x for x in tensors if x is not None]
            self._before = [x.clone() for x in self.tensors]
            launch(*args, **kwargs)
            self._after = [x.clone() for x in self.tensors]
            self._grid, self._args, self._kwargs = grid, args, kwargs

        return record

    @property
    def programs(self) -> int:
        """Of the last launch."""
        return self._grid[0]

    @property
    def given(self) -> dict:
        """Named arguments of the last launch."""
        return self._kwargs

    def repeat(self, order: str, seed: int) -> Report:
        """AssertionError if memory is not as after the launch, up to the order of sums."""
        for tensor, before in zip(self.tensors, self._before, strict=True):
            tensor.copy_(before)
        self.options |= {"order": order, "seed": seed}
        super().__getitem__(self._grid)(*self._args, **self._kwargs)
        for tensor, after in zip(self.tensors, self._after, strict=True):
            torch.testing.assert_close(tensor, after, equal_nan=True)
        return self.reports[-1]


@contextmanager
def on_the_cpu(
    order: str = "random", seed: int = 0, sms: int = 2, mutants: dict[str, ModuleType] | None = None,
    in_order: bool = False,
) -> Iterator[dict[str, Recorded]]:
    """Within it the launchers of the Hopper kernels take CPU tensors, and so does `impl="hopper"`.

    `mutants`: modules with another kernel of a name in `KERNELS`. `in_order`: as in `emulator.run`. Yields
    the kernels, with their reports.
    """
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        kernels = {}
        for name, module in KERNELS.items():
            kernel = getattr((mutants or KERNELS).get(name, module), name)
            kernels[name] = Recorded(kernel, order, seed, sms, in_order)
            patch.setattr(module, name, kernels[name])
        patch.setattr(hopper_gpu, "unsupported_here", lambda q: None)
        patch.setattr(device, "num_sms", lambda index: sms)
        for module in counters, forward_plan, launch_fp8, narrow, pooled:
            patch.setattr(module, "counter", lambda index: counter)
        families.forget_launches()  # they are those of other kernels, and of so many SMs
        try:
            yield kernels
        finally:
            families.forget_launches()
    assert counter.item() == 0, "the counter of tiles is not set back"


def mutate(mutation: Mutation) -> dict[str, ModuleType]:
    """The modules of kernels whose code changes with that of the mutation's module."""
    source = mutation.of(inspect.getsource(mutation.module))
    mutants = {mutation.module.__name__: sources.load_source("mutant", source)}
    for owner in KERNELS.values():
        _renew(owner, mutants)
    found = {name: mutants[owner.__name__] for name, owner in KERNELS.items()}
    return {name: mutant for name, mutant in found.items() if mutant is not None}


def _renew(module: ModuleType, mutants: dict[str, ModuleType | None]) -> None:
    """Add `module` as it is with mutants for what it imports, itself or by way of others that it imports;
    None if there is nothing of the kind."""
    if module.__name__ in mutants:
        return
    mutants[module.__name__] = None
    text = changed = inspect.getsource(module)
    for package, names in IMPORT.findall(text):
        names = names.strip("(),\n ").split(",")
        for imported in package, *(f"{package}.{name.split()[0]}" for name in names):
            if imported in sys.modules and hasattr(sys.modules[imported], "gluon"):
                _renew(sys.modules[imported], mutants)
    for name, mutant in mutants.items():
        if mutant is not None:
            package, _, short = name.rpartition(".")
            whole, instead = f"from {package} import {short}", f"import {mutant.__name__} as "
            changed = changed.replace(f"{whole} as ", instead)
            # Its name in a list of names is overwritten behind the list.
            listed = rf"^from {re.escape(package)} import "
            listed += rf"(\(\s+)?(?:\w+,\s+)*{short}\b(?(1)[^)]*\)|(?:, \w+)*$)"
            changed = re.sub(listed, rf"\g<0>\n{instead}{short}", changed, flags=re.MULTILINE)
            changed = changed.replace(f"from {name} import", f"from {mutant.__name__} import")
    if changed != text:
        mutants[module.__name__] = sources.load_source("mutant", changed)


# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """A call of attention. `varlen`: lengths of queries and keys of its sequences, instead of S_q and S_k.
    `D_v`: columns of values, where they are not D."""

    D: int
    H: int = 2
    H_kv: int = 1
    S_q: int = 150
    S_k: int = 200
    causal: bool = True
    B: int = 1
    dtype: torch.dtype = torch.float16
    sm_scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    varlen: tuple[tuple[int, int], ...] = ()
    return_lse: bool = True
    config: HopperConfig | HopperBackwardConfig | None = None
    deterministic: bool = False
    D_v: int | None = None

    @property
    def scale(self) -> float:
        return self.D**-0.5 if self.sm_scale is None else self.sm_scale

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v, d_out of normal numbers."""
        rng = torch.Generator().manual_seed(0)
        shapes = [(self.B, self.H, self.S_q, self.D)] + [(self.B, self.H_kv, self.S_k, self.D)] * 2
        if self.varlen:
            T_q, T_k = map(sum, zip(*self.varlen, strict=True))
            shapes = [(T_q, self.H, self.D)] + [(T_k, self.H_kv, self.D)] * 2
        shapes.append(shapes[0])
        if self.D_v is not None:
            shapes[2:] = [(*shape[:-1], self.D_v) for shape in shapes[2:]]
        return [torch.randn(shape, generator=rng).to(self.dtype) for shape in shapes]

    def params(self, backward: bool = False) -> Params:
        """What the call asks for besides its tensors."""
        window, config = mask_window(self.causal, self.window), self.config
        if backward != isinstance(config, HopperBackwardConfig):
            config = None
        return Params(window, self.scale, self._varlen(), self.return_lse, self.deterministic, config=config)

    def _varlen(self) -> Varlen | None:
        if not self.varlen:
            return None
        ends = torch.tensor(self.varlen).cumsum(0).int().T
        cu_q, cu_k = (torch.cat([torch.zeros(1, dtype=torch.int32), x]) for x in ends)
        longest_q, longest_k = (max(x) for x in zip(*self.varlen, strict=True))
        return Varlen(cu_q, cu_k, longest_q, longest_k)


def check_forward(call: Call, order: str = "random", seed: int = 0, **where) -> Recorded:
    """AssertionError for a wrong result; returns what ran."""
    q, k, v, _ = call.tensors()
    with on_the_cpu(order, seed, **where) as kernels:
        out, lse = families.forward(hopper, q, k, v, call.params())
    assert (lse is not None) == call.return_lse
    close = {"rtol": 1e-2, "atol": 1e-2} if call.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    for found, found_lse, *one in _sequences(call, out, lse, q, k, v):
        if one[1].shape[2]:
            truth, truth_lse = attention_fp64(
                *one, causal=call.causal, sm_scale=call.scale, window=call.window
            )
        else:  # a sequence without keys
            truth = torch.zeros_like(found, dtype=torch.float64)
            truth_lse = truth[..., 0] - torch.inf
        torch.testing.assert_close(found.double(), truth, **close)
        if lse is not None:
            torch.testing.assert_close(found_lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    return kernels["attention_forward_hopper"]


def _sequences(call: Call, out, lse, q, k, v) -> Iterator[tuple]:
    """out, lse, q, k, v of each sequence as a batch of one; of a batch, all as they are."""
    if not call.varlen:
        yield out, lse, q, k, v
        return
    at_q = at_k = 0
    for S_q, S_k in call.varlen:
        if S_q:
            here, keys = slice(at_q, at_q + S_q), slice(at_k, at_k + S_k)
            own = None if lse is None else lse[:, here][None]
            yield (
                out[here].transpose(0, 1)[None], own,
                *(x.transpose(0, 1)[None] for x in (q[here], k[keys], v[keys])),
            )  # fmt: skip
        at_q, at_k = at_q + S_q, at_k + S_k


def _keys_without_queries(call: Call, *gradients: torch.Tensor) -> Iterator[torch.Tensor]:
    """dK and dV of each sequence that has no queries, of which `_sequences` knows nothing."""
    at = 0
    for S_q, S_k in call.varlen or ():
        if S_q == 0:
            yield from (gradient[at : at + S_k] for gradient in gradients)
        at += S_k


def check_backward(call: Call, order: str = "random", seed: int = 0, **where) -> Recorded:
    """AssertionError for a wrong gradient; returns what ran."""
    q, k, v, d_out = call.tensors()
    options = {"causal": call.causal, "sm_scale": call.scale, "window": call.window}
    out, lse = torch.zeros_like(d_out), torch.empty(q.shape[:-1])
    if call.varlen:
        lse = lse.T.contiguous()  # (H, T_q)
    for own_out, own_lse, *one in _sequences(call, out, lse, q, k, v):
        found = attention_fp64(*one, **options)
        own_out.copy_(found[0])
        own_lse.copy_(found[1])
    with on_the_cpu(order, seed, in_order=call.deterministic, **where) as kernels:
        gradients = families.backward(hopper, d_out, q, k, v, out, lse, call.params(backward=True))
    close = {"rtol": 3e-2, "atol": 3e-2} if call.dtype == torch.bfloat16 else {"rtol": 2e-3, "atol": 2e-3}
    inputs, outputs = _sequences(call, d_out, lse, q, k, v), _sequences(call, d_out, lse, *gradients)
    for (own_d_out, _, *one), (_, _, *found) in zip(inputs, outputs, strict=True):
        for gradient, expected in zip(found, gradient_fp64(own_d_out, *one, **options), strict=True):
            torch.testing.assert_close(gradient.double(), expected, **close)
    for unseen in _keys_without_queries(call, *gradients[1:]):
        assert not unseen.any(), "keys of a sequence without queries have gradients"
    return next(kernel for kernel in kernels.values() if kernel.reports)
