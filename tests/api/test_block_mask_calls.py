"""attention(block_mask=): what runs and why, autograd, compilers, transformations, FLOPs."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import triton
from cases import INTERPRETER_REMARKS
from fake_gpu import gpu, tensor  # noqa: F401  (a fixture)
from sparse_cases import FUNCTIONS
from torch.utils.flop_counter import FlopCounterMode

from attnlib import BlockMask, Score, attention, dispatch, explain, scored_call
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import MaskWindow, Params

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def inputs(*shape, device="cpu", S_k=None, grad=False):
    B, H, S, D = shape
    rng = torch.Generator().manual_seed(0)
    sizes = shape, (B, H, S_k or S, D), (B, H, S_k or S, D)
    return [torch.randn(s, generator=rng).to(device).requires_grad_(grad) for s in sizes]


def on_gpu(mask: BlockMask) -> BlockMask:
    mask.device = torch.device("cuda", 0)
    return mask


def test_what_runs(gpu):
    q = tensor(1, 2, 256, 64)
    mask = on_gpu(BlockMask.from_function(FUNCTIONS["causal"], 256, 256))
    choice = explain(q, q, q, block_mask=mask)
    assert choice.kernel == "hopper" and choice.configuration.pairs == 2
    assert choice.reason == "compute capability 9.x, a half precision, layouts that TMA can read"
    assert explain(q.float(), q.float(), q.float(), block_mask=mask).kernel == "triton"
    odd = tensor(1, 2, 256, 64, strides=(256 * 128 * 2, 256 * 128, 1, 256))
    assert explain(odd, q, q,
    block_mask=mask).reason.startswith("hopper needs layouts that TMA can read; q has")
    gpu(8)
    assert explain(q, q, q, block_mask=mask).kernel == "triton"


def test_decoding_kernels_take_none(gpu):
    # Rows of keys overlap, to take less memory.
    q, k = tensor(1, 1, 16, 256), tensor(1, 1, 4096, 256, strides=(256, 256, 16, 1))
    mask = on_gpu(BlockMask.from_function(lambda b, h, q, k: k % 3 > 0, 16, 4096))
    assert explain(q, k, k).kernel == "decode"
    assert explain(q, k, k, block_mask=mask).kernel == "hopper"
    with pytest.raises(ValueError, match="impl: 'decode' takes no block mask"):
        explain(q, k, k, block_mask=mask, impl="decode")


def test_the_backward_pass_is_chosen_for_itself(gpu):
    q = tensor(1, 2, 256, 64)
    mask = on_gpu(BlockMask.from_function(FUNCTIONS["causal"], 256, 256))
    params = Params(MaskWindow(None, None), 0.1, return_lse=True, block_mask=mask)
    assert dispatch.resolve(q, q, q, params).kernel == "hopper"
    assert dispatch.resolve(q, q, q, params, backward=True).kernel == "hopper"
    assert dispatch.resolve(q, q, q, params._replace(deterministic=True), backward=True).kernel == "triton"
    wide = tensor(1, 1, 256, 256)
    assert dispatch.resolve(wide, wide, wide, params, backward=True).kernel == "hopper"


def test_steps_of_half_a_tile_where_a_mask_needs_no_more_or_rows_are_short(gpu):
    for name, S, block_n in (("dots", 1100, 128), ("dots", 256, 64), ("stripes", 1100, 64)):
        q, mask = tensor(1, 1, S, 72), on_gpu(BlockMask.from_function(FUNCTIONS[name], S, S))
        assert explain(q, q, q, block_mask=mask).configuration.block_n == block_n


def test_the_reference_takes_masks_too():
    q, k, v = inputs(1, 2, 20, 16, S_k=30)
    mask = BlockMask.from_function(FUNCTIONS["dots"], 20, 30)
    out, lse = attention(q, k, v, block_mask=mask, return_lse=True, impl="reference")
    expected = attention_fp64(q, k, v, mask=mask.to_dense())
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


def test_a_window_and_a_mask_are_both_kept():
    q, k, v = inputs(1, 1, 40, 16, S_k=50)
    mask = BlockMask.from_function(FUNCTIONS["dots"], 40, 50)
    i, j = torch.arange(40)[:, None] + 10, torch.arange(50)
    for options, seen in (
        ({"causal": True}, j <= i), ({"window": (5, 3)}, (j >= i - 5) & (j <= i + 3)),
        ({"causal": True, "window": (5, -1)}, (j >= i - 5) & (j <= i)),
    ):  # fmt: skip
        expected, _ = attention_fp64(q, k, v, mask=mask.to_dense() & seen)
        out = attention(q, k, v, block_mask=mask, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing_and_calls_without_keys():
    q, k, v = inputs(1, 1, 20, 16, grad=True)
    out, lse = attention(q, k, v, block_mask=BlockMask.from_function(FUNCTIONS["none"], 20, 20),
    return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())
    assert not any(x.any() for x in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


class Layer(torch.nn.Module):
    def __init__(self, mask: BlockMask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return attention(q, k, v, block_mask=self.mask, causal=True) * 2


@pytest.mark.parametrize("shape", [(4, 1), (1, 2), (4, 2)], ids=str)
def test_compiled_with_a_mask_for_each(shape):
    """Sizes of q are symbols there, those of the mask are not."""
    torch._dynamo.reset()
    q, mask = torch.randn(4, 2, 20, 8), BlockMask.from_mask(torch.rand(*shape, 20, 20) < 0.7)
    call = torch.compile(
        lambda x: attention(x, x, x, block_mask=mask), backend="eager", fullgraph=True, dynamic=True
    )
    torch.testing.assert_close(call(q), attention(q, q, q, block_mask=mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """One graph, the same numbers, gradients too; another mask is another run of it."""
    compiled = torch.compile(
        lambda layer, *x: layer(*x), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for name in ("dots", "documents"):
        x = inputs(1, 2, 40, 16, grad=True)
        layer = Layer(BlockMask.from_function(FUNCTIONS[name], 40, 40))
        found, expected = compiled(layer, *x), layer(*x)
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(
            *(torch.autograd.grad(out, x, torch.ones_like(out)) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_functional_gradients_and_vmap():
    q, k, v = inputs(3, 2, 20, 16)
    mask = BlockMask.from_function(FUNCTIONS["dots"], 20, 20)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    expected = torch.autograd.grad(attention(*x, block_mask=mask).sum(), x)
    found = torch.func.grad(lambda *x: attention(*x, block_mask=mask).sum(), (0, 1, 2))(q, k, v)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    mapped = torch.vmap(lambda *x: attention(*(y[None] for y in x), block_mask=mask)[0])(q, k, v)
    torch.testing.assert_close(mapped, attention(q, k, v, block_mask=mask))
    own = BlockMask.from_function(FUNCTIONS["dots"], 20, 20, B=2)
    with pytest.raises(NotImplementedError, match="with a block mask for each batch element"):
        torch.vmap(lambda *x: attention(*(y.expand(2, -1, -1, -1) for y in x), block_mask=own))(q, k, v)


def test_a_mask_made_and_cut_under_a_transformation():
    """What a transformation of torch.func wraps does not stay in a mask, nor in that of a call without."""
    q, k, v = inputs(1, 2, 20, 16)
    every = torch.ones(1, 1, dtype=torch.bool)
    kept = [BlockMask.from_function(FUNCTIONS["dots"], 20, 20), BlockMask.from_chosen(every, 20)]
    made = (
        lambda: kept[0], lambda: kept[1], lambda: BlockMask.from_function(FUNCTIONS["dots"], 20, 20),
        lambda: BlockMask.from_chosen(every & True, 20), lambda: None,
    )  # fmt: skip
    scored_call._everything.cache_clear()
    for mask in made:
        score = None if mask() is not None else Score(soft_cap=2.0)

        def loss(q, mask=mask, score=score):
            return attention(q, k, v, block_mask=mask(), score=score, window=(9, 0), impl="triton").sum()

        found, x = torch.func.grad(loss)(q), q.clone().requires_grad_()
        torch.testing.assert_close(found, torch.autograd.grad(loss(x), x)[0])
    with pytest.raises(NotImplementedError, match="a block mask of what torch.vmap maps"):
        torch.vmap(lambda x: BlockMask.from_chosen(x, 20).words)(every[None])


def test_a_dispatch_mode_keeps_the_mask_for_the_backward_pass():
    q, k, v = inputs(1, 1, 20, 16, grad=True)
    for options in ({}, {"score": Score(soft_cap=2.0)}):
        with FlopCounterMode(display=False):
            mask = BlockMask.from_function(FUNCTIONS["dots"], 20, 20)
            out, expected = attention(q, k, v, block_mask=mask, **options), mask.to_dense()
            del mask
            gc.collect()
            dq = torch.autograd.grad(out.sum(), q)[0]
        again = attention(q, k, v, block_mask=BlockMask.from_mask(expected), **options)
        torch.testing.assert_close(dq, torch.autograd.grad(again.sum(), q)[0])


def test_flops_go_by_the_blocks():
    q, k, v = inputs(1, 2, 256, 16)
    mask = BlockMask.from_blocks(torch.eye(4, dtype=torch.bool), 256, 256, block_size=64)
    counts = []
    for options in ({}, {"block_mask": mask}):
        with FlopCounterMode(display=False) as counter:
            attention(q, k, v, **options)
        counts.append(counter.get_total_flops())
    assert counts[1] == round(counts[0] * mask.density()) == counts[0] // 2  # rows of tiles are 128


@pytest.mark.parametrize(("S_q", "S_k"), [(20, 50), (300, 700), (256, 256)])
def test_flops_of_a_mask_that_hides_nothing(S_q, S_k):
    """Blocks behind the last key, which fill up its tile, do not count."""
    q, k = torch.randn(1, 1, S_q, 16), torch.randn(1, 1, S_k, 16)
    mask = BlockMask.from_function(lambda b, h, i, j: j >= 0, S_q, S_k)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, k, block_mask=mask, impl="reference")
    assert counter.get_total_flops() == 4 * 16 * S_q * S_k
    assert mask.density() == mask.density(128) == 1.0


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_a_copy_of_a_mask_is_found_as_itself_in_a_graph(again):
    """Numbers are of a process: one that was made by another may meet a mask that has its number here."""
    q, k, v = inputs(1, 1, 20, 16)
    mask = BlockMask.from_mask(torch.eye(20).bool())
    state = pickle.dumps(mask)
    copied = again(mask)
    assert copied.handle != mask.handle
    compiled = torch.compile(lambda q, mask: attention(q, k, v, block_mask=mask), backend="aot_eager")
    expected = attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(compiled(q, copied), expected)
    del mask
    gc.collect()
    torch.testing.assert_close(compiled(q, copied), expected)
    other = BlockMask.from_mask(torch.ones(20, 20).bool())
    loaded = pickle.loads(state)
    assert loaded.handle not in (other.handle, copied.handle)
    torch.testing.assert_close(compiled(q, loaded), expected)


@triton.jit
def doubled(s, i, j, h, b):
    return 2 * s


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_no_mask_and_no_function(strict):
    """It would have their numbers in this process. A compiled program has them, too, and stays here."""

    class Layer(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.options = options

        def forward(self, q):
            return attention(q, q, q, **self.options)

    mask, q = BlockMask.from_mask(torch.eye(20).bool()), (torch.randn(1, 1, 20, 16),)
    score = Score(function=doubled, reference=lambda s, i, j, h, b: 2 * s)
    error = RuntimeError if strict else NotImplementedError  # Dynamo's has ours inside
    for options, said in (
        ({"block_mask": mask}, "block_mask: expected None under torch.export"),
        ({"score": score}, "score: expected no function under torch.export"),
    ):
        torch.compile(Layer(**options), backend="eager", fullgraph=True)(*q)
        with pytest.raises(error, match=said):
            torch.export.export(Layer(**options), q, strict=strict)


def test_a_batch_of_gradients_is_refused_by_name():
    q, k, v = inputs(1, 1, 5, 16, grad=True)
    out = attention(q, k, v)
    with pytest.raises(NotImplementedError, match="^attnlib: a batch of gradients"):
        torch.autograd.grad(out, [q, k, v], torch.randn(3, *out.shape), is_grads_batched=True)
