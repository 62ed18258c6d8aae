"""The calls that run under compute-sanitizer (`sanitize`), and what runs each of them.

Tensors are made on the CPU: a copy to the GPU is no kernel, and the sanitizer knows that it initializes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A forward and a backward pass. varlen: the same rows as three sequences instead of a batch."""

    impl: str
    shape: Any
    window: tuple[int, int] | None = None
    varlen: bool = False
    mask: str = ""  # a block mask: "dots", in which all blocks are partial, or "blocks"


class DecodeCall(NamedTuple):
    """Two new tokens for sequences of different lengths, one of them empty. same_launch: merged by the
    program that is last. scales: of caches in FP8, what has one: "all", or "pairs" of a sequence, or a page,
    and a head."""

    head_dim: int
    page: int | None
    split: str
    same_launch: bool
    scales: str | None = None
    impl: str = "decode"


class Fp8Call(NamedTuple):
    """attention_fp8 of grouped heads, with the kernels that quantize. varlen: the same rows as three
    sequences."""

    head_dim: int
    causal: bool
    varlen: bool
    scaling: str
    impl: str = "fp8"


class EntmaxCall(NamedTuple):
    """Queries and keys of different lengths. room: of a list."""

    head_dim: int
    alpha: float
    causal: bool
    room: int
    varlen: bool = False
    impl: str = "entmax"


class PooledCall(NamedTuple):
    """Attention and a pooled map. kept: "hopper" keeps maxima, "triton" computes scores anew. Lists of chosen
    blocks are not here: PyTorch's kernels make what theirs reads, and initcheck does not see these."""

    head_dim: int
    causal: bool
    size: int
    kept: str
    impl: str = "pooled"


class AccumulateCall(NamedTuple):
    """Keys in two parts, the second merged into the result of the first. out: its dtype."""

    head_dim: int
    causal: bool
    out: str
    impl: str


class BsfaCall(NamedTuple):
    """Queries and keys of different lengths, some blocks kept."""

    head_dim: int
    causal: bool
    heads: int
    impl: str


class ScoredCall(NamedTuple):
    """A forward and a backward pass with a score: "ALiBi", a "bias" that the Hopper kernel copies, a "table"
    by distance, which it loads, "sinks", or a function of one's "own". heads: of queries; as many of keys."""

    head_dim: int
    score: str
    heads: int
    impl: str = "hopper"


class MonarchCall(NamedTuple):
    """Tokens that do not fill their last block; masked: some do not count."""

    head_dim: int
    block: int
    steps: int
    masked: bool
    impl: str = "monarch"


class DistrCall(NamedTuple):
    """Queries and keys of different lengths. rows: that share an order of the columns, where queries are
    hashed; None: a head's keys are."""

    head_dim: int
    group: int
    rows: int | None
    causal: bool
    impl: str


class KeptCall(NamedTuple):
    """The forward Hopper kernel with `keep_shift`, of more tiles than an H200 has SMs. fp8: in e4m3."""

    head_dim: int
    causal: bool
    fp8: bool = False
    impl: str = "kept"


def calls() -> Iterator[NamedTuple]:
    """Whole blocks, tails, shifted diagonals, grouped heads, windows, varlen sequences; caches, pages."""
    from attnlib.bench.shapes import Shape

    for head_dim in (64, 128, 256):
        for impl in ("hopper", "triton"):
            for causal in (True, False):
                yield Call(impl, Shape(1, 2, 256, head_dim, causal))
                # Neither rows nor keys fill their last block.
                yield Call(impl, Shape(1, 2, 250, head_dim, causal))
                yield Call(impl, Shape(2, 4, 129, head_dim, causal, heads_kv=2))
                yield Call(impl, Shape(1, 2, 230, head_dim, causal, heads_kv=1), varlen=True)
            yield Call(impl, Shape(1, 2, 100, head_dim, True, seqlen_k=250))
            yield Call(impl, Shape(1, 2, 250, head_dim, False), window=(70, 20))
            # More tiles than an H200 has SMs: a program of the Hopper kernel computes several.
            yield Call(impl, Shape(1, 150, 130, head_dim, True, heads_kv=75, seqlen_k=200))
    for head_dim in (80, 96, 160, 192):  # in two parts
        yield Call("hopper", Shape(1, 2, 250, head_dim, True))
        yield Call("hopper", Shape(1, 2, 230, head_dim, False, heads_kv=1), varlen=True)
        yield Call("hopper", Shape(1, 150, 130, head_dim, True, heads_kv=75, seqlen_k=200))
    for impl in ("hopper", "triton"):  # values of another width
        yield Call(impl, Shape(1, 2, 250, 192, True, head_dim_v=128))
        yield Call(impl, Shape(1, 2, 230, 176, False, heads_kv=1, head_dim_v=104), varlen=True)
    yield Call("triton", Shape(1, 2, 130, 64, True, head_dim_v=256))
    for head_dim in (72, 104, 136):  # filled up
        yield Call("hopper", Shape(1, 2, 130, head_dim, True, "bfloat16"))
        yield Call("triton", Shape(1, 2, 130, head_dim, True, "bfloat16"))
    yield Call("triton", Shape(1, 2, 70, 64, True, "float32"))
    for head_dim, impl in product((64, 128, 256), ("hopper", "triton")):
        for mask in ("dots", "blocks"):
            yield Call(impl, Shape(2, 4, 300, head_dim, False, heads_kv=2, seqlen_k=390), mask=mask)
        # More tiles than an H200 has SMs.
        yield Call(impl, Shape(1, 75, 260, head_dim, False, seqlen_k=260), mask="dots")
    for head_dim in (64, 128):  # keys are gathered
        yield Call("hopper", Shape(1, 4, 600, head_dim, False, heads_kv=2), mask="S2")
    for head_dim, page, split, same_launch in product(
        (64, 96, 256), (None, 16), ("none", "fixed", "stream_k"), (False, True)
    ):
        if split != "none" or not same_launch:
            yield DecodeCall(head_dim, page, split, same_launch)
    for head_dim, page, scales in product((64, 128, 256), (None, 16, 64), ("all", "pairs")):
        yield DecodeCall(head_dim, page, "stream_k", False, scales)
    for head_dim in (128, 256):  # a page has all keys of a tile
        yield DecodeCall(head_dim, 64, "stream_k", False)
    yield DecodeCall(128, None, "none", False, "pairs")
    yield DecodeCall(128, 16, "fixed", True, "pairs")
    for head_dim, causal in product((64, 128, 256), (True, False)):
        yield Fp8Call(head_dim, causal, False, "block")
        yield Fp8Call(head_dim, causal, True, "head" if causal else "tensor")
    yield Fp8Call(72, True, False, "tensor")
    for head_dim, alpha, causal in ((64, 1.5, True), (64, 2.0, False), (96, 1.25, True), (256, 1.5, False)):
        yield EntmaxCall(head_dim, alpha, causal, 4096)
        yield EntmaxCall(head_dim, alpha, causal, 64)
        yield EntmaxCall(head_dim, alpha, causal, 64, True)
    for head_dim, causal, size in ((64, True, 64), (128, True, 128), (128, False, 64), (256, True, 64)):
        for kept in ("hopper", "triton"):
            yield PooledCall(head_dim, causal, size, kept)
    for head_dim, causal, impl in product((64, 128), (True, False), ("hopper", "triton")):
        yield BsfaCall(head_dim, causal, 2, impl)
    yield BsfaCall(128, True, 150, "hopper")  # more tiles than an H200 has SMs
    yield BsfaCall(64, True, 150, "hopper")
    for head_dim, score in product((64, 128), ("ALiBi", "bias", "sinks", "own")):
        yield ScoredCall(head_dim, score, 75)  # more tiles than an H200 has SMs
    for head_dim in (64, 128):
        yield ScoredCall(head_dim, "table", 2)
    for score in ("ALiBi", "bias", "table", "sinks", "own"):
        yield ScoredCall(256, score, 2)
    for score in ("bias", "sinks", "own"):
        yield ScoredCall(64, score, 2, "triton")
    for head_dim, impl in product((64, 80, 128, 256), ("hopper", "triton")):
        yield AccumulateCall(head_dim, True, "float32", impl)
        yield AccumulateCall(head_dim, False, "float16", impl)
    for head_dim, block, steps in ((64, 16, 1), (64, 45, 2), (128, 200, 3), (80, 7, 2)):
        yield MonarchCall(head_dim, block, steps, False)
        yield MonarchCall(head_dim, block, steps, True)
    for head_dim, group, rows in ((64, 2, None), (128, 4, 128), (72, 3, None), (64, 2, 128)):
        for impl in ("hopper", "triton"):
            yield DistrCall(head_dim, group, rows, rows is None, impl)
    for head_dim, causal in product((64, 128, 256), (True, False)):
        yield KeptCall(head_dim, causal)
        yield KeptCall(head_dim, causal, fp8=True)


def run(call: NamedTuple) -> tuple:
    """Its outputs and gradients; nothing where the kernel has none."""
    own = {
        BsfaCall: run_bsfa, DecodeCall: run_decoding, EntmaxCall: run_entmax, Fp8Call: run_fp8,
        PooledCall: run_pooled, ScoredCall: run_scored, AccumulateCall: run_accumulating,
        MonarchCall: run_monarch, DistrCall: run_distr, KeptCall: run_kept,
    }  # fmt: skip
    return own.get(type(call), run_training)(call)


def run_training(call: Call) -> tuple:
    """Output, LSE and gradients of a forward and a backward pass; nothing where the kernel has none."""
    import torch

    from attnlib import attention, attention_varlen
    from attnlib.bench.oracle import make_inputs
    from attnlib.kernels import hopper
    from attnlib.params import Params, mask_window

    impl, shape, window, varlen, mask = call
    # Made on the CPU: a copy to the GPU is no kernel, and the sanitizer knows that it initializes.
    inputs = make_inputs(shape, device="cpu")
    if varlen:
        inputs = [x[0].transpose(0, 1).contiguous() for x in inputs]
    q, k, v = (x.cuda().requires_grad_() for x in inputs)
    d_out = torch.randn(*q.shape[:-1], v.shape[-1]).to(q.dtype).cuda()
    how = {"causal": shape.causal, "window": window, "impl": impl, "return_lse": True}
    if mask:
        how |= {"block_mask": block_mask(mask, shape)}
    if varlen:
        cu = torch.tensor([0, 65, 65, shape.seqlen], dtype=torch.int32).cuda()
        out, lse = attention_varlen(q, k, v, cu, cu, shape.seqlen - 65, shape.seqlen - 65, **how)
    elif impl == "hopper" and hopper.unsupported(q, k, v, Params(mask_window(shape.causal, window), 1.0)):
        return ()
    else:
        out, lse = attention(q, k, v, **how)
    out.backward(d_out)
    torch.cuda.synchronize()
    return out, lse, q.grad, k.grad, v.grad


def run_decoding(call: DecodeCall) -> tuple:
    """The output: of a row that sees no key the LSE is -inf."""
    from dataclasses import replace

    import torch

    from attnlib.kernels import DECODERS
    from attnlib.kernels.decode.launch import call_of, configuration
    from attnlib.params import DecodeParams, mask_window

    lengths = torch.tensor([0, 17, 700, 1300], dtype=torch.int32)
    room, page, D = 1312, call.page, call.head_dim
    size = (4, 2, room, D) if page is None else (4 * -(-room // page), 2, page, D)
    dtype = torch.float16 if call.scales is None else torch.float8_e4m3fn
    q, k, v = (torch.randn(shape).half() for shape in ((4, 8, 2, D), size, size))
    q, k, v = q.cuda(), k.to(dtype).cuda(), v.to(dtype).cuda()
    scale = {None: None, "all": torch.tensor(0.5), "pairs": torch.rand(size[:2])}[call.scales]
    scale = None if scale is None else scale.cuda()
    table = None if page is None else torch.randperm(size[0]).view(4, -1).int().cuda()
    params = DecodeParams(mask_window(True, None), D**-0.5, lengths.cuda(), table, True, call.split)
    params = params._replace(k_scale=scale, v_scale=scale)
    config = replace(configuration(call_of(q, k, v, table, params)), same_launch=call.same_launch)
    out, _ = DECODERS["triton"].forward(q, k, v, params._replace(config=config))
    torch.cuda.synchronize()
    return (out,)


def run_fp8(call: Fp8Call) -> tuple:
    """The output: of a row that sees no key the LSE is -inf."""
    import torch

    from attnlib import attention_fp8, attention_fp8_varlen

    if torch.cuda.get_device_capability()[0] != 9:
        return ()
    D, rows, keys = call.head_dim, (0, 65, 65, 250), (0, 140, 150, 390)
    options = {"causal": call.causal, "scaling": call.scaling}
    if call.varlen:
        sizes = (rows[-1], 4, D), (keys[-1], 2, D), (keys[-1], 2, D)
        q, k, v = (torch.randn(size).bfloat16().cuda() for size in sizes)
        starts = [torch.tensor(x, dtype=torch.int32).cuda() for x in (rows, keys)]
        out = attention_fp8_varlen(q, k, v, *starts, 185, 240, **options)
    else:
        sizes = (2, 4, rows[-1], D), (2, 2, keys[-1], D), (2, 2, keys[-1], D)
        q, k, v = (torch.randn(size).bfloat16().cuda() for size in sizes)
        out = attention_fp8(q, k, v, **options)
    torch.cuda.synchronize()
    return (out,)


def run_pooled(call: PooledCall) -> tuple:
    """Output and map."""
    import torch

    from attnlib import attention_pooled
    from attnlib.bench.oracle import make_inputs
    from attnlib.bench.shapes import Shape

    if call.kept == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        return ()
    q, k, v = make_inputs(Shape(1, 4, 330, call.head_dim, call.causal, heads_kv=2))
    return attention_pooled(q, k, v, block=call.size, causal=call.causal, impl=call.kept)


def give_room(numbers: int) -> int:
    """Lists of entmax have room for so many numbers; returns for how many before."""
    from attnlib.kernels.entmax import call, launch, launch_backward

    usual, call.ROOM = call.ROOM, numbers
    for module in (launch, launch_backward):
        module.prepare.cache_clear()
    return usual


def run_entmax(call: EntmaxCall) -> tuple:
    """Output, threshold and gradients. A row that sees no key has no threshold: it is +inf."""
    usual = give_room(call.room)
    try:
        return run_entmax_in_room(call)
    finally:
        give_room(usual)


def run_entmax_in_room(call: EntmaxCall) -> tuple:
    import torch

    from attnlib import attention_entmax, attention_entmax_varlen

    sizes = (4, 200), (2, 230), (2, 230)
    options = {"alpha": call.alpha, "causal": call.causal, "return_tau": True}
    if call.varlen:
        ends = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([0, 70, 70, 200], [0, 30, 35, 230]))
        q, k, v = (torch.randn(n, h, call.head_dim).half().cuda().requires_grad_() for h, n in sizes)
        out, tau = attention_entmax_varlen(q, k, v, *ends, 130, 195, **options)
    else:
        q, k, v = (torch.randn(1, h, n, call.head_dim).half().cuda().requires_grad_() for h, n in sizes)
        out, tau = attention_entmax(q, k, v, **options)
    out.backward(torch.randn(out.shape).half().cuda())
    torch.cuda.synchronize()
    return out, tau[tau != torch.inf], q.grad, k.grad, v.grad


def run_accumulating(call: AccumulateCall) -> tuple:
    """Output and LSE, of which nothing is written before."""
    import torch

    from attnlib import dispatch
    from attnlib.params import Existing, MaskWindow, Params

    if call.impl == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        return ()
    sizes = (4, 200), (2, 330), (2, 330)
    q, k, v = (torch.randn(1, h, n, call.head_dim).half().cuda() for h, n in sizes)
    out = torch.empty(q.shape, dtype=getattr(torch, call.out), device="cuda")
    into = Existing(out, torch.full(q.shape[:3], -torch.inf).cuda())
    params = Params(MaskWindow(None, None), 0.1, impl=call.impl)
    dispatch.accumulate(q, k[:, :, :100], v[:, :, :100], into, params)
    seen = MaskWindow(None, 0 if call.causal else None)
    dispatch.accumulate(q, k[:, :, 100:], v[:, :, 100:], into, params._replace(window=seen))
    torch.cuda.synchronize()
    return tuple(into)


def run_monarch(call: MonarchCall) -> tuple:
    """The output."""
    import torch

    from attnlib import attention_monarch

    q, k, v = (torch.randn(2, h, 530, call.head_dim).half().cuda() for h in (4, 2, 2))
    mask = (torch.rand(2, 530) < 0.7).cuda() if call.masked else None
    out = attention_monarch(q, k, v, block=call.block, steps=call.steps, key_mask=mask, impl="triton")
    torch.cuda.synchronize()
    return (out,)


def run_distr(call: DistrCall) -> tuple:
    """The output."""
    import torch

    from attnlib import attention_distr

    if call.impl == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        return ()
    sizes = (4, 300), (2, 330), (2, 330)
    q, k, v = (torch.randn(1, h, n, call.head_dim).half().cuda() for h, n in sizes)
    hashed = {"hashed": "k"} if call.rows is None else {"hashed": "q", "rows": call.rows}
    out = attention_distr(q, k, v, group=call.group, causal=call.causal, impl=call.impl, **hashed)
    torch.cuda.synchronize()
    return (out,)


def run_kept(call: KeptCall) -> tuple:
    """Output and LSE; scores grow from block to block, so that warps need new shifts."""
    from dataclasses import replace

    import torch

    from attnlib.kernels import fp8, hopper
    from attnlib.kernels.common.fp8 import Recipe
    from attnlib.kernels.hopper import launch_fp8
    from attnlib.kernels.hopper.configs import hopper_config
    from attnlib.kernels.hopper.configs_fp8 import fp8_config
    from attnlib.params import Params, mask_window

    if torch.cuda.get_device_capability()[0] != 9:
        return ()
    q, k, v = (torch.randn(1, 75, 512, call.head_dim) for _ in "qkv")
    q[..., 0], k[..., 0] = 8.0, torch.arange(512, 0, -1) / 8
    q, k, v = (x.half().cuda() for x in (q, k, v))
    of_width = fp8_config if call.fp8 else hopper_config
    config = replace(of_width(call.head_dim), keep_shift=True)
    params = Params(mask_window(call.causal, None), call.head_dim**-0.5, return_lse=True, config=config)
    if call.fp8:
        operands = [fp8.quantize(x, role, Recipe()) for x, role in zip((q, k, v), "qkv", strict=True)]
        found = launch_fp8.forward(*operands, params, torch.float16)
    else:
        found = hopper.forward(q, k, v, params)
    torch.cuda.synchronize()
    return found


def run_bsfa(call: BsfaCall) -> tuple:
    """Output, LSE and what was kept."""

    import torch

    from attnlib import attention_bsfa

    sizes = (call.heads, 200), (call.heads // 2, 530), (call.heads // 2, 530)
    q, k, v = (torch.randn(1, h, n, call.head_dim).half().cuda() for h, n in sizes)
    options = {"threshold": 3.9, "causal": call.causal, "impl": call.impl}
    found = attention_bsfa(q, k, v, return_lse=True, return_kept=True, **options)
    torch.cuda.synchronize()
    return found


def run_scored(call: ScoredCall) -> tuple:
    """Output, LSE and gradients, that of what is learned too."""
    import torch
    from time_sparse import softsign, softsign_derivative

    from attnlib import Score, attention

    sizes = 260, 264, 264
    q, k, v = (torch.randn(1, call.heads, n, call.head_dim).half().cuda().requires_grad_() for n in sizes)
    d_out = torch.randn(q.shape).half().cuda()
    if call.score == "ALiBi":
        learned, score = [], Score(alibi=torch.rand(call.heads).cuda(), soft_cap=5.0)
    elif call.score == "bias":
        learned = [torch.randn(260, 264).half().cuda().requires_grad_()]
        score = Score(bias=learned[0])
    elif call.score == "sinks":
        learned = [torch.randn(call.heads).cuda().requires_grad_()]
        score = Score(sinks=learned[0])
    elif call.score == "own":
        learned, score = [], Score(function=softsign, derivative=softsign_derivative)
    else:
        learned = [torch.randn(call.heads, 41).cuda().requires_grad_()]
        score = Score(relative=learned[0])
    out, lse = attention(q, k, v, causal=True, score=score, impl=call.impl, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v, *learned), d_out)
    torch.cuda.synchronize()
    return out, lse, *gradients


def block_mask(name: str, shape: Any):
    """Made of a tensor that was made on the CPU, some keys seen by nobody; "S2" by its pattern."""
    import torch

    from attnlib import BlockMask, S2Pattern

    if name == "S2":
        return S2Pattern(shape.heads, shape.heads_kv, local_blocks=1, stride=2).mask(shape.seqlen, "cuda")
    q, k = torch.arange(shape.seqlen)[:, None], torch.arange(shape.keys)
    seen = (q + k) % 3 == 0 if name == "dots" else (q // 128 + k // 128) % 2 == 0
    return BlockMask.from_mask((seen & (k >= 128)).cuda())
