"""What the contests of chapters 34 to 36 begin with, and their solutions, compiled for sm_90 as they are
launched there."""

from __future__ import annotations

import pytest

from attnlib.bench import inspect_sm90, sources


def pointers(dtype: str, names: str) -> dict[str, str]:
    return dict.fromkeys((f"{name}_ptr" for name in names.split()), f"*{dtype}:16")


ENTMAX = pointers("bf16", "q k v o") | {"S": "i32:16", "scale": "fp32"}
ENTMAX_TILE = {"D": 64, "BLOCK_M": 64, "BLOCK_N": 64}
MONARCH = pointers("fp16", "q k") | {"N": "i32:16", "qk_scale": "fp32"}
ROUND = MONARCH | pointers("fp16", "v mean_k mean_v") | pointers("fp32", "entropy")
COLUMN = MONARCH | pointers("fp16", "mean_k mean_v out") | pointers("fp32", "entropy")
BLOCK = {"BLOCK": "i32:16"}
JOBS = {  # chapter, where: the notebook's kernel, its exercises or the solutions; kernel, types, constants
    "34": ("34_entmax", "kernel", "entmax_forward", ENTMAX | pointers("fp32", "tau"),
           ENTMAX_TILE | {"CAUSAL": True}, 3),
    "34, solved": ("34_entmax", "solutions", "causal_entmax", ENTMAX, ENTMAX_TILE, 4),
    "35, R": ("35_monarch", "kernel", "r_step", ROUND | BLOCK, {"D": 64, "TILE": 128}, 3),
    "35, L": ("35_monarch", "kernel", "l_step",
              MONARCH | pointers("fp16", "mean_k mean_v o") | pointers("fp32", "entropy") | BLOCK,
              {"D": 64, "TILE": 128}, 3),
    "35, centers": ("35_monarch", "exercise", "center_kernel",
                    MONARCH | pointers("fp16", "mean_k center") | pointers("fp32", "entropy") | BLOCK,
                    {"D": 64, "TILE": 128}, 3),
    "35, R, solved": ("35_monarch", "solutions", "whole_r_step", ROUND,
                      {"BLOCK": 128, "D": 64, "LAST": False}, 3),
    "35, last R, solved": ("35_monarch", "solutions", "whole_r_step", ROUND,
                           {"BLOCK": 128, "D": 64, "LAST": True}, 3),
    "35, centers, solved": ("35_monarch", "solutions", "whole_column", COLUMN | BLOCK,
                            {"D": 64, "BLOCKS": 128, "LAST": False}, 3),
    "35, L, solved": ("35_monarch", "solutions", "whole_column", COLUMN | BLOCK,
                      {"D": 64, "BLOCKS": 128, "LAST": True}, 3),
    "36, solved": ("36_distr", "solutions", "sums_in_place",
                   pointers("bf16", "q o") | pointers("i32", "places") | {"S": "i32:16"},
                   {"GROUP": 2, "D": 128, "ROWS": 128}, 3),
}  # fmt: skip


def file_of(chapter: str, where: str) -> str:
    """The file that Triton reads the kernel from."""
    notebook = sources.notebook_of(chapter)
    if where == "solutions":
        return str(notebook.parent / "solutions" / f"{chapter}.py")
    texts = [sources.kernel_source(notebook)]
    if where == "exercise":
        texts += [text for text in sources.cells_tagged(notebook, "exercise") if "@triton.jit" in text]
    return sources.load_source(f"contest_{chapter}", "\n\n".join(texts)).__file__


@pytest.fixture(scope="module")
def compiled() -> dict[str, inspect_sm90.Stats]:
    """All of them in one child process."""
    jobs = []
    for chapter, where, kernel, types, constants, stages in JOBS.values():
        jobs.append(inspect_sm90.Job(file_of(chapter, where), kernel, types, constants, 4, stages))
    return dict(zip(JOBS, inspect_sm90.compile_all(jobs), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_it_fits(compiled: dict[str, inspect_sm90.Stats], name: str) -> None:
    stats = compiled[name]
    assert stats.fits and stats.ctas_per_sm > 0 and stats.warnings == ()


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith("solved")])
def test_solutions_use_tensor_cores(compiled: dict[str, inspect_sm90.Stats], name: str) -> None:
    opcodes = compiled[name].opcodes
    assert opcodes.get("HGMMA") or opcodes.get("HMMA")
