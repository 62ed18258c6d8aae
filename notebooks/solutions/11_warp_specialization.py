"""Solutions of chapter 11."""


def place(i, stages):
    """(slot, parity of the full barrier, parity of the free barrier) for tile i of a ring."""
    slot, turn = i % stages, i // stages
    return slot, turn & 1, (turn & 1) ^ 1


def registers(consumers, producer):
    """(registers of a thread at the start, of a consumer's thread at work)."""
    threads = 128 * (consumers + 1)
    at_start = 65536 // threads // 8 * 8
    left = at_start * (consumers + 1) - producer
    return at_start, left // consumers // 8 * 8


def verdict(change):
    """What can happen in a ring with two slots after this change."""
    return {
        # V was ordered after K, but copies land in any order.
        "no V barrier": "wrong data",
        # The consumers wait for K and V by themselves; the order of the copies is nobody's concern.
        "V first": "fine",
        # The barrier completes while consumer 0 may still be reading.
        "one for both": "wrong data",
        # Nobody fills a slot after the last tile.
        "lazy consumer": "fine",
        # K stays a product longer than it must; the other slot is still there for the producer.
        "late release": "fine",
        # K 2 needs the slot of K 0, which is released with V 0, which is ordered after K 2.
        "K two ahead": "deadlock",
        # Tile 1 is the first in slot 1, and a fresh barrier lets a wait for parity 1 pass.
        "parity of the tile": "wrong data",
    }[change]
