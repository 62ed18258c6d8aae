"""The kernels: a folder for each family, and the registry of those that `attention` runs.

A family of exact attention is a module with

    unsupported(q, k, v, params, backward)    what it needs and the call does not have; None if it has all
    slower(q, k, params, backward)            why another one is faster for the call; None if none is
    configuration(q, k, params, backward)     how its kernels are compiled and launched for the call
    prepare(call, backward)                   the launches of all calls with this signature, or None
    forward(q, k, v, params)                              (out, lse)
    backward(d_out, q, k, v, out, lse, params)            (dq, dk, dv)
    FITS                                      why it runs a call, if it is the first that can

on valid arguments, none of them empty. `params` is an `attnlib.params.Params`, whose `config` is what
`configuration` gave or a caller's own, and whose `plan` is what `prepare` gave or None.
"""

from attnlib.kernels import decode, fp8, hopper, portable, reference
from attnlib.kernels.decode import few_queries
from attnlib.kernels.hopper import fp8 as hopper_fp8
from attnlib.kernels.reference import decode as reference_decode
from attnlib.kernels.reference import fp8 as reference_fp8

FAMILIES = {"decode": few_queries, "hopper": hopper, "triton": portable, "reference": reference}
"""Name, as in `impl` -> family, in the order of preference. The last one runs every call."""

FOR_FEW_CALLS = {"decode"}
"""Families for calls of one kind. That a call is of another kind is no reason to tell for what runs it."""

FP8 = {"hopper": hopper_fp8, "reference": reference_fp8}
"""The same for `attention_fp8`, which only an explicit `impl` leads to the reference: modules with

    unsupported(device)                       what they need and a device does not have; None if it has all
    forward(q, k, v, params, out_dtype)       (out, lse), of operands that are `common.fp8.Fp8`
"""

QUANTIZERS = {"triton": fp8, "reference": reference_fp8}
"""What `quantize_fp8` runs, in the order of preference: modules with

    unsupported(device)                       as above
    quantize(x, role, recipe, cu_seqlens, max_seqlen)     an `Fp8`
"""

DECODERS = {"triton": decode, "reference": reference_decode}
"""The same for `attention_decode`: modules with unsupported(q, params) and forward(q, k, v, params), where
`params` is an `attnlib.params.DecodeParams`."""
