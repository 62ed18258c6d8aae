"""Grouped heads, backward: how many of a group's query heads a program visits, and where programs that share
a key head leave dK and dV."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnlib.kernels.common import device, l2_sections
from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.l2_sections import SMS, Heads, Sections, finished
from attnlib.kernels.common.launch_postprocess import Sums, conversion
from attnlib.kernels.common.launcher import Launch
from attnlib.kernels.common.signature import Signature, mean_rows
from attnlib.kernels.hopper.configs_backward import BackwardKind, HopperBackwardConfig

# Constants of the model of a launch. docs/lab/hopper-backward.md says where the numbers are from.
FLOPS = 2450
"""FLOPs of products that an SM does in a clock."""
BEGIN, BEGIN_STAYS = 2, 1.2
"""What the beginning and the end of a tile take, in steps of 64 queries: of a program of its own, and of one
that stays on its SM."""
LEAVE_BYTES = 32
"""Bytes of sums that an SM adds to memory in a clock, at the end of a program that shares a key head."""
MEMORY_BYTES = 17.8
"""Bytes that memory moves in a clock, for each SM."""
LAUNCH = 5000
"""Clocks of the launches that convert sums to dK and dV."""
SPREAD = 0.02
"""Under a diagonal the programs of a launch drift apart along their lists of query heads. Where the heads
don't fit into L2 together, each further head makes a launch of programs of 128 keys longer by this share, and
one of 64 keys by twice that: those read as much for half the products. It does not apply where whole groups
are visited at one time, or one head with more than half of the SMs."""
L2 = 50 << 20
GAIN = 1.15
"""Programs share a key head where the model predicts at least this gain. Where it was measured, the model had
predicted up to 1.14 times too much."""


class Launched(NamedTuple):
    """What the model knows of a call with sequences in batches. heads: B * H_kv; values: columns of a tile of
    values; left, right: of the window."""

    config: HopperBackwardConfig
    heads: int
    group: int
    rows: int
    keys: int
    width: int
    values: int
    left: int | None
    right: int | None

    @classmethod
    def of(cls, call: Signature) -> Launched:
        B, H, H_kv, S_q, S_k = call.dimensions()
        widths = call.config.widths(call.head_dim, call.value_dim)
        return cls(call.config, B * H_kv, H // H_kv, S_q, S_k, *widths, *call.window.clipped(S_q, S_k))

    def key_heads(self, visited: int) -> Heads:
        """Those of programs that visit so many of the group's query heads, with their work in steps of 64
        queries."""
        config, share = self.config, self.group // visited
        begin = BEGIN_STAYS if config.persistent else BEGIN
        leave = self._sums / LEAVE_BYTES / self._step if share > 1 else 0
        work = tuple(visited * self._steps(block) + begin + leave for block in range(self._blocks))
        rows = self.rows
        if self.left is not None and self.right is not None:
            rows = min(rows, self.left + self.right + config.block_n)
        counted = visited if config.whole_groups else 1
        nbytes = row_bytes(self.width, self.values) * rows * counted
        return Heads(self.heads * share, work, nbytes, visited // counted)

    def clocks(self, visited: int) -> float:
        """From the first program to the last gradient, where a program visits so many of the group's query
        heads: programs start in their order on whichever SM is free."""
        heads, share = self.key_heads(visited), self.group // visited
        sections = self.config.sections(heads)
        together = min(heads.number, max(sections.size, -(-SMS // self._blocks)))
        masked = self.right is not None
        spread = 1 + self._spread(together * visited) * (visited - 1) if masked else 1
        total = finished(heads, sections) * self._step * spread
        if share > 1:  # set to 0, added to, read
            total += 2 * self._sums * self._blocks * self.heads / (MEMORY_BYTES * SMS) + LAUNCH
        return total

    @property
    def _blocks(self) -> int:
        return -(-self.keys // self.config.block_n)

    @property
    def _step(self) -> float:
        """Clocks of 64 queries."""
        return 10 * 64 * self.config.block_n * (self.width + self.values) / 2 / FLOPS

    @property
    def _sums(self) -> int:
        """Bytes of a block of keys."""
        return 4 * self.config.block_n * (self.width + self.values)

    def _steps(self, block: int) -> int:
        """Blocks of 64 queries that see a block of keys."""
        first, end = 0, -(-self.rows // 64)
        place = block * self.config.block_n + self.rows - self.keys  # of the first key, among the queries
        if self.right is not None:
            first = max(place - self.right, 0) // 64
        if self.left is not None:
            end = min(end, -(-max(place + self.config.block_n + self.left, 0) // 64))
        return max(end - first, 0)

    def _spread(self, heads: int) -> float:
        """The share of time that each further head costs, with `heads` visited at one time."""
        if self.width < 96 or 8 * self.rows * self.width * heads <= L2:  # short rows wait for exponentials
            return 0.0
        if self.config.whole_groups or 2 * self.keys >= SMS * self.config.block_n:
            return 0.0
        return SPREAD * 128 / self.config.block_n


def row_bytes(width: int, values: int) -> int:
    """Of Q, the sums of dQ and dO, all of which a program reads or adds to for a query. Values with fewer
    columns than queries count as many."""
    return max(8 * width, 6 * width + 2 * values)


def key_blocks(call: Signature) -> int:
    """Of a key head. Of varlen sequences together: sequence b begins with block
    cu_seqlens_k[b] // block_n + b, whatever the lengths are."""
    B, *_, S_k = call.dimensions()
    block_n = call.config.block_n
    return call.k[0] // block_n + B if call.varlen else -(-S_k // block_n)


def sections(call: Signature, visited: int) -> Sections:
    """The key heads of a call that advance together, where a program visits so many query heads. Varlen
    sequences count as the longest; up to 128 columns and without a mask as their mean, or half of the longest
    one, which has most of the work where it is many times the mean."""
    if not call.varlen:
        return call.config.sections(Launched.of(call).key_heads(visited))
    config, (_, H, _, S_q, S_k) = call.config, call.dimensions()
    heads, rows, width = H // visited, S_q, row_bytes(*config.widths(call.head_dim, call.value_dim)) // 8
    dense = call.window.clipped(S_q, S_k) == (None, None)
    if dense and config.block_n == 128 and not config.deterministic:
        rows = max(call.mean_lengths()[0], S_q // 2)
    if config.whole_groups and visited > 1:
        return Sections(l2_sections.by_cache(heads, rows * visited, width, config.l2_bytes))
    return Sections(l2_sections.key_heads(heads, key_blocks(call), rows, width, config.l2_bytes))


def chosen(call: Launched) -> int:
    """Query heads of a group that one program visits: all, or fewer where the model says that it pays."""
    clocks = {visited: call.clocks(visited) for visited in divisors(call.group)}
    best = min(clocks, key=clocks.__getitem__)
    return best if clocks[call.group] >= GAIN * clocks[best] else call.group


def divisors(group: int) -> list[int]:
    """The group itself is the last one."""
    return [n for n in range(1, group + 1) if group % n == 0]


def part_of(group: int, parts: int) -> int:
    """The largest divisor of the group that goes into it `parts` times or more."""
    return max(n for n in divisors(group) if parts * n <= group)


TIE = 1.02
"""Two query heads are taken rather than one where the model says less than this between them: timed they were
as fast or faster."""
WHOLE_ROWS = 4096
"""With fewer rows a program of 64 keys visits a whole group of four, which leaves no sums, if the model says
so: timed at 512, 1024 and 2048 rows it was 1.17, 1.09 and 1.02 times as fast, and at 16384 0.96."""
ROWS_IN_ORDER = 512
"""With fewer rows that see a key, programs whose sums have an order visit whole groups. With 512, at D = 128,
one head and whole groups took the same time while the launch before still set the sums to 0 that programs
store; without that one head should be faster, which was not timed."""
ROWS_OF_SEQUENCES = 256
"""With fewer rows that see a key, on average, programs of varlen sequences visit whole groups; not timed."""
LONG_ROWS_OF_SEQUENCES = 1024
"""From so many rows on they visit one of eight. With 2048 that was 1.03 times as fast as two, with 512 it was
0.96 to 0.97 times as fast."""
SHORT_ROWS, SHORT_ROWS_SLOW = 384, 768
"""With fewer rows that see a key a program of 96 keys visits one query head. On an H200 two were the faster
ones with 512 rows and one with 256; on an H100, whose memory is slower, two with 1024 and one with 564."""


def staying(
    config: HopperBackwardConfig, width: int, group: int, rows: float, kind: BackwardKind
) -> HopperBackwardConfig | None:
    """What grouped heads get whose programs stay on their SM; None where programs of one tile are as fast.
    Measured on an H100, docs/lab/hopper-backward.md.

    Args:
        config: of programs that stay.
        width: columns of a tile.
        group: query heads of a key head.
        rows: queries of a head that see a key, on average.
        kind: of a batch.
    """
    if rows < (256 if width == 128 and group >= 4 else 512):
        return None
    if width == 128:
        visited = 1 if group >= 4 else group
    elif group < 8 or not kind.masked or (width == 64 and kind.left_bound):
        visited = group
    else:
        visited = part_of(group, 4)
    return replace(config, visited=visited)


def of_sequences(
    config: HopperBackwardConfig, group: int, rows: float, kind: BackwardKind
) -> HopperBackwardConfig:
    """What grouped heads of varlen sequences get under a diagonal: programs that visit two of eight query
    heads, or one from `LONG_ROWS_OF_SEQUENCES` on, and with 64 keys a program two of four. Measured on an
    H200 with two key heads or four, whose launches have few programs: up to 128 columns, where programs stay,
    whole groups of eight take 1.07 to 1.33 times as long; at 256 columns two are 1.01 to 1.03 times as fast.
    Of four heads a program visits all up to 128 columns: with one or two it was 0.96 to 1.01 times as fast.
    With 96 keys a program `query_heads` decides.

    Args: as of `staying`, without `width`.
    """
    least, parts = (4, 2) if config.block_n == 64 else (8, 4)
    if config.block_n == 128 and rows >= LONG_ROWS_OF_SEQUENCES:
        parts = 8
    if not kind.masked or kind.left_bound or config.block_n == 96:
        return config
    if group < least or rows < ROWS_OF_SEQUENCES:
        return config
    return replace(config, visited=part_of(group, parts))


def in_order(
    config: HopperBackwardConfig, width: int, group: int, rows: float, kind: BackwardKind
) -> HopperBackwardConfig:
    """What grouped heads get where sums have an order. Under a diagonal the shortest programs come first. The
    longest ones, of whole groups, would end the launch: calls took 1.3 to 1.7 times as long as without an
    order. Programs that visit one query head leave sums of dK and dV of their own, which are added up
    afterwards. So calls take 1.1 to 1.4 times as long (docs/lab/hopper-backward.md), and more memory, about
    twice that of the sums of dQ. Of varlen sequences they do so beyond 128 columns, and in groups of eight
    with 128; in the others whole groups were as fast or faster.

    Args: as of `staying`.
    """
    if not kind.masked or kind.left_bound:
        return config
    if kind.varlen and config.block_n == 128 and (width < 128 or group < 8):
        return config
    if rows < (ROWS_OF_SEQUENCES if kind.varlen else ROWS_IN_ORDER):
        return config
    return replace(config, visited=1, added=False)


def query_heads(call: Signature) -> int:
    """How many query heads of a group one program visits. It visits all of deterministic calls that
    `in_order` leaves alone, of varlen sequences that `of_sequences` leaves alone, whose programs the model
    does not know, and up to 128 columns of windows with a left bound. Beyond 128 columns it visits at most
    one or two of a group of four and more under a diagonal, but for `WHOLE_ROWS`: so it was faster than the
    model knows in all lengths, with 96 keys in varlen sequences, too (docs/lab/hopper-backward.md).

    Raises:
        ValueError: the configuration says a number that does not divide the group.
    """
    B, H, H_kv, S_q, S_k = call.dimensions()
    group, config = H // H_kv, call.config
    if config.visited is not None:
        if config.visited < 1 or group % config.visited:
            raise ValueError(
                f"visited: expected a divisor of the group of {group} query heads, got {config.visited}"
            )
        return config.visited
    left, right = call.window.clipped(S_q, S_k)
    keys96 = config.block_n == 96
    bounded = left is not None and (call.varlen or config.block_n == 128)
    if group == 1 or bounded or config.deterministic or (call.varlen and not keys96):
        return group
    launched = Launched.of(call)
    visited = group if call.varlen else chosen(launched)
    if left is not None or right is None or group < 4 or config.block_n == 128:
        return visited
    if config.block_n == 64 and group == visited == 4 and S_q < WHOLE_ROWS:
        return group
    slow = device.bandwidth(call.device) < device.SLOW_MEMORY
    fewest = SHORT_ROWS_SLOW if slow else SHORT_ROWS
    short = keys96 and mean_rows(*call.mean_lengths(), call.window) < fewest
    most = 1 if short else 2 - group % 2
    if visited < most and launched.clocks(most) < TIE * launched.clocks(visited):
        return most
    return min(visited, most)


class SharedKeys(NamedTuple):
    """`share` programs for each block of keys of a key head, and the float32 sums that they leave in the
    buffer: for 64 keys those of dK, then those of dV. heads: B * H_kv, varlen H_kv; padded: keys of one, with
    those that fill blocks up."""

    call: Signature
    share: int
    heads: int
    padded: int

    @property
    def _parts(self) -> int:
        """Sums for each head."""
        return 1 if self.call.config.added else self.share

    @property
    def _widths(self) -> tuple[int, int]:
        return self.call.config.sums_widths(self.call.widest)

    @property
    def elements(self) -> int:
        return self.heads * self._parts * self.padded * sum(self._widths)

    def conversions(self, start: int, dk: Window, dv: Window) -> list[Launch]:
        """What makes dK and dV of the sums, which begin at element `start`."""
        config, (width, values) = self.call.config, self._widths
        keys = config.block_n if config.block_n % 64 else 0  # of transposed gradients

        def sums(name: str, start: int, width: int, others: int, scale: float) -> Sums:
            more = width, scale, self._parts, others, keys
            return Sums(name, start, self.heads, self.padded, config.block_n, *more)

        return [
            conversion(self.call, dk, sums("dk", start, width, values, self.call.sm_scale)),
            conversion(self.call, dv, sums("dv", start + (keys or 64) * width, values, width, 1.0)),
        ]
