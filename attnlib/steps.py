"""The steps of the ladder and the names of everything that is measured, in one place.

A key is what a record calls an implementation: a step (the name of its notebook, "03_online_softmax"), the
package itself ("attnlib"), or a peer ("cudnn"). Texts, tables and charts all take the reader's name for it
from here."""

import re

STEPS: list[tuple[str, str]] = [
    ("01_naive", "Naive attention"),
    ("02_tiling", "Tiling"),
    ("03_online_softmax", "Online softmax"),
    ("04_exp2", "exp2"),
    ("05_two_pass_causal", "Two-pass causal"),
    ("06_autotuning", "Autotuning"),
    ("07_production", "Production kernel"),
    ("08_tma_wgmma", "TMA and wgmma"),
    ("09_warp_specialization", "Warp specialization"),
    ("10_overlap", "Overlap"),
    ("11_scheduling", "Scheduling"),
]
"""(notebook name, title) of each step, in the order in which the book takes them. From GLUON_FROM on they are
written in Gluon, for Hopper."""

GLUON_FROM = 8

CHAPTERS: list[tuple[str, str]] = [
    ("00_how_we_measure", "How we measure"),
    *STEPS,
    ("12_record", "The record"),
    ("13_backward", "The backward pass"),
]
"""All chapters: the steps, and those that build no kernel of their own."""

PEERS: dict[str, str] = {
    "math": "PyTorch math",
    "flash": "FA2",
    "flex": "FlexAttention",
    "tutorial": "Triton tutorial",
    "cudnn": "cuDNN",
    "fa3": "FA3",
}
"""Key -> short name of each implementation that is not ours."""

_TITLES = dict(CHAPTERS)


def number(impl: str) -> int | None:
    """The step number in a key: 3 for "03_online_softmax", None for a peer. "attnlib", the package, comes
    after the last step."""
    if impl == "attnlib":
        return len(STEPS) + 1
    found = re.match(r"(\d\d)_", impl)
    return int(found.group(1)) if found else None


def label(impl: str) -> str:
    """The reader's name of an implementation: "03 Online softmax", "cuDNN", "attnlib"; an unknown key stays
    as it is."""
    if impl in PEERS:
        return PEERS[impl]
    if impl in _TITLES:
        return f"{impl[:2]} {_TITLES[impl]}"
    return re.sub(r"^(\d\d)_", r"\1 ", impl).replace("_", " ")


def is_ours(impl: str) -> bool:
    """True for the steps of the book and the package, False for peers."""
    return number(impl) is not None
