"""What a chapter shows of a kernel that it makes by changes: what each replaces, what the compiler makes of
it, and that it is right in the emulator."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.changes import changed, parts
from attnlib.bench.sass import opcode
from attnlib.bench.setting import warming
from attnlib.bench.shapes import Shape
from attnlib.book import lesson, palette
from attnlib.book.charts import new_figure
from attnlib.book.exercises import ORDERS, judge_gluon
from attnlib.kernels import hopper

SMALL = (Shape(1, 3, 300, 64), Shape(1, 2, 200, 64, causal=False))
"""Calls of several tiles for a program of the emulator, with rows that end inside of a block."""


def load(step: str) -> dict[str, ModuleType]:
    """The kernels of a chapter as modules: before its changes, and after each of them."""
    texts = sources.kernel_sources(sources.notebook_of(step))
    return {name: sources.load_source(module_name(step, name), text) for name, text in texts.items()}


def beside(step: str, name: str, change: str) -> ModuleType:
    """A kernel that is not on the way: one of the chapter's with another change."""
    text = changed(sources.kernel_sources(sources.notebook_of(step))[name], change)
    return sources.load_source(f"{step}_beside_{name}", text)


def with_functions(step: str, functions: Iterable, *constants: str) -> ModuleType:
    """A chapter's last kernel with these functions, and texts of constants, in the place of its own: an
    answer to an exercise."""
    text = sources.kernel_source(sources.notebook_of(step))
    for change in ("\n\n\n".join(inspect.getsource(function.fn) for function in functions), *constants):
        text = changed(text, change)
    return sources.load_source(f"{step}_answer", text)


def module_name(step: str, change: str) -> str:
    return change if change[:2].isdigit() else f"{step}_{change}"


def show(step: str, name: str) -> None:
    """The diff of what a change replaces, without what it adds, which its cell shows."""
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


def judge(module: ModuleType) -> None:
    """Run a kernel in the emulator, in several orders, and say so; AssertionError if it is wrong."""
    if warming():
        return
    for shape in SMALL:
        judge_gluon(module.attention, shape)
    orders = ", ".join(f"{order} {seed}" for order, seed in ORDERS)
    lesson.say(
        f"In the emulator, causal and dense, S = {' and '.join(str(shape.seqlen) for shape in SMALL)}, "
        f"D = 64, in the orders {orders}: right, no race, no deadlock."
    )


def job(module: ModuleType, head_dim: int, causal: bool = True) -> inspect_sm90.Job:
    """A kernel as its launcher compiles it, fp16."""
    plan = module.plan_of.fn(head_dim, causal)
    keys, columns = plan.block_n.value, of_plan(plan, "o_columns", head_dim)
    tiles = {"q": (64, head_dim), "k": (keys, head_dim), "v": (keys, head_dim), "o": (64, columns)}
    types = {f"{name}_desc": inspect_sm90.gluon_descriptor([1, *tile]) for name, tile in tiles.items()}
    types |= {"counter_ptr": "*i32:16", "qk_scale": "fp32"}
    types |= dict.fromkeys(("S", "heads", "section", "tiles"), "i32")
    fixed = {"D": head_dim, "CAUSAL": causal}
    registers = of_plan(plan, "max_registers", 168)
    return inspect_sm90.Job(module.__file__, "flash_forward", types, fixed, 4, max_registers=registers)


NUMBERS = "S_q, S_k, H, GROUP, HEADS, SECTION, num_m, tiles"
PACKAGE = """# {digest}
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from attnlib.kernels.hopper.configs import HopperConfig
from attnlib.kernels.hopper.forward_kernel import attention_forward_hopper
from attnlib.kernels.hopper.launch import make_plan
PLAN = gl.constexpr(make_plan({d}, {config}, {mask}, flip=False, store_lse=False, varlen=False))
@gluon.jit
def fixed(desc_q, desc_k, desc_v, desc_o, lse_ptr, counter_ptr, qk_scale, {numbers}):
    attention_forward_hopper(
        desc_q, desc_k, desc_v, desc_o, lse_ptr, counter_ptr, qk_scale, {numbers}, PLAN)
"""
"""A file in which a plan of the package's kernel is a constant: a plan can't be handed to another process."""


def package_stats(head_dims: Iterable[int]) -> dict[int, inspect_sm90.Stats]:
    """What the compiler makes of the package's kernel for a causal fp16 call with many rows."""
    kernels = Path(hopper.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(kernels.glob("*.py")))
    digest, jobs = hashlib.sha256(text.encode()).hexdigest(), {}
    for d in head_dims:
        c = hopper.configs.hopper_config(d)
        mask = {"causal": True, "blocks": 1, "skip": c.block_n != 64 * c.warpgroups, "shifted": False}
        tiles = {"q": (64, d), "k": (c.block_n, d), "v": (c.block_n, d), "o": (64, c.o_columns)}
        types = {f"desc_{x}": inspect_sm90.gluon_descriptor((1, 1, *tile)) for x, tile in tiles.items()}
        types |= {"counter_ptr": "*i32:16", "qk_scale": "fp32"} | dict.fromkeys(NUMBERS.split(", "), "i32")
        source = PACKAGE.format(
            digest=digest, d=d, config=c, mask=mask | {"left": False}, numbers=NUMBERS
        )
        file = sources.load_source(f"package_d{d}", source).__file__
        registers = c.max_registers
        jobs[d] = inspect_sm90.Job(file, "fixed", types, {"lse_ptr": None}, 4, max_registers=registers)
    return dict(zip(jobs, inspect_sm90.compile_all(jobs.values()), strict=True))


def of_plan(plan, field: str, default: int) -> int:
    """A constant of a plan, or what it is in kernels that have no such constant yet."""
    return getattr(plan, field).value if hasattr(plan, field) else default


def compiled(
    modules: Mapping[str, ModuleType], head_dims: Iterable[int], causal: bool = True
) -> dict[tuple[str, int], inspect_sm90.Stats]:
    """(name, head dimension) -> what the compiler makes of each kernel for sm_90."""
    cases = [(name, d) for d in head_dims for name in modules]
    jobs = [job(modules[name], d, causal) for name, d in cases]
    return dict(zip(cases, inspect_sm90.compile_all(jobs), strict=True))


def machine_code(stats: Mapping[tuple[str, int], inspect_sm90.Stats], names: Sequence[str]) -> list[dict]:
    """The table of some kernels' hot loops, a row for each head dimension and kernel."""
    rows = []
    for (name, d), found in stats.items():
        if name in names:
            loop, listing = found.loops[0], found.loop_listings[0]
            rows.append({
                "D": d, "kernel": name, "order in the loop": found.order(0), "loop": sum(loop.values()),
                "BAR.SYNC": sum("BAR.SYNC" in text for text in listing), "SHFL": loop.get("SHFL", 0),
                "FMUL": loop.get("FMUL", 0), "FMNMX": loop.get("FMNMX", 0), "registers": found.registers,
                "spills": found.spills, "shared memory (B)": found.shared_bytes,
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["D"])


STRIP = {
    "HGMMA": ("product", "#222222"), "wait": ("wait for products", palette.COLORS["fa3"]),
    "BAR": ("barrier", "#9A5B9A"), "FMNMX": ("maximum", palette.COLORS["cudnn"]),
    "SHFL": ("exchange in a row", "#6B4C1E"), "MUFU.EX2": ("exponential", palette.OURS),
    "FADD": ("sum", palette.COLORS["faded"]), "FMUL": ("rescaling", "#E8A33D"),
}  # fmt: skip
"""Kind of instruction in `strip` -> what it is, and its color."""


def strips(stats: Mapping[str, inspect_sm90.Stats], where: str) -> Figure:
    """Hot loops under each other, with what the colors mean above them."""
    figure, axes = new_figure(palette.WIDE, 0.55 + 0.5 * len(stats), len(stats) + 1, 1, sharex=True,
                              height_ratios=[0.55, *[1] * len(stats)])  # fmt: skip
    axes[0, 0].axis("off")
    for i, (text, color) in enumerate(STRIP.values()):
        axes[0, 0].text(0.25 * (i % 4), 0.75 - 0.75 * (i // 4), f"▮ {text}", color=color, fontsize=6.5,
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
