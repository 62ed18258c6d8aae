"""What adding in few bits costs FP8 attention whose values have a mean, and what centering them leaves of it:
`python -m attnlib.bench.fp8_sums`.

A model on a CPU of the product P V alone: P and V in float8_e4m3fn, 32 products at a time added to what there
is, each cut off KEPT bits below the largest (chapter 22 measures that tensor cores do so). All else is fp64.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import torch

from attnlib.kernels.common.fp8 import LARGEST

KEPT = 13
"""Bits below the leading one."""
BLOCK, TOGETHER, OFFSET = 128, 32, 6.5
"""Keys of a block, of which the last is visited first; products added at once; P is rounded as 2^OFFSET P."""

VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean 0": lambda at: 0 * at,
    "mean 1": lambda at: 0 * at + 1,
    "mean 100": lambda at: 0 * at + 100,
    "0 in the first half, 2 in the second": lambda at: 2 * (at >= 0.5).double(),
    "1 in the first half, -1 in the second": lambda at: 1 - 2 * (at >= 0.5).double(),
    "from 0 to 2": lambda at: 2 * at,
}
"""What is added to values of N(0, 1), by the place of their key from 0 to 1."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).double()


def last_bit(total: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """That of an addition of `total` and the products along the first dimension, KEPT below the largest's."""
    largest = torch.maximum(total.abs(), products.abs().amax(0))
    return torch.exp2(largest.clamp_min(2.0**-126).log2().floor() - KEPT)


def add(total: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """`total` and the products, each cut off at the last bit."""
    last = last_bit(total, products)
    return ((total / last).trunc() + (products / last).trunc().sum(0)) * last


def product(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p [rows, S] times v [S, D] as tensor cores add."""
    total = p.new_zeros(len(p), v.shape[1])
    for block in reversed(range(0, len(v), BLOCK)):
        for key in range(block, block + BLOCK, TOGETHER):
            keys = slice(key, key + TOGETHER)
            total = add(total, p[:, keys].mT[:, :, None] * v[keys][:, None])
    return total


def errors(keys: int, added: Callable, causal: bool, rows: int = 24, columns: int = 16) -> dict[str, float]:
    """RMS of the output, and RMS errors with values as they are and centered. Rows are those of a causal
    call, evenly spread, or such as see all keys."""
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, keys, generator=rng, dtype=torch.float64) * math.log2(math.e)
    v = torch.randn(keys, columns, generator=rng, dtype=torch.float64)
    v = v + added(torch.arange(keys, dtype=torch.float64) / keys)[:, None]
    if causal:
        last = (torch.arange(rows) + 0.5) * keys / rows
        scores.masked_fill_(torch.arange(keys) > last[:, None], -math.inf)
    p = torch.exp2(scores - scores.amax(1, keepdim=True))
    sums = p.sum(1, keepdim=True)
    truth, found = p @ v / sums, {}
    for name, mean in (("as they are", 0 * v[0]), ("centered", v.mean(0))):
        scale = (v - mean).abs().max() / LARGEST
        out = product(rounded(p * 2**OFFSET), rounded((v - mean) / scale)) * scale / 2**OFFSET / sums + mean
        found[name] = (out - truth).square().mean().sqrt().item()
    return {"size": truth.square().mean().sqrt().item(), **found}


def rows(lengths: list[int]) -> Iterator[dict[str, float | int | str]]:
    for keys in lengths:
        for name, added in VALUES.items():
            for causal in (False, True):
                mask = "causal" if causal else "dense"
                yield {"keys": keys, "values": name, "mask": mask, **errors(keys, added, causal)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096, 16384])
    for row in rows(parser.parse_args().seqlen):
        text = "S {keys:6} {mask:6} V + {values:38} RMS of O {size:8.3f}, error {as they are:.1e}, "
        print(f"{text}{{centered:.1e}}".format_map(row), flush=True)


if __name__ == "__main__":
    main()
