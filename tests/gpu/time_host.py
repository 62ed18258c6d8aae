"""Time what the host adds to a call on this GPU: attention through autograd beside PyTorch's cuDNN backend.

    python tests/gpu/time_host.py     about a minute; figures/data/<gpu>/host_time.json

Three tables. `backward`: wall time of `torch.autograd.grad` in a loop, of attnlib and of cuDNN, in rounds
that take them in a new order each time, and the time of attnlib's kernels alone, replayed from a CUDA graph.
`host`: what a call keeps the host busy, the GPU's queue never full. `step`: forward and backward of a
12-layer model on sequences of 1024 tokens, with attnlib and with `scaled_dot_product_attention`. bf16; a call
is judged against fp64 first. Status 0 when all calls were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hopper_only import no_hopper
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, dispatch, node  # noqa: E402
from attnlib.bench import records, timing  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.dispatch import Saved  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

CALLS = [
    Shape(1, 48, 777, 128, False, "bfloat16"),
    Shape(2, 16, 2048, 128, True, "bfloat16"),
    Shape(3, 20, 1777, 64, True, "bfloat16"),
    Shape(1, 24, 300, 128, True, "bfloat16"),
]
LAYERS, TOKENS, HEADS, WIDTH = 12, 1024, 12, 768
STEP_TIMED = (
    "wall time of single steps in shuffled order; ratios within a round; low to high: 99% interval of their "
    "median (sign test)"
)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attnlib(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return attention(q, k, v, causal=causal)


IMPLEMENTATIONS = {"attnlib": attnlib, "cudnn": cudnn}


def make(shape: Shape) -> tuple[Tensors, torch.Tensor]:
    """(q, k, v), which want gradients, and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
    made = [torch.randn(size, generator=generator, device="cuda").bfloat16() for _ in range(4)]
    return tuple(x.requires_grad_() for x in made[:3]), made[3]


def wall_us(fn: Callable[[], Any], calls: int) -> float:
    """Microseconds of a call in a loop, from its start to the end of the GPU's work."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        fn()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def in_rounds(functions: Mapping[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Wall times of each, a number for each round. No garbage is collected in between, as in `timeit`."""
    for fn in functions.values():
        wall_us(fn, calls)
    gc.collect()
    gc.disable()
    found: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds):
        for name in random.Random(number).sample(list(functions), len(functions)):
            found[name].append(wall_us(functions[name], calls))
    gc.enable()
    return found


def summary(name: str, times: Sequence[float]) -> dict[str, float]:
    return {f"{name}_us": statistics.median(times), f"{name}_low": min(times), f"{name}_high": max(times)}


def kernels_us(shape: Shape, tensors: Tensors, d_out: torch.Tensor, calls: int = 10) -> float:
    """Microseconds of the backward kernels alone: `calls` calls without autograd, replayed from a CUDA
    graph."""
    q, k, v = (x.detach() for x in tensors)
    params = Params(mask_window(shape.causal, None), shape.head_dim**-0.5, return_lse=True)
    saved = Saved(q, k, v, *dispatch.forward(q, k, v, params))
    dispatch.backward(d_out, saved, params)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            dispatch.backward(d_out, saved, params)
    return min(wall_us(graph.replay, 20) for _ in range(5)) / calls


def gradient_of(shape: Shape, tensors: Tensors, d_out: torch.Tensor, impl: str) -> Callable[[], Any]:
    out = IMPLEMENTATIONS[impl](*tensors, shape.causal)
    return lambda: torch.autograd.grad(out, tensors, d_out, retain_graph=True)


def judge(shape: Shape, tensors: Tensors, d_out: torch.Tensor) -> None:
    gradients = torch.autograd.grad(attnlib(*tensors, shape.causal), tensors, d_out)
    oracle = GradientOracle(d_out, *(x.detach() for x in tensors), shape.causal)
    for verdict in oracle.judge(*gradients).values():
        verdict.raise_if_bad(shape.label)


def backward_row(shape: Shape, rounds: int, calls: int) -> dict[str, Any]:
    tensors, d_out = make(shape)
    judge(shape, tensors, d_out)
    functions = {impl: gradient_of(shape, tensors, d_out, impl) for impl in IMPLEMENTATIONS}
    found = in_rounds(functions, rounds, calls)
    row: dict[str, Any] = {"call": shape.label, **shape.to_dict()}
    for impl, times in found.items():
        row |= summary(impl, times)
    shares = [ours / theirs for ours, theirs in zip(found["attnlib"], found["cudnn"], strict=True)]
    return row | {"of_cudnn": statistics.median(shares), "kernels_us": kernels_us(shape, tensors, d_out)}


def host_rows(shape: Shape) -> list[dict[str, Any]]:
    tensors, d_out = make(shape)
    rows = []
    for impl, function in IMPLEMENTATIONS.items():
        with torch.no_grad():
            forward = timing.host_us(lambda function=function: function(*tensors, shape.causal))
        recorded = timing.host_us(lambda function=function: function(*tensors, shape.causal))
        backward = timing.host_us(gradient_of(shape, tensors, d_out, impl))
        times = {"forward_us": forward, "forward_with_grad_us": recorded, "backward_us": backward}
        rows.append({"call": shape.label, "impl": impl, **times})
    return rows


class Layer(nn.Module):
    """A layer of a language model, its attention as given."""

    def __init__(self, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, S, WIDTH]
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)  # [B, H, S, D]
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


def step_row(batch: int, rounds: int) -> dict[str, Any]:
    """A step with attnlib and with SDPA, which is there twice. Single steps follow each other in shuffled
    order, so that the host's slow seconds meet all three alike, and ratios are taken within a round."""
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    attends = {"attnlib": partial(attention, causal=True), "sdpa": sdpa, "control": sdpa}
    functions = {}
    for name, attend in attends.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(attend) for _ in range(LAYERS))).cuda().bfloat16()
        x = torch.randn(batch, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        functions[name] = lambda model=model, x=x: model(x).float().square().mean().backward()
    found = in_rounds(functions, rounds, calls=1)
    row: dict[str, Any] = {"batch": batch, "layers": LAYERS, "tokens": TOKENS}
    for name, times in found.items():
        row |= summary(name, times)
    for name in ("attnlib", "control"):
        shares = [one / other for one, other in zip(found[name], found["sdpa"], strict=True)]
        low, middle, high = median_within(shares)
        row |= {f"{name}_of_sdpa": middle, f"{name}_of_sdpa_low": low, f"{name}_of_sdpa_high": high}
    return row


def median_within(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high): 99 of 100 times the median of many more values lies from low to high, whatever
    their distribution is (the sign test)."""
    ordered, n = sorted(values), len(values)
    rank = max(0, math.floor(n / 2 - 2.576 * math.sqrt(n) / 2))
    return ordered[rank], statistics.median(ordered), ordered[n - 1 - rank]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time what the host adds to a call on this GPU.")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="of a round (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="rounds of `step` (default: %(default)s)")
    parser.add_argument("--only-step", action="store_true", help="time `step` alone and write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/host_time.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    if node.wait() is None:
        print("calls go through Python here, not through node.cpp: see the warning above", file=sys.stderr)
    if args.only_step:
        print(*(step_row(batch, args.steps) for batch in (1, 4)), sep="\n")
        return 0
    try:
        backward = [backward_row(shape, args.rounds, args.calls) for shape in CALLS]
    except AssertionError as error:
        print(error)
        return 1
    host = [row for shape in CALLS for row in host_rows(shape)]
    steps = [step_row(batch, args.steps) for batch in (1, 4)]
    for row in (*backward, *host, *steps):
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    method = {"rounds": args.rounds, "calls": args.calls, "timed": "wall time, rounds in shuffled order"}
    header = records.provenance(method)
    path = records.report_path("host_time", header, args.out)
    how = {"rounds": args.steps, "calls": 1, "timed": STEP_TIMED}
    tables = {"backward": {"rows": backward}, "host": {"rows": host}, "step": {"rows": steps, "method": how}}
    records.write_report(path, {"notebook": "host_time", **header}, tables)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
