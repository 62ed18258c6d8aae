"""The calls that the kernels under a block mask are judged on, and the judgement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import judge_forward
from draws import raise_if_bad

from attnlib import BlockMask, attention
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.gradients import visible
from attnlib.params import mask_window

DOCUMENTS = torch.tensor([0] * 40 + [1] * 90 + [2] * 130 + [3] * 140)


def documents(b, h, q, k):
    return (DOCUMENTS.to(q.device)[q] == DOCUMENTS.to(q.device)[k]) & (q >= k)


FUNCTIONS = {
    "causal": lambda b, h, q, k: q >= k,
    "all": lambda b, h, q, k: q >= 0,
    "none": lambda b, h, q, k: q < 0,
    "band by head": lambda b, h, q, k: (q - k).abs() < 20 + 50 * h,
    "band by batch": lambda b, h, q, k: (q - k).abs() < 10 + 70 * b,
    "band by both": lambda b, h, q, k: (q + 40 * b - k).abs() < 30 + 60 * h,
    "documents": documents,
    "hole": lambda b, h, q, k: (q < 128) | (k < 128) | (k >= 256),  # whole blocks, and one that is absent
    "dots": lambda b, h, q, k: (3 * q + 5 * k) % 7 < 3,
    "stripes": lambda b, h, q, k: (k // 64) % 2 == 0,  # half of each tile of 128 keys
    "rungs": lambda b, h, q, k: (q // 64) % 2 == 1,  # half of each tile of 128 queries sees nothing
    "corner": lambda b, h, q, k: (q >= 130) & (k < 50),  # rows and columns of tiles that see nothing
    "first keys and last queries": lambda b, h, q, k: (k == 0) | (q == 149),
}
"""Name -> whether query q sees key k."""


@dataclass(frozen=True)
class SparseCase:
    """One call: its shape (causal: the window's part), a mask of `FUNCTIONS`, or of random blocks of a size
    ("random 64"), and its inputs."""

    shape: Shape
    mask: str = "dots"
    kind: str = "normal"
    sm_scale: float | None = None
    window: tuple[int, int] | None = None

    @property
    def shared(self) -> tuple[bool, bool]:
        """Whether all batch elements, and all heads, have one mask."""
        by_batch, by_head = (self.mask.endswith((f"by {word}", "by both")) for word in ("batch", "head"))
        return not by_batch, not (by_head or self.mask.startswith("random"))

    @property
    def label(self) -> str:
        kind = "" if self.kind == "normal" else f" {self.kind}"
        scale = "" if self.sm_scale is None else f" scale {self.sm_scale:g}"
        window = "" if self.window is None else f" window {self.window[0]},{self.window[1]}"
        return f"{self.shape.label}{kind}{scale}{window} {self.mask}"

    def block_mask(self, device: str) -> BlockMask:
        s = self.shape
        B, H = (None if shared else n for shared, n in zip(self.shared, (s.batch, s.heads), strict=True))
        if self.mask.startswith("random"):
            size = int(self.mask.split()[1])
            rng = torch.Generator().manual_seed(0)
            blocks = torch.rand(B or 1, H or 1, -(-s.seqlen // size), -(-s.keys // size), generator=rng) < 0.4
            return BlockMask.from_blocks(blocks.to(device), s.seqlen, s.keys, block_size=size)
        return BlockMask.from_function(FUNCTIONS[self.mask], s.seqlen, s.keys, B=B, H=H, device=device)

    def dense(self, device: str) -> torch.Tensor:
        """Bool (B, H, S_q, S_k), found without `BlockMask` but for random blocks; what the window hides is
        hidden."""
        s = self.shape
        if self.mask.startswith("random"):
            seen = self.block_mask(device).to_dense()
        else:
            b, h, q, k = (torch.arange(n, device=device) for n in (s.batch, s.heads, s.seqlen, s.keys))
            at = b[:, None, None, None], h[:, None, None], q[:, None], k
            seen = FUNCTIONS[self.mask](*at).expand(s.batch, s.heads, s.seqlen, s.keys)
        return seen & visible(s.seqlen, s.keys, mask_window(s.causal, self.window), device)


def check_forward(case: SparseCase, device: str, impl: str | None = "triton") -> None:
    """AssertionError unless output and LSE are within the error budget, 0 and -inf where nothing is seen."""
    q, k, v = make_inputs(case.shape, case.kind, device=device)
    options = {"causal": case.shape.causal, "window": case.window, "sm_scale": case.sm_scale, "impl": impl}
    out, lse = attention(q, k, v, block_mask=case.block_mask(device), return_lse=True, **options)
    oracle = Oracle(q, k, v, sm_scale=case.sm_scale, mask=case.dense(device))
    judge_forward(out, lse, oracle, case.label)


def check_backward(case: SparseCase, device: str, impl: str | None = "triton", slack: float = 1) -> None:
    """AssertionError unless all gradients are within the error budget times `slack`."""
    q, k, v = (x.requires_grad_() for x in make_inputs(case.shape, case.kind, device=device))
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    options = {"causal": case.shape.causal, "window": case.window, "sm_scale": case.sm_scale, "impl": impl}
    out = attention(q, k, v, block_mask=case.block_mask(device), **options)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    oracle = GradientOracle(
        d_out, *(x.detach() for x in (q, k, v)), sm_scale=case.sm_scale, mask=case.dense(device)
    )
    for verdict in oracle.judge(*gradients).values():
        raise_if_bad(verdict, slack, case.label)


def _cases() -> list[SparseCase]:
    cases = [SparseCase(Shape(1, 2, 150, 64, False, seqlen_k=200), mask) for mask in FUNCTIONS]
    cases += [SparseCase(Shape(1, 1, 200, 64, False, seqlen_k=150), mask) for mask in ("corner", "documents")]
    for mask in ("band by head", "band by batch", "band by both"):
        cases.append(SparseCase(Shape(2, 4, 130, 64, False, heads_kv=2, seqlen_k=170), mask))
    for size in (64, 128):
        cases.append(SparseCase(Shape(1, 2, 300, 64, False, seqlen_k=290), f"random {size}"))
        cases.append(SparseCase(Shape(1, 2, 256, 64, False, heads_kv=1), f"random {size}"))
    for head_dim, dtype in (
        (40, "float16"), (128, "float16"), (256, "float16"), (128, "bfloat16"), (40, "float32"),
        (256, "float32"),
    ):  # fmt: skip
        cases.append(SparseCase(Shape(1, 2, 70, head_dim, False, dtype, heads_kv=1, seqlen_k=140)))
    for scale in (0.0, -0.1, 2.0):
        cases.append(SparseCase(Shape(1, 1, 90, 64, False, seqlen_k=70), sm_scale=scale))
    for kind in ("large", "outlier", "sink"):
        cases.append(SparseCase(Shape(1, 1, 140, 64, False), "documents", kind))
    cases.append(SparseCase(Shape(1, 1, 140, 64, True, seqlen_k=170)))
    cases.append(SparseCase(Shape(1, 1, 140, 64, False, seqlen_k=170), window=(30, 20)))
    cases.append(SparseCase(Shape(1, 1, 1, 64, False, seqlen_k=1), "all"))
    return cases


CASES: dict[str, SparseCase] = {case.label: case for case in _cases()}
"""Label -> case."""
assert len(CASES) == len(_cases()), "two cases have one label"
