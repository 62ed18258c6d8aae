"""The kernels under a block mask compiled for sm_90, in every configuration."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product

import pytest
import side_by_side
import torch
import triton
import triton.language as tl
from chosen import more, with_more
from gluon_kernels import compile_kernel, tile_types, tritons_barriers
from launches import jobs_of
from score_cases import bent, bent_derivative
from time_sparse import softsign, softsign_derivative

from attnlib import BlockMask, attention
from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.bench.sass import opcode
from attnlib.block_mask.mask import Form
from attnlib.kernels.common import preprocess
from attnlib.kernels.common.launch_preprocess import preprocess as preprocess_of
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.sparse import (
    backward_kernels,
    bias_kernel,
    forward_kernel,
    hopper_bias,
    launch_hopper,
    launch_hopper_backward,
    launch_hopper_bias,
    portable,
    scores,
)
from attnlib.kernels.sparse.configs import sparse_backward_config, sparse_forward_config
from attnlib.kernels.sparse.configs_hopper import (
    WIDE,
    HopperSparseBackwardConfig,
    hopper_bias_config,
    hopper_sparse_backward_config,
    hopper_sparse_config,
)
from attnlib.kernels.sparse.hopper_backward_columns import V_FREE
from attnlib.params import MaskWindow, Params
from attnlib.scores import Score, parts_of

CONFIGS = {
    "64": hopper_sparse_config(64),
    "64 wide": WIDE,
    "128": hopper_sparse_config(128),
    "128 fine": hopper_sparse_config(128, coarse=False),
    "256": hopper_sparse_config(256),
}
# At D = 256 no call keeps its shifts.
CONFIGS |= {
    f"{name} kept": replace(config, keep_shift=True) for name, config in CONFIGS.items() if name != "256"
}
PLAIN = [name for name in CONFIGS if "kept" not in name]
TWO_Q = "128 fine kept, two Q"
CONFIGS[TWO_Q] = replace(CONFIGS["128 fine kept"], q_buffers=2)
"""Consumers start the next tile's first product beside their last one."""
ENDS = {
    f"{name}, ends": replace(CONFIGS[name], leaves_out=True) for name in (TWO_Q, "128 fine kept", "64 kept")
}
CONFIGS |= ENDS
"""Consumers leave out steps."""
COPIES = {
    "64 copied": hopper_sparse_config(64, True, True, True),
    "128 copied": hopper_sparse_config(128, True, True, True),
    "128 fine copied": hopper_sparse_config(128, False, True, True),
}
"""Under a bias that comes through shared memory."""
# Whether steps carry bits, negative scale, LSE.
KINDS = {
    "blocks": (False, False, False), "blocks, LSE": (False, False, True), "bits": (True, False, False),
    "bits, LSE": (True, False, True), "bits, negative, LSE": (True, True, True),
}  # fmt: skip
SCORES = {
    "cap": Score(soft_cap=30.0), "alibi": Score(alibi=torch.zeros(2)),
    "all": Score(soft_cap=30.0, alibi=torch.zeros(2), sinks=torch.zeros(2)),
    "every part": Score(30.0, torch.zeros(2), torch.zeros(2), torch.zeros(1, 2, 256, 250)),
    "half": Score(30.0, torch.zeros(2), torch.zeros(2), torch.zeros(1, 2, 256, 256).half()),
    "bias": Score(bias=torch.zeros(256, 256).half()),
    "single": Score(bias=torch.zeros(256, 250)), "relative": Score(relative=torch.zeros(2, 9)),
    "own": Score(function=softsign, derivative=softsign_derivative),
    "own, capped": Score(30.0, torch.zeros(2), function=softsign, derivative=softsign_derivative),
}  # fmt: skip
KINDS |= {f"bits, LSE, {name}": (True, False, True, name) for name in SCORES}
SCORED = [("64", "bits, LSE, alibi"), *product(("64", "128", "256"), ("bits, LSE, all",))]
SCORED += product(("64 wide", "128"), ("bits, LSE, every part",))
"""All parts of a score take the most registers."""
BY_BITS = with_more(["128 fine"], PLAIN)
"""Compiled without bits and with them."""
KEPT = with_more([TWO_Q], ["64 kept", "128 kept"])
CASES = with_more(
    [
        *product(BY_BITS, ("blocks", "bits"), ("fp16",)),
        ("64", "bits, negative, LSE", "bf16"),
        *product(KEPT, ("blocks",), ("fp16",)),
        (TWO_Q, "bits, LSE", "fp16"),
        *product(with_more([f"{TWO_Q}, ends"], ENDS), ("bits, LSE",), ("fp16",)),
        ("256", "bits, LSE, all", "fp16"),
        ("128", "bits, LSE, every part", "fp16"),
        ("64 copied", "bits, LSE, half", "bf16"),
        ("128", "bits, LSE, own", "fp16"),
    ],
    [
        ("128", "bits, negative, LSE", "bf16"),
        *product(("64 kept", "128 kept"), ("blocks",), ("bf16",)),
        ("64 kept", "bits, negative, LSE", "bf16"),
        ("128 kept", "bits, LSE, cap", "fp16"),
        ("128 copied", "bits, LSE, half", "fp16"),
        *product(CONFIGS, ("bits, negative, LSE",), ("fp16",)),
        (TWO_Q, "blocks, LSE", "bf16"),
        *product(("64 wide kept", "128 fine kept"), ("blocks", "bits"), ("fp16",)),
        ("64", "blocks, LSE", "fp16"),
        ("256", "bits, negative, LSE", "bf16"),
        *((*case, "fp16") for case in SCORED),
        *product(COPIES, ("bits, LSE, bias",), ("fp16",)),
        ("128 fine copied", "bits, LSE, half", "fp16"),
        *product(("64 wide", "128", "256"), ("bits, LSE, own, capped",), ("fp16",)),
    ],
)
BACKWARD = [(64, False, "fp16"), (128, True, "fp16", "all")] + more([(128, True, "bf16")])
BACKWARD += [(128, True, "fp16", "bias"), (64, True, "bf16", "relative")]
BACKWARD += [(128, True, "fp16", "own"), (128, True, "fp16", "gathered")]
BACKWARD += more(product((64, 128, 256), (True,), ("fp16",), ("own, capped",)))
BACKWARD += more([(64, True, "fp16"), (128, False, "fp16"), (128, True, "fp16"), (64, True, "fp16", "cap")])
BACKWARD += more([(64, True, "bf16", "gathered")])
BACKWARD += more((width, bits, "fp16", "a column") for width, bits in ((128, True), (64, False)))
BACKWARD += more([(64, True, "bf16", "gathered, a column")])
BACKWARD += more([(128, True, "fp16", "abreast"), (64, True, "fp16", "gathered, abreast")])
BACKWARD += [(256, True, "fp16")] + more([(256, True, "fp16", "every part")])
BACKWARD += more(product((64, 128), (True,), ("fp16",), ("half", "single", "every part")))
BACKWARD += more([(256, False, "fp16")])
BACKWARD += more(product((256,), (True,), ("fp16",), ("all", "relative", "half")))
"""Head dimension, whether steps carry bits, dtype, and the score if there is one, or "gathered" keys,
programs of "a column" where calls have some that stay, and consumers "abreast" where calls have turns."""
SPILLS = {False: 4, True: 14}
"""Words of the backward kernel, by whether steps carry bits: some of the producer, whose numbers come from
lists and are not uniform to the compiler, and up to two of a consumer in a step."""
FORWARD_SPILLS = {("128 copied", "bits, LSE, half"): 4}
"""Of the forward kernel: where the LSE goes, kept from a tile's begin to its end. Others have none."""
KEPT_SPILLS = 4
"""With kept shifts and bits, outside the loop."""
MOST_SPILLS = {"all": 34, "half": 28, "single": 20, "relative": 20, "every part": 64}
MOST_SPILLS |= {"own": 18, "own, capped": 26}
"""Under a soft cap and ALiBi at D = 128, P and the derivative of its scores wait for the bits; a bias that is
loaded has addresses."""
WIDE_SPILLS = {"all": 44, "relative": 24, "half": 66, "every part": 66}
WIDE_SPILLS |= {"own": 30, "own, capped": 36}
"""At D = 256, of the warpgroup with the scores, whose sums of dV are 128 registers of a thread."""
LOADED = "single", "relative", "every part"
"""With loads from global memory in its loop, ptxas takes operands' addresses for different in each thread
and moves them, some 80 in a step. Why is not known."""
HGMMA = {"64": 64, "64 wide": 48, "128": 64, "128 fine": 48, "256": 80}
HGMMA |= {f"{name} kept": number for name, number in HGMMA.items()}
HGMMA[TWO_Q] = HGMMA["128 fine kept"] + 16  # the first product of the first tile, and of the next one
HGMMA |= {name: HGMMA[name.removesuffix(", ends")] for name in ENDS}
HGMMA |= {name: HGMMA[name.replace("64 copied", "64 wide").removesuffix(" copied")] for name in COPIES}
"""Products in the code of all consumers: first step, loop, last values."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compile_case(case: tuple[str, str, str]) -> Stats:
    """The compiled kernel in numbers."""
    from attnlib.kernels.sparse.hopper_kernel import attention_sparse_forward_hopper as kernel

    name, kind, dtype = case
    width, config = int(name.split()[0]), (CONFIGS | COPIES)[name]
    partial, flip, lse, *rest = KINDS[kind]
    score = None
    if rest:
        own = SCORES[rest[0]]
        q = torch.zeros(1, 2, 256, width)
        k = q if own.bias is None else q[:, :, : own.bias.shape[-1]]
        score = parts_of(own, q, k).form
    copied = config.copies_bias and hopper_bias.bias_window(score, 256, 256) is not None
    plan = launch_hopper.make_plan(width, config, flip, lse, partial, score, copied)
    has = {
        "lse_ptr": lse, "inner": plan.soft_cap.value or plan.function.value, "alibi_ptr": plan.alibi.value,
        "after": plan.soft_cap.value and plan.function.value,
        "sinks_ptr": plan.sinks.value, "bias_ptr": plan.bias.value, "desc_bias": copied,
    }  # fmt: skip
    has |= dict.fromkeys(("bias_b", "bias_h", "bias_m", "S_k"), plan.bias.value)
    absent = [name for name, there in has.items() if not there]
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in absent]
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(("qk_scale", "inner", "after"), "fp32")
    types |= {name: "*fp32" for name, there in has.items() if there and name.endswith("_ptr")}
    bias = (None, score.bias) if copied else None
    descriptors = launch_hopper.descriptors((None,) * 4, 1, width, config, DTYPES[dtype], bias)
    types |= tile_types(descriptors, dtype, desc_words="i32", desc_bias="fp16")
    function = {"FUNCTION": None if score is None else score.function}
    return compile_kernel(kernel, plan, types, absent, pointers, config.max_registers, function)[0]


def config_of(case: tuple) -> HopperSparseBackwardConfig:
    """Of a case of `BACKWARD`."""
    name = case[3] if case[3:] else ""
    score = SCORES.get(name)
    capped = score is not None and score.soft_cap is not None
    placed = score is not None and any(x is not None for x in (score.bias, score.relative, score.function))
    config = hopper_sparse_backward_config(case[0], capped, placed)
    if "abreast" in name or "a column" in name:
        config = replace(config, alternate=False, persistent="a column" not in name)
    return replace(config, gathered="gathered" in name)


def compile_backward(case: tuple) -> Stats:
    """The same for the backward pass."""
    width, partial, dtype, *rest = case
    score = None
    shape = 1, 2, 256, width
    if rest and rest[0] in SCORES:
        own = SCORES[rest[0]]
        q = torch.zeros(shape)
        k = q if own.bias is None else q[:, :, : own.bias.shape[-1]]
        score = parts_of(own, q, k).form
    config = config_of(case)
    module, _, kernel = launch_hopper_backward.KERNELS[config.block_n].rpartition(".")
    kernel = getattr(importlib.import_module(module), kernel)
    bias = hopper_bias.bias_window(score, 256, 256) if config.copies_bias else None
    strides = (torch.empty(shape, device="meta").stride(),) * 5
    call = Signature(
        shape, shape, strides, DTYPES[dtype], -1, MaskWindow(None, None), 0.1, None, True, config,
        Form(1, 1, 1, partial, partial, True), score,
    )  # fmt: skip
    window = shape, strides[0]
    rows = preprocess_of(call, window, window, 128, width)
    plan = launch_hopper_backward.make_plan(width, config, partial, score, bias is not None)
    has = {"inner": plan.curved.value, "after": plan.soft_cap.value and plan.function.value}
    has |= {"alibi_ptr": plan.alibi.value, "place": plan.alibi.value, "units_ptr": config.gathered}
    has |= dict.fromkeys(("counter_ptr", "columns", "LEADING"), config.persistent)
    has |= dict.fromkeys(("bias_ptr", "bias_b", "bias_h", "bias_m", "S_k"), plan.bias.value)
    has["desc_bias"] = bias
    absent = [name for name, there in has.items() if not there and name in kernel.arg_names]
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in absent]
    types = dict.fromkeys(pointers, "*i32") | {"dq_ptr": "*fp32", "qk_scale": "fp32", "sm_scale": "fp32"}
    types |= {name: "fp32" for name in ("inner", "after") if has[name]}
    types |= {"alibi_ptr": "*fp32"} if plan.alibi.value else {}
    types |= {"bias_ptr": "*fp16" if bias else "*fp32"} if plan.bias.value else {}
    descriptors = launch_hopper_backward.descriptors((window,) * 6, 1, rows, call, bias)
    own = {"desc_words": f"i{config.word_bits}", "desc_rows": "fp32", "desc_bias": "fp16"}
    types |= tile_types(descriptors, dtype, **own)
    more = {name: getattr(score, name.lower(), None) for name in ("FUNCTION", "DERIVATIVE")}
    stats, compiled = compile_kernel(kernel, plan, types, absent, pointers, config.max_registers, more)
    assert {0, 1, 2} <= tritons_barriers(compiled) <= set(range(V_FREE.value)), "a barrier is in common"
    return stats


BIASES = [(128, "bias", True, "fp16"), (64, "relative", True, "bf16")]
BIASES += more([(128, "relative", True, "fp16"), (64, "bias", False, "fp16"), (128, "single", True, "fp16")])
"""Of the kernel that makes a bias' gradient: head dimension, score, whether tiles have words, dtype."""


def compile_bias(case: tuple) -> Stats:
    """The kernel of a bias' gradient."""
    from attnlib.kernels.sparse.hopper_bias_kernel import attention_sparse_bias_gradient_hopper as kernel

    width, name, partial, dtype = case
    q = torch.zeros(1, 2, 256, width, dtype=DTYPES[dtype])
    k = q if SCORES[name].bias is None else q[:, :, : SCORES[name].bias.shape[-1]]
    score = parts_of(SCORES[name], q, k).form
    config = hopper_bias_config(width, score.bias.itemsize)
    call = Signature(
        q.shape, k.shape, (q.stride(),) * 5, q.dtype, -1, MaskWindow(None, None), 0.1, None, True,
        hopper_sparse_backward_config(width, True), Form(1, 1, 1, partial, partial, True), score,
    )  # fmt: skip
    window = tuple(q.shape), q.stride()
    rows = preprocess_of(call, window, window, 128, width)
    made = launch_hopper_bias.descriptors(
        dict.fromkeys(("q", "d_out", "k", "v"), window), rows, width, q.dtype
    )
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    types = dict.fromkeys(pointers, "*i32") | {"kinds_ptr": "*i8", "counter_ptr": "*fp32", "qk_scale": "fp32"}
    types |= {"bias_ptr": "*fp16" if score.bias.itemsize == 2 else "*fp32", "dbias_ptr": "*fp32"}
    types |= tile_types(made, dtype, desc_rows="fp32")
    plan = launch_hopper_bias.make_plan(config, partial, score, 1, 2)
    return compile_kernel(kernel, plan, types, [], pointers, config.max_registers)[0]


@pytest.mark.parametrize("case", BIASES, ids=lambda case: "-".join(map(str, case)))
def test_the_gradient_of_a_bias(case: tuple) -> None:
    stats, (width, *_) = compile_bias(case), case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes["HGMMA"] == 2 * 2 * width // 16, "two products of each consumer"
    assert stats.opcodes["UTMALDG"] == 6 * width // 64 + 4 and not stats.opcodes.get("HMMA")
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT
    visits = [loop for loop in stats.loops if loop.get("HGMMA") == 2 * width // 16]
    assert len(visits) == 2
    for loop in visits:
        assert loop["MUFU.EX2"] == 64 and loop["FFMA"] == 192
        assert loop.get("LDL", 0) <= 3 and loop.get("STL", 0) <= 2, "scores, or sums, are spilled in a visit"


def _wide(stats: Stats) -> list[str]:
    """Loads of four matrices of 8 x 8 in the loops."""
    texts = [text for listing in stats.loop_listings for text in listing]
    return [text for text in texts if "LDSM" in text and text.rstrip("; ").split()[0].endswith("4")]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    found = dict(zip(CASES, side_by_side.run(compile_case, CASES), strict=True))
    return found | dict(zip(BACKWARD, side_by_side.run(compile_backward, BACKWARD), strict=True))


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: "-".join(map(str, case)))
def test_hopper_backward(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats, (width, *_) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA")
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    most = WIDE_SPILLS if width == 256 else MOST_SPILLS
    assert stats.spills <= max(SPILLS[case[1]], *(most.get(score, 0) for score in ("", *case[3:])))
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT
    assert stats.registers == config_of(case).max_registers
    if config_of(case).block_n == 64:
        assert sorted(loop["HGMMA"] for loop in stats.loops) == [8, 24, 24]
        assert case[3:] or not any(loop.get("LDL", 0) for loop in stats.loops), "words are spilled in a step"
        return
    moved = [sum("R2UR" in text for text in listing) for listing in stats.loop_listings]
    assert (max(moved) > 2) == (case[3:] != () and case[3] in LOADED), "addresses: different in each thread?"
    if case[3:] in (("bias",), ("half",)):
        assert stats.opcodes["LDSM"] == 10 and all("MT88" in text for text in _wide(stats)), "transposed"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_hopper(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats, (name, kind, _) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes["HGMMA"] == HGMMA[name] and not stats.opcodes.get("HMMA")
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    with_bits = KEPT_SPILLS if "kept" in name and "bits" in kind else 0
    assert stats.spills <= FORWARD_SPILLS.get((name, kind), with_bits)
    assert not any(loop.get("LDL", 0) for loop in stats.loops), "words are spilled in a step"
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT
    assert stats.registers == (CONFIGS | COPIES)[name].max_registers


@pytest.mark.parametrize("name", KEPT)
def test_where_shifts_are_kept_no_maximum_is_on_the_way(compiled: dict[tuple, Stats], name: str) -> None:
    """Up to the vote, after which a warp with a large weight goes another way."""
    for listing in compiled[name, "blocks", "fp16"].loop_listings:
        vote = next(i for i, text in enumerate(listing) if "VOTE.ANY" in text)
        before = [opcode(text) for text in listing[:vote]]
        print(f"{name}: {len(before)} instructions before the vote")
        assert not {"FMNMX", "SHFL"} & set(before)
        assert before.count("MUFU.EX2") == before.count("FFMA") == CONFIGS[name].block_n // 2


def test_bits_take_two_instructions_for_each_score(compiled: dict[tuple, Stats]) -> None:
    """A test of a bit that the compiler knows, and a select; and a few more for each row."""
    for name in BY_BITS:
        config = CONFIGS[name]
        plain, bits = (compiled[name, kind, "fp16"].loop_size for kind in ("blocks", "bits"))
        scores = 64 * config.block_n // 128
        assert 2 * scores <= bits - plain <= 2 * scores + 24


# ---------------------------------------------------------------- plain Triton


def launched(head_dim: int, dtype: str, name: str, arch, own: Score | None = None) -> list:
    """What a call, and its backward pass, would launch, but what sums the gradient of sinks; own: with this
    score."""
    jobs = launched_with_sinks(head_dim, dtype, name, arch, own)
    return [job for job in jobs if "sinks" not in job.kernel_name]


def launched_with_sinks(head_dim: int, dtype: str, name: str, arch, own: Score | None = None) -> list:
    """The same with it; of both without the pass before the backward kernels."""
    q = torch.zeros(1, 2, 256, head_dim, dtype=getattr(torch, dtype))
    blocks = torch.eye(2, dtype=torch.bool)
    mask = BlockMask.from_blocks(blocks, 256, 256)
    if name == "bits":
        mask = BlockMask.from_function(lambda b, h, q, k: q >= k, 256, 256)
    params = Params(MaskWindow(None, None), 0.1, return_lse=True, block_mask=mask)
    if name == "score":
        slopes, bias = torch.ones(2), torch.zeros(256, 256)
        params = params._replace(score=parts_of(Score(30.0, slopes, slopes, bias), q, q, bias_gradient=True))
    if own is not None:
        params = params._replace(score=parts_of(own, q, q))
    forward = params._replace(config=sparse_forward_config(head_dim, dtype, arch))
    backward = params._replace(config=sparse_backward_config(head_dim, dtype, arch))
    modules = forward_kernel, backward_kernels, bias_kernel, scores, preprocess
    jobs = jobs_of(modules, lambda: portable.forward(q, q, q, forward))
    jobs += jobs_of(modules, lambda: portable.backward(q, q, q, q, q, torch.zeros(1, 2, 256), backward))
    return [job for job in jobs if "preprocess" not in job.kernel_name]


PORTABLE = with_more(
    [(64, "float16", "blocks"), (128, "bfloat16", "bits"), (256, "float16", "bits")],
    product((64, 128, 256), ("float16",), ("blocks", "bits")),
)


@pytest.fixture(scope="module")
def portables() -> dict[tuple, list[Stats]]:
    jobs = {case: launched(*case, (9, 0)) for case in PORTABLE}
    found = iter(inspect_sm90.compile_all(job for some in jobs.values() for job in some))
    return {case: [next(found) for _ in some] for case, some in jobs.items()}


@pytest.mark.parametrize("case", PORTABLE, ids=lambda case: "-".join(map(str, case)))
def test_portable(portables: dict[tuple, list[Stats]], case: tuple) -> None:
    for stats in portables[case]:
        print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
        assert stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA")
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0
        # Where a loop is not pipelined, the compiler says that it puts in an instruction (C7519).
        assert not [text for text in stats.warnings if "C7519" not in text], "wgmma serialized?"
        assert stats.spills == 0


def test_portable_with_every_part_of_a_score() -> None:
    """The gradient of the bias, too, copies the next block while it computes one."""
    jobs = launched(64, "float16", "score", (9, 0))
    assert [job.kernel_name.rpartition("_")[2] for job in jobs] == ["forward", "dkdv", "dq", "gradient"]
    for stats in inspect_sm90.compile_all(jobs):
        assert stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA")
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0 and stats.spills <= 4
    more = [job for width in (128, 256) for job in launched(width, "float16", "score", (9, 0))]
    made = [stats, *inspect_sm90.compile_all(job for job in more if "bias" in job.kernel_name)]
    for stats in made:
        loop = stats.loops[0]  # of tiles without words
        assert loop["UTMALDG"] == 4 and loop["LDGSTS"] > 2, "tiles, and rows, of the next block"
        assert loop.get("LDL", 0) <= 2 and not loop.get("STL"), "spilled words are of what is before it"
        assert stats.shared_bytes <= SMEM_LIMIT and stats.spills <= 24 and stats.warnings == ()


def test_portable_with_a_function_of_the_users_own() -> None:
    """In this process: a job with a function can't be sent to another one."""
    from triton import knobs

    own = Score(function=bent, derivative=bent_derivative)
    with knobs.compilation.scope(), knobs.nvidia.scope():
        jobs = launched(64, "float16", "bits", (9, 0), own)
        assert [job.kernel_name.rpartition("_")[2] for job in jobs] == ["forward", "dkdv", "dq"]
        for stats in map(inspect_sm90.compile_here, jobs):
            assert stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA")
            assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0 and stats.spills <= 32
            assert stats.opcodes.get("MUFU.RCP"), "the division of the function"


FACTOR = tl.constexpr(2.0)


@triton.jit
def multiplied(s, i, j, h, b):
    return s * FACTOR


def test_a_function_keeps_its_global_variables(monkeypatch) -> None:
    """Nothing is compiled again where one has changed, so the call says so."""
    q = torch.randn(1, 1, 4, 16)
    own = Score(function=multiplied, reference=lambda s, i, j, h, b: s * FACTOR.value)
    attention(q, q, q, score=own)
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3.0))
    expected = r"score.function: expected the global variable FACTOR to stay constexpr\[2.0\], got "
    for score in (own, replace(own, soft_cap=5.0)):
        with pytest.raises(ValueError, match=expected):
            attention(q, q, q, score=score)
