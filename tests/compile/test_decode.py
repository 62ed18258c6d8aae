"""The decoding kernels compiled for sm_90: what calls of `attention_decode` would run on an H100 or H200."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from chosen import more, with_more
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels import decode
from attnlib.kernels.common import device
from attnlib.kernels.decode import configs, decode_kernels
from attnlib.params import DecodeParams, mask_window

GROUP, ROOM = 4, 4096
SPLITS = ("none", "fixed", "stream_k")
# Head dimension, dtype, rows of a group, cache, split.
HALF = list(product((64, 128, 256), ("float16",), (4,), ("paged",), ("stream_k",)))
HALF += [(96, "bfloat16", 4, "window", "stream_k")]  # padded to 128
HALF += [(256, "float16", 4, "ragged", "fixed"), (64, "float16", 64, "ragged", "none")]
WHOLE, LARGE, SMALL, OTHER = (
    (128, "float16", 4, cache, "stream_k") for cache in ("ragged", "paged 64", "paged", "paged 48")
)
HALF += [WHOLE, LARGE, OTHER]
# As many sequences as multiprocessors, which are left whole where they are nearly equal.
NEAR, NEAR_PAGED = ((128, "float16", 4, cache, "whole") for cache in ("ragged", "paged"))
HALF += [NEAR, NEAR_PAGED]
HALF = with_more(
    HALF,
    [
        *product((64, 128, 256), ("float16",), (4,), ("full", "ragged", "window"), ("stream_k",)),
        *product((64, 128, 256), ("float16",), (4,), ("ragged",), ("none", "fixed")),
        *product((64, 128, 256), ("float16",), (32, 64), ("ragged", "paged"), ("stream_k",)),
        *product((64, 256), ("float16",), (4,), ("ragged", "paged"), ("whole",)),
        (128, "float16", 64, "ragged", "whole"),
        (96, "float16", 4, "ragged", "stream_k"),
        *product((128,), ("bfloat16",), (4,), ("ragged", "paged"), ("stream_k",)),
        *product((64, 128, 256), ("float16",), (4,), ("paged 80", "paged 96"), ("stream_k",)),
    ],
)
# The same with caches in FP8: "scales" are of each page.
FP8 = [(128, "float16", 4, "ragged", "stream_k"), (256, "bfloat16", 4, "paged scales", "stream_k")]
FP8 += [(64, "bfloat16", 64, "paged scales", "stream_k"), (128, "bfloat16", 4, "paged 48 scales", "stream_k")]
FP8 += [(96, "bfloat16", 4, "ragged", "stream_k")]  # padded to 128
FP8 = with_more(
    FP8,
    [
        *product((64, 192, 256), ("float16",), (4,), ("ragged",), ("stream_k",)),
        *product((128,), ("float16",), (4,), ("full", "paged"), ("stream_k",)),
        (128, "float16", 4, "ragged", "none"),
        (256, "bfloat16", 32, "ragged", "stream_k"),
        (128, "bfloat16", 4, "paged scales", "stream_k"),
        *product((128, 256), ("bfloat16",), (64,), ("paged scales",), ("stream_k",)),
        *product((64, 256), ("bfloat16",), (4,), ("paged 80 scales",), ("stream_k",)),
    ],
)
FP8 = [(*case, "fp8") for case in FP8]
# No LSE, as most calls: other registers.
FP8 += [(64, "float16", 4, "paged", "stream_k", "fp8", "no LSE")]
FP8 += more(
    (d, "float16", 4, cache, "stream_k", "fp8", "no LSE") for d, cache in ((128, "ragged"), (256, "paged"))
)
# A head dimension that is no multiple of 16.
EIGHT = (72, "bfloat16", 4, "ragged", "stream_k", "fp8")
FULL = [(256, "float32", 4, "ragged", "stream_k")]
FULL += more((d, "float32", 4, "ragged", "stream_k") for d in (64, 128))


def jobs(
    head_dim: int, dtype: str, rows: int, cache: str, split: str, fp8: str = "", lse: str = ""
) -> list[Job]:
    """The kernels that a call would launch on an H200: attention, and the merge unless there is one split."""
    dtype = getattr(torch, dtype)
    batch = 66 if split == "whole" else 2  # 132 pairs
    q = torch.zeros(batch, 2 * GROUP, rows // GROUP, head_dim, dtype=dtype)
    paged = cache.startswith("paged")
    page = int(next(filter(str.isdigit, cache.split()), 16))
    shape = (8, 2, page, head_dim) if paged else (batch, 2, ROOM, head_dim)
    k = torch.empty(shape, dtype=torch.float8_e4m3fn if fp8 else dtype)
    table = torch.zeros(batch, ROOM // page, dtype=torch.int32) if paged else None
    scale = None
    if fp8:
        scale = torch.ones(()) if cache == "paged" else torch.ones(shape[:2])
    lengths = None if cache == "full" else torch.zeros(batch, dtype=torch.int32)
    window = mask_window(True, (512, 0) if cache == "window" else None)
    params = DecodeParams(window, 0.1, lengths, table, not lse, None if split == "whole" else split)
    params = params._replace(k_scale=scale, v_scale=scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "num_sms", lambda index: 132)
        patch.setattr(device, "capability", lambda index: (9, 0))
        patch.setattr(device, "overlaps", lambda index: True)
        return jobs_of(decode_kernels, lambda: decode.forward(q, k, k, params))


def name(case: tuple) -> str:
    return "-".join(str(part) for part in case)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[Stats]]:
    """All at once: the compiler's start-up costs more than a kernel."""
    found = {case: jobs(*case) for case in [*HALF, *FULL, *FP8, EIGHT]}
    stats = iter(inspect_sm90.compile_all([job for of_case in found.values() for job in of_case]))
    return {case: [next(stats) for _ in of_case] for case, of_case in found.items()}


@pytest.mark.parametrize("case", HALF, ids=name)
def test_half_precision(compiled: dict[tuple, list[Stats]], case: tuple) -> None:
    main, *merges = compiled[case]
    assert len(merges) == (case[4] != "none")
    copies = [text for text in main.listing if "LDGSTS" in text]
    assert copies and all(".128" in text for text in copies), "copies of less than 16 bytes"
    kept = [text for text in main.listing if "LDG." in text and ".128" in text]
    assert len(kept) <= 2 * main.num_warps, "keys or values through registers"
    assert main.opcodes.get("HMMA") or main.opcodes.get("HGMMA"), "no tensor cores"
    assert main.warnings == ()
    for stats in compiled[case]:
        assert stats.spills == 0
        assert stats.shared_bytes <= SMEM_LIMIT
    block_m = max(16, case[2])
    asked = configs.Work(case[2], case[0], "float16", 8, 8192, 132)
    expected = 1 if case[4] in ("none", "whole") else configs.residency(block_m, asked).programs
    assert main.ctas_per_sm >= expected, "fewer programs share an SM than are launched for it"


def test_pages_cost_few_instructions(compiled: dict[tuple, list[Stats]]) -> None:
    """For each tile: where it lies in one page hardly any, in several less than half as many as it has."""
    whole, large, small, other = (compiled[case][0].loop_size for case in (WHOLE, LARGE, SMALL, OTHER))
    assert large < 1.15 * whole and small < 1.5 * whole
    assert other <= 1.02 * small, "the size of a page need not be a power of two"


def test_what_is_left_whole_leaves_the_merge_room_and_is_read_as_fast(compiled) -> None:
    """In pages, too: a tile takes hardly more instructions than in one piece."""
    for case in (NEAR, NEAR_PAGED):
        main, merge = compiled[case]
        taken = 32 * main.num_warps * main.registers
        assert taken + 4 * 32 * merge.num_warps * merge.registers <= configs.REGISTERS
    assert compiled[NEAR_PAGED][0].loop_size < 1.1 * compiled[NEAR][0].loop_size


def test_a_program_reaches_its_first_keys_without_barriers(compiled: dict[tuple, list[Stats]]) -> None:
    """But for one, which the copies to shared memory have before them: each warp counts the tiles of few
    sequences by itself."""
    listing = compiled[WHOLE][0].listing
    first = next(i for i, text in enumerate(listing) if "LDGSTS" in text)
    assert sum("BAR.SYNC" in text for text in listing[:first]) <= 1


@pytest.mark.parametrize("case", FP8, ids=name)
def test_fp8_caches(compiled: dict[tuple, list[Stats]], case: tuple) -> None:
    head_dim, dtype, rows, cache, split, *_ = case
    main, *merges = compiled[case]
    paged_scales = "scales" in cache
    copies = [text for text in main.listing if "LDGSTS" in text]
    assert sum(".128" in text for text in copies) >= 8
    assert paged_scales or all(".128" in text for text in copies), "copies of less than 16 bytes"
    assert not [text for text in main.listing if "LDS.U8" in text], "operands are put together byte by byte"
    assert main.opcodes.get("HMMA") or main.opcodes.get("HGMMA"), "no tensor cores"
    assert main.opcodes["F2FP"] and not main.opcodes.get("F2F"), "FP8 is not turned into 16 bits in pairs"
    assert main.warnings == ()
    assert main.spills == 0 and not any(stats.spills for stats in merges)
    local = [text for loop in main.loop_listings for text in loop if text.startswith(("STL", "LDL"))]
    assert not local, "what is spilled is read in the loop"
    for stats in compiled[case]:
        assert stats.shared_bytes <= SMEM_LIMIT
    asked = configs.Work(rows, head_dim, dtype, 4, ROOM, 132, False, True, paged_scales)
    config = configs.decode_config(asked, split)
    expected = 1 if split == "none" else configs.residency(config.block_m, asked).programs
    assert main.ctas_per_sm >= expected, "fewer programs share an SM than are launched for it"


def test_fp8_in_rows_of_odd_multiples_of_8_bytes(compiled: dict[tuple, list[Stats]]) -> None:
    """They are copied by 8 bytes, and asynchronously, too."""
    main = compiled[EIGHT][0]
    assert sum("LDGSTS" in text and ".64" in text for text in main.listing) >= 16
    assert not main.loop.get("LDG") and main.spills == 0 and main.warnings == ()


@pytest.mark.parametrize("case", FULL, ids=name)
def test_float32(compiled: dict[tuple, list[Stats]], case: tuple) -> None:
    """Exact products: no tensor core has them in float32."""
    for stats in compiled[case]:
        assert not stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA"), "products rounded to TF32"
        assert stats.spills == 0
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0
