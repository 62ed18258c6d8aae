"""FLOPs, bytes and ceilings against counts made another way."""

import dataclasses

import pytest
import torch

from attnlib.bench import roofline
from attnlib.bench.roofline import H100, H200
from attnlib.bench.shapes import TASK, Shape, sweep


@pytest.mark.parametrize("shape", [*TASK.values(), *sweep(64, causal=False), *sweep(128)])
def test_flops_follow_the_published_formula(shape):
    dense = 4 * shape.batch * shape.heads * shape.seqlen**2 * shape.head_dim
    assert roofline.flops(shape) == (dense // 2 if shape.causal else dense)


def test_task_flops():
    """The figures that the benchmark task prints, in TFLOP."""
    assert [round(roofline.flops(s) / 1e12, 4) for s in TASK.values()] == [0.2749, 0.5498, 1.0995]


@pytest.mark.parametrize(("sq", "sk"), [(96, 96), (32, 96), (96, 32), (1, 64)])
def test_pairs_agree_with_the_mask_up_to_its_diagonal(sq, sk):
    """Area and cell count of a bottom-right mask differ by half a cell for each row on the diagonal."""
    shape = Shape(2, 4, sq, 16, seqlen_k=sk)
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)
    pairs = roofline.flops(shape) / (4 * shape.batch * shape.heads * shape.head_dim)
    assert pairs == mask.sum().item() - min(sq, sk) / 2
    assert roofline.exps(shape) == shape.batch * shape.heads * pairs


def test_bytes():
    shape = Shape(2, 8, 100, 64, heads_kv=2, seqlen_k=300, causal=False)
    q, out = 2 * 8 * 100 * 64 * 2, 2 * 8 * 100 * 64 * 2
    k, v = 2 * 2 * 300 * 64 * 2, 2 * 2 * 300 * 64 * 2
    assert roofline.min_bytes(shape) == q + k + v + out
    scores = 2 * 8 * 100 * 300
    assert roofline.naive_bytes(shape) == q + k + v + out + 4 * 2 * scores
    assert roofline.naive_bytes(shape, score_itemsize=4) == q + k + v + out + 4 * 4 * scores


def test_tiled_work_counts_every_tile_of_every_head():
    shape = Shape(2, 3, 256, 32)
    visited = [(i, j) for i in range(4) for j in range(4) if j <= i]  # of 64 x 64
    work = roofline.tiled_work(shape, products=4, tiles_read=3, exps_per_score=2)
    tile, heads = 64 * 32 * 2, 6
    assert work["HBM"] == 4 * heads * 256 * 32 * 2
    assert work["L2"] == heads * (sum(3 * tile for _ in visited) + 2 * 256 * 32 * 2)
    assert work["tensor"] == heads * sum(4 * 2 * 64 * 64 * 32 for _ in visited)
    assert work["exp"] == heads * sum(2 * 64 * 64 for _ in visited)
    dense = roofline.tiled_work(dataclasses.replace(shape, causal=False), 4, 3, 2)
    assert dense["exp"] == heads * 2 * 256 * 256
    assert (
        roofline.tiled_work(dataclasses.replace(shape, seqlen=129), 1, 1, 1, 128)["exp"] == heads * 3 * 128**2
    )


def test_intensity():
    """The ideal dense kernel does S/2 FLOP per byte; the naive one approaches D/2 of fp16, whatever S is."""
    shape = Shape(1, 1, 65536, 128, causal=False)
    assert roofline.intensity(shape) == 65536 / 2
    assert roofline.intensity(shape, roofline.naive_bytes(shape)) == pytest.approx(128 / 2, rel=0.01)


@pytest.mark.parametrize("hw", [H100, H200])
def test_datasheet_is_consistent(hw):
    assert hw.sms * 4096 * hw.boost_mhz * 1e6 == pytest.approx(hw.tensor_tflops_fp16 * 1e12, rel=1e-3)
    assert hw.tensor_tflops_fp8 == pytest.approx(2 * hw.tensor_tflops_fp16, rel=1e-3)


def test_attainable_is_the_lower_of_two_roofs():
    assert roofline.attainable(10, H200) == pytest.approx(48.0)
    assert roofline.attainable(1e6, H200) == H200.tensor_tflops_fp16
    assert roofline.attainable(H200.ridge, H200) == pytest.approx(H200.tensor_tflops_fp16)
    assert 205 < H200.ridge < 207 < H100.ridge
    measured = dataclasses.replace(H200, tensor_tflops_fp16=680.0)
    assert roofline.attainable(1e6, measured) == 680.0


def test_exp_roof():
    """At D = 64 the exponentials alone take as long as the matmuls at peak; at D = 128 half as long."""
    assert roofline.exp_roof_tflops(64, H200) == pytest.approx(H200.tensor_tflops_fp16, rel=1e-3)
    assert roofline.exp_roof_tflops(128, H200) == pytest.approx(2 * H200.tensor_tflops_fp16, rel=1e-3)
