"""How many heads a Hopper kernel lets advance together, so that what they read again stays in the L2."""

SMS = 132
WAVES = 2
"""Where a launch has few programs, a section of key heads has at least about this many for each SM."""
FEW = 8
"""A launch with at most this many programs for each SM has few: the idle time after its last section
counts."""
MANY = 300
"""With more for each SM the order by sections was faster; why is not known."""


def query_heads(heads: int, group: int, keys: int, width: int, l2_bytes: int) -> int:
    """Of a forward pass: a power of two times `group`, at most about `heads`.

    heads: B * H; group: query heads of one key head; keys: S_k; width: columns of a tile. K and V have two
    bytes for each element.
    """
    return _power_of_two(heads // group, 4 * keys * width, l2_bytes) * group


def key_heads(heads: int, blocks: int, rows: int, width: int, l2_bytes: int) -> int:
    """Of a backward pass, at most `heads`.

    heads: B * H_kv; blocks: programs of each; rows: S_q, of all query heads that count; width: columns of a
    tile. Q and dO have two bytes for each element, the sums of dQ four.

    A program is a block of keys, the longest ones first in each section. The longest ones of the last section
    begin when most others have ended, so where there are few programs in all the sections are of equal size,
    and so large that the short ones at a section's end fill the time.
    """
    if heads * blocks <= FEW * SMS:
        return -(-heads // max(heads * blocks // (WAVES * SMS), 1))
    return by_cache(heads, rows, width, l2_bytes)


def last_section(heads: int, blocks: int, section: int, waves: float) -> int:
    """The head that the last section of a backward pass begins with, a multiple of `section`.

    In each section the longest programs come first, and those of the last one begin when most others have
    ended. So it has at least about `waves` programs for each SM, whatever the cache holds: the short ones of
    more heads fill the end.
    """
    least = max(section, round(waves * SMS / blocks))
    return max(heads - least, 0) // section * section


def leading_programs(heads: int, blocks: int, long: int) -> int:
    """How many programs of each head come before the others of all heads, of a backward pass whose heads have
    so many long ones. In sections alone those of the last one would begin when most others have ended. 0
    where a launch has few programs, whose sections are made for that, or very many: with 248 for each SM S2
    took 0.91 to 0.94 of the time by it, with 496 1.08 (docs/lab/s2.md)."""
    return long if FEW * SMS < heads * blocks <= MANY * SMS else 0


def by_cache(heads: int, rows: int, width: int, l2_bytes: int) -> int:
    """The same by the size of the cache alone: a power of two."""
    return _power_of_two(heads, 8 * rows * width, l2_bytes)


def _power_of_two(heads: int, bytes_per_head: int, l2_bytes: int) -> int:
    chosen = 1
    while 2 * chosen <= heads and 2 * chosen * bytes_per_head <= l2_bytes:
        chosen *= 2
    return chosen
