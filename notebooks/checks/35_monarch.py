"""Checks of the exercises of chapter 35."""

import math

import numpy as np
import torch

from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson
from attnlib.kernels.reference import monarch as model
from attnlib.params import MonarchParams


def check_best_block(best_block):
    """Fewest scores in tiles among all blocks."""

    def in_tiles(size):
        return 16 if size <= 16 else 1 << (size - 1).bit_length()

    for tokens in (20, 256, 300, 1000, 2048, 4096, 6000, 8192):
        scores = {}
        for block in range(1, tokens + 1):
            blocks = math.ceil(tokens / block)
            scores[block] = blocks * in_tiles(block) ** 2 + block * in_tiles(blocks) ** 2
        want, got = min(scores, key=scores.get), best_block(tokens)
        assert got in scores, f"N = {tokens}: expected a block from 1 to N, got {got!r}"
        told = f"{want} with {scores[want]} scores, got {got} with {scores[got]}"
        assert got == want, f"N = {tokens}: expected {told}"


def check_centers(centers):
    """Mean queries against fp64: several sizes of column and block, half precision, and far blocks."""
    torch.manual_seed(0)
    sizes = ((64, 8, 1.0, torch.float32), (60, 3, 1.0, torch.float32), (64, 8, 1.0, torch.float16))
    for tokens, block, spread, dtype in (*sizes, (64, 8, 400.0, torch.float32)):
        q, mean_k = (torch.randn(1, 2, tokens, 16, device=lesson.device()).to(dtype) for _ in range(2))
        q = q * spread
        entropy = torch.rand(1, 2, tokens, device=q.device)
        with np.errstate(all="ignore"):  # a wrong answer makes the interpreter warn of NaN
            got = centers(q, mean_k, entropy, block, 0.25).double()
        columns = [x.double().unflatten(2, (-1, block)) for x in (q, mean_k)]  # (1, 2, M, B, D)
        scores = 0.25 * torch.einsum("...npd,...mpd->...pnm", *columns)
        bias = math.log(2) * entropy.double().unflatten(2, (-1, block)).mT[..., None, :]
        weights = torch.softmax(torch.log_softmax(scores + bias, -1), -2)  # over the queries of a column
        want = torch.einsum("...pnm,...npd->...mpd", weights, columns[0]).flatten(2, 3)
        bound = spread * (2e-2 if dtype == torch.float16 else 1e-3)
        error = (got - want).abs().max().item()
        case = f"N={tokens}, block {block}, {dtype}, queries times {spread:g}"
        assert error <= bound, f"{case}: max error {error:.1e}, at most {bound:.0e}"


def judge_rounds(out, q, k, v, block):
    """Two rounds of the first head and the last against the model in fp64: three times what the model itself
    is off where it rounds as a kernel does, and the rounding of the output."""
    params = MonarchParams(block, 2, 0, q.shape[-1] ** -0.5)
    out, *ends = (x[:, [0, -1]] for x in (out, q, k, v))
    truth = model.output(*ends, params)
    usual, last = model.output(*ends, params, q.dtype) - truth, truth.to(q.dtype).double() - truth
    norms = {"max": lambda x: x.abs().max().item(), "RMS": lambda x: x.square().mean().sqrt().item()}
    for name, norm in norms.items():
        error, most = norm(out.double() - truth), 3 * (norm(usual.double()) + norm(last))
        case = f"N = {q.shape[2]}, block {block}, {str(q.dtype)[6:]}"
        assert error <= most, f"{case}: {name} error {error:.1e}, at most {most:.1e}"


def judge_two_rounds(attention):
    """Small calls: as many blocks as places, fewer, and more."""
    for tokens, block in ((256, 16), (512, 32), (512, 16)):
        tensors = make_inputs(Shape(1, 2, tokens, 64, causal=False), device=lesson.device())
        with np.errstate(all="ignore"):  # a wrong answer makes the interpreter warn of NaN
            out = attention(*tensors, block)
        judge_rounds(out, *tensors, block)
