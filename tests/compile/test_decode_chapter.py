"""Chapter 23's kernels, and the solution of its exercise, compiled for sm_90: what the chapter says of them."""

from __future__ import annotations

import pytest

from attnlib.bench import inspect_sm90, sources
from attnlib.book import lesson

STEP = "23_decoding"
TENSORS = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*fp16:16")
PARTS = dict.fromkeys(("part_o", "part_m", "part_l"), "*fp32:16")
PLAN = dict.fromkeys(("cuts", "begins", "lengths"), "*i32:16")
SIZES = {"scale": "fp32", "PAIRS": "i32", "H_KV": "i32"}


def chapter_file() -> str:
    text = "\n\n".join(sources.cells_tagged(sources.notebook_of(STEP), "variant"))
    return sources.load_source("23_open_cells", text).__file__


@pytest.mark.parametrize("stamps", ["", "*i64:16"])
@pytest.mark.parametrize("D", [64, 128])
def test_decode(D: int, stamps: str) -> None:
    """As many programs fit on a multiprocessor as the chapter says, at D = 128; keys and values are copied
    asynchronously, ahead of their use; without stamps there is no clock."""
    types = TENSORS | PARTS | PLAN | ({"stamps": stamps} if stamps else {}) | {"S": "i32:16"} | SIZES
    fixed = {"GROUP": 4, "D": D, "BLOCK_N": 64, "N": 64} | ({} if stamps else {"stamps": None})
    (stats,) = inspect_sm90.compile_all([inspect_sm90.Job(chapter_file(), "decode", types, fixed)])
    assert stats.spills == 0 and stats.warnings == ()
    assert stats.ctas_per_sm == 3 if D == 128 else stats.ctas_per_sm > 3
    assert stats.loop.get("LDGSTS") == 2 * 64 * D * 2 // (128 * 16) and stats.loop.get("HMMA")
    clocks = [line for line in stats.listing if "GLOBALTIMER" in line]
    assert bool(clocks) == bool(stamps), clocks


@pytest.mark.parametrize("parts", [2, 64, 512])
def test_merge(parts: int) -> None:
    types = {"o_ptr": "*fp16:16", **PARTS, "cuts": "*i32:16", "begins": "*i32:16", "PROGRAMS": "i32"}
    columns = min(128, max(16, 8192 // parts))
    fixed = {"GROUP": 4, "D": 128, "SLICE": columns, "PARTS": parts, "N": 512}
    (stats,) = inspect_sm90.compile_all([inspect_sm90.Job(chapter_file(), "merge", types, fixed)])
    assert stats.spills == 0


def test_one_program_a_pair_and_pages() -> None:
    pair = inspect_sm90.Job(chapter_file(), "decode_pair", TENSORS | {"S": "i32:16", "scale": "fp32"},
                            {"GROUP": 4, "D": 128, "BLOCK_N": 64})  # fmt: skip
    types = TENSORS | dict.fromkeys(("table", "lengths"), "*i32:16")
    types |= {"pages_of": "i32", "scale": "fp32", "H_KV": "i32"}
    fixed = {"GROUP": 4, "D": 128, "PAGE": 16, "BLOCK_N": 64}
    pages = inspect_sm90.Job(lesson.solutions(STEP).__file__, "decode_pages_kernel", types, fixed)
    assert all(stats.spills == 0 for stats in inspect_sm90.compile_all([pair, pages]))
