"""The names of everything that is measured.

A key is what a record calls an implementation: a step of the book (the name of its notebook,
"03_online_softmax"), the package itself ("attnlib"), its portable kernel ("attnlib-triton") or a peer
("cudnn"). "08_production" is the kernel of that chapter's cell, and never what the package made of it. The
titles of the steps are the book's, in `attnlib.book.chapters`."""

import re

PEERS: dict[str, str] = {
    "math": "PyTorch math",
    "flash": "FA2",
    "flex": "FlexAttention",
    "tutorial": "Triton tutorial",
    "cudnn": "cuDNN",
    "fa3": "FA3",
}
"""Key -> short name of each implementation that is not ours."""


PORTABLE = "attnlib-triton"


def number(impl: str) -> int | None:
    """The step number in a key: 3 for "03_online_softmax", None for a peer. "attnlib", the package, comes
    after every step; its portable kernel is beside the step that it was made from."""
    if impl == "attnlib":
        return 100
    if impl == PORTABLE:
        return 8
    found = re.match(r"(\d\d)_", impl)
    return int(found.group(1)) if found else None


CONTROL = " (control)"
"""What the name of a control row adds to that of the implementation which it repeats."""


def label(impl: str) -> str:
    """The reader's name of an implementation: "cuDNN", "attnlib", "03 online softmax", "cuDNN (control)"; an
    unknown key stays as it is."""
    if impl.endswith(CONTROL):
        return label(impl.removesuffix(CONTROL)) + CONTROL
    return PEERS.get(impl) or re.sub(r"^(\d\d)_", r"\1 ", impl).replace("_", " ")


def is_ours(impl: str) -> bool:
    """True for the steps of the book and the package, False for peers."""
    return number(impl) is not None
