"""alpha-entmax attention in PyTorch, in fp64, by bisection; and its gradient, by the implicit derivative."""

import torch

from attnlib.kernels.reference.dense import sequences
from attnlib.params import EntmaxParams

HALVINGS = 100
ROWS = 1024
"""Query rows at a time: their scores are kept."""


def unsupported(q) -> None:
    """Nothing is."""


def flags_size(q, k, varlen=None) -> int:
    """It computes again what flags would tell."""
    return 0


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: EntmaxParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out in the dtype of q, tau (B, H, Sq) float32, varlen (H, Tq), no flags)."""
    if params.varlen is not None:
        return _varlen_forward(q, k, v, params)
    keys, values = (_per_query_head(x, q) for x in (k, v))
    out = torch.empty_like(q, dtype=torch.float64)
    tau = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for rows, z in _scores(q, keys, params):
        p, tau[:, :, rows] = entmax(z, params.alpha)
        out[:, :, rows] = p @ values
    flags = torch.empty(0, dtype=torch.int32, device=q.device)
    precise = q.dtype == torch.float64
    return out.to(q.dtype), tau if precise else tau.float(), flags


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    tau: torch.Tensor,
    flags: torch.Tensor,
    params: EntmaxParams,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in the dtypes of q, k and v; weights are computed again."""
    if params.varlen is not None:
        return _varlen_backward(d_out, q, k, v, params)
    keys, values = (_per_query_head(x, q) for x in (k, v))
    dq = torch.empty_like(q, dtype=torch.float64)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, z in _scores(q, keys, params):
        p, _ = entmax(z, params.alpha)
        d = d_out[:, :, rows].double()
        dz = entmax_gradient(p, d @ values.mT, params.alpha) * params.sm_scale
        dq[:, :, rows] = dz @ keys
        dk += dz.mT @ q[:, :, rows].double()
        dv += p.mT @ d
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = (x.unflatten(1, groups).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _varlen_forward(q, k, v, params: EntmaxParams):
    out = torch.zeros_like(q)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tau = torch.full(q.shape[1::-1], torch.inf, dtype=dtype, device=q.device)
    for rows, _, sequence in sequences(q, k, v, *params.varlen[:2]):
        found, threshold, _ = forward(*sequence, params._replace(varlen=None))
        out[rows], tau[:, rows] = found[0].transpose(0, 1), threshold[0]
    return out, tau, torch.empty(0, dtype=torch.int32, device=q.device)


def _varlen_backward(d_out, q, k, v, params: EntmaxParams):
    gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, sequence in sequences(q, k, v, *params.varlen[:2]):
        own_d_out = d_out[rows].transpose(0, 1)[None]
        found = backward(own_d_out, *sequence, None, None, None, params._replace(varlen=None))
        for gradient, part, own in zip(gradients, (rows, keys, keys), found, strict=True):
            gradient[part] = own[0].transpose(0, 1)
    return gradients


def entmax(z: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(p, tau): p = [(alpha - 1) z - tau]_+^(1 / (alpha - 1)) along the last dimension, sum 1; a row of -inf
    gives p = 0 and tau = +inf."""
    s = z * (alpha - 1)
    power = 1 / (alpha - 1)
    top = s.amax(-1, keepdim=True)
    empty = top == -torch.inf
    low = torch.where(empty, 0.0, top - 1)
    high = torch.where(empty, 0.0, top)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = (s - middle).clamp(min=0).pow(power).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    p = (s - low).clamp(min=0).pow(power)
    total = p.sum(-1, keepdim=True)
    return p / torch.where(empty, 1.0, total), torch.where(empty, torch.inf, low).squeeze(-1)


def entmax_gradient(p: torch.Tensor, dp: torch.Tensor, alpha: float) -> torch.Tensor:
    """The gradient of z from that of p: diag(u) - u u^T / sum(u) with u = p^(2 - alpha), from differentiating
    sum p = 1 by z."""
    u = torch.where(p > 0, p.pow(2 - alpha), 0.0)
    total = u.sum(-1, keepdim=True)
    delta = (u * dp).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return u * (dp - delta)


def _per_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: torch.Tensor, keys: torch.Tensor, params: EntmaxParams):
    """Rows, and their scores: -inf where a row does not see a key."""
    S_q, S_k = q.shape[2], keys.shape[2]
    columns = torch.arange(S_k, device=q.device)
    for first in range(0, S_q, ROWS):
        rows = slice(first, min(first + ROWS, S_q))
        z = q[:, :, rows].double() @ keys.mT * params.sm_scale
        if params.causal:
            places = torch.arange(rows.start, rows.stop, device=q.device) + S_k - S_q
            z = z.masked_fill(columns > places[:, None], -torch.inf)
        yield rows, z
