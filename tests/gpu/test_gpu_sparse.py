"""Block masks on a GPU: the calls of the interpreter's tests in both kernels, and at full size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from captured import captured, side_by_side
from cases import judge_forward
from sparse_cases import CASES, FUNCTIONS, check_backward, check_forward

from attnlib import BlockMask, S2Pattern, attention
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.block_mask import chosen
from attnlib.kernels.common import device
from attnlib.kernels.sparse import hopper, launch_hopper_backward
from attnlib.kernels.sparse.configs_hopper import hopper_sparse_config
from attnlib.params import MaskWindow, Params

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
KERNELS = ("hopper", "triton") if HOPPER else ("triton",)
NAMES = [(label, kernel) for label, case in CASES.items() for kernel in KERNELS
         if kernel == "triton" or case.shape.dtype != "float32"]  # fmt: skip


@pytest.mark.parametrize(("label", "kernel"), NAMES)
def test_forward(label, kernel):
    check_forward(CASES[label], "cuda", kernel)


@pytest.mark.parametrize(("label", "kernel"), NAMES)
def test_backward(label, kernel):
    check_backward(CASES[label], "cuda", kernel)


def many_tiles(mask, head_dim):
    """(q, k, v and the gradient of the output, block mask) of a call whose programs have several tiles of
    several lengths."""
    B, H, H_kv, S_q, S_k = 2, 8, 4, 3001, 3001 if mask == "S2" else 4001
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (B, H, S_q, head_dim), *2 * [(B, H_kv, S_k, head_dim)]
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").half() for shape in shapes)
    d_out = torch.randn(q.shape, generator=generator, device="cuda").half()
    if mask == "random":
        blocks = torch.rand(B, H, 24, 32, generator=generator, device="cuda") < 0.3
        block_mask = BlockMask.from_blocks(blocks, S_q, S_k)
    elif mask == "S2":
        block_mask = S2Pattern(H, H_kv, stride=8, dense_heads=1).mask(S_q, "cuda")
    else:
        block_mask = BlockMask.from_function(FUNCTIONS[mask], S_q, S_k, H=H, device="cuda")
    return (q, k, v, d_out), block_mask


MANY = ["random", "band by head", "dots", "S2"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MANY)
def test_many_tiles(mask, head_dim, kernel):
    """Twice, as the second launch takes another way."""
    (q, k, v, d_out), block_mask = many_tiles(mask, head_dim)
    dense = block_mask.to_dense()
    oracle, gradients = Oracle(q, k, v, mask=dense), GradientOracle(d_out, q, k, v, mask=dense)
    for _ in range(2):
        x = [y.clone().requires_grad_() for y in (q, k, v)]
        out, lse = attention(*x, block_mask=block_mask, return_lse=True, impl=kernel)
        oracle.judge(out, lse).raise_if_bad(f"{mask} D{head_dim} {kernel}")
        for verdict in gradients.judge(*torch.autograd.grad(out, x, d_out)).values():
            verdict.raise_if_bad(f"{mask} D{head_dim} {kernel}")


ENDS = [label for label, case in CASES.items() if case.window is None and not case.shape.causal
        and case.shape.dtype != "float32" and case.shape.head_dim <= 128]  # fmt: skip


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper")
@pytest.mark.parametrize("label", ENDS)
def test_consumers_that_leave_out_steps(label):
    case = CASES[label]
    q, k, v = make_inputs(case.shape, case.kind, device="cuda")
    scale = q.shape[-1] ** -0.5 if case.sm_scale is None else case.sm_scale
    params = Params(MaskWindow(None, None), scale, return_lse=True, block_mask=case.block_mask("cuda"))
    config = hopper_sparse_config(q.shape[-1], coarse=False, keep=True, short=True)
    params = params._replace(config=replace(config, leaves_out=True))
    oracle = Oracle(q, k, v, sm_scale=case.sm_scale, mask=case.dense("cuda"))
    judge_forward(*hopper.forward(q, k, v, params), oracle, label)


def judge_programs(tensors, sm_scale, block_mask, dense, label):
    """Of the backward pass: those that stay, which calls have, twice, as the second launch takes another way;
    on 4 SMs, where each has many columns; with consumers abreast; and those of one column, which calls with a
    bias have."""
    q, k, v, d_out = tensors
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    params = Params(MaskWindow(None, None), scale, return_lse=True, block_mask=block_mask)
    out, lse = hopper.forward(q, k, v, params._replace(config=hopper.configuration(q, k, v, params)))
    gradients = GradientOracle(d_out, q, k, v, sm_scale=scale, mask=dense)
    config = hopper.configuration(q, k, v, params, backward=True)
    assert config.persistent and config.alternate
    abreast = replace(config, alternate=False)

    def judge(chosen):
        own = params._replace(config=chosen)
        for verdict in gradients.judge(*hopper.backward(d_out, q, k, v, out, lse, own)).values():
            verdict.raise_if_bad(label)

    for tried in (config, config, replace(abreast, persistent=False)):
        judge(tried)
    launch_hopper_backward.prepare.cache_clear()  # its launches are for all SMs
    try:
        with mock.patch.object(device, "num_sms", lambda index: 4):
            judge(config)
            judge(abreast)
    finally:
        launch_hopper_backward.prepare.cache_clear()


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper")
@pytest.mark.parametrize("label", ENDS)
def test_programs_that_stay(label):
    case = CASES[label]
    d_out = make_inputs(case.shape, seed=1, device="cuda")[0]
    tensors = *make_inputs(case.shape, case.kind, device="cuda"), d_out
    judge_programs(tensors, case.sm_scale, case.block_mask("cuda"), case.dense("cuda"), label)


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MANY)
def test_programs_that_stay_have_many_columns(mask, head_dim):
    tensors, block_mask = many_tiles(mask, head_dim)
    judge_programs(tensors, None, block_mask, block_mask.to_dense(), f"{mask} D{head_dim}")


def test_in_a_cuda_graph():
    q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda").half() for _ in range(3))
    mask = BlockMask.from_function(FUNCTIONS["causal"], 1024, 1024, device="cuda")
    expected = attention(q, k, v, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, block_mask=mask)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def training_step(q, k, v, d_out, block_mask):
    """(out, dq, dk, dv)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, block_mask=block_mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def close(found, expected):
    """dQ is a sum in no order; all else has the same bits."""
    out, dq, dk, dv = zip(found, expected, strict=True)
    assert all(torch.equal(*pair) for pair in (out, dk, dv))
    assert (dq[0] - dq[1]).float().square().mean() <= 1e-6 * dq[1].float().square().mean()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_training_step_in_a_cuda_graph(head_dim):
    """Of programs that stay: a replay begins with the first column again."""
    shape = 1, 16, 2048, head_dim
    tensors = [torch.randn(shape, device="cuda").half() for _ in range(4)]
    mask = BlockMask.from_function(FUNCTIONS["causal"], 2048, 2048, device="cuda")
    graph, found = captured(lambda: training_step(*tensors, mask))
    for _ in range(3):
        for x in tensors:
            x.copy_(torch.randn(shape, device="cuda"))
        expected = training_step(*tensors, mask)
        graph.replay()
        close(found, expected)


def test_training_steps_on_two_streams():
    """Each has a counter of columns of its own."""
    made = [[torch.randn(1, 16, 2048, 128, device="cuda").half() for _ in range(4)] for _ in range(2)]
    mask = BlockMask.from_function(FUNCTIONS["causal"], 2048, 2048, device="cuda")
    expected = [training_step(*tensors, mask) for tensors in made]
    for found in side_by_side([partial(training_step, *tensors, mask) for tensors in made], 5):
        for mine, other in zip(found, expected, strict=True):
            close(mine, other)


def test_a_chosen_mask_that_is_first_used_under_capture():
    """Its lists and words are the graph's alone: a call outside makes its own, before the graph has run."""
    S, size = 2000, 128
    q, k, v = (torch.randn(1, 4, S, 128, device="cuda").half() for _ in range(3))
    blocks = torch.rand(1, 4, 16, 16, device="cuda") < 0.3
    attention(q, k, v, block_mask=BlockMask.from_chosen(blocks, S, block_size=size))  # compiled, prepared
    chosen._made.clear()
    mask = BlockMask.from_chosen(blocks, S, block_size=size)
    place = torch.arange(S, device="cuda")
    i, j = place[:, None] // size, place // size
    oracle = Oracle(q, k, v, mask=(blocks[:, :, i, j] | (i == j)) & (place[:, None] >= place))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, block_mask=mask)
    oracle.judge(attention(q, k, v, block_mask=mask)).raise_if_bad("beside a graph that has not run")
    graph.replay()
    oracle.judge(out).raise_if_bad("the graph")
    del graph, out
    scratch = [torch.full((1 << 22,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
    oracle.judge(attention(q, k, v, block_mask=mask)).raise_if_bad("when the graph is gone")
    del scratch


def test_a_mask_that_another_stream_meets():
    """What a call makes of a mask is there for a call on another stream that does not wait for the first."""
    tensors = [torch.randn(1, 16, 2048, 64, device="cuda").half() for _ in range(4)]

    def mask_of_now():
        return BlockMask.from_function(FUNCTIONS["causal"], 2048, 2048, device="cuda")

    expected = training_step(*tensors, mask_of_now())
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(first):
            mask = mask_of_now()
            torch.cuda._sleep(40_000_000)  # 20 ms, which what the mask makes of itself is behind
            training_step(*tensors, mask)
        with torch.cuda.stream(second):
            found = training_step(*tensors, mask)
        torch.cuda.synchronize()
        close(found, expected)


def test_torch_masks_on_the_gpu():
    from torch.nn.attention.flex_attention import create_block_mask

    theirs = create_block_mask(FUNCTIONS["documents"], None, None, 400, 400, device="cuda")
    ours = BlockMask.from_torch(theirs)
    direct = BlockMask.from_function(FUNCTIONS["documents"], 400, 400, device="cuda")
    assert torch.equal(ours.to_dense(), direct.to_dense())
