"""Chapter 23's kernels, and the solution of its exercise, compiled for sm_90: what the chapter says of
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlib.bench import inspect_sm90, sources

STEP, D, KEYS = "23_decoding", 128, 64
TENSORS = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*fp16:16")
PARTS = dict.fromkeys(("part_o", "part_m", "part_l"), "*fp32:16")
PLAN = dict.fromkeys(("cuts", "begins", "lengths"), "*i32:16")
SIZES = {"S": "i32:16", "scale": "fp32", "PAIRS": "i32", "H_KV": "i32"}
FIXED = {"GROUP": 4, "D": D, "BLOCK_N": KEYS}
DECODE = TENSORS | PARTS | PLAN | SIZES


@pytest.fixture(scope="module")
def compiled() -> dict[str, inspect_sm90.Stats]:
    """All of them in one child process."""
    text = "\n\n".join(sources.cells_tagged(sources.notebook_of(STEP), "variant"))
    file = sources.load_source("23_open_cells", text).__file__
    solutions = str(Path(sources.notebook_of(STEP)).parent / "solutions" / f"{STEP}.py")
    merge = {"o_ptr": "*fp16:16", **PARTS, "cuts": "*i32:16", "begins": "*i32:16", "PROGRAMS": "i32"}
    pages = TENSORS | dict.fromkeys(("table", "lengths"), "*i32:16")
    pages |= {"pages_of": "i32", "scale": "fp32", "H_KV": "i32"}
    jobs = {
        "decode": (file, "decode", DECODE, FIXED | {"N": 64, "stamps": None}),
        "stamped": (file, "decode", DECODE | {"stamps": "*i64:16"}, FIXED | {"N": 64}),
        "merge": (file, "merge", merge, {"GROUP": 4, "D": D, "SLICE": 16, "PARTS": 512, "N": 512}),
        "pair": (file, "decode_pair", TENSORS | {"S": "i32:16", "scale": "fp32"}, FIXED),
        "pages": (solutions, "decode_pages_kernel", pages, FIXED | {"PAGE": 16}),
    }
    found = inspect_sm90.compile_all(inspect_sm90.Job(*job) for job in jobs.values())
    return dict(zip(jobs, found, strict=True))


def test_nothing_spills(compiled: dict[str, inspect_sm90.Stats]) -> None:
    assert all(stats.fits and stats.spills == 0 and stats.warnings == () for stats in compiled.values())


def test_three_programs_fit_and_copy_ahead(compiled: dict[str, inspect_sm90.Stats]) -> None:
    """As the chapter says; a copy moves 16 bytes for each of 128 threads."""
    stats = compiled["decode"]
    assert stats.ctas_per_sm == 3
    assert stats.loop.get("LDGSTS") == 2 * KEYS * D * 2 // (128 * 16) and stats.loop.get("HMMA")


def test_stamps_compile_to_nothing_where_there_are_none(compiled: dict[str, inspect_sm90.Stats]) -> None:
    clocks = {name: " ".join(stats.listing).count("GLOBALTIMER") for name, stats in compiled.items()}
    assert clocks.pop("stamped") == 2 and not any(clocks.values())
