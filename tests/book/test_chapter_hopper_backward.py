"""The kernels of chapter 21 in the emulator: each change, and mistakes planted in the last kernel."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from chosen import in_turn
from emulated import ORDERS

from attnlib.bench import sources
from attnlib.bench.backward import make_gradient
from attnlib.bench.changes import changed
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import changes, lesson
from attnlib.book.exercises import judge_gradients
from attnlib.emulator import emulated
from attnlib.kernels.reference.dense import attention_fp64

STEP = "21_hopper_backward"
KERNELS = list(sources.kernel_sources(sources.notebook_of(STEP)))
VARIANTS = sources.cells_tagged(sources.notebook_of(STEP), "variant")


def check(
    module: ModuleType, shape: Shape, order: str, kind: str = "normal", dtype: torch.dtype = torch.float16
) -> None:
    q, k, v = (x.to(dtype) for x in make_inputs(shape, kind, device="cpu"))
    d_out = make_gradient(shape, device="cpu").to(dtype)
    out, lse = attention_fp64(q, k, v, causal=shape.causal)
    with emulated(vars(module), order) as kernels:
        assert list(kernels) == ["flash_backward"]
        call = d_out, q, k, v, out.to(dtype), lse.float(), shape.causal, shape.head_dim**-0.5
        found = module.gradients(*call)
    for verdict in GradientOracle(d_out, q, k, v, causal=shape.causal).judge(*found).values():
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("name", "order"), in_turn(KERNELS, ORDERS))
def test_each_change(name: str, order: str) -> None:
    """The chapter itself, when it is replayed, judges each in several orders."""
    module = changes.load(STEP)[name]
    check(module, Shape(1, 2, 200, 64), order)
    check(module, Shape(1, 1, 150, 128, causal=False), "random")


@pytest.mark.parametrize("text", VARIANTS[:2], ids=["turns", "delay"])
def test_variants(text: str) -> None:
    module = changes.beside(STEP, KERNELS[-1], text)
    for shape in (Shape(1, 1, 300, 64, causal=False), Shape(1, 1, 65, 128), Shape(1, 1, 17, 64)):
        judge_gradients(module.gradients, shape)


def test_the_wide_form() -> None:
    module = changes.beside(STEP, KERNELS[-1], VARIANTS[2])
    for shape in (Shape(1, 1, 65, 256, causal=False), Shape(1, 2, 200, 256)):
        judge_gradients(module.gradients, shape)
    check(module, Shape(1, 1, 130, 256), "late", "sink", torch.bfloat16)
    with pytest.raises(ValueError, match="q: expected a head dimension of 256, got 64"):
        module.attention(*(torch.zeros(1, 1, 64, 64) for _ in range(3)))


@pytest.mark.parametrize(("S", "D"), [(1, 64), (17, 128), (129, 128), (400, 64)])
def test_lengths(S: int, D: int) -> None:
    module = sources.load_step(STEP)
    check(module, Shape(1, 2, S, D), "random")
    check(module, Shape(2, 1, S, D, causal=False), "late")


@pytest.mark.parametrize("kind", ["large", "sink"])
def test_other_inputs_and_bfloat16(kind: str) -> None:
    module = sources.load_step(STEP)
    check(module, Shape(1, 1, 200, 64, causal=False), "random", kind)
    check(module, Shape(1, 1, 200, 128), "random", kind, torch.bfloat16)


def test_autograd_and_an_unknown_head_dimension() -> None:
    module, shape = sources.load_step(STEP), Shape(1, 2, 70, 64)
    tensors = [x.requires_grad_() for x in make_inputs(shape, device="cpu")]
    d_out = make_gradient(shape, device="cpu")
    with emulated(vars(module)):
        found = torch.autograd.grad(module.attention(*tensors), tensors, d_out)
    for verdict in GradientOracle(d_out, *tensors, causal=True).judge(*found).values():
        assert verdict.ok, verdict.reason
    with pytest.raises(ValueError, match="q: expected a head dimension of 64 or 128, got 256"):
        module.attention(*(torch.zeros(1, 1, 64, 256) for _ in range(3)))


def test_who_is_first_in_exercise_4() -> None:
    """The teaching kernel has no order and `turns` has more barriers: neither is an answer."""
    check = lesson.checks(STEP).check_in_turns
    with pytest.raises(AssertionError, match="right, but no consumer is always the first: .* is 8 products"):
        check([sources.load_step(STEP).consume])
    turns = sources.load_source("21_turns", changed(sources.kernel_source(sources.notebook_of(STEP)),
                                VARIANTS[0].replace("TURN +", "5 +")))  # fmt: skip
    with pytest.raises(AssertionError, match="right, but with the hardware's barriers 5, 6 besides"):
        check([turns.take_turn, turns.pass_turn, turns.consume])


PLANTED = (
    ("    fence_async_shared()  # the tensor cores see dS", "    pass  #", 64),
    ("DS_FULL + 2 * (1 - W)", "DS_FULL + 2 * W", 64),
    ("(j & 1) * 2 + W).store", "W).store", 64),  # one buffer of dS
    ("        await_ds(j - 1, W)\n", "", 128),
    ("    await_ds(n - 1, W)\n", "", 128),
    ("        release(DO_FREE, j, plan)\n", "", 64),
    ("2 * 128 + 32", "128 + 32", 64),  # the producer waits for one consumer
    ("j > 0, W, plan)", "j >= 0, W, plan)", 128),  # the dQ of no block is added
    ("block + j - 1", "block + j", 64),
    ("wait(mem.q_full, j + 1, plan)", "pass", 64),
    ("key - first * plan.block_m", "key", 64),
    ("mem.v.index(W), i_h, key)  # the other", "mem.k.index(W), i_h, key)  # the other", 128),
    ("    tma.store_wait(0)\n    store(dk_desc", "    store(dk_desc", 64),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "d"), PLANTED, ids=range(len(PLANTED)))
def test_a_planted_mistake_is_noticed(old: str, new: str, d: int) -> None:
    text = sources.kernel_source(sources.notebook_of(STEP))
    assert old in text
    module = sources.load_source("21_planted", text.replace(old, new))
    noticed = "Race|Deadlock|max error|not finite|overwrites|without|arrive|came|outside"
    with pytest.raises(Exception, match=noticed):
        judge_gradients(module.gradients, Shape(1, 1, 520 if d == 64 else 300, d))


def test_the_next_dS_is_not_written_before_dQ_of_the_block_before() -> None:
    """What stands in the place of a barrier: see chapter 21, change 4."""
    text = sources.kernel_source(sources.notebook_of(STEP))
    tell = "        tell_ds(mem, ds, j, W)\n"
    later = "        await_ds(j - 1, W)\n"
    early = text.replace(tell, "").replace(later, tell + later)
    assert early.count(tell) == 1 and early != text
    with pytest.raises(AssertionError, match="Race"):
        judge_gradients(sources.load_source("21_early", early).gradients, Shape(1, 1, 600, 128))
