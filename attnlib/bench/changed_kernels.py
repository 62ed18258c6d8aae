"""Kernels that chapters make by changes, as modules, and what the compiler makes of them for sm_90."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.changes import changed
from attnlib.bench.sass import opcode
from attnlib.kernels import hopper


def load(step: str) -> dict[str, ModuleType]:
    """The kernels of a chapter as modules: before its changes, and after each of them."""
    texts = sources.kernel_sources(sources.notebook_of(step))
    return {name: sources.load_source(module_name(step, name), text) for name, text in texts.items()}


def beside(step: str, name: str, change: str) -> ModuleType:
    """A kernel that is not on the way: one of the chapter's with another change."""
    text = changed(sources.kernel_sources(sources.notebook_of(step))[name], change)
    return sources.load_source(f"{step}_beside_{name}", text)


def variants(step: str, base: str) -> dict[str, ModuleType]:
    """Kernels beside each other as modules: the last one of `base`, and the variants of it in `step`."""
    texts = sources.variant_sources(sources.notebook_of(step), base)
    return {name: sources.load_source(module_name(step, name), text) for name, text in texts.items()}


def with_functions(
    step: str, functions: Iterable, *constants: str, variant: int | None = None
) -> ModuleType:
    """A chapter's last kernel with these functions, and texts of constants, in the place of its own: an
    answer to an exercise. Of its variants, cells tagged "variant", that of this number, the first one 0."""
    notebook = sources.notebook_of(step)
    before = () if variant is None else (sources.cells_tagged(notebook, "variant")[variant],)
    answer = "\n\n\n".join(inspect.getsource(function.fn) for function in functions)
    text = sources.kernel_source(notebook)
    for change in (*before, answer, *constants):
        text = changed(text, change)
    return sources.load_source(f"{step}_answer", text)


def module_name(step: str, change: str) -> str:
    return change if change[:2].isdigit() else f"{step}_{change}"


def job(module: ModuleType, head_dim: int, causal: bool = True) -> inspect_sm90.Job:
    """A kernel as its launcher compiles it, fp16."""
    plan = module.plan_of.fn(head_dim, causal)
    if hasattr(module, "flash_backward"):
        return _backward_job(module, plan)
    keys, columns = plan.block_n.value, of_plan(plan, "o_columns", head_dim)
    tiles = {"q": (64, head_dim), "k": (keys, head_dim), "v": (keys, head_dim), "o": (64, columns)}
    types = {f"{name}_desc": inspect_sm90.gluon_descriptor([1, *tile]) for name, tile in tiles.items()}
    types |= {"counter_ptr": "*i32:16", "qk_scale": "fp32"}
    types |= dict.fromkeys(("S", "heads", "section", "tiles"), "i32")
    fixed = {"D": head_dim, "CAUSAL": causal}
    registers = of_plan(plan, "max_registers", 168)
    return inspect_sm90.Job(module.__file__, "flash_forward", types, fixed, 4, max_registers=registers)


def _backward_job(module: ModuleType, plan) -> inspect_sm90.Job:
    """A kernel of chapter 21."""
    d, block_m = plan.d.value, plan.block_m.value
    tiles = dict.fromkeys(("q", "do"), (1, block_m, d)) | dict.fromkeys(("k", "v", "dk", "dv"), (1, 64, d))
    types = {f"{name}_desc": inspect_sm90.gluon_descriptor(tile) for name, tile in tiles.items()}
    types["rows_desc"] = f"tensordesc<fp32[1, 1, {block_m}],{module.ROWS_LAYOUT!r}>"
    types |= {"dq_ptr": "*fp32:16", "qk_scale": "fp32", "sm_scale": "fp32"}
    types |= dict.fromkeys(("S", "heads", "section", "num_m", "num_n"), "i32")
    fixed, options = {"D": d, "CAUSAL": plan.causal.value}, module.OPTIONS
    return inspect_sm90.Job(module.__file__, "flash_backward", types, fixed, options["num_warps"],
                            max_registers=options.get("maxnreg"))  # fmt: skip


NUMBERS = "S_q, S_k, H, GROUP, HEADS, SECTION, num_m, tiles"
PACKAGE = """from triton.experimental import gluon
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
    """What the compiler makes of the package's kernel for a causal fp16 call with many rows, without kept
    shifts, which chapter 37 adds."""
    configs = {d: replace(hopper.configs.hopper_config(d), keep_shift=False) for d in head_dims}
    jobs = [package_job(d, config) for d, config in configs.items()]
    return dict(zip(configs, inspect_sm90.compile_all(jobs), strict=True))


def package_job(head_dim: int, config: hopper.configs.HopperConfig) -> inspect_sm90.Job:
    """The package's kernel in this configuration for a causal fp16 call with many rows."""
    d, c = head_dim, config
    mask = {"causal": True, "blocks": 1, "skip": c.block_n != 64 * c.warpgroups, "shifted": False}
    tiles = {"q": (64, d), "k": (c.block_n, d), "v": (c.block_n, d), "o": (64, c.o_columns)}
    types = {f"desc_{x}": inspect_sm90.gluon_descriptor((1, 1, *tile)) for x, tile in tiles.items()}
    types |= {"counter_ptr": "*i32:16", "qk_scale": "fp32"} | dict.fromkeys(NUMBERS.split(", "), "i32")
    text = PACKAGE.format(d=d, config=c, mask=mask | {"left": False}, numbers=NUMBERS)
    file = sources.load_source(f"package_d{d}", text).__file__
    return inspect_sm90.Job(file, "fixed", types, {"lse_ptr": None}, 4, max_registers=c.max_registers)


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
    return _code(stats, names, ("SHFL", "FMUL", "FMNMX"))


def backward_code(stats: Mapping[tuple[str, int], inspect_sm90.Stats], names: Sequence[str]) -> list[dict]:
    """The table of some backward kernels' loops, those of the first consumer."""
    rows = _code(stats, names, ("REDG",))
    return [row | {"CTAs": stats[row["kernel"], row["D"]].ctas_per_sm} for row in rows]


def _code(
    stats: Mapping[tuple[str, int], inspect_sm90.Stats], names: Sequence[str], opcodes: Sequence[str]
) -> list[dict]:
    """Of the first hot loop, with how many there are of some instructions; and what a kernel takes."""
    rows = []
    for (name, d), found in stats.items():
        if name in names:
            loop, listing = found.loops[0], found.loop_listings[0]
            rows.append({
                "D": d, "kernel": name, "order in the loop": found.order(0), "loop": sum(loop.values()),
                "BAR.SYNC": sum("BAR.SYNC" in text for text in listing),
                **{opcode: loop.get(opcode, 0) for opcode in opcodes},
                "registers": found.registers, "spills": found.spills,
                "shared memory (B)": found.shared_bytes,
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["D"])


def order_in_loop(
    stats: Mapping[tuple[str, int], inspect_sm90.Stats], names: Sequence[str]
) -> list[dict]:
    """The table of what stands where in some kernels' hot loops: the last exchange in a row and after how
    many instructions its result is used, the last exponential and how many conversions to 16 bits are
    behind it, the release of a slot, and the branch around the rescaling (None without one)."""
    rows = []
    for (name, d), found in stats.items():
        if name in names:
            listing = found.loop_listings[0]
            at = {kind: [i for i, text in enumerate(listing) if opcode(text) == kind]
                  for kind in ("SHFL", "MUFU.EX2", "F2FP", "VOTE", "BRA")}  # fmt: skip
            exchange, exponential = at["SHFL"][-1], at["MUFU.EX2"][-1]
            rows.append({
                "D": d, "kernel": name, "last exchange": exchange,
                "used after": _used_at(listing, exchange) - exchange, "last exponential": exponential,
                "conversions behind it": sum(i > exponential for i in at["F2FP"]),
                "release": next(i for i, text in enumerate(listing) if "BAR.ARV" in text),
                "branch": min((i for i in at["BRA"] if at["VOTE"] and i > at["VOTE"][0]), default=None),
                "loop": len(listing),
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["D"])


def _used_at(listing: Sequence[str], at: int) -> int:
    """The first instruction behind `at` that names the register which that one writes."""
    register = re.search(r"\bR\d+\b", listing[at])[0]
    return next(i for i, text in enumerate(listing) if i > at and re.search(rf"\b{register}\b", text))
