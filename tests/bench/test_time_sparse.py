"""What tests/gpu/time_sparse.py times on a GPU: its masks, and that a wrong result is refused."""

from __future__ import annotations

import pytest
import time_sparse
import torch
from cases import INTERPRETER_REMARKS
from time_sparse import Judge, checked, flex_mask, inputs_of, kept_blocks

from attnlib import BlockMask, attention
from attnlib.kernels.reference.scores import scored
from attnlib.scores import parts_of

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("part", time_sparse.KEPT)
def test_rows_keep_as_many_blocks_each_head_others(part):
    keep = kept_blocks(2, time_sparse.TOKENS, part, "cpu")
    assert set(keep.sum(-1).flatten().tolist()) == {round(part * 128)}
    assert not torch.equal(keep[:, 0], keep[:, 1])


def test_the_mask_of_flex_attention_is_the_same():
    keep = kept_blocks(2, 512, 1 / 2, "cpu")
    ours = BlockMask.from_blocks(keep, 512, 512)
    assert torch.equal(BlockMask.from_torch(flex_mask(keep)).to_dense(), ours.to_dense())
    assert torch.equal(time_sparse._last_head(ours), ours.to_dense()[:, -1:])


def test_a_right_call_is_kept_and_a_wrong_one_not(device, capsys):
    tensors = [x[:, :2] for x in inputs_of(16, 256, device)]
    q, k, v, d_out = tensors
    mask = BlockMask.from_blocks(kept_blocks(2, 256, 1 / 2, device), 256, 256)
    judge, calls = Judge(tensors, mask), {}
    out = attention(q, k, v, block_mask=mask)
    assert checked("attnlib", lambda: out, judge.forward, calls)
    assert not checked("attnlib wrong", lambda: out * 1.1, judge.forward, calls)
    assert checked("a peer", lambda: out * 1.1, judge.forward, calls), "a peer that is wrong is left out"
    assert list(calls) == ["attnlib"] and "left out: a peer: AssertionError" in capsys.readouterr().out
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(attention(*leaves, block_mask=mask), leaves, d_out)
    judge.backward("attnlib", gradients)
    with pytest.raises(AssertionError, match="is wrong: dv"):
        judge.backward("attnlib", (*gradients[:2], gradients[2] * 1.1))


@pytest.mark.parametrize("name", ["relative", "bias", "own", "learned relative", "learned bias"])
def test_scores_are_judged_and_are_those_of_flex_attention(name, device):
    tensors = [x[:, :2] for x in inputs_of(16, 128, device)]
    mask = BlockMask.from_function(time_sparse.causal, 128, 128, device=device)
    score, theirs = time_sparse.scores_of(2, 128, device)[name]
    judge = Judge(tensors, mask, score)
    judge.forward("attnlib", attention(*tensors[:3], causal=True, score=score))
    with pytest.raises(AssertionError, match="is wrong"):
        judge.forward("attnlib", attention(*tensors[:3], causal=True))
    s = torch.randn(128, 128, device=device)
    i, j = torch.arange(128, device=device)[:, None], torch.arange(128, device=device)
    ours = parts_of(score, *tensors[:2])
    expected = scored(s.expand(1, 2, 128, 128), ours, 0, (128, 128))[0][0, 1]
    torch.testing.assert_close(theirs(s, 0, 1, i, j), expected)


def test_the_gradient_of_a_table_is_judged(device):
    *inputs, d_out = (x[:, :2] for x in inputs_of(16, 300, device))
    mask = BlockMask.from_function(time_sparse.causal, 300, 300, device=device)
    score, _ = time_sparse.scores_of(2, 300, device)["learned relative"]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, causal=True, score=score)
    gradients = torch.autograd.grad(out, (*leaves, score.relative), d_out)
    judge = Judge((*inputs, d_out), mask, score)
    judge.backward("attnlib", gradients)
    wrong = gradients[3].clone()
    wrong[1, time_sparse.REACH - 3] += 1
    with pytest.raises(AssertionError, match="is wrong: dbias"):
        judge.backward("attnlib", (*gradients[:3], wrong))


def test_peers_come_from_a_file_that_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(time_sparse.PEERS, raising=False)
    assert time_sparse.peers() == {} and "is not set" in capsys.readouterr().out
    path = tmp_path / "mine.py"
    fa4 = "make_fa4_sparse = lambda q, k, v, keep, causal: (q, causal)"
    path.write_text(f"{fa4}\nmake_cudnn_bsa = lambda *x: x\n")
    monkeypatch.setenv(time_sparse.PEERS, str(path))
    made = time_sparse.peers()
    assert made["FlashAttention-4"](1, 2, 3, 4) == (1, False) and made["cuDNN"](1, 2, 3, 4) == (1, 2, 3, 4)
