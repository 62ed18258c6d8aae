"""The shape of one attention call, the shapes of the benchmark task, and sweeps over the sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

DTYPES = {"float16": ("fp16", 2), "bfloat16": ("bf16", 2), "float32": ("fp32", 4)}
"""dtype name -> (short name, bytes per element)."""


@dataclass(frozen=True)
class Shape:
    """One attention call: q is (batch, heads, seqlen, head_dim), k is (batch, heads_kv, seqlen_k, head_dim),
    v the same with head_dim_v columns.

    `heads_kv`, `seqlen_k` and `head_dim_v` are None when they equal `heads`, `seqlen` and `head_dim`; equal
    values are stored as None too, so that two descriptions of the same call compare equal.
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool = True
    dtype: str = "float16"
    heads_kv: int | None = None
    seqlen_k: int | None = None
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        optional = "heads_kv", "seqlen_k", "head_dim_v"
        for name in ("batch", "heads", "seqlen", "head_dim", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal: expected a bool, got {self.causal!r} ({type(self.causal).__name__})")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads_kv: expected a divisor of heads={self.heads}, got {self.heads_kv}")
        if self.heads_kv == self.heads:
            object.__setattr__(self, "heads_kv", None)
        if self.seqlen_k == self.seqlen:
            object.__setattr__(self, "seqlen_k", None)
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", None)

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.heads if self.heads_kv is None else self.heads_kv

    @property
    def keys(self) -> int:
        """Length of k and v."""
        return self.seqlen if self.seqlen_k is None else self.seqlen_k

    @property
    def value_dim(self) -> int:
        """Columns of v and of the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][1]

    @property
    def torch_dtype(self) -> Any:
        """The torch.dtype of this name."""
        import torch  # here, so that shapes, FLOPs and bytes can be counted without torch

        return getattr(torch, self.dtype)

    @property
    def label(self) -> str:
        """Short text for tables and charts: "B4 H32 S4096 D64 causal fp16"; "H32/8", "S1x4096", "D192/128"
        where keys and values have heads, a length, values a head dimension of their own."""
        heads = f"H{self.heads}" if self.heads_kv is None else f"H{self.heads}/{self.heads_kv}"
        length = f"S{self.seqlen}" if self.seqlen_k is None else f"S{self.seqlen}x{self.seqlen_k}"
        columns = f"D{self.head_dim}" if self.head_dim_v is None else f"D{self.head_dim}/{self.head_dim_v}"
        mask = "causal" if self.causal else "dense"
        return f"B{self.batch} {heads} {length} {columns} {mask} {DTYPES[self.dtype][0]}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict that JSON can hold; fields that are None are left out."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        """The inverse of `to_dict`. A key that is no field is a ValueError."""
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"shape: unknown keys {unknown}; expected {[f.name for f in fields(cls)]}")
        return cls(**data)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Shape:
        """The shape of a row of a record, whose other keys are ignored."""
        return cls(**{f.name: row[f.name] for f in fields(cls) if f.name in row})


TASK: dict[str, Shape] = {
    "d64": Shape(4, 32, 4096, 64),
    "d128": Shape(2, 16, 8192, 128),
    "d256": Shape(1, 8, 16384, 256),
}
"""The benchmark task: causal fp16, 16384 tokens, hidden size 2048. All three have the same number of scores,
B*H*S^2 = 2^31 before masking, and the same bytes of q, k, v and out; the FLOPs double from one to the next
with D."""


def sweep(
    head_dim: int,
    seqlens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384),
    tokens: int = 16384,
    hidden: int = 2048,
    causal: bool = True,
    dtype: str = "float16",
) -> list[Shape]:
    """Shapes over the sequence length with the number of tokens and the hidden size held fixed.

    batch = tokens / S and heads = hidden / head_dim, so every shape reads and writes the same bytes and only
    the quadratic part grows. ValueError when `tokens` or `hidden` does not divide evenly.
    """
    if hidden % head_dim:
        raise ValueError(f"head_dim: expected a divisor of hidden={hidden}, got {head_dim}")
    shapes = []
    for seqlen in seqlens:
        if tokens % seqlen:
            raise ValueError(f"seqlens: expected divisors of tokens={tokens}, got {seqlen}")
        shapes.append(Shape(tokens // seqlen, hidden // head_dim, seqlen, head_dim, causal, dtype))
    return shapes
