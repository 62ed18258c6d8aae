"""How many heads a Hopper kernel lets advance together, so that what they read again stays in the L2."""


def query_heads(heads: int, group: int, keys: int, width: int, l2_bytes: int) -> int:
    """Of a forward pass: a power of two times `group`, at most about `heads`.

    heads: B * H; group: query heads of one key head; keys: S_k; width: columns of a tile. K and V have two
    bytes for each element.
    """
    return _power_of_two(heads // group, 4 * keys * width, l2_bytes) * group


def key_heads(heads: int, group: int, rows: int, width: int, l2_bytes: int) -> int:
    """Of a backward pass: a power of two, at most about `heads`.

    heads: B * H_kv; group: query heads of one of them; rows: S_q; width: columns of a tile. Q and dO have two
    bytes for each element, the sums of dQ four.
    """
    return _power_of_two(heads, 8 * rows * width * group, l2_bytes)


def _power_of_two(heads: int, bytes_per_head: int, l2_bytes: int) -> int:
    chosen = 1
    while 2 * chosen <= heads and 2 * chosen * bytes_per_head <= l2_bytes:
        chosen *= 2
    return chosen
