"""attnlib as the FlashAttention of PyTorch, on a CPU: registered there for the test."""

from __future__ import annotations

import re

import pytest
import torch

from attnlib import attention, sdpa

aten = torch.ops.aten


@pytest.fixture
def active():
    kept = sdpa._Active("CPU")
    yield kept
    kept.remove()


def inputs(rows: int = 20, keys: int = 20) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (2, 4, rows, 16), (2, 2, keys, 16), (2, 2, keys, 16)
    return [torch.randn(*size, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradients(active, causal):
    given, same = inputs(), inputs()
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*given, is_causal=causal, scale=0.4)
    expected, exact_lse = attention(*same, causal=causal, sm_scale=0.4, return_lse=True, impl="reference")
    assert (out - expected).abs().max() < 1e-5 and (lse - exact_lse).abs().max() < 1e-5
    out.sum().backward()  # a gradient that is one number, expanded
    expected.sum().backward()
    for x, y in zip(given, same, strict=True):
        assert (x.grad - y.grad).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p: expected 0, got 0.1"),
        ({"return_debug_mask": True}, "return_debug_mask: expected False, got True"),
        ({"is_causal": True}, "is_causal: expected as many queries as keys, got 20 and 24"),
    ],
)
def test_what_it_refuses(active, options, message):
    with pytest.raises(RuntimeError, match=message):
        aten._scaled_dot_product_flash_attention(*inputs(keys=24), **options)


def of_sizes(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=dtype) for size in sizes]


FITTING = [(1, 2, 20, 16)] * 3
WRONG = {
    "k: expected batch size 2 as q has": (of_sizes((2, 2, 20, 16), *FITTING[1:]), {}),
    "k: expected a number of heads that divides q's 3": (of_sizes((1, 3, 20, 16), *FITTING[1:]), {}),
    "v: expected shape (1, 2, 20, 16) as k has": (of_sizes(*FITTING[1:], (1, 2, 19, 16)), {}),
    "q: expected a head dimension that is a multiple of 8": (of_sizes(*[(1, 2, 20, 12)] * 3), {}),
    "q: expected dtype float16": (of_sizes(*FITTING, dtype=torch.float64), {}),
    "sm_scale: expected a number from": (of_sizes(*FITTING), {"scale": float("nan")}),
}


@pytest.mark.parametrize("message", WRONG)
def test_the_operators_check_what_they_are_given(active, message):
    given, options = WRONG[message]
    wrong = pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}")
    with wrong:
        aten._scaled_dot_product_flash_attention(*given, **options)
    out = torch.ones(*given[0].shape[:3], given[2].shape[3], dtype=given[0].dtype)
    lse, seed = out[..., 0].float(), torch.zeros(2, dtype=torch.uint64)
    sizes = None, None, given[0].shape[2], given[1].shape[2]
    with wrong:
        aten._scaled_dot_product_flash_attention_backward(
            out, *given, out, lse, *sizes, 0.0, False, seed, seed, **options
        )


def test_pytorch_knows_it_and_forgets_it():
    from torch.nn import attention as backends

    sdpa.register()
    assert sdpa.NAME in backends.list_flash_attention_impls()
    backends.activate_flash_attention_impl(sdpa.NAME)
    assert backends.current_flash_attention_impl() == sdpa.NAME
    backends.restore_flash_attention_impl()
    assert backends.current_flash_attention_impl() is None


def test_nothing_is_left_when_it_is_removed():
    sdpa._Active("CPU").remove()
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(*inputs())
