"""What a chapter shows of a kernel that it makes by changes: what each replaces, its hot loops as pictures,
and that it is right in the emulator. The kernels come from `bench.changed_kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.changed_kernels import (
    backward_code,
    beside,
    compiled,
    load,
    machine_code,
    order_in_loop,
    package_job,
    package_stats,
    variants,
    with_functions,
)
from attnlib.bench.changes import parts
from attnlib.bench.sass import opcode
from attnlib.bench.setting import warming
from attnlib.bench.shapes import Shape
from attnlib.book import palette
from attnlib.book.chapters import label
from attnlib.book.charts import new_figure
from attnlib.book.exercises import ORDERS, judge_gluon, judge_gradients

__all__ = [
    "backward_code",
    "beside",
    "between",
    "compiled",
    "judge",
    "load",
    "machine_code",
    "order_in_loop",
    "package_job",
    "package_stats",
    "show",
    "strips",
    "variants",
    "with_functions",
]

SMALL = (Shape(1, 3, 300, 64), Shape(1, 2, 200, 64, causal=False))
"""Calls of several tiles for a program of the emulator, with rows that end inside of a block."""
SMALL_BACKWARD = (Shape(1, 1, 300, 64), Shape(1, 1, 150, 128, causal=False))
"""The same of a backward pass."""
SMALL_WIDE = (Shape(1, 1, 300, 256), Shape(1, 1, 150, 256, causal=False))
"""The same of one for D = 256."""


def show(step: str, name: str) -> None:
    """The diff of what a change replaces, without what it adds, which its cell shows."""
    from attnlib.book import lesson  # switches the interpreter on

    texts = sources.kernel_sources(sources.notebook_of(step))
    before = dict(zip(list(texts)[1:], texts, strict=False))[name]
    old = {part.names: part.text for part in parts(texts[before]) if not part.is_import}
    new = {part.names: part.text for part in parts(texts[name]) if not part.is_import}
    both = [names for names in new if names in old and new[names] != old[names]]
    was, now = ("\n\n\n".join(text[names] for names in both) for text in (old, new))
    lesson.show_texts(was, now, f"{before}, what is replaced", name)
    gone = [", ".join(names) for names in old if names not in new]
    added = [", ".join(names) for names in new if names not in old]
    said = [f"{word}: {', '.join(f'`{x}`' for x in found)}" for word, found in
            (("new", added), ("gone", gone)) if found]  # fmt: skip
    if said:
        lesson.say("; ".join(said) + ".")


def between(step: str, base: str, old: str, new: str) -> None:
    """Show the diff of two kernels on the way from one step, `base`, to the next: either of them by its name,
    or a variant of `base` that the notebook of `step` has. A notebook may have variants and no kernel."""
    from attnlib.book import lesson  # switches the interpreter on

    notebook = sources.notebook_of(step)
    texts = sources.variant_sources(notebook, base)
    if sources.cells_tagged(notebook, "kernel"):
        texts |= {step: sources.kernel_source(notebook)}
    for name in (old, new):
        if name not in texts:
            raise ValueError(f"{step}: expected one of {', '.join(texts)}, got {name!r}")
    lesson.show_texts(texts[old], texts[new], *(label(name) for name in (old, new)))


def judge(module: ModuleType, shapes: Sequence[Shape] = ()) -> None:
    """Run a kernel in the emulator, in several orders, and say so; AssertionError if it is wrong. shapes: of
    the calls, by default of those at D = 64 and 128 that its pass has."""
    from attnlib.book import lesson

    if warming():
        return
    is_backward = hasattr(module, "gradients")
    shapes = shapes or (SMALL_BACKWARD if is_backward else SMALL)
    for shape in shapes:
        if is_backward:
            judge_gradients(module.gradients, shape)
        else:
            judge_gluon(module.attention, shape)
    orders = ", ".join(f"{order} {seed}" for order, seed in ORDERS)
    lengths = " and ".join(dict.fromkeys(str(shape.seqlen) for shape in shapes))
    widths = " and ".join(dict.fromkeys(str(shape.head_dim) for shape in shapes))
    lesson.say(
        f"In the emulator, causal and dense, S = {lengths}, D = {widths}, in the orders {orders}: right, no "
        "race, no deadlock."
    )


STRIP = {
    "HGMMA": ("product", "#222222"), "wait": ("wait for products", palette.COLORS["fa3"]),
    "BAR": ("barrier", "#9A5B9A"), "FMNMX": ("maximum", palette.COLORS["cudnn"]),
    "SHFL": ("exchange in a row", "#6B4C1E"), "MUFU.EX2": ("exponential", palette.OURS),
    "FADD": ("sum", palette.COLORS["faded"]), "F2FP": ("conversion of P", "#8A8A8A"),
    "FMUL": ("rescaling", "#E8A33D"),
}  # fmt: skip
"""Kind of instruction in `strip` -> what it is, and its color."""
COLUMNS = (0.0, 0.17, 0.42, 0.63, 0.79)
"""Where the names above the strips begin, which are of different length."""


def strips(stats: Mapping[str, inspect_sm90.Stats], where: str) -> Figure:
    """Hot loops under each other, with what the colors mean above them."""
    figure, axes = new_figure(palette.WIDE, 0.55 + 0.5 * len(stats), len(stats) + 1, 1, sharex=True,
                              height_ratios=[0.55, *[1] * len(stats)])  # fmt: skip
    axes[0, 0].axis("off")
    for i, (text, color) in enumerate(STRIP.values()):
        axes[0, 0].text(COLUMNS[i % 5], 0.75 - 0.75 * (i // 5), f"▮ {text}", color=color, fontsize=6.5,
                        transform=axes[0, 0].transAxes)  # fmt: skip
    for ax, (title, found) in zip(axes[1:, 0], stats.items(), strict=True):
        strip(ax, found)
        ax.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=7)
    axes[-1, 0].set(xlabel=f"instruction of the loop, in order ({where})",
                    xlim=(-2, 2 + max(len(found.loop_listings[0]) for found in stats.values())))  # fmt: skip
    return figure


def strip(ax: Axes, stats: inspect_sm90.Stats) -> None:
    """A hot loop from left to right, a line for each instruction, colored by what it does."""
    listing = stats.loop_listings[0]
    for i, text in enumerate(listing):
        kind = opcode(text)
        if kind == "WARPGROUP":
            kind = "wait" if "DEPBAR" in text else ""
        if kind in STRIP:
            tall = kind in ("HGMMA", "wait", "BAR")
            ax.plot([i, i], [0 if tall else 0.12, 1 if tall else 0.88], color=STRIP[kind][1],
                    lw=1.6 if tall else 0.7, solid_capstyle="butt", zorder=3 if tall else 2)  # fmt: skip
    ax.set(ylim=(0, 1), yticks=[])
    ax.grid(visible=False)
