"""The production kernel compiled for sm_90: what every call of `attention` would run on an H100 or H200."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from chosen import more, with_more
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels import portable
from attnlib.kernels.portable import forward_kernel as kernels
from attnlib.kernels.portable.configs import ForwardConfig, forward_config
from attnlib.params import Params, Varlen, mask_window

# (Sq, Sk): a partial key tile at the end, and a diagonal that misses the corners of the tiles, compile to
# other code than whole tiles do.
LENGTHS = {"whole": (256, 256), "tail": (250, 250), "shifted": (100, 256), "shifted-tail": (100, 250)}
OTHER_LENGTHS = {"empty": (256, 128)}  # the first queries see no key
HALF = list(product((64, 128, 256), ("float16",), ("causal",), ("whole", "shifted"), ("",)))
HALF += [(256, "float16", "dense", "tail", "lse")]
HALF += [(96, "float16", "causal", "tail", "lse")]  # padded to 128
HALF = with_more(
    HALF,
    [
        *product((64, 128, 256), ("float16",), ("causal", "dense"), LENGTHS, ("lse",)),
        *product((64, 128, 256), ("bfloat16",), ("causal",), ("shifted-tail",), ("lse",)),
        (128, "float16", "dense", "whole", ""),
        (128, "bfloat16", "dense", "shifted-tail", "lse"),
    ],
)
FULL = with_more(
    [(256, "float32", "causal", "shifted", ""), (128, "float32", "dense", "tail", "lse")],
    [
        *product((64, 128, 256), ("float32",), ("causal",), ("shifted",), ("",)),
        *product((64, 128, 256), ("float32",), ("dense",), ("tail",), ("lse",)),
    ],
)
NEGATIVE = [(128, "float16", "causal", "whole", "", -0.1)]  # the scale: see FLIP
NEGATIVE += more((d, *NEGATIVE[0][1:]) for d in (64, 256))
EMPTY = [(64, "float16", "causal", "empty", "lse", 0.1)]
EMPTY += more((d, *EMPTY[0][1:]) for d in (128, 256))
# Few keys have configurations of their own.
FEW = with_more(
    [(128, "float16", "causal", "tail", "lse", 0.1, 512), (256, "float16", "dense", "whole", "", 0.1, 512)],
    (
        (d, dtype, mask, lengths, lse, sm_scale, 512)
        for d, dtype, mask in product((128, 256), ("float16", "bfloat16"), ("causal", "dense"))
        for lengths, lse, sm_scale in [("tail", "lse", 0.1), ("whole", "", 0.1), ("shifted", "lse", -0.1)]
        if dtype == "float16" or (d, lengths) == (128, "tail")
    ),
)
# (left, right) of a window and its sequences: varlen, or the lengths of one; few keys: one more of either.
WINDOWS = {
    "left": ((512, -1), "tail"), "window": ((512, 0), "shifted"), "wide window": ((512, 64), "shifted-tail"),
    "varlen": (None, "varlen"), "varlen window": ((512, 0), "varlen"),
}  # fmt: skip
WINDOWED = [(d, "float16", "causal", "varlen window", "lse") for d in (64, 256)]
WINDOWED += [(128, "bfloat16", "dense", "wide window", "lse")]
WINDOWED = with_more(
    WINDOWED,
    [
        (d, "float16", mask, window, lse)
        for d in (64, 128, 256)
        for mask, window, lse in [
            ("dense", "left", "lse"), ("causal", "window", "lse"), ("dense", "wide window", "lse"),
            ("causal", "varlen", "lse"), ("dense", "varlen", "lse"), ("causal", "varlen window", ""),
            ("causal", "varlen window", "lse"),
        ]
    ],
)  # fmt: skip
WINDOWED += more(
    (d, "float16", mask, window, "lse", -0.1, 512)
    for d in (64, 128, 256)
    for mask, window in (("causal", "window"), ("causal", "varlen"), ("dense", "varlen window"))
)
FULL_WINDOWED = with_more(
    [(64, "float32", "causal", "window", "lse")],
    ((d, "float32", "causal", w, "lse") for d, w in product((64, 128, 256), ("window", "varlen"))),
)
SPILLS_FLOAT32 = {64: 0, 128: 0, 256: 80}
"""4-byte words of a thread that may spill: at D = 256 no tile is small enough, and 72 do."""
SPILLS_VARLEN = 2
"""The same in half precision for varlen sequences, outside of the loops: where they begin is known late. All
other calls have none."""


def job(
    head_dim: int, dtype: str, mask: str, lengths: str, lse: str, sm_scale: float = 0.1, many: int = 1 << 20,
    config: ForwardConfig | None = None,
) -> Job:  # fmt: skip
    """The kernel that a call of `attention` would launch on a Hopper GPU: with these lengths, but in the
    configuration for `many` keys."""
    window, lengths = WINDOWS.get(lengths, (None, lengths))
    dtype, varlen = getattr(torch, dtype), None
    if lengths == "varlen":
        q, k = torch.zeros(300, 2, head_dim, dtype=dtype), torch.zeros(400, 1, head_dim, dtype=dtype)
        varlen = Varlen(*torch.zeros(2, 5, dtype=torch.int32), many, many)
    else:
        queries, keys = (LENGTHS | OTHER_LENGTHS)[lengths]
        q = torch.zeros(1, 2, queries, head_dim, dtype=dtype)
        k = torch.zeros(1, 1, keys, head_dim, dtype=dtype)
    config = config or forward_config(head_dim, str(dtype).removeprefix("torch."), (9, 0), many)
    seen = mask_window(mask == "causal", window)
    params = Params(seen, sm_scale, varlen, return_lse=lse == "lse", config=config)
    [found] = jobs_of(kernels, lambda: portable.forward(q, k, k, params))
    return found


def name(case: tuple) -> str:
    return "-".join(str(part) for part in case if part)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    """All at once: the compiler's start-up costs more than a kernel."""
    cases = HALF + FULL + NEGATIVE + EMPTY + FEW + WINDOWED + FULL_WINDOWED
    return dict(zip(cases, inspect_sm90.compile_all(job(*case) for case in cases), strict=True))


@pytest.mark.parametrize("case", HALF + NEGATIVE + EMPTY + FEW + WINDOWED, ids=name)
def test_half_precision(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats = compiled[case]
    assert stats.opcodes.get("HGMMA"), "no warpgroup product"
    assert not stats.opcodes.get("HMMA"), "a product without the warpgroup instruction"
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    assert stats.spills <= (SPILLS_VARLEN if case[3] == "varlen" else 0)
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0


@pytest.mark.parametrize("case", FULL + FULL_WINDOWED, ids=name)
def test_float32(compiled: dict[tuple, Stats], case: tuple) -> None:
    """Exact products: no tensor core has them in float32."""
    stats = compiled[case]
    print(f"{name(case)}: {stats.registers} registers, {stats.spills} words spilled")
    assert not stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA"), "products rounded to TF32"
    assert stats.spills <= SPILLS_FLOAT32[case[0]]
    assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0


def test_four_programs_share_an_sm(compiled: dict[tuple, Stats]) -> None:
    """Why D = 64 has its bound of 128 registers: with a few more, there are three."""
    assert {compiled[case].ctas_per_sm for case in HALF + WINDOWED if case[0] == 64} == {4}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_loop_has_no_mask(compiled: dict[tuple, Stats], head_dim: int) -> None:
    """A mask is one select for each score of a thread."""
    config = forward_config(head_dim)
    scores = config.block_m * config.block_n // (32 * config.num_warps)
    loops = compiled[head_dim, "float16", "causal", "shifted", ""].loops
    masked, unmasked = loops if config.order == "late" else reversed(loops)
    assert masked["FSEL"] >= scores
    assert unmasked.get("FSEL", 0) < scores / 2


def test_a_program_divides_nothing_before_its_first_load(compiled: dict[tuple, Stats]) -> None:
    """Dividing by a number that the compiler does not know takes MUFU.RCP, an estimate, and corrections."""
    for d in (64, 128, 256):
        listing = compiled[d, "float16", "causal", "whole", ""].listing
        first = next(n for n, text in enumerate(listing) if "UTMALDG" in text)
        assert not any("MUFU.RCP" in text for text in listing[:first])


def test_warnings_are_seen() -> None:
    """128 x 128 scores in 4 warps take more registers than there are: ptxas then serializes the products."""
    too_large = ForwardConfig(128, 128, num_warps=4, num_stages=2)
    [stats] = inspect_sm90.compile_all([job(128, "float16", "causal", "whole", "", config=too_large)])
    assert stats.spills > 0
    assert any("wgmma" in text and "serialized" in text for text in stats.warnings)
