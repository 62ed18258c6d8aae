"""The kernels: a folder for each family, and the registry of those that `attention` runs.

A family of exact attention is a module with

    unsupported(q, k, v, params, backward)    what it needs and the call does not have; None if it has all
    slower(q, k, params, backward)            why another one is faster for the call; None if none is
    configuration(q, k, v, params, backward)  how its kernels are compiled and launched for the call
    prepare(call, backward)                   the launches of all calls with this signature, or None
    forward(q, k, v, params)                              (out, lse)
    backward(d_out, q, k, v, out, lse, params)            (dq, dk, dv)
    FITS                                      why it runs a call, if it is the first that can

on valid arguments, none of them empty. `params` is an `attnlib.params.Params`, whose `config` is what
`configuration` gave or a caller's own, and whose `plan` is what `prepare` gave or None. `forward` merges its
result into `params.into`, where there is one.
"""

from attnlib.kernels import (
    add,
    bsfa,
    decode,
    distr,
    entmax,
    fp8,
    hopper,
    lists,
    monarch,
    pool,
    portable,
    reference,
    sparse,
)
from attnlib.kernels.decode import few_queries
from attnlib.kernels.hopper import fp8 as hopper_fp8
from attnlib.kernels.hopper import narrow as hopper_narrow
from attnlib.kernels.hopper import pooled as hopper_pooled
from attnlib.kernels.portable import narrow as portable_narrow
from attnlib.kernels.reference import add as reference_add
from attnlib.kernels.reference import bsfa as reference_bsfa
from attnlib.kernels.reference import decode as reference_decode
from attnlib.kernels.reference import distr as reference_distr
from attnlib.kernels.reference import entmax as reference_entmax
from attnlib.kernels.reference import fp8 as reference_fp8
from attnlib.kernels.reference import monarch as reference_monarch
from attnlib.kernels.reference import pool as reference_pool

FAMILIES = {"decode": few_queries, "hopper": hopper, "triton": portable, "reference": reference}
"""Name, as in `impl` -> family, in the order of preference. The last one runs every call."""

FOR_FEW_CALLS = {"decode"}
"""Families for one kind of call only. Where a call is of another kind, `Choice.reason` does not mention
them."""

MASKED = {
    "decode": few_queries, "hopper": sparse.hopper, "triton": sparse.portable, "reference": reference
}  # fmt: skip
"""The same as `FAMILIES` for calls with a block mask."""

FP8 = {"hopper": hopper_fp8, "reference": reference_fp8}
"""The same for `attention_fp8`. The first one runs every call without an `impl`; there is no fallback.
Modules with

    unsupported(device)                       what they need and a device does not have; None if it has all
    forward(q, k, v, params, out_dtype)       (out, lse), of operands that are `common.fp8.Fp8`; queries may
                                              be a tensor where `common.fp8.scaled_by_row` says so
"""

QUANTIZERS = {"triton": fp8, "reference": reference_fp8}
"""What `quantize_fp8` runs, in the order of preference: modules with

    unsupported(device)                       as above
    quantize(x, role, recipe, cu_seqlens, max_seqlen)     an `Fp8`
"""

DECODERS = {"triton": decode, "reference": reference_decode}
"""The same for `attention_decode`: modules with

    unsupported(q, params)                    what they need and a call does not have; None if it has all
    forward(q, k, v, params)                  (out, lse), params an `attnlib.params.DecodeParams`
    prepared(q, k, v, params)                 the launches with which `forward` runs it; None where there are
                                              none, or a tensor has to be copied first
"""

ENTMAX = {"triton": entmax, "reference": reference_entmax}
"""What `attention_entmax` runs, in the order of preference: modules with

    unsupported(q)                            what they need and a call does not have; None if it has all
    flags_size(q, k, varlen)                  int32 words of flags for the backward pass, from the shapes
    forward(q, k, v, params)                  (out, tau, flags), params an `attnlib.params.EntmaxParams`
    backward(d_out, q, k, v, out, tau, flags, params)     (dq, dk, dv)
"""

BSFA = {"hopper": bsfa.hopper, "triton": bsfa.portable, "reference": reference_bsfa}
"""The same for `attention_bsfa`: modules with

    unsupported(q, k, v, params)              what they need and a call does not have; None if it has all
    forward(q, k, v, params)                  (out, lse, kept), params an `attnlib.params.BsfaParams`; lse and
                                              kept may be None unless asked for

and for `bsfa_threshold` those of "triton" and "reference" with maxima(q, k, params), the largest scores of
blocks."""

MONARCH = {"triton": monarch, "reference": reference_monarch}
"""The same for `attention_monarch`, which only an explicit `impl` leads to the reference: modules with
unsupported(q, params) and forward(q, k, v, params), which returns the output; the reference has the matrix
of weights, too. `params` is an `attnlib.params.MonarchParams`."""

LISTERS = lists
"""What makes the lists of a mask on its device: a module with unsupported(device) and lists_of_chosen(blocks,
seqlen, units, step), which gives the tensors of `attnlib.block_mask.lists.Lists`."""

POOLERS = {"triton": pool, "reference": reference_pool}
"""What pools the weights of `attention_pooled`: modules with

    unsupported(device)                       what they need and a device does not have; None if it has all
    of_scores(q, k, lse, causal, sm_scale)    the map of units of 64 queries by 64 keys, (B, H, units, units)

The first one also has of_maxima(maxima, lse, S_k, causal), for the maxima of a family of `KEEPS_MAXIMA`, and
too_many_keys(S_k), why it can't pool those of so many keys; None if it can."""

KEEPS_MAXIMA = {"hopper": hopper_pooled}
"""Forward passes that keep the largest score of each row and 64 keys: modules with unsupported(q, k, v,
params), forward(q, k, v, params), which gives (out, lse, maxima), and bytes_kept(q, k, v, params), how many
bytes of maxima these are."""

GROUPERS = {"triton": distr, "reference": reference_distr}
"""What groups the columns for `attention_distr`: modules with group(q, k, grouping, causal), which gives a
`common.distr.Grouped`."""

DISTR = {"hopper": hopper_narrow, "triton": portable_narrow, "reference": reference_distr}
"""What multiplies them, in the order of preference: modules with unsupported(q) and forward(grouped, v,
params). The reference takes what its own grouper gives."""

ADDERS = {"triton": add, "reference": reference_add}
"""What adds two parts of a gradient, in the order of preference: modules with

    unsupported(device)                       what they need and a device does not have; None if it has all
    add(first, second, result, start)         result = first + second

`second` has the rows from `start` on that it has; the others are those of `first`."""
