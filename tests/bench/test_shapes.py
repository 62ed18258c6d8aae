"""Shapes: validation, canonical form, round trips, the benchmark task and the sweep."""

import pytest
import torch

from attnlib.bench.shapes import TASK, Shape, sweep


def test_label_and_derived_sizes():
    shape = Shape(4, 32, 4096, 64)
    assert shape.label == "B4 H32 S4096 D64 causal fp16"
    assert (shape.kv_heads, shape.keys, shape.itemsize, shape.torch_dtype) == (32, 4096, 2, torch.float16)
    grouped = Shape(1, 32, 1, 128, False, "float32", heads_kv=8, seqlen_k=8192)
    assert grouped.label == "B1 H32/8 S1x8192 D128 dense fp32"
    assert (grouped.kv_heads, grouped.keys, grouped.itemsize) == (8, 8192, 4)


def test_same_call_compares_equal_however_it_is_written():
    assert Shape(1, 8, 64, 64, heads_kv=8, seqlen_k=64) == Shape(1, 8, 64, 64)
    assert Shape(1, 8, 64, 64, heads_kv=4) != Shape(1, 8, 64, 64)
    assert len({Shape(1, 8, 64, 64), Shape(1, 8, 64, 64, seqlen_k=64)}) == 1


@pytest.mark.parametrize("shape", [*TASK.values(), Shape(1, 8, 3, 16, False, "bfloat16", 2, 7)])
def test_dict_round_trip(shape):
    data = shape.to_dict()
    assert None not in data.values()
    assert Shape.from_dict(data) == shape
    assert Shape.of_row({**data, "impl": "ours", "ms": 1.0}) == shape


def test_from_dict_rejects_unknown_keys():
    with pytest.raises(ValueError, match="unknown keys.*headdim"):
        Shape.from_dict({"batch": 1, "heads": 1, "seqlen": 1, "headdim": 64})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch: expected at least 1, got 0"),
        ({"seqlen": 16.0}, TypeError, "seqlen: expected an int, got 16.0"),
        ({"heads": True}, TypeError, "heads: expected an int, got True"),
        ({"causal": 1}, TypeError, "causal: expected a bool, got 1"),
        ({"dtype": "fp16"}, ValueError, "dtype: expected one of float16, bfloat16, float32, got 'fp16'"),
        ({"heads_kv": 3}, ValueError, "heads_kv: expected a divisor of heads=8, got 3"),
        ({"seqlen_k": 0}, ValueError, "seqlen_k: expected at least 1, got 0"),
    ],
)
def test_bad_fields_are_named(changes, error, message):
    fields = {"batch": 1, "heads": 8, "seqlen": 16, "head_dim": 64, **changes}
    with pytest.raises(error, match=message):
        Shape(**fields)


def test_task_is_the_published_one():
    assert [s.label for s in TASK.values()] == [
        "B4 H32 S4096 D64 causal fp16",
        "B2 H16 S8192 D128 causal fp16",
        "B1 H8 S16384 D256 causal fp16",
    ]
    assert {s.batch * s.heads * s.seqlen**2 for s in TASK.values()} == {2**31}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sweep_holds_tokens_and_hidden_size(head_dim):
    shapes = sweep(head_dim, causal=False, dtype="bfloat16")
    assert [s.seqlen for s in shapes] == [512, 1024, 2048, 4096, 8192, 16384]
    assert {s.batch * s.seqlen for s in shapes} == {16384}
    assert {s.heads * s.head_dim for s in shapes} == {2048}
    assert {(s.causal, s.dtype) for s in shapes} == {(False, "bfloat16")}


def test_sweep_rejects_what_does_not_divide():
    with pytest.raises(ValueError, match="head_dim"):
        sweep(96)
    with pytest.raises(ValueError, match="seqlens.*1000"):
        sweep(64, seqlens=(512, 1000))
