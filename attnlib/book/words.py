"""Sentences that say one thing for each head dimension."""

from collections.abc import Mapping


def by_head_dim(texts: Mapping[int, str]) -> str:
    """ "L2 at every D" if the texts of all head dimensions are the same, else "L2 at D = 64 and 128, ALU at D
    = 256"."""
    dims: dict[str, list[int]] = {}
    for d, text in texts.items():
        dims.setdefault(text, []).append(d)
    if len(dims) == 1 and len(texts) > 1:
        return f"{next(iter(dims))} at every D"
    return ", ".join(f"{text} at D = {' and '.join(map(str, found))}" for text, found in dims.items())
