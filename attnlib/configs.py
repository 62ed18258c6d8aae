"""Launch configurations of the kernels: frozen dataclasses, chosen by a pure function that needs no GPU."""

from dataclasses import dataclass, replace
from typing import Literal

Order = Literal["two loops", "one loop", "late"]


@dataclass(frozen=True)
class ForwardConfig:
    """How `kernels.forward.attention_forward` is compiled and launched.

    Attributes:
        block_m: query rows of one program.
        block_n: keys of one step of its loop; at most `block_m`.
        num_warps: warps of one program; four make a warpgroup.
        num_stages: key/value tiles in flight; more stages hide more latency and take more shared memory.
        order: in which a program visits its keys, and where the mask is; see the kernel's module. "late" has
            no form with a left edge.
        q_in_registers: keep Q in registers instead of shared memory.
        heads_per_section: heads whose row blocks are launched together, at most; it has to divide all heads.
        max_registers: bound on the registers of a thread that the compiler must keep, None for no bound.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    order: Order = "late"
    q_in_registers: bool = False
    heads_per_section: int = 1
    max_registers: int | None = None


def block_d(head_dim: int) -> int:
    """The tile width that holds `head_dim` columns: the next power of two, at least 16 (the smallest dot)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_width(head_dim: int) -> int:
    """The same where a tile has at least 64 columns, which is also what configurations are chosen by."""
    return max(64, block_d(head_dim))


# Found by measurement on an H200, causal fp16 at 16384 tokens (notebook 07 shows neighbors of each,
# docs/lab/plain-triton-forward.md what lost).
_HOPPER = {
    # 128 registers let four programs share an SM; a few more, and there are three.
    64: ForwardConfig(64, 64, 4, 2, order="late", heads_per_section=4, max_registers=128),
    128: ForwardConfig(64, 64, 4, 3, order="two loops", q_in_registers=True, heads_per_section=4),
    256: ForwardConfig(64, 32, 4, 3, order="late", q_in_registers=True, heads_per_section=2),
}
SHORT = 512
"""Keys that a query sees on average, half the sequence when causal, up to which `_HOPPER_SHORT` is faster: at
D = 128 and 256 the two change places between S = 1024 and 2048, causal."""
_HOPPER_SHORT = {
    64: _HOPPER[64],
    128: ForwardConfig(64, 64, 4, 3, order="one loop", heads_per_section=4),
    256: replace(_HOPPER[256], order="two loops"),
}
# Not measured: chosen so that Q, K and V fit 99 KB of shared memory, which every GPU since Ampere has.
_PORTABLE = {
    64: ForwardConfig(64, 64, num_warps=4, num_stages=2),
    128: ForwardConfig(64, 32, num_warps=4, num_stages=2),
    256: ForwardConfig(64, 16, num_warps=4, num_stages=2),
}
# float32 runs exact products on the CUDA cores. A thread reads whole rows of both operands, so registers
# bound the tiles: these compile without spills up to D = 128, and at D = 256 with the fewest that were found.
_FLOAT32 = {
    64: ForwardConfig(32, 16, num_warps=4, num_stages=1),
    128: ForwardConfig(16, 16, num_warps=8, num_stages=1),
    256: ForwardConfig(16, 16, num_warps=8, num_stages=1),
}


def forward_config(
    head_dim: int, dtype: str = "float16", arch: tuple[int, int] | None = (9, 0), keys: int = 1 << 30
) -> ForwardConfig:
    """The configuration for one call.

    Args:
        head_dim: D, 1 to 256.
        dtype: "float16", "bfloat16" or "float32".
        arch: CUDA compute capability, such as (9, 0) for H100 and H200; None for the interpreter.
        keys: that a query sees on average; many, unless given.

    Raises:
        ValueError: `head_dim` or `dtype` out of range.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected 1 to 256, got {head_dim}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype: expected 'float16', 'bfloat16' or 'float32', got {dtype!r}")
    width = tile_width(head_dim)
    if dtype == "float32":
        return _FLOAT32[width]
    if arch is None or arch[0] == 9:
        return (_HOPPER_SHORT if keys <= SHORT else _HOPPER)[width]
    return _PORTABLE[width]


def upwards(config: ForwardConfig) -> ForwardConfig:
    """The same in an order that can have a left edge."""
    return replace(config, order="two loops") if config.order == "late" else config


@dataclass(frozen=True)
class HopperConfig:
    """How `kernels.hopper.attention_forward_hopper` is compiled and launched.

    Attributes:
        block_n: keys of one step.
        warpgroups: consumer warpgroups, 2 to 4; each computes 64 query rows.
        stages: slots of the ring of key and value blocks in shared memory; a power of two.
        o_columns: columns of the buffer through which the output leaves: all, or half of them in two goes.
        q_columns: leading columns of Q that stay in registers; the others, some always, are read from shared
            memory.
        late_wait: wait for P V of the block before half way through the exponentials, not before them.
        pin: keep the assembler from moving that wait up.
        tree: row maximum of a thread as a tree, not as a chain.
        joint: one barrier for the keys and the values of a slot, instead of one each.
        named: consumers give a slot back through the hardware's named barriers, not an mbarrier.
        consumer_registers, producer_registers: of a thread, after the program has shared them out anew.
        max_registers: of a thread when the program starts.
        l2_bytes: keys and values of the heads that advance together should fit in here.
    """

    block_n: int
    warpgroups: int
    stages: int
    o_columns: int
    q_columns: int = 0
    late_wait: bool = False
    pin: bool = False
    tree: bool = False
    joint: bool = False
    named: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24
    max_registers: int = 168
    l2_bytes: int = 16 << 20

    def heads_per_section(self, heads: int, group: int, keys: int, width: int) -> int:
        """Query heads that advance together: a power of two times `group`, at most about `heads`.

        heads: B * H; group: query heads of one key head; keys: S_k; width: columns of a tile. Two bytes each.
        """
        kv_heads, bytes_per_head = 1, 4 * keys * width
        while 2 * kv_heads * group <= heads and 2 * kv_heads * bytes_per_head <= self.l2_bytes:
            kv_heads *= 2
        return kv_heads * group


# Found by measurement on an H200, causal and dense fp16 at 16384 tokens (docs/lab/hopper.md has the losers).
# At D = 64 there are three tiles: four warpgroups hide each other's waits and share the registers that two
# have elsewhere, three have registers for blocks of 128 keys, and two make the smallest tile.
# The first two have in common:
_MANY = {"pin": True, "tree": True, "joint": True, "producer_registers": 32}
TALL = HopperConfig(64, 4, 8, 64, consumer_registers=112, max_registers=96, **_MANY)
LONG = HopperConfig(128, 3, 4, 64, consumer_registers=160, max_registers=128, **_MANY)
FEW_ROWS = HopperConfig(128, 2, 2, 64, late_wait=True, pin=True, joint=True, named=True)
_WARP_SPECIALIZED = {
    64: TALL,
    128: HopperConfig(128, 2, 2, 128, q_columns=64, late_wait=True, pin=True, named=True, l2_bytes=32 << 20),
    256: HopperConfig(64, 2, 2, 128, q_columns=128, tree=True, named=True),
}
_FEW_KEYS = {128: replace(_WARP_SPECIALIZED[128], l2_bytes=8 << 20)}
FEW_KEYS = 2048
"""Keys up to which sections of 8 MB are faster at D = 128, by 12% with 512 keys, 8% with 1024, 2% with 2048;
with 8192 there is no difference, and with still smaller sections long tiles come last."""
_PACE = {TALL: (525, 60), LONG: (555, 170), FEW_ROWS: (474, 150)}
"""TFLOP/s with many long rows, and what the block on the diagonal costs beside that, in keys. Fitted to 46
measured shapes, of all of which `busiest` finds the fastest tile: the middle of the numbers that do."""


def busiest(config: HopperConfig, rows: int, keys: int, seen: float, heads: int, sms: int) -> float:
    """Time of the SM with most to do, at D = 64, to compare configurations; no unit.

    The arguments are those of `hopper_config`. Tiles that all see the same keys come in waves, the last of
    which may leave SMs idle. Under a diagonal, tiles of all lengths even that out, unless there are so few
    that all wait for the longest.
    """
    speed, diagonal = _PACE[config]
    block_m = 64 * config.warpgroups
    tiles = -(-rows // block_m) * heads
    if seen == keys:
        steps = -(-tiles // sms) * keys
    else:
        steps = max(tiles / sms * (seen + block_m / 2 + diagonal), keys + diagonal)
    return steps * block_m / speed


def hopper_config(
    head_dim: int,
    rows: int | None = None,
    heads: int = 1,
    sms: int = 132,
    keys: int | None = None,
    seen: float | None = None,
) -> HopperConfig:
    """The configuration of the Hopper kernel for one call.

    Args:
        head_dim: D, 1 to 256.
        rows: query rows S_q of a head; None: more than enough for every SM.
        heads: B * H, over all batches.
        sms: streaming multiprocessors of the GPU.
        keys: S_k; None for windows, which TALL computes fastest unless they are thousands of keys wide.
        seen: keys that a row sees on average; None: all.

    Raises:
        ValueError: `head_dim` out of range.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected 1 to 256, got {head_dim}")
    width = tile_width(head_dim)
    if head_dim > 64 and keys is not None and keys <= FEW_KEYS:
        return _FEW_KEYS.get(width, _WARP_SPECIALIZED[width])
    if head_dim > 64 or rows is None:
        return _WARP_SPECIALIZED[width]
    if keys is None:
        tiles = -(-rows // (64 * TALL.warpgroups)) * heads
        return FEW_ROWS if tiles <= sms or rows <= 64 * FEW_ROWS.warpgroups else TALL
    seen = keys if seen is None else seen
    return min(_PACE, key=lambda tile: busiest(tile, rows, keys, seen, heads, sms))
