"""Calls of `attention_distr`, and their judgement: each of its kernels against what it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlib import attention_distr
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import distr
from attnlib.kernels.common.distr import Grouped, Grouping
from attnlib.kernels.reference import distr as model
from attnlib.params import Params, mask_window

NEAR_ZERO = 1e-5
"""Of the sum of all magnitudes: a projection so small may have either sign in float32."""

Forward = Callable[[Grouped, torch.Tensor, Params], torch.Tensor]


@dataclass(frozen=True)
class DistrCase:
    """One call. alike: how many columns in a row are equal in k, and in q; they are then shuffled."""

    S: int = 150
    grouping: Grouping = Grouping(2)
    D: int = 64
    heads: int = 2
    kv_heads: int = 2
    keys: int | None = None
    batch: int = 1
    causal: bool = True
    dtype: str = "float16"
    sm_scale: float | None = None
    kind: str = "normal"
    alike: tuple[int, int] = (1, 1)
    strided: bool = False

    def __str__(self) -> str:
        group, hashed, rows, _ = self.grouping
        name = f"B{self.batch} H{self.heads}/{self.kv_heads} S{self.S}x{self.keys or self.S} D{self.D}"
        name += f" G{group} {hashed}{'' if rows is None else rows}"
        name += f" {'causal' if self.causal else 'dense'} {self.dtype}"
        more = [self.kind] * (self.kind != "normal") + ["strided"] * self.strided
        more += [f"scale {self.sm_scale:g}"] if self.sm_scale is not None else []
        more += [f"alike {self.alike}"] if self.alike != (1, 1) else []
        return " ".join([name, *more])

    def tensors(self, device: str) -> list[torch.Tensor]:
        """q, k, v."""
        shape = Shape(
            self.batch, self.heads, self.S, self.D, self.causal, self.dtype, self.kv_heads,
            self.keys or self.S,
        )  # fmt: skip
        q, k, v = make_inputs(shape, self.kind, device=device)
        order = torch.randperm(self.D, generator=torch.Generator().manual_seed(3)).to(device)
        q, k = (
            x[..., ::n].repeat_interleave(n, -1)[..., order]
            for x, n in zip((q, k), reversed(self.alike), strict=True)
        )
        if self.strided:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return [q, k, v]

    def params(self) -> Params:
        """What the product is asked for."""
        scale = self.D**-0.5 if self.sm_scale is None else self.sm_scale
        return Params(mask_window(self.causal, None), scale)


def grouped(case: DistrCase, q: torch.Tensor, k: torch.Tensor) -> Grouped:
    """What the kernels make of q and k, judged."""
    made = distr.group(q, k, case.grouping, case.causal)
    check_places(case, q, k, made.places)
    check_columns(case, q, k, made)
    return made


def check_places(case: DistrCase, q: torch.Tensor, k: torch.Tensor, places: torch.Tensor) -> None:
    """Those of the model, unless a projection is so near to 0 that its sign is a matter of rounding."""
    every = torch.arange(case.D, device=places.device, dtype=torch.int32).expand_as(places)
    assert torch.equal(places.sort(-1).values, every), f"{case} is wrong: places: not a permutation"
    x = q if case.grouping.hashed == "q" else k
    shared = (case.grouping.rows or x.shape[2]) if case.grouping.hashed == "q" else x.shape[2]
    found = model.projected(x, shared, case.grouping.seed)
    size = torch.stack([part.double().abs().sum(-2) for part in x.split(shared, 2)], 2)[..., None, :]
    doubtful = ((found.abs() < NEAR_ZERO * size) & (found != 0)).flatten(-2).any(-1)  # (B, H, blocks)
    expected = model.places_of(q, k, case.grouping)
    wrong = (places != expected).any(-1) & ~doubtful
    assert not wrong.any(), f"{case} is wrong: places: {int(wrong.sum())} of {wrong.numel()} orders"


def check_columns(case: DistrCase, q: torch.Tensor, k: torch.Tensor, made: Grouped) -> None:
    """Sums of q's columns up to a rounding, and k's columns themselves."""
    group = case.grouping.group
    order = made.places.long().argsort(-1)  # (B, Hp, blocks, D)
    of_q = order.repeat_interleave(case.heads // order.shape[1], 1)
    shared = case.grouping.rows if case.grouping.hashed == "q" and case.grouping.rows else case.S
    for i, part in enumerate(q.double().split(shared, 2)):
        index = of_q[:, :, i, None].expand(*part.shape)
        sums = part.gather(-1, index).unflatten(-1, (-1, group)).sum(-1)
        found = made.q[:, :, i * shared : i * shared + part.shape[2]].double()
        columns = sums.shape[-1]
        assert not found[..., columns:].any(), f"{case} is wrong: q: columns beyond the last group"
        size = part.abs().gather(-1, index).unflatten(-1, (-1, group)).sum(-1)
        roundings = max(1, (group - 1) / 2)  # half an eps each: of the sums in float32, or one at the end
        off = (found[..., :columns] - sums).abs() > roundings * torch.finfo(q.dtype).eps * size
        assert not off.any(), f"{case} is wrong: q: {int(off.sum())} sums"
    keys = k.repeat_interleave(case.heads // case.kv_heads if case.grouping.hashed == "q" else 1, 1)
    chosen = made.k.unflatten(1, (order.shape[1], -1))  # (B, Hp, blocks, Sk, columns)
    for i in range(order.shape[2]):
        index = order[:, :, i, ::group][:, :, None].expand(*keys.shape[:3], -1)
        end = keys.shape[2]
        if case.causal and order.shape[2] > 1:  # keys that no query of the block sees may be left out
            end = max(1, min(end, (i + 1) * shared + end - case.S))
        found = chosen[:, :, i, :end]
        same = torch.equal(found[..., : index.shape[-1]], keys.gather(-1, index)[:, :, :end])
        assert same, f"{case} is wrong: k: columns of block {i}"
        assert not found[..., index.shape[-1] :].any(), f"{case} is wrong: k: columns beyond the last group"


def check_product(case: DistrCase, made: Grouped, q, k, v, out: torch.Tensor) -> None:
    """Within the budget of dense attention whose queries are the sums: see the model."""
    wide = model.scattered(q, made.places, case.grouping).to(q.dtype)
    Oracle(wide, k, v, case.causal, case.sm_scale).judge(out).raise_if_bad(str(case))


def check(case: DistrCase, device: str, forward: Forward | None = None, impl: str | None = None) -> None:
    """AssertionError unless groups, sums, columns and output are right, and no input changed. forward: of the
    product, in place of the call itself."""
    q, k, v = case.tensors(device)
    before = [x.clone() for x in (q, k, v)]
    made = grouped(case, q, k)
    if forward is not None:
        out = forward(made, v, case.params())
    else:
        group, hashed, rows, seed = case.grouping
        out = attention_distr(
            q, k, v, group=group, causal=case.causal, seed=seed, sm_scale=case.sm_scale, hashed=hashed,
            rows=rows, impl=impl,
        )  # fmt: skip
    check_product(case, made, q, k, v, out)
    for name, now, then in zip("qkv", (q, k, v), before, strict=True):
        assert torch.equal(now, then), f"{case} is wrong: {name} was written to"


QUERIES, BLOCKS = Grouping(2, "q"), Grouping(2, "q", 128)
CASES = {
    str(case): case
    for case in [
        DistrCase(), DistrCase(causal=False), DistrCase(grouping=Grouping(1)),
        DistrCase(grouping=Grouping(4, seed=7), D=128), DistrCase(grouping=Grouping(16), D=128, S=70),
        DistrCase(200, Grouping(2), 64, 4, 2, 230, 2),
        DistrCase(200, QUERIES, 64, 4, 2, 230, 2, causal=False),
        DistrCase(300, BLOCKS), DistrCase(300, BLOCKS, 128, 2, 1, 330), DistrCase(300, BLOCKS, causal=False),
        DistrCase(300, BLOCKS, keys=200), DistrCase(130, BLOCKS, keys=400, dtype="bfloat16"),
        DistrCase(600, Grouping(4, "q", 256), heads=1, kv_heads=1), DistrCase(100, BLOCKS, keys=40),
        DistrCase(40, Grouping(5), 40), DistrCase(33, Grouping(8), 8, keys=70), DistrCase(1),
        DistrCase(17, keys=1), DistrCase(70, BLOCKS, dtype="float32", strided=True),
        DistrCase(70, dtype="float32", sm_scale=-0.3), DistrCase(90, dtype="bfloat16", strided=True),
        DistrCase(90, kind="sink"), DistrCase(90, kind="outlier"),
        DistrCase(90, kind="constant", sm_scale=0.0), DistrCase(70, alike=(2, 2)),
    ]
}  # fmt: skip
