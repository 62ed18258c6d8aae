"""Time attention under block masks on this GPU, beside FlexAttention and what else is there.

    python tests/gpu/time_sparse.py                 all tables: nine minutes with five shares of blocks
    python tests/gpu/time_sparse.py --tables blocks,making      some of them, in a minute and a half
    python tests/gpu/time_sparse.py --dims 128      one head dimension
    python tests/gpu/time_sparse.py --seqlen 65536  longer sequences, with fewer heads; use --out, too
    python tests/gpu/time_sparse.py --tables scores --scores "soft cap,ALiBi"   some scores; with --out, too
    python tests/gpu/time_sparse.py --configs       the Hopper kernels in other configurations; no record
    python tests/gpu/time_sparse.py --configs forward --dims 64     one of them: forward, backward or bias

The report goes to figures/data/<gpu>/sparse.json, or to --out: each table when it is done, beside those that
are there from other runs; a table says at which commit it was measured.

fp16. Random blocks of 128 x 128, for each head its own, as many in each row; 50 to 0.8% of them are kept. A
time is the median over shuffled rounds of calls with a cold L2; "attnlib again" is the same call under
another name and shows the noise. Ideal is the time of the dense kernel times the part that is kept. Then the
backward pass at 25 and 50%, masks of functions (causal, documents), scores forward and backward (`SCORES`),
and what it takes to make a mask. "gallery" has the masks of chapter 30, and "chapter" its kernels. Before it
is timed a call is judged against fp64 on its last head, peers too. Nothing wrong is timed.

FlexAttention comes with PyTorch. ATTNLIB_SPARSE_PEERS names a Python file with more peers: functions
make_fa4_sparse(q, k, v, keep, causal) and make_cudnn_bsa(q, k, v, keep), which return a call; keep is bool
(B, H, blocks, blocks). One that is absent, or refuses, is left out and named.
Status 0 when all calls were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from hopper_only import no_hopper
from rounds import in_rounds

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import BlockMask, Score, attention, dispatch  # noqa: E402
from attnlib.bench import records, sources  # noqa: E402
from attnlib.bench.changes import changed  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.oracle import Oracle  # noqa: E402
from attnlib.bench.setting import WINDOW  # noqa: E402
from attnlib.params import MaskWindow, Params  # noqa: E402
from attnlib.scores import parts_of  # noqa: E402

HEADS = {64: 32, 128: 16, 256: 8}
"""Head dimension -> heads of 16384 tokens, as in the shapes of the task."""
TOKENS, BLOCK = 16384, 128
KEPT = 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128
PEERS = "ATTNLIB_SPARSE_PEERS"
TABLES = "blocks", "making", "functions", "scores", "backward", "gallery", "chapter"
CHAPTER = "30_block_masks"
"""Its cells have the masks of the gallery, and kernels."""
SOFT_CAP = 30.0
REACH = 128
"""Of the table by distance, as in T5."""
CONFIGURED = "forward", "backward", "bias"
SCORES = "soft cap", "ALiBi", "sinks", "relative", "bias", "own", "learned relative", "learned bias"
"""The learned ones have gradients of their own, which FlexAttention adds up by atomics."""
MADE = 65536
"""Length of the masks that are made of functions."""

Call = Callable[[], Any]


def inputs_of(head_dim: int, seqlen: int, device: str = "cuda") -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    heads = max(1, HEADS.get(head_dim, 2) * TOKENS // seqlen) if seqlen >= TOKENS else HEADS.get(head_dim, 2)
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, heads, seqlen, head_dim
    return [torch.randn(shape, generator=generator, device=device).half() for _ in range(4)]


def kept_blocks(heads: int, seqlen: int, part: float, device: str = "cuda") -> torch.Tensor:
    """Bool (1, heads, blocks, blocks), as many in each row."""
    n = seqlen // BLOCK
    generator = torch.Generator(device).manual_seed(1)
    rank = torch.rand(1, heads, n, n, generator=generator, device=device).argsort(-1).argsort(-1)
    return rank < max(1, round(part * n))


def documents(length: int, device: str) -> Callable:
    """Causal attention within documents of some 1000 tokens, as a mask function."""
    number = torch.arange(length, device=device) // 1000
    return lambda b, h, q, k: (number[q] == number[k]) & (q >= k)


def causal(b, h, q, k):
    return q >= k


@triton.jit
def softsign(s, i, j, h, b):
    return s / (1 + tl.abs(s))


@triton.jit
def softsign_derivative(s, i, j, h, b):
    t = 1 / (1 + tl.abs(s))
    return t * t


def scores_of(heads: int, seqlen: int, device: str = "cuda") -> dict[str, tuple[Score, Callable | None]]:
    """Name of `SCORES` -> ours, and the same as FlexAttention takes it: a function of a score and its place;
    None where it has no such thing. Causal: keys are never behind their query."""
    rng = torch.Generator(device).manual_seed(2)
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
    table = torch.randn(heads, 2 * REACH + 1, generator=rng, device=device)
    bias = torch.randn(seqlen, seqlen, generator=rng, device=device).half()
    learned_table, learned_bias = (x.clone().requires_grad_() for x in (table, bias))
    own = Score(
        function=softsign, derivative=softsign_derivative,
        reference=lambda s, i, j, h, b: torch.nn.functional.softsign(s),
    )  # fmt: skip
    return {
        "soft cap": (Score(soft_cap=SOFT_CAP), lambda s, b, h, q, k: SOFT_CAP * torch.tanh(s / SOFT_CAP)),
        "ALiBi": (Score(alibi=slopes), lambda s, b, h, q, k: s - slopes[h] * (q - k)),
        "sinks": (Score(sinks=torch.zeros(heads, device=device)), None),
        "relative": (
            Score(relative=table),
            lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -REACH, REACH) + REACH],
        ),
        "bias": (Score(bias=bias), lambda s, b, h, q, k: s + bias[q, k]),
        "own": (own, lambda s, b, h, q, k: s / (1 + torch.abs(s))),
        "learned relative": (
            Score(relative=learned_table),
            lambda s, b, h, q, k: s + learned_table[h, torch.clamp(k - q, -REACH, REACH) + REACH],
        ),
        "learned bias": (Score(bias=learned_bias), lambda s, b, h, q, k: s + learned_bias[q, k]),
    }


# ---------------------------------------------------------------- the judge


class Judge:
    """Truth and budget of the last head of a call."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], mask: BlockMask, score: Score | None = None
    ) -> None:
        self.inputs = [x[-1:, -1:] for x in tensors]
        dense = BlockMask.to_dense(mask) if mask.shape[1] == 1 else _last_head(mask)
        self.mask = dense
        self.score = None
        if score is not None:
            parts = {name: getattr(score, name) for name in ("alibi", "sinks", "relative")}
            parts = {name: None if x is None else x[-1:].detach() for name, x in parts.items()}
            if score.bias is not None:  # that of all heads
                parts["bias"] = score.bias.detach()
            own = replace(score, **parts)  # a function looks at no head
            self.score = parts_of(own, *self.inputs[:2])
        self.oracle = Oracle(*self.inputs[:3], mask=dense, score=self.score)

    def forward(self, name: str, out: torch.Tensor) -> None:
        self.oracle.judge(out[-1:, -1:].contiguous()).raise_if_bad(name)

    def backward(self, name: str, gradients: Sequence[torch.Tensor]) -> None:
        q, k, v, d_out = self.inputs
        found = GradientOracle(d_out, q, k, v, mask=self.mask, score=self.score)
        judged = dict(zip(("dq", "dk", "dv"), (x[-1:, -1:] for x in gradients[:3]), strict=True))
        # Of a learned table the distances that are one diagonal each; a bias of all heads is judged by tests.
        if len(gradients) > 3 and self.score.diagonal:
            exact, zero = found.truth["dbias"].float(), self.inputs[0].shape[2] - 1
            exact[:, zero + 1 - REACH : zero + REACH] = gradients[3][-1:, 1:-1]
            judged["dbias"] = exact
        for wanted, gradient in judged.items():
            found.judge_one(wanted, gradient).raise_if_bad(name)


def _last_head(mask: BlockMask) -> torch.Tensor:
    """Bool (1, 1, S_q, S_k) of its last head, without the memory of the others."""
    kinds = mask._tiles.kinds[-1:, -1:]
    assert len(mask._tiles.words) == 1, "masks of blocks only"
    dense = (kinds == 2).repeat_interleave(64, 2).repeat_interleave(64, 3)
    return dense[:, :, : mask.shape[2], : mask.shape[3]]


# ---------------------------------------------------------------- calls


@cache
def flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64  # each mask function and each head dimension is one
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex_mask(keep: torch.Tensor):
    """Its mask of full blocks alone."""
    from torch.nn.attention.flex_attention import BlockMask as TorchMask

    counts = keep.sum(-1, dtype=torch.int32)
    indices = (~keep).int().argsort(dim=-1, stable=True).int()
    none = torch.zeros_like(counts), torch.zeros_like(indices)
    return TorchMask.from_kv_blocks(*none, counts, indices, BLOCK_SIZE=BLOCK)


def peers() -> dict[str, Callable]:
    """Name -> make(q, k, v, keep), of the file that `PEERS` names."""
    path = os.environ.get(PEERS)
    if not path:
        print(f"{PEERS} is not set: FlexAttention is the only peer")
        return {}
    spec = importlib.util.spec_from_file_location("sparse_peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        "FlashAttention-4": lambda q, k, v, keep: module.make_fa4_sparse(q, k, v, keep, False),
        "cuDNN": lambda q, k, v, keep: module.make_cudnn_bsa(q, k, v, keep),
    }


def checked(name: str, call: Call, judge: Callable[[str, Any], None], calls: dict[str, Call]) -> bool:
    """Keep a call that is right. False if ours is wrong; a peer that fails is left out and named."""
    try:
        judge(name, call())
    except Exception as error:  # whatever a peer raises
        print(f"  left out: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return not name.startswith("attnlib")
    calls[name] = call
    return True


def times(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median ms of each, over shuffled rounds."""
    return {name: statistics.median(taken) for name, taken in in_rounds(calls, rounds, WINDOW).items()}


def row_of(label: str, part: float, flops: float, found: dict[str, float], ideal: float | None) -> list[dict]:
    print(f"{label}" + ("" if ideal is None else f", ideal {ideal:.3f} ms"), flush=True)
    rows = []
    for name, ms in found.items():
        row = {"call": label, "kept": part, "implementation": name, "ms": ms}
        row["tflops"] = flops * part / ms / 1e9
        if ideal is not None:
            row["of_ideal"] = ideal / ms
        rows.append(row)
        share = "" if ideal is None else f"  {100 * ideal / ms:5.1f}% of ideal"
        print(f"  {name:18} {ms:8.3f} ms  {row['tflops']:6.0f} TFLOP/s of what is kept{share}", flush=True)
    return rows


# ---------------------------------------------------------------- tables


class Run:
    """The calls of one head dimension."""

    def __init__(self, head_dim: int, seqlen: int, rounds: int) -> None:
        self.head_dim, self.seqlen, self.rounds, self.right = head_dim, seqlen, rounds, True
        self.q, self.k, self.v, self.d_out = self.tensors = inputs_of(head_dim, seqlen)
        self.flops = 4 * self.q.shape[1] * seqlen * seqlen * head_dim
        self.name = f"D{head_dim} H{self.q.shape[1]} S{seqlen}"

    def blocks(self, more: dict[str, Callable]) -> list[dict]:
        """Forward, random blocks."""
        q, k, v = self.tensors[:3]
        rows = []
        for part in KEPT:
            keep = kept_blocks(q.shape[1], self.seqlen, part)
            mask, theirs = BlockMask.from_blocks(keep, self.seqlen, self.seqlen), flex_mask(keep)
            real = keep.float().mean().item()
            judge, calls = Judge(self.tensors, mask), {}
            ours = lambda mask=mask: attention(q, k, v, block_mask=mask)  # noqa: E731
            self.right &= checked("attnlib", ours, judge.forward, calls)
            calls["attnlib again"] = ours
            other = lambda theirs=theirs: flex()(q, k, v, block_mask=theirs)  # noqa: E731
            checked("FlexAttention", other, judge.forward, calls)
            for name, make in more.items():
                try:
                    call = make(q, k, v, keep)
                except Exception as error:  # whatever a peer raises
                    print(f"  left out: {name}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                checked(name, call, judge.forward, calls)
            found = times(calls | {"dense": lambda: attention(q, k, v)}, self.rounds)
            dense = found.pop("dense")
            rows += row_of(f"{self.name} kept {100 * real:.1f}%", real, self.flops, found, dense * real)
        return rows

    def backward(self) -> list[dict]:
        """At 25 and 50%, beside FlexAttention."""
        return [row for part in (1 / 4, 1 / 2) for row in self.backward_of(part)]

    def backward_of(self, part: float) -> list[dict]:
        leaves = [x.clone().requires_grad_() for x in self.tensors[:3]]
        keep = kept_blocks(self.q.shape[1], self.seqlen, part)
        mask, theirs = BlockMask.from_blocks(keep, self.seqlen, self.seqlen), flex_mask(keep)
        real = keep.float().mean().item()
        judge, calls = Judge(self.tensors, mask), {}

        def differentiated(out: torch.Tensor) -> Call:
            return lambda: torch.autograd.grad(out, leaves, self.d_out, retain_graph=True)

        ours = differentiated(attention(*leaves, block_mask=mask))
        self.right &= checked("attnlib", ours, judge.backward, calls)
        calls["attnlib again"] = ours
        try:
            other = differentiated(flex()(*leaves, block_mask=theirs))
        except Exception as error:  # whatever a peer raises
            print(f"  left out: FlexAttention: {type(error).__name__}: {str(error)[:200]}", flush=True)
        else:
            checked("FlexAttention", other, judge.backward, calls)
        found = times(calls | {"dense": differentiated(attention(*leaves))}, self.rounds)
        dense = found.pop("dense")
        label = f"{self.name} backward kept {100 * real:.1f}%"
        return row_of(label, real, 2.5 * self.flops, found, dense * real)

    def functions(self) -> list[dict]:
        """Causal, beside our own causal kernel too, and documents."""
        more = {"causal": {"attnlib causal=True": lambda: attention(*self.tensors[:3], causal=True)}}
        return self.masked({"causal": causal, "documents": documents(self.seqlen, "cuda")}, more)

    def gallery(self) -> list[dict]:
        """The masks of chapter 30."""
        cell = sources.cells_tagged(sources.notebook_of(CHAPTER), "variant")[1]
        return self.masked(sources.load_source("gallery", cell).gallery(self.seqlen, "cuda"))

    def masked(self, masks: dict[str, Callable], more: dict | None = None) -> list[dict]:
        """Forward under masks that are functions, beside FlexAttention; more: name of a mask -> calls."""
        from torch.nn.attention.flex_attention import create_block_mask

        q, k, v = self.tensors[:3]
        S, rows = self.seqlen, []
        for name, function in masks.items():
            mask = BlockMask.from_function(function, S, S, device="cuda")
            theirs = create_block_mask(function, None, None, S, S, device="cuda")
            judge, calls = Judge(self.tensors, mask), {}
            ours = lambda mask=mask: attention(q, k, v, block_mask=mask)  # noqa: E731
            self.right &= checked("attnlib", ours, judge.forward, calls)
            calls["attnlib again"] = ours
            other = lambda theirs=theirs: flex()(q, k, v, block_mask=theirs)  # noqa: E731
            checked("FlexAttention", other, judge.forward, calls)
            found = times(calls | (more or {}).get(name, {}), self.rounds)
            part = mask.to_dense().float().mean().item()
            rows += row_of(f"{self.name} {name}", part, self.flops, found, None)
        return rows

    def chapter(self) -> list[dict]:
        """The kernels of chapter 30, with lists and with a branch, on random blocks of 128 x 64."""
        text = sources.kernel_source(sources.notebook_of(CHAPTER))
        change = sources.cells_tagged(sources.notebook_of(CHAPTER), "variant")[0]
        step, branch = (sources.load_source("30", x) for x in (text, changed(text, change)))
        q, k, v = self.tensors[:3]
        rows = []
        for part in KEPT:
            keep = kept_blocks(q.shape[1], self.seqlen, part)
            mask = BlockMask.from_blocks(keep, self.seqlen, self.seqlen)
            halves = keep[0].repeat_interleave(2, 2)
            judge, calls = Judge(self.tensors, mask), {}
            for name, call in {
                "attnlib": lambda mask=mask: attention(q, k, v, block_mask=mask),
                "30, list": lambda mask=mask: step.attention(q, k, v, mask=mask),
                "30, branch": lambda halves=halves: branch.attention(q, k, v, keep=halves),
            }.items():
                checked(name, call, judge.forward, calls)
                self.right &= name in calls
            if "attnlib" in calls:
                calls["attnlib again"] = calls["attnlib"]
            found = times(calls, self.rounds)
            rows += row_of(f"{self.name} kept {100 * part:.1f}%", part, self.flops, found, None)
        return rows

    def scores(self, names: Sequence[str]) -> Iterator[list[dict]]:
        """Forward and, up to 16384 tokens, backward, causal, with scores of these names, most of them beside
        FlexAttention; rows of each call. The gradients are those of q, k and v, and of what is learned."""
        from torch.nn.attention.flex_attention import create_block_mask

        S, H = self.seqlen, self.q.shape[1]
        mask = BlockMask.from_function(causal, S, S, device="cuda")
        theirs = create_block_mask(causal, None, None, S, S, device="cuda")
        part = (S + 1) / (2 * S)
        made = scores_of(H, S)
        for name in names:
            score, function = made[name]
            leaves = [x.clone().requires_grad_() for x in self.tensors[:3]]
            leaves += [x for x in (score.bias, score.relative) if x is not None and x.requires_grad]
            ways = {"attnlib": lambda x, score=score: attention(*x, causal=True, score=score)}
            if function is not None:
                ways["FlexAttention"] = lambda x, function=function: flex()(*x, function, block_mask=theirs)
            judge = Judge(self.tensors, mask, score)
            for backward in (False, True)[: 2 if S <= TOKENS else 1]:
                calls = {}
                for who, way in ways.items():
                    try:
                        call = lambda way=way: way(self.tensors[:3])  # noqa: E731
                        if backward:
                            out = way(leaves[:3])
                            call = lambda out=out, leaves=leaves: torch.autograd.grad(  # noqa: E731
                                out, leaves, self.d_out, retain_graph=True
                            )
                    except Exception as error:  # whatever a peer raises
                        print(f"  left out: {who}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                        continue
                    right = checked(who, call, judge.backward if backward else judge.forward, calls)
                    self.right &= right
                if "attnlib" in calls:
                    calls["attnlib again"] = calls["attnlib"]
                found, flops = times(calls, self.rounds), self.flops * (2.5 if backward else 1)
                kind = "backward " if backward else ""
                yield row_of(f"{self.name} {kind}causal, {name}", part, flops, found, None)

    def forward_configurations(self) -> None:
        """The Hopper kernel in its configurations, at 25 and 6%."""
        from attnlib.kernels.sparse import hopper
        from attnlib.kernels.sparse.configs_hopper import SHARED, WIDE, hopper_sparse_config

        chosen = hopper_sparse_config(self.head_dim, keep=True)
        tried = {"chosen": chosen}
        if self.head_dim == 64:
            tried |= {"wide": WIDE, "halves": replace(SHARED, o_columns=32)}
            tried["2 stages"] = replace(SHARED, stages=2)
            tried |= {"apart": replace(SHARED, joint=False), "late": replace(SHARED, late_wait=True)}
            tried |= {f"{name}, pin": replace(tried[name], pin=True) for name in ("late", "chosen")}
        if self.head_dim == 128:
            tried |= {"joint": replace(chosen, joint=True), "Q in memory": replace(chosen, q_columns=0)}
            tried |= {"steps of 64": hopper_sparse_config(128, coarse=False)}
        tried["small sections"] = replace(chosen, l2_bytes=8 << 20)
        tried["one section"] = replace(chosen, l2_bytes=1 << 40)
        for part in (1 / 4, 1 / 16):
            keep = kept_blocks(self.q.shape[1], self.seqlen, part)
            mask = BlockMask.from_blocks(keep, self.seqlen, self.seqlen)
            judge, calls = Judge(self.tensors, mask), {}
            for name, config in tried.items():
                params = Params(MaskWindow(None, None), self.head_dim**-0.5, config=config, block_mask=mask)
                call = lambda params=params: hopper.forward(*self.tensors[:3], params)[0]  # noqa: E731
                self.right &= checked(f"attnlib {name}", call, judge.forward, calls)
            found = times(calls | {"dense": lambda: attention(*self.tensors[:3])}, self.rounds)
            dense = found.pop("dense")
            row_of(f"{self.name} kept {100 * part:.1f}%", part, self.flops, found, dense * part)

    def bias_configurations(self) -> None:
        """The Hopper kernel under a bias, causal: copied and loaded."""
        from attnlib.kernels.sparse import hopper
        from attnlib.kernels.sparse.configs_hopper import hopper_sparse_config

        q, k, v = self.tensors[:3]
        mask = BlockMask.from_function(causal, self.seqlen, self.seqlen, device="cuda")
        score = scores_of(q.shape[1], self.seqlen)["bias"][0]
        window, parts = MaskWindow(None, None), parts_of(score, q, k)
        params = Params(window, self.head_dim**-0.5, block_mask=mask, score=parts)
        chosen = hopper.configuration(q, k, v, params)
        tried = {"chosen": chosen, "loaded": replace(chosen, copies_bias=False)}
        tried |= {"small sections": replace(chosen, l2_bytes=8 << 20)}
        tried |= {"one section": replace(chosen, l2_bytes=1 << 40)}
        if self.head_dim == 128:
            tried["steps of 64"] = hopper_sparse_config(128, coarse=False, bias=True, copied=True)
        judge, calls = Judge(self.tensors, mask, score), {}
        for name, config in tried.items():
            own = params._replace(config=config)
            call = lambda own=own: hopper.forward(q, k, v, own)[0]  # noqa: E731
            self.right &= checked(f"attnlib {name}", call, judge.forward, calls)
        calls["no score"] = lambda: attention(q, k, v, block_mask=mask)
        part = (self.seqlen + 1) / (2 * self.seqlen)
        row_of(f"{self.name} causal, bias", part, self.flops, times(calls, self.rounds), None)

    def backward_configurations(self) -> None:
        """The Hopper backward kernel in its configurations, and the portable ones, under random blocks, a
        quarter and a sixteenth, and under a diagonal."""
        for kept in (1 / 4, 1 / 16):
            keep = kept_blocks(self.q.shape[1], self.seqlen, kept)
            mask = BlockMask.from_blocks(keep, self.seqlen, self.seqlen)
            self.backward_configurations_under(mask, f"kept {kept:.1%}", kept)
        mask = BlockMask.from_function(causal, self.seqlen, self.seqlen, device="cuda")
        self.backward_configurations_under(mask, "causal", (self.seqlen + 1) / (2 * self.seqlen))

    def backward_configurations_under(self, mask: BlockMask, what: str, part: float) -> None:
        """part: the share of all scores that the mask keeps."""
        from attnlib.kernels.sparse import hopper, portable

        judge, calls = Judge(self.tensors, mask), {}
        window, scale = MaskWindow(None, None), self.head_dim**-0.5
        params = Params(window, scale, return_lse=True, block_mask=mask)
        out, lse = dispatch.forward(self.q, self.k, self.v, params)
        given = self.d_out, self.q, self.k, self.v, out, lse
        tried = {"portable": (portable, portable.configuration(self.q, self.k, self.v, params, True))}
        chosen = hopper.configuration(self.q, self.k, self.v, params, backward=True)
        configs = {"chosen": chosen, "one section": replace(chosen, l2_bytes=1 << 40)}
        if self.head_dim <= 128:
            other = "rounded P" if not chosen.half_p else "whole P"
            configs |= {other: replace(chosen, half_p=not chosen.half_p)}
            configs |= {"64 queries": replace(chosen, block_m=64)}
            configs |= {"abreast": replace(chosen, alternate=False)}
            configs |= {f"pauses, {every}": replace(chosen, pause_every=every) for every in (0, 2, 4, 8)}
            leaves = replace(chosen, alternate=False, persistent=False)
            configs |= {"a column": leaves, "a column, in turns": replace(leaves, alternate=True)}
        tried |= {name: (hopper, config) for name, config in configs.items()}
        for name, (family, config) in tried.items():
            own = params._replace(config=config)
            call = lambda own=own, family=family: family.backward(*given, own)  # noqa: E731
            self.right &= checked(f"attnlib {name}", call, judge.backward, calls)
        row_of(f"{self.name} backward {what}", part, 2.5 * self.flops, times(calls, self.rounds), None)


def making() -> list[dict]:
    """Milliseconds, and memory beside what the mask keeps, of making masks of functions."""
    rows = []
    shifted = lambda b, h, q, k: (q - k < 4096) & (q >= k)  # noqa: E731
    for name, function in (("causal", causal), ("window", shifted), ("documents", documents(MADE, "cuda"))):
        taken = []
        for _ in range(4):  # the first one warms up
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            mask = BlockMask.from_function(function, MADE, MADE, device="cuda")
            torch.cuda.synchronize()
            taken.append(1000 * (time.perf_counter() - begin))
            peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
            del mask
        mask = BlockMask.from_function(function, MADE, MADE, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        mask.lists(128)
        torch.cuda.synchronize()
        listed = 1000 * (time.perf_counter() - begin)
        row = {"mask": name, "S": MADE, "ms": statistics.median(taken[1:]), "lists_ms": listed}
        row |= {"peak_mib": peak / 2**20, "kept_mib": kept / 2**20}
        rows.append(row)
        print(
            f"{name} of {MADE} x {MADE}: {row['ms']:.1f} ms, its lists {listed:.1f} ms, "
            f"{row['peak_mib']:.0f} MiB at most, {row['kept_mib']:.1f} MiB kept",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time attention under block masks on this GPU.")
    parser.add_argument("--dims", default="64,128", help="head dimensions (default: %(default)s)")
    parser.add_argument("--seqlen", type=int, default=TOKENS, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--tables", default=",".join(TABLES), help="(default: %(default)s)")
    of = ",".join(CONFIGURED)
    parser.add_argument("--configs", nargs="?", const=of, help=f"try configurations instead, of {of}")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/sparse.json)")
    parser.add_argument("--scores", default=",".join(SCORES), help="of that table (default: %(default)s)")
    args = parser.parse_args(argv)
    dims = [int(d) for d in args.dims.split(",")]
    if not set(dims) <= set(HEADS):
        parser.error(f"--dims: expected some of {', '.join(map(str, HEADS))}, got {args.dims}")
    if not set(args.tables.split(",")) <= set(TABLES):
        parser.error(f"--tables: expected some of {', '.join(TABLES)}, got {args.tables}")
    names = args.scores.split(",")
    if not set(names) <= set(SCORES):
        parser.error(f"--scores: expected some of {', '.join(SCORES)}, got {args.scores}")
    configs = args.configs.split(",") if args.configs else []
    if not set(configs) <= set(CONFIGURED):
        parser.error(f"--configs: expected some of {of}, got {args.configs}")
    if no_hopper():
        return 2
    runs = [Run(d, args.seqlen, args.rounds) for d in dims]
    if configs:
        for run in runs:
            for name in configs:
                getattr(run, f"{name}_configurations")()
        return int(not all(run.right for run in runs))
    more = peers() if "blocks" in args.tables else {}
    makers = {
        "blocks": lambda: (run.blocks(more) for run in runs),
        "making": lambda: [making()],
        "functions": lambda: (run.functions() for run in runs),
        "scores": lambda: (rows for run in runs for rows in run.scores(names)),
        "gallery": lambda: (run.gallery() for run in runs),
        "chapter": lambda: (run.chapter() for run in runs),
        # The judge of gradients holds all scores of a head.
        "backward": lambda: (run.backward() for run in runs if run.seqlen <= 2 * TOKENS),
    }
    header = records.provenance({"rounds": args.rounds, "timed": "median of rounds, cold L2"})
    path = records.report_path("sparse", header, args.out)
    for name in args.tables.split(","):
        rows: list[dict] = []
        for some in makers[name]():  # kept at once, in case the run is cut off
            rows += some
            records.add_table(path, header, name, rows)
    print(path)
    return int(not all(run.right for run in runs))


if __name__ == "__main__":
    sys.exit(main())
