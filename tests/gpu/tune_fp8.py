"""Judge and time configurations of the FP8 forward kernel on this GPU.

    python tests/gpu/tune_fp8.py                                those of SHORT, a minute on 16 cores
    python tests/gpu/tune_fp8.py --all                          all of them, about three minutes
    python tests/gpu/tune_fp8.py --pick "128:2x128 q pin,64:3x128"
    python tests/gpu/tune_fp8.py --kept                         kept shifts and lagging ones, some 70 s

Processes compile the candidates side by side, and judge each on small calls of all KINDS, some of which are
made to mislead kept shifts, and on the timed call: the RMS of what it adds to exact attention of the same
quantized operands (fp64) must be that of a model that rounds P as the kernel does. What is wrong, or does not
compile, is reported and not timed. Then all of one shape are timed in shuffled rounds, with attnlib's 16-bit
kernel, and FlashAttention-3 in FP8 where ATTNLIB_FA3_FP8 is a folder that holds its fa3_fwd.so. Quantizing is
not timed. A shape's rows are printed, and the record in $OUT (or where --out says) is written, as soon as the
shape is timed: what is cut off by a limit has told of those
before. Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import attnlib  # noqa: E402
from attnlib.bench import records, timing  # noqa: E402
from attnlib.bench.setting import WINDOW  # noqa: E402
from attnlib.kernels.common.fp8 import ROWS, Fp8, Recipe  # noqa: E402
from attnlib.kernels.hopper import launch_fp8 as launch  # noqa: E402
from attnlib.kernels.hopper.configs import HopperConfig  # noqa: E402
from attnlib.kernels.hopper.configs_fp8 import fp8_config  # noqa: E402
from attnlib.kernels.reference import fp8 as reference  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

SHAPES = {64: (4, 32, 4096), 128: (2, 16, 8192), 256: (1, 8, 16384)}
"""Head dimension -> B, H, S of the timed call."""
MORE = {128: [(4, 16, 4096), (1, 16, 16384)]}
"""Those that --kept times besides."""
KINDS = "normal", "flat", "outliers", "rising"
SMALL = 2, 4, 512
DEVICE = "cuda"
FOLDER = "ATTNLIB_FA3_FP8"
EXACT = reference.Rounding(offset=None)
LARGEST = 1.25
"""The model's RMS error times so much is what a candidate may have."""


def three(block_n: int, stages: int, o_columns: int, **options) -> HopperConfig:
    registers = {"consumer_registers": 160, "producer_registers": 32, "max_registers": 128}
    return HopperConfig(block_n, 3, stages, o_columns, **registers, **options)


def four(block_n: int, stages: int, o_columns: int, **options) -> HopperConfig:
    registers = {"consumer_registers": 112, "producer_registers": 32, "max_registers": 96}
    return HopperConfig(block_n, 4, stages, o_columns, **registers, **options)


LATE = {"late_wait": True, "pin": True}
CANDIDATES: dict[int, dict[str, HopperConfig]] = {
    64: {
        "3x128": three(128, 4, 64, pin=True, joint=True),
        "3x128 q": three(128, 4, 64, q_columns=64, pin=True, joint=True),
        "3x128 q late": three(128, 4, 64, q_columns=64, joint=True, **LATE),
        "3x128 q free": three(128, 4, 64, q_columns=64, joint=True),
        "3x128 q named": three(128, 4, 64, q_columns=64, pin=True, joint=True, named=True),
        "4x64 q pin": four(64, 8, 64, q_columns=64, joint=True, pin=True),
        "2x128 q late": HopperConfig(128, 2, 4, 64, q_columns=64, joint=True, named=True, **LATE),
        "3x128 q kept": three(128, 4, 64, q_columns=64, joint=True, keep_shift=True),
        "3x128 q late kept": three(128, 4, 64, q_columns=64, joint=True, keep_shift=True, **LATE),
        "2x128 q late kept": HopperConfig(
            128, 2, 4, 64, q_columns=64, joint=True, named=True, keep_shift=True, **LATE
        ),
        "2x256 pin": HopperConfig(256, 2, 2, 64, pin=True, joint=True),
    },
    128: {
        "2x128 late": HopperConfig(128, 2, 4, 128, joint=True, **LATE),
        "2x128 q late": HopperConfig(128, 2, 4, 128, q_columns=128, joint=True, **LATE),
        "2x128 q late named": HopperConfig(128, 2, 4, 128, q_columns=128, named=True, **LATE),
        "2x128 q pin": HopperConfig(128, 2, 4, 128, q_columns=128, joint=True, pin=True),
        "2x128 q kept named": HopperConfig(128, 2, 4, 128, q_columns=128, named=True, keep_shift=True),
        "2x128 q late kept named": HopperConfig(
            128, 2, 4, 128, q_columns=128, named=True, keep_shift=True, **LATE
        ),
        "3x64 q": three(64, 8, 64, q_columns=128, pin=True, joint=True),
    },
    256: {
        "2x64 q named": HopperConfig(64, 2, 4, 128, q_columns=256, named=True),
        "2x128 named": HopperConfig(128, 2, 2, 128, named=True),
        "2x128 pin joint": HopperConfig(128, 2, 2, 128, pin=True, joint=True),
        "2x128 pin named": HopperConfig(128, 2, 2, 128, pin=True, named=True),
        "2x128 late named": HopperConfig(128, 2, 2, 128, named=True, **LATE),
        "2x128 kept named": HopperConfig(128, 2, 2, 128, named=True, keep_shift=True),
    },
}


SHORT = {
    64: ("3x128 q late", "3x128 q", "4x64 q pin"),
    128: ("2x128 q late named", "2x128 q late", "3x64 q"),
    256: ("2x128 late named", "2x128 pin named", "2x128 pin joint"),
}
"""Those that differ most from each other, with the ones that `fp8_config` chooses."""
KEPT = {
    64: ("3x128 q late", "3x128 q kept", "3x128 q late kept", "2x128 q late kept"),
    128: ("2x128 q late named", "2x128 q late kept named", "2x128 q kept named"),
    256: ("2x128 late named", "2x128 kept named"),
}
"""The chosen ones, with kept shifts and without."""


class Quantized(NamedTuple):
    q: Fp8
    k: Fp8
    v: Fp8

    def head(self) -> Quantized:
        """The last head of the last batch element alone."""
        return Quantized(*(_head(x) for x in self))


def _head(x: Fp8) -> Fp8:
    rest = x.role, x.scaling, x.rotated, x.head_dim, x.dtype, x.tokens
    mean = None if x.mean is None else x.mean[-1:, -1:].contiguous()
    return Fp8(x.data[-1:, -1:], x.scale[-1:, -1:], *rest, mean=mean)


def tensors(head_dim: int, shape: tuple[int, int, int], kind: str = "normal") -> list[torch.Tensor]:
    """q, k, v. Of rows of kind rising scores grow by 11.5 powers of two in every 64 keys that a row visits,
    from the last on; those of kind flat differ by a tenth of what is usual."""
    generator = torch.Generator(DEVICE).manual_seed(head_dim)
    make = {"device": DEVICE, "dtype": torch.bfloat16, "generator": generator}
    q, k, v = (torch.randn(*shape, head_dim, **make) for _ in range(3))
    if kind == "flat":
        q *= 0.1
    if kind == "outliers":
        for x in (q, k, v):
            x += 10 * torch.randn(x.shape, **make) * (torch.rand(x.shape, **make) < 0.001)
    if kind == "rising":
        q[..., 0], S = head_dim**0.5, shape[-1]
        k[..., 0] = 8.0 * (S // 64 - torch.arange(S, device=DEVICE) // 64).to(k.dtype)
    return [q, k, v]


def quantized(head_dim: int, shape: tuple[int, int, int], scaling: str, kind: str = "normal") -> Quantized:
    inputs = zip(tensors(head_dim, shape, kind), "qkv", strict=True)
    return Quantized(*(reference.quantize(x, role, Recipe(scaling)) for x, role in inputs))


def scaling_of(config: HopperConfig) -> str:
    """A block of keys has one scale, so blocks of more than 128 keys are for coarser ones."""
    return "block" if config.block_n <= ROWS["k"] else "head"


def params(head_dim: int, causal: bool, config: HopperConfig | None) -> Params:
    return Params(mask_window(causal, None), head_dim**-0.5, None, False, config=config)


def kernel(operands: Quantized, causal: bool, config: HopperConfig) -> Callable[[], torch.Tensor]:
    asked = params(operands.q.head_dim, causal, config)
    return lambda: launch.forward(*operands, asked, torch.bfloat16)[0]


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def judged(job: tuple[int, str]) -> tuple[int, str, dict[str, Any]]:
    """What is wrong with a candidate, and how large its errors are; in a child process."""
    head_dim, name = job
    config = CANDIDATES[head_dim][name]
    found: dict[str, Any] = {"wrong": None}
    try:
        cases = [*((SMALL, kind) for kind in KINDS), (SHAPES[head_dim], "normal")]
        for (shape, kind), causal in product(cases, (True, False)):
            operands = quantized(head_dim, shape, scaling_of(config), kind)
            out = kernel(operands, causal, config)()[-1:, -1:]
            asked = params(head_dim, causal, None)
            exact, model = (
                reference.forward(*operands.head(), asked, torch.float64, rounding)[0]
                for rounding in (EXACT, reference.AS_KERNEL._replace(keys=config.block_n))
            )
            error, expected = rms(out - exact), rms(model.bfloat16() - exact)
            call = f"{'causal' if causal else 'dense'} {shape[-1]} {kind}"
            found[call] = [error / rms(exact), expected / rms(exact)]
            if not error <= LARGEST * expected:
                found["wrong"] = f"{call}: RMS error {error:.3e}, the model's {expected:.3e}"
        with timing.launched_kernels() as kernels:
            kernel(operands, causal, config)()
        found["resources"] = timing.resources(kernels)
    except Exception as error:  # reported with the others
        found["wrong"] = f"{type(error).__name__}: {error}"[:300]
    return head_dim, name, found


def fa3_fp8(inputs: Sequence[torch.Tensor], causal: bool) -> Callable[[], torch.Tensor] | None:
    """FlashAttention-3 on q, k, v (B, H, S, D) with a scale per head; None without it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    for library in glob.glob(f"{folder}/libcudart.so.12*"):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(f"{folder}/fa3_fwd.so")
    data, scales = [], []
    for x in inputs:
        scale = x.abs().amax((2, 3)).float() / 448
        data.append((x.float() / scale[..., None, None]).to(torch.float8_e4m3fn).transpose(1, 2).contiguous())
        scales.append(scale)
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options |= {"softmax_scale": inputs[0].shape[-1] ** -0.5, "is_causal": causal, "num_splits": 1}
    return lambda: torch.ops.fa3_fwd.fwd(*data, **options)[0].transpose(1, 2)


def rows(
    head_dim: int, shape: tuple[int, int, int], causal: bool, names: Sequence[str], rounds: int
) -> Iterator[dict[str, Any]]:
    """Times of one shape, the fastest first."""
    B, H, S = shape
    q, k, v = tensors(head_dim, shape)
    operands = {scaling: quantized(head_dim, shape, scaling) for scaling in ("block", "head")}
    configs = {name: CANDIDATES[head_dim][name] for name in names}
    calls = {name: kernel(operands[scaling_of(config)], causal, config) for name, config in configs.items()}
    calls["attnlib bf16"] = lambda: attnlib.attention(q, k, v, causal=causal)
    peer = fa3_fp8((q, k, v), causal)
    if peer is not None:
        calls["FA3 FP8"] = peer
        exact = attnlib.attention(q[-1:, -1:], k[-1:, -1:], v[-1:, -1:], causal=causal)
        assert rms(peer()[-1:, -1:] - exact) < 0.1 * rms(exact), "FA3's output is not attention"
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        order = list(calls)
        random.Random(i).shuffle(order)
        for name in order:
            samples[name].append(timing.time_ms(calls[name], setting=WINDOW).median)
    flops = 4 * B * H * S * S * head_dim / (2 if causal else 1)
    for name, taken in sorted(samples.items(), key=lambda item: statistics.median(item[1])):
        yield {
            "head_dim": head_dim, "shape": shape, "causal": causal, "name": name,
            "ms": statistics.median(taken), "tflops": flops / statistics.median(taken) / 1e9,
            "fastest": flops / min(taken) / 1e9,
            "slowest": flops / max(taken) / 1e9,
        }  # fmt: skip


def chosen(asked: argparse.Namespace) -> list[tuple[int, str]]:
    """(head dimension, name) of the candidates that are asked for; ValueError for one that is not there."""
    if asked.pick is None:
        table = CANDIDATES if asked.all else KEPT if asked.kept else SHORT
        return [(d, name) for d in map(int, asked.dims.split(",")) for name in table[d]]
    jobs = []
    for pick in asked.pick.split(","):
        width, _, name = pick.partition(":")
        if not width.isdigit() or name not in CANDIDATES.get(int(width), ()):
            known = [f"{d}:{name}" for d, names in CANDIDATES.items() for name in names]
            raise ValueError(f"--pick: expected some of {', '.join(known)}, got {pick}")
        jobs.append((int(width), name))
    return jobs


def show(found: list[dict[str, Any]]) -> None:
    """Rows of one shape."""
    head_dim, causal = found[0]["head_dim"], found[0]["causal"]
    config = fp8_config(head_dim, dense=not causal)
    default = next((n for n, c in CANDIDATES[head_dim].items() if c == config), None)
    peer = next((row["ms"] for row in found if row["name"] == "FA3 FP8"), None)
    mask = "causal" if causal else "dense"
    usual = next((row["ms"] for row in found if row["name"] == default), None)
    told = "ms, TFLOP/s [slowest-fastest]" + ", x the default" * bool(usual) + ", x FA3" * bool(peer)
    print(f"D {head_dim} S {found[0]['shape'][-1]} {mask}: {told}")
    for row in found:
        mark = " (default)" if row["name"] == default else ""
        ratio = "".join(f" {ms / row['ms']:.3f}" for ms in (usual, peer) if ms)
        speed = f"{row['ms']:.4f} {row['tflops']:5.0f} [{row['slowest']:.0f}-{row['fastest']:.0f}]{ratio}"
        print(f"  {row['name'] + mark:28} {speed}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time configurations of the FP8 kernel on this GPU.")
    parser.add_argument("--dims", default="64,128,256", help="head dimensions (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="all candidates, not the short list")
    parser.add_argument("--kept", action="store_true", help="the chosen ones, with kept shifts and without")
    parser.add_argument("--pick", help="these alone: D:name,D:name (names hold no comma)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="(default: tune_fp8.json in $OUT, or in build/)")
    args = parser.parse_args(argv)
    jobs = chosen(args)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    path = args.out or Path(os.environ.get("OUT", ROOT / "build")) / "tune_fp8.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        **records.provenance({"rounds": args.rounds, "timed": "median of rounds, cold L2"}),
        "candidates": {f"{d} {name}": asdict(CANDIDATES[d][name]) for d, name in jobs},
        "judged": {},
        "rows": [],
    }
    children = min(len(jobs), max(1, len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(judged, job) for job in jobs]):
            head_dim, name, found = done.result()
            record["judged"][f"{head_dim} {name}"] = found
            if found["wrong"]:
                print(f"WRONG D {head_dim} {name}: {found['wrong']}", flush=True)
    records.write_json(path, records.rounded(record))
    print(f"compiled and judged after {time.perf_counter() - begin:.0f} s", flush=True)
    wrong = {job for job in jobs if record["judged"][f"{job[0]} {job[1]}"]["wrong"]}
    dims = dict.fromkeys(d for d, _ in jobs)
    shapes = [(d, shape) for d in dims for shape in [SHAPES[d], *(MORE.get(d, []) if args.kept else [])]]
    for (head_dim, shape), causal in product(shapes, (True, False)):
        names = [name for d, name in jobs if d == head_dim and (d, name) not in wrong]
        found = list(rows(head_dim, shape, causal, names, args.rounds))
        record["rows"] += found
        records.write_json(path, records.rounded(record))
        show(found)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
