"""What a color, a marker and a line style mean, the same in every figure of the book.

Blue is ours, light for the first steps and dark for the last of each part of the book; indigo where they are
written in Gluon. Every peer has a color of its own, where possible one of seaborn's palette for readers with
a color vision deficiency; a marker and a dash pattern say the same once more, for print in gray. Roofs and
other limits of the hardware are gray or black."""

import matplotlib
import matplotlib.colors
import seaborn as sns

from attnlib.bench.names import number
from attnlib.book.chapters import GLUON_FROM, STEPS, label

COLUMN = 3.25
"""Width in inches of a figure in one column of a two-column paper."""
WIDE = 5.5
"""Width in inches of a figure over the full text width."""

_BLIND = dict(
    zip(
        ("blue", "orange", "green", "vermilion", "purple", "brown", "pink", "gray", "yellow", "sky"),
        sns.color_palette("colorblind").as_hex(),
        strict=True,
    )
)
OURS = _BLIND["blue"]
COLORS: dict[str, str] = {
    "ours": OURS,
    "attnlib": OURS,
    "fa3": _BLIND["vermilion"],
    "cudnn": _BLIND["green"],
    "flash": _BLIND["orange"],
    "tutorial": _BLIND["purple"],
    "flex": "#5E3C99",  # the palette's other colors are too light for a line on white, or too near to these
    "math": "#6B4C1E",
    "roof": "#222222",
    "measured": "#777777",
    "muted": "#777777",
    "grid": "#DDDDDD",
    "faded": "#8FBEDC",
}
MARKERS: dict[str, str] = {
    "ours": "o",
    "attnlib": "o",
    "attnlib-triton": "o",
    "fa3": "^",
    "cudnn": "s",
    "flash": "D",
    "tutorial": "v",
    "flex": "P",
    "math": "X",
}
DASHES: dict[str, tuple | str] = {
    "ours": "-",
    "attnlib": "-",
    "fa3": (0, (6, 1.5)),
    "cudnn": (0, (4, 1.5, 1, 1.5)),
    "flash": (0, (3, 1.5)),
    "tutorial": (0, (5, 1.5, 1, 1.5, 1, 1.5)),
    "flex": (0, (2, 1)),
    "math": (0, (1, 1)),
}

_STEP_MARKERS = ["p", "*", "d", ">", "h", "<", "o", "8", "H", "1", "2", "3", "4"]  # none of a peer's
_INDIGOS = sns.blend_palette(["#8E94E0", "#23237E"], as_cmap=True)
_BLUES = sns.blend_palette(["#64A2CF", OURS, "#00395A"], as_cmap=True)

FONT = "DejaVu Sans"  # comes with matplotlib: the same glyphs on every machine
PRINT: dict[str, object] = {
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.titleweight": "bold",
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.5,
    "xtick.bottom": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.6,
    "patch.linewidth": 0.6,
    "patch.force_edgecolor": False,  # a bar ends at its value
    "figure.figsize": (COLUMN, 2.2),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,  # keeps the width exact, which savefig.bbox="tight" would not
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "attnlib",  # without it the ids in an SVG differ from run to run
}
"""What the size of a printed figure asks for beyond seaborn's theme, and what makes files reproducible."""


def style() -> None:
    """Set seaborn's theme for papers on a white grid, at the book's print size: 8 pt at final size, exact
    width, embedded fonts, reproducible files. Settings made before are lost."""
    matplotlib.rcdefaults()
    sns.set_theme(context="paper", style="whitegrid", palette="colorblind", font=FONT, rc=PRINT)


def label_of(impl: str) -> str:
    """The name of an implementation in a chart: see `chapters.label`."""
    return label(impl)


def color_of(impl: str) -> str:
    """The color of an implementation: the peer's own, or the blue of the step (the first of a part of the
    book light, its last one dark)."""
    if impl in COLORS:
        return COLORS[impl]
    step = number(impl)
    if step is None:
        return COLORS["muted"]
    gluon = step >= GLUON_FROM
    part = [number(name) for name, _ in STEPS if (number(name) >= GLUON_FROM) == gluon]
    share = min(1.0, sum(other < step for other in part) / (len(part) - 1))
    return matplotlib.colors.to_hex(_INDIGOS(share)) if gluon else shade(share)


def marker_of(impl: str) -> str:
    """The marker of an implementation; steps have one each, too."""
    if impl in MARKERS:
        return MARKERS[impl]
    steps = [name for name, _ in STEPS]
    return _STEP_MARKERS[steps.index(impl)] if impl in steps else "."


def dash_of(impl: str) -> tuple | str:
    """The line style of an implementation: solid for ours, one dash pattern for each peer."""
    return DASHES.get(impl, "-")


def shade(share: float) -> str:
    """A blue of ours: light at 0, dark at 1. For an order within our own results, such as the number of
    warps."""
    return matplotlib.colors.to_hex(_BLUES(min(1.0, max(0.0, share))))


def luminance(color: str) -> float:
    """Relative luminance of a color, 0 (black) to 1 (white), as WCAG 2 defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(color)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_of(color: str) -> str:
    """`color` for small text on white: darkened until its contrast is 6 to 1."""
    rgb = matplotlib.colors.to_rgb(color)
    for percent in range(100, 0, -2):
        dark = matplotlib.colors.to_hex([c * percent / 100 for c in rgb])
        if 1.05 / (luminance(dark) + 0.05) >= 6:
            return dark
    return "#000000"


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on `color`."""
    return "white" if luminance(color) < 0.18 else "black"
