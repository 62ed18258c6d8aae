"""Configurations of the BSFA kernels: frozen dataclasses, chosen by pure functions."""

from dataclasses import dataclass

from attnlib.kernels.common import l2_sections


@dataclass(frozen=True)
class BsfaTile:
    """How the portable kernels are compiled and launched.

    Attributes:
        num_warps: warps of a program.
        num_stages: blocks of keys in flight. Values are loaded where they are needed, and waited for.
        heads_per_section: heads that advance together, at most.
    """

    num_warps: int = 4
    num_stages: int = 2
    heads_per_section: int = 4


# Not compared with others.
_TILES = {64: BsfaTile(num_stages=3), 128: BsfaTile()}


def bsfa_tile(head_dim: int) -> BsfaTile:
    """For a head dimension of 64 or 128."""
    return _TILES[head_dim]


@dataclass(frozen=True)
class HopperBsfaConfig:
    """How `hopper_kernel.attention_bsfa_forward_hopper` is compiled and launched.

    Attributes:
        stages: slots of the ring of blocks of keys in shared memory.
        q_columns: leading columns of Q that stay in registers.
        consumer_registers, producer_registers: of a thread, after the program has shared them out anew.
        max_registers: of a thread when the program starts.
        l2_bytes: keys and values of the heads that advance together should fit in here.
    """

    stages: int
    q_columns: int = 0
    consumer_registers: int = 240
    producer_registers: int = 24
    max_registers: int = 168
    l2_bytes: int = 32 << 20

    def heads_per_section(self, heads: int, group: int, keys: int, width: int) -> int:
        """Query heads that advance together, see `l2_sections.query_heads`."""
        return l2_sections.query_heads(heads, group, keys, width, self.l2_bytes)


# At D = 128 two slots and the buffers of values fill the shared memory. Columns of Q in registers spare the
# products of scores, of which there are more than of outputs, reads of shared memory. docs/lab/bsfa.md.
_HOPPER = {
    64: HopperBsfaConfig(4, 64),
    128: HopperBsfaConfig(2, 64),
}


def hopper_bsfa_config(head_dim: int) -> HopperBsfaConfig:
    """For a head dimension of 64 or 128."""
    return _HOPPER[head_dim]
