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

from attnlib.kernels import decode, hopper, portable, reference, sparse
from attnlib.kernels.reference import decode as reference_decode

FAMILIES = {"hopper": hopper, "triton": portable, "reference": reference}
"""Name, as in `impl` -> family, in the order of preference. The last one runs every call."""

MASKED = {"hopper": sparse.hopper, "triton": sparse.portable, "reference": reference}
"""The same for calls with a block mask."""

DECODERS = {"triton": decode, "reference": reference_decode}
"""The same for `attention_decode`: modules with unsupported(q, params) and forward(q, k, v, params), where
`params` is an `attnlib.params.DecodeParams`."""
