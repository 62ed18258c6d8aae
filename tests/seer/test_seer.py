"""The gate, what becomes of its scores, and the small model that its quality is measured with."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INTERPRETER_REMARKS

from attnlib import attention, attention_decode
from attnlib.bench import seer_quality
from attnlib.bench.oracle import Oracle
from attnlib.seer import SeerGate, above, decode_chosen, mask_of, top, top_of_density

pytestmark = INTERPRETER_REMARKS


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gate_of(decode: bool = False, heads: int = 4, **options) -> SeerGate:
    torch.manual_seed(0)
    gate = SeerGate(heads, 2, 16, block=64, decode=decode, **options)
    with torch.no_grad():
        for x in gate.parameters():
            x += 0.1 * torch.randn_like(x)
    return gate


# ---------------------------------------------------------------- scores


def by_hand(gate: SeerGate, q: torch.Tensor, k: torch.Tensor, b: int, h: int, i: int, j: int) -> float:
    """One score, from the definition: without `decode` of block i, with it of query i and key head h."""

    def placed(x: torch.Tensor, place: int) -> torch.Tensor:
        x, half = x / x.square().mean().sqrt(), gate.width // 2
        turned = torch.view_as_complex(torch.stack([x[:half], x[half:]], -1))
        angle = place * gate.theta ** (-torch.arange(half) / half)
        turned = turned * torch.polar(torch.ones(half), angle.float())
        return torch.cat([turned.real, turned.imag])

    group, size = gate.heads // gate.kv_heads, gate.block
    own = k[b, h if gate.decode else h // group, j * size : (j + 1) * size]
    key = torch.cat([own.max(0).values, own.min(0).values, own.mean(0)])
    key = placed(key @ gate.k_map[h if gate.decode else h // group], j)
    if gate.decode:
        query = torch.cat([q[b, h * group + g, i] for g in range(group)])
        return float(placed(query @ gate.q_map[h], i // size) @ key) / math.sqrt(gate.width)
    query = q[b, h, i * size : (i + 1) * size].mean(0)
    return float(placed(query @ gate.q_map[h], i) @ key) / math.sqrt(gate.width)


@pytest.mark.parametrize("decode", [False, True])
@torch.no_grad()
def test_scores_are_the_definition(decode):
    gate = gate_of(decode, width=8)
    q, k = randn(2, 4, 200, 16), randn(2, 2, 200, 16, seed=1)
    found = gate(q, k)
    assert found.shape == ((2, 2, 200, 4) if decode else (2, 4, 4, 4))
    for b, h, i, j in ((0, 0, 3, 1), (1, 1, 3, 2), (1, 0, 2, 0)):
        i = 50 * i if decode else i
        assert found[b, h, i, j].item() == pytest.approx(by_hand(gate, q, k, b, h, i, j), abs=1e-4)
    row = torch.arange(found.shape[2])[:, None] // (64 if decode else 1)
    assert torch.equal(found[0, 0] == -math.inf, torch.arange(4) > row)


@torch.no_grad()
def test_keys_of_full_blocks_never_change():
    """What decoding relies on: the scores of a token are those of the whole sequence's row."""
    gate, q, k = gate_of(True), randn(1, 4, 200, 16), randn(1, 2, 200, 16, seed=1)
    whole, part = gate.keys(k), gate.keys(k[:, :, :130])
    torch.testing.assert_close(whole[:, :, :2], part[:, :, :2])
    scores = gate.queries(q[:, :, 150:151], first=150) @ whole[:, :, :3].mT / math.sqrt(gate.width)
    torch.testing.assert_close(scores, gate(q, k)[:, :, 150:151, :3])


def test_the_loss_is_smallest_at_the_truth():
    gate, n = gate_of(), 6
    below = torch.ones(n, n, dtype=torch.bool).tril()
    pooled = torch.rand(1, 4, n, n, generator=torch.Generator().manual_seed(2)).masked_fill(~below, 0.0)
    truth = pooled.log()  # -inf above the diagonal, and up to a number for each row
    assert gate.loss(truth + randn(1, 4, n, 1), pooled).item() == pytest.approx(0, abs=1e-6)
    scores = (truth + randn(1, 4, n, n)).requires_grad_()
    loss = gate.loss(scores, pooled)
    loss.backward()
    assert loss > 0.05 and torch.isfinite(scores.grad).all()
    wanted, found = (pooled / pooled.sum(-1, keepdim=True))[0, 1, 5], torch.softmax(scores, -1)[0, 1, 5]
    one = (wanted * (wanted / found).log()).sum().item()
    rows = gate.loss(scores[:, 1:2, 5:], pooled[:, 1:2, 5:], skip=0.0).item()
    assert rows == pytest.approx(one, rel=1e-5)
    # A map of attention that is not causal is one that no scores can reach.
    assert gate.loss(truth, pooled + 0.1).item() == math.inf


# ---------------------------------------------------------------- choices


def test_top_keeps_the_diagonal_and_the_largest():
    scores = randn(2, 3, 9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    found = top(scores, 3) & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(found.sum(-1), torch.arange(1, 10).clamp(max=3).expand(2, 3, -1))
    assert found.diagonal(dim1=2, dim2=3).all()
    best = scores[0, 0, 8, :8].topk(2).indices
    assert set(found[0, 0, 8].nonzero().flatten().tolist()) == {8, *best.tolist()}
    assert torch.equal(above(scores, 0.2), torch.softmax(scores, -1) > 0.2)


def test_scores_that_are_no_numbers():
    """A NaN must not hide the other blocks of its row."""
    scores = randn(9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    scores[8, 2] = torch.nan
    found = top(scores, 3)[8]
    assert set(found.nonzero().flatten().tolist()) == {2, 8, int(scores[8].nan_to_num(-9)[:8].argmax())}
    assert not above(scores, 0.1)[8].any() and above(scores, 0.1)[7].any()


@pytest.mark.parametrize("blocks", [1, 7, 64])
def test_top_of_density(blocks):
    for density in (0.01, 0.1, 0.5, 0.93, 1.0):
        count = top_of_density(blocks, density)
        kept = [sum(min(n, i + 1) for i in range(blocks)) for n in (count, count + 1)]
        most = density * blocks * (blocks + 1) / 2
        assert count == 1 or kept[0] <= most
        assert count == blocks or kept[1] > most


@torch.no_grad()
def test_from_queries_to_attention(device):
    """Gate, choice, mask and engine: exact attention under the blocks that were chosen."""
    gate, S = gate_of().to(device), 200
    q, k, v = (randn(1, h, S, 16, seed=s).half().to(device) for s, h in enumerate((4, 2, 2)))
    chosen = top(gate(q.float(), k.float()), 2)
    out = attention(q, k, v, block_mask=mask_of(chosen, S, 64))
    place = torch.arange(S, device=device)
    seen = chosen[:, :, place[:, None] // 64, place // 64] & (place[:, None] >= place)
    Oracle(q, k, v, mask=seen).judge(out).raise_if_bad("chosen by a gate")


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_decode_chosen(count, device):
    """Sequences of several lengths, one with fewer blocks than may be kept, one empty."""
    q, k, v = (randn(4, h, n, 16, seed=h).half().to(device) for h, n in ((6, 1), (2, 256), (2, 256)))
    v = v + 1
    lengths, scores = [256, 130, 64, 0], randn(4, 2, 4).to(device)
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = decode_chosen(q, k, v, scores, count, lengths=given)
    mask = torch.zeros(4, 6, 1, 256, dtype=torch.bool, device=device)
    for b, length in enumerate(lengths):
        newest = (length - 1) // 64
        for h in range(2):
            older = scores[b, h, : max(newest, 0)]
            kept = [*older.topk(min(count - 1, len(older))).indices.tolist(), *[newest] * (length > 0)]
            for j in kept:
                mask[b, 3 * h : 3 * h + 3, 0, 64 * j : min(64 * j + 64, length)] = True
    Oracle(q, k, v, mask=mask).judge(out).raise_if_bad(f"{count} blocks")
    if count == 9:
        assert torch.equal(out[:3], attention_decode(q, k, v, lengths=given)[:3])


@pytest.mark.parametrize(("value", "kept"), [(-torch.inf, {1, 2, 3}), (torch.nan, {0, 2, 3})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_chosen_reads_what_is_there(dtype, value, kept, device):
    """Whatever the scores are, blocks that come before the newest are taken first: behind it is NaN."""
    q, k, v = (randn(1, 1, n, 16, seed=n).half().to(device) for n in (1, 256, 256))
    k[:, :, 64:], v[:, :, 64:] = torch.nan, torch.nan
    lengths = torch.tensor([64], dtype=torch.int32, device=device)
    scores = randn(1, 1, 16).sort().values.to(device, dtype)  # ascending
    scores[..., 0] = value
    for count in (3, 4, 5):
        out = decode_chosen(q, k, v, scores, count, lengths=lengths)
        seen = kept if count == 3 else {0, 1, 2, 3}
        mask = torch.isin(torch.arange(64, device=device) // 16, torch.tensor([*seen], device=device))
        Oracle(q, k[:, :, :64], v[:, :, :64], mask=mask[None, None, None]).judge(out).raise_if_bad(f"{count}")


# ---------------------------------------------------------------- the small model


def test_texts_can_be_continued():
    text, known = seer_quality.texts(seer_quality.TINY, 256, 3, torch.Generator().manual_seed(0))
    assert text.shape == (3, 256) and known.shape == (3, 255) and known[0].sum() == 2 * 63
    for row in text.tolist():
        place = {token: i for i, token in enumerate(row[:128])}
        assert len(place) == 128
        for i in known[0].nonzero().flatten().tolist():
            assert row[i + 1] == row[place[row[i]] + 1], "what followed the token before follows it now"


def test_quality_of_a_tiny_model():
    """It learns to copy; with all blocks kept it says the same under a mask; the oracle finds more than
    chance, and its loss is lower."""

    def quickly(number, q, k, v, *_):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    setup = seer_quality.TINY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seer_quality, "DENSITIES", (0.7,))
        patch.setattr(seer_quality, "CHOICES", ("oracle", "random"))
        patch.setattr(seer_quality, "dense", quickly)  # the interpreter would take minutes
        model = seer_quality.train(setup, "cpu")
        gates = seer_quality.distill(model, setup, "cpu")
        rows = list(seer_quality.evaluate(model, gates, setup, "cpu"))
        patch.setattr(seer_quality, "DENSITIES", (1.0,))
        patch.setattr(seer_quality, "CHOICES", ("gate",))
        rows += list(seer_quality.evaluate(model, gates, setup, "cpu"))[1:]
    found = {row["choice"]: row for row in rows}
    dense = found["all keys"]["loss"]
    assert dense < math.log(setup.lengths[0] / 2), "better than any token of the text"
    assert found["gate"]["loss"] == pytest.approx(dense, rel=1e-3)
    assert found["gate"]["kept"] == found["gate"]["found"] == 1
    assert found["oracle"]["kept"] == found["random"]["kept"] <= 0.7
    assert found["oracle"]["found"] >= found["random"]["found"]
    assert found["oracle"]["mass"] > found["random"]["mass"]
    assert found["oracle"]["loss"] < found["random"]["loss"]
