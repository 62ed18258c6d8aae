"""AdaSplash 1 and 2, to time beside attnlib's entmax: the package `adasplash`, in the folder that
ATTNLIB_PEERS names, or installed. ImportError: it is not there.

AdaSplash 2 chooses among 60 compiled kernels for each length, by timing them. Triton compiles them one after
the other, and times each for 100 ms without what it takes to flush L2, which is most of a short call. Here
`compile_share` compiles some of them in a process of its own, without a launch, and the choice is made in
windows of this package, which have at most 100 calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from attnlib.bench import timing
from attnlib.bench.decode_peers import package
from attnlib.bench.setting import Setting

Attend = Callable[..., torch.Tensor]
CHOICE = Setting("choice", rounds=1, pause_ms=0, warmup_ms=1, rep_ms=10)


def adasplash_1() -> Attend:
    attend = package("adasplash.adasplash_block_mask").sparse_attn
    return lambda q, k, v: attend(q, k, v, alpha=1.5, is_causal=True)


def adasplash_2() -> Attend:
    from triton.runtime.autotuner import Autotuner

    module = package("adasplash.adasplash_v2")
    for kernel in vars(module).values():
        if isinstance(kernel, Autotuner):
            kernel.do_bench = choose
    return module.sparse_attn


def choose(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    """Quantiles of a call's times in ms, in a short window."""
    estimate = timing.estimate_ms(call, cold=True)
    samples = timing.samples_ms(call, estimate, CHOICE, cold=True)
    return torch.tensor(samples).quantile(torch.tensor(quantiles)).tolist()


@contextlib.contextmanager
def compile_share(share: int, shares: int) -> Iterator[None]:
    """Within it kernels that Triton tunes are not launched, and of every `shares` configurations one is
    compiled, number `share`."""
    from triton.runtime.autotuner import Autotuner

    numbers = itertools.count()

    def compile_some(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for config in self.configs:
            if next(numbers) % shares == share:
                with contextlib.suppress(Exception):  # the choice meets it again, and leaves it out
                    self.fn.run(*args, grid=grid, warmup=True, **options, **config.all_kwargs())

    usual, Autotuner.run = Autotuner.run, compile_some
    try:
        yield
    finally:
        Autotuner.run = usual
