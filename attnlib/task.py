"""The benchmark task: causal fp16 attention on three shapes, against PyTorch's SDPA.

`custom_attention_forward` is the function that the task asks for. The harness prints the lines that the
task's own harness prints and times as it does: 25 warm-up calls, then 100 calls back to back, a pair of
events around each, the upper median; no L2 flush. Three things are stricter. A difference of NaN fails (`NaN
> 1e-2` is false, so the original passes it), the output is checked again after the timing, and a failure is
the exit status.

    python -m attnlib.task --batch 4 --seqlen 4096 --nheads 32 --headdim 64 --causal
    python -m attnlib.task --all
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib.bench import roofline
from attnlib.bench.shapes import TASK, Shape

TOLERANCE = 1e-2
"""Largest absolute difference from SDPA that the task allows; `attnlib.bench.oracle` is stricter."""

_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # as the task: no cuDNN


def custom_attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, sm_scale: float | None = None
) -> torch.Tensor:
    """The task's interface: q, k, v are (batch, heads, seqlen, head_dim), contiguous; returns the same shape
    and dtype.

    `sm_scale` defaults to 1/sqrt(head_dim).
    """
    from attnlib.api import attention  # here, so that the harness can be read and tested without Triton

    return attention(q, k, v, causal=causal, sm_scale=sm_scale)


@dataclass(frozen=True)
class Result:
    """What the harness found. The defaults are what it prints for a kernel that failed."""

    max_diff: float = 1.0
    mean_diff: float = 1.0
    latency_ms: float = 999999.0
    tflops: float = 0.0
    sdpa_latency_ms: float = 999999.0
    sdpa_tflops: float = 0.0
    speedup: float = 0.0
    correct: bool = False
    message: str = ""

    @property
    def test_metrics(self) -> str:
        """The line that the task reads."""
        return (
            f"TEST_METRICS: speedup_vs_sdpa={self.speedup:.4f} tflops={self.tflops:.4f} "
            f"latency_ms={self.latency_ms:.4f} sdpa_latency_ms={self.sdpa_latency_ms:.4f} "
            f"max_diff={self.max_diff:.6e} correct={int(self.correct)}"
        )


def _latency_ms(fn: Callable[[], object], warmup: int, rep: int) -> float:
    """The task's timer, in ms: the upper median of `rep` calls that are queued back to back."""
    for _ in range(warmup):
        fn()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rep)]
    for start, end in events:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[rep // 2]


def _differences(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest and mean absolute difference, in fp32."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        raise ValueError(
            f"output: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(out.shape)} {out.dtype}"
        )
    difference = (out.float() - expected.float()).abs()
    return difference.max().item(), difference.mean().item()


def run(
    shape: Shape,
    *,
    seed: int = 42,
    warmup: int = 25,
    rep: int = 100,
    forward: Callable[..., torch.Tensor] = custom_attention_forward,
    device: str = "cuda",
) -> Result:
    """Check and time `forward` on one shape as the task does. A kernel that fails gives Result.message."""
    torch.manual_seed(seed)
    size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=shape.torch_dtype) for _ in range(3))
    scale = 1 / math.sqrt(shape.head_dim)

    def ours() -> torch.Tensor:
        return forward(q, k, v, causal=shape.causal, sm_scale=scale)

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(_SDPA):
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, scale=scale)

    expected = sdpa()
    try:
        max_diff, mean_diff = _differences(ours(), expected)
        if not (max_diff <= TOLERANCE):
            return Result(max_diff, mean_diff, message=_inaccurate(max_diff))
        latency = _latency_ms(ours, warmup, rep)
        again, _ = _differences(ours(), expected)
    except Exception as error:
        return Result(message=f"ERROR: custom kernel failed: {error}")
    if not (again <= TOLERANCE):
        return Result(again, mean_diff, message=_inaccurate(again) + " after the timing")
    sdpa_latency = _latency_ms(sdpa, warmup, rep)
    flops = roofline.flops(shape)
    return Result(
        max_diff=max_diff,
        mean_diff=mean_diff,
        latency_ms=latency,
        tflops=flops / latency * 1e-9,
        sdpa_latency_ms=sdpa_latency,
        sdpa_tflops=flops / sdpa_latency * 1e-9,
        speedup=sdpa_latency / latency,
        correct=True,
    )


def _inaccurate(max_diff: float) -> str:
    return f"FAIL: max_diff {max_diff:.6e} is not within {TOLERANCE:g}"


def report(shape: Shape, result: Result) -> str:
    """The lines of the task's harness for one shape."""
    lines = [
        f"Config: batch={shape.batch}, seqlen={shape.seqlen}, nheads={shape.heads}, "
        f"headdim={shape.head_dim}, causal={shape.causal}, dtype={shape.dtype}",
        f"FLOPs: {roofline.flops(shape) / 1e12:.4f} TFLOPs per forward pass",
    ]
    if result.correct:
        lines += [
            f"TRAIN_METRICS: max_diff={result.max_diff:.6e} mean_diff={result.mean_diff:.6e}",
            f"TRAIN_METRICS: latency_ms={result.latency_ms:.3f} tflops={result.tflops:.1f} "
            f"sdpa_latency_ms={result.sdpa_latency_ms:.3f} sdpa_tflops={result.sdpa_tflops:.1f} "
            f"speedup_vs_sdpa={result.speedup:.3f}",
        ]
    else:
        lines.append(result.message)
    return "\n".join([*lines, result.test_metrics])


def _row(name: str, result: Result) -> str:
    if not result.correct:
        return f"{name:6s}  {result.message}"
    return (
        f"{name:6s} {result.tflops:9.1f} {result.latency_ms:9.4f} {result.sdpa_tflops:9.1f} "
        f"{result.speedup:9.3f} {result.max_diff:11.2e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Status 0 when every kernel is correct, 1 when one is not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m attnlib.task", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the three shapes of the task, as one table")
    for name in ("batch", "seqlen", "nheads", "headdim"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--warmup", type=int, default=25)
    parser.add_argument("--rep", type=int, default=100)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output-dir", default=".", help="accepted and unused, as in the task's harness")
    args = parser.parse_args(argv)
    sizes = (args.batch, args.nheads, args.seqlen, args.headdim)
    if args.all == any(size is not None for size in sizes) or (not args.all and None in sizes):
        parser.error("give either --all or --batch, --seqlen, --nheads and --headdim")
    least = {"batch": 1, "seqlen": 1, "nheads": 1, "headdim": 1, "warmup": 0, "rep": 1}
    for name, value in ((name, getattr(args, name)) for name in least):
        if value is not None and value < least[name]:
            parser.error(f"--{name}: expected at least {least[name]}, got {value}")
    if not torch.cuda.is_available():
        print("attnlib.task: the benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    options = {"seed": args.seed, "warmup": args.warmup, "rep": args.rep}
    if not args.all:
        shape = Shape(*sizes, args.causal, args.dtype)
        result = run(shape, **options)
        print(report(shape, result))
        return 0 if result.correct else 1
    print(f"{'shape':6s} {'TFLOP/s':>9s} {'ms':>9s} {'SDPA':>9s} {'speedup':>9s} {'max diff':>11s}")
    correct = True
    for name, shape in TASK.items():
        result = run(dataclasses.replace(shape, dtype=args.dtype), **options)
        print(_row(name, result), flush=True)
        correct = correct and result.correct
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
