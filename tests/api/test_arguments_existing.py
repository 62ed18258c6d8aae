"""What a call is merged into: every mistake has a message that names it."""

from __future__ import annotations

import pytest
import torch
from families import forget_launches

from attnlib import dispatch
from attnlib.params import Existing, MaskWindow, Params, Varlen

PARAMS = Params(MaskWindow(None, None), 0.2, impl="reference")
OUT = ("into.out: expected the last dimension contiguous, other strides positive multiples of 8 and an "
       "address of 16 bytes")  # fmt: skip
LSE = "into.lse: expected the last dimension contiguous and other strides positive"


def q(dtype=torch.float16):
    return torch.randn(1, 2, 5, 16).to(dtype)


def existing(**changed):
    parts = {"out": torch.zeros(1, 2, 5, 16), "lse": torch.full((1, 2, 5), -torch.inf)}
    return Existing(**(parts | changed))


def varlen():
    cu = torch.tensor([0, 5], dtype=torch.int32)
    return PARAMS._replace(varlen=Varlen(cu, cu, 5, 5))


MISTAKES = {
    "varlen": (existing(), varlen(), ValueError,
               "into: expected None beside varlen sequences, got an existing "
               "result"),
    "mask": (existing(), PARAMS._replace(block_mask=object()), ValueError,
             "into: expected None beside a block mask, got an existing result"),
    "no tensor": (existing(out=None), PARAMS, TypeError, "into.out: expected a torch.Tensor, got NoneType"),
    "dimensions": (existing(lse=torch.zeros(2, 5)), PARAMS, ValueError,
                   "into.lse: expected (B, H, Sq), got shape (2, 5)"),
    "dtype": (existing(out=torch.zeros(1, 2, 5, 16).bfloat16()), PARAMS, TypeError,
              "into.out: expected dtype torch.float16 as q has, or torch.float32, got torch.bfloat16"),
    "dtype of the LSE": (existing(lse=torch.zeros(1, 2, 5).double()), PARAMS, TypeError,
                         "into.lse: expected dtype torch.float32, got torch.float64"),
    "shape": (existing(out=torch.zeros(1, 2, 6, 16)), PARAMS, ValueError,
              "into.out: expected shape (1, 2, 5, 16), got (1, 2, 6, 16)"),
    "shape of the LSE": (existing(lse=torch.zeros(1, 2, 4)), PARAMS, ValueError,
                         "into.lse: expected shape (1, 2, 5), got (1, 2, 4)"),
    "device": (existing(out=torch.zeros(1, 2, 5, 16, device="meta")), PARAMS, ValueError,
               "into.out: expected device cpu as q has, got meta"),
    "columns apart": (existing(out=torch.zeros(1, 2, 16, 5).transpose(2, 3)), PARAMS, ValueError,
                      f"{OUT}, got strides (160, 80, 1, 5) and address 0 mod 16"),
    "rows that are one": (existing(out=torch.zeros(1, 2, 1, 16).expand(-1, -1, 5, -1)), PARAMS, ValueError,
                          f"{OUT}, got strides (32, 16, 0, 1) and address 0 mod 16"),
    "address": (existing(out=torch.zeros(200)[1:161].view(1, 2, 5, 16)), PARAMS, ValueError,
                f"{OUT}, got strides (160, 80, 16, 1) and address 4 mod 16"),
    "rows of the LSE apart": (existing(lse=torch.zeros(1, 5, 2).transpose(1, 2)), PARAMS, ValueError,
                              f"{LSE}, got strides (10, 1, 2)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name):
    into, params, kind, message = MISTAKES[name]
    with pytest.raises(kind) as error:
        dispatch.accumulate(q(), q(), q(), into, params)
    assert str(error.value) == message


def test_decoding_merges_into_nothing():
    forget_launches()
    with pytest.raises(ValueError, match="impl: 'decode' merges into no existing result"):
        dispatch.accumulate(q(), q(), q(), existing(), PARAMS._replace(impl="decode"))


def test_no_keys():
    """Rows that have seen none get 0, the others stay."""
    into = existing(out=torch.ones(1, 2, 5, 16))
    into.lse[:, 0] = 0.5
    none = q()[:, :, :0]
    dispatch.accumulate(q(), none, none, into, PARAMS)
    assert (into.out[:, 0] == 1).all() and (into.out[:, 1] == 0).all()
    assert (into.lse[:, 0] == 0.5).all() and (into.lse[:, 1] == -torch.inf).all()


def test_own_results_stay_as_they_are():
    """The launches of a call with an existing result are not those of a call with one of its own."""
    forget_launches()
    params = Params(MaskWindow(None, None), 0.2, return_lse=True, impl="triton")
    tensors = [q(torch.float32) for _ in range(3)]
    alone = dispatch.forward(*tensors, params)
    into = existing()
    dispatch.accumulate(*tensors, into, params)
    again = dispatch.forward(*tensors, params)
    for x, y, z in zip(alone, again, into, strict=True):
        assert torch.equal(x, y) and torch.allclose(x, z, atol=1e-6) and x.data_ptr() != z.data_ptr()
