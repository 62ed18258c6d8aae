"""Powers of two without the exponential unit, as NumPy models that agree bit for bit with the kernels.

Each model takes float32 exponents x and returns float32 values of 2^x. `fused` says whether a product and a
sum are rounded once, as on a GPU, or twice, as in the emulator; all else is the same in both.

- `polynomial`: 2^x = 2^n 2^f with n = round(x) and a polynomial for f in [-1/2, 1/2].
- `schraudolph`: the bits of a bfloat16 number, read as a whole number, are about 128 (x + 127).
- `vexp`: the same, with the seven bits of the fraction put right by two parabolas in whole numbers.
- `pairs`: exponents in float16, as `ex2.approx.f16x2` takes them; exact but for two roundings.
"""

from __future__ import annotations

from functools import cache

import numpy as np

ONE_AND_HALF = np.float32(1.5 * 2**23)
"""What is added to this in float32 is rounded to a whole number, which stands in the lowest bits."""
CENTER = 6
"""What Schraudolph's line is lowered by, in the last of seven bits: about as far above 2^x as below it. A
whole number, since what it is added to has no bits for less."""
LEAST = np.float32(-126.0)
"""The smallest exponent of a normal float32."""


def fma(a: np.ndarray, b: np.ndarray | float, c: np.ndarray | float, fused: bool = True) -> np.ndarray:
    """a b + c in float32, rounded once, or as two operations if not `fused`."""
    a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
    with np.errstate(over="ignore", invalid="ignore"):
        if not fused:
            return a * b + c
        product, summand = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + summand  # the product is exact, the sum is rounded to 53 bits
        high = total - product
        error = (product - (total - high)) + (summand - high)
        # Round to odd: a sum that is not exact never ends up half way between two float32 numbers.
        bits = np.atleast_1d(total).view(np.int64)
        even, inexact = bits & 1 == 0, np.isfinite(error) & (error != 0)
        away = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(even & inexact, (bits + away).view(np.float64), total)
        return np.asarray(total.reshape(np.broadcast_shapes(a.shape, b.shape, c.shape))).astype(np.float32)


@cache
def coefficients(degree: int) -> tuple[float, ...]:
    """Of f^0, f^1, ...: the polynomial whose largest relative error to 2^f on [-1/2, 1/2] is least, by
    Remez' exchange; rounded to float32."""
    if not 1 <= degree <= 6:
        raise ValueError(f"degree: expected 1 to 6, got {degree}")
    n = degree + 2  # points at which the error has its largest size, with turning signs
    points = 0.5 * np.cos(np.pi * np.arange(n) / (n - 1))[::-1]
    dense = np.linspace(-0.5, 0.5, 20001)
    for _ in range(12):
        weight = np.exp2(-points)[:, None]
        system = np.hstack([weight * np.vander(points, degree + 1, increasing=True), _signs(n)[:, None]])
        found = np.linalg.solve(system, np.ones(n))[:-1]
        error = np.polyval(found[::-1], dense) * np.exp2(-dense) - 1
        turns = np.flatnonzero(np.diff(np.sign(error)))
        points = np.array([part[np.abs(error[part]).argmax()] for part in np.split(np.arange(len(dense)),
                                                                                 turns + 1)])  # fmt: skip
        points = dense[points]
    return tuple(float(np.float32(x)) for x in found)


def _signs(n: int) -> np.ndarray:
    return (-1.0) ** np.arange(n)


def polynomial(x: np.ndarray, degree: int, fused: bool = True) -> np.ndarray:
    x = np.maximum(np.asarray(x, np.float32), LEAST)
    moved = x + ONE_AND_HALF  # [.] n in the lowest bits
    f = x - (moved - ONE_AND_HALF)
    c = coefficients(degree)
    p = np.full_like(f, c[degree])
    for i in range(degree - 1, -1, -1):
        p = fma(p, f, c[i], fused)
    with np.errstate(over="ignore"):
        return (p.view(np.int32) + (moved.view(np.int32) << 23)).view(np.float32)


def schraudolph(x: np.ndarray, fused: bool = True) -> np.ndarray:
    """Values are bfloat16 numbers; 0 below 2^-127."""
    return _wide(_words(x, 127 * 128 - CENTER, fused))


def vexp(x: np.ndarray, fused: bool = True) -> np.ndarray:
    """As `schraudolph`, with VEXP's correction of the fraction m of 128."""
    word = _words(x, 127 * 128, fused)
    m = word & 127
    low = 8 * m * (m + 363) >> 12
    high = 127 - ((255 - 2 * m) * 7 * (m + 278) >> 12)
    return _wide(word & -128 | np.where(m < 64, low, high))


def _words(x: np.ndarray, zero: float, fused: bool) -> np.ndarray:
    """128 x + zero rounded to a whole number, at least 0: in the lowest 16 bits."""
    zero = np.float32(ONE_AND_HALF + np.float32(zero))
    return np.maximum(fma(x, 128.0, zero, fused), ONE_AND_HALF).view(np.int32)


def _wide(word: np.ndarray) -> np.ndarray:
    """The lowest 16 bits as bfloat16, in float32."""
    return (word << 16).view(np.float32)


def pairs(x: np.ndarray, fused: bool = True) -> np.ndarray:
    """`fused` changes nothing. The GPU's `ex2.approx.f16x2` may be off by one last bit from this."""
    with np.errstate(over="ignore"):
        return np.exp2(np.asarray(x, np.float16).astype(np.float64)).astype(np.float16).astype(np.float32)


MODELS = {
    "poly2": lambda x, fused=True: polynomial(x, 2, fused),
    "poly3": lambda x, fused=True: polynomial(x, 3, fused),
    "poly4": lambda x, fused=True: polynomial(x, 4, fused),
    "schraudolph": schraudolph,
    "vexp": vexp,
    "pairs": pairs,
}
"""Name of a variant of chapter 37 -> its model."""


def every(dtype: str) -> np.ndarray:
    """Every finite number of "float16" or "bfloat16" that is not above 0, as float32, from -0 down."""
    words = np.arange(0x8000, 0x10000, dtype=np.uint32)
    if dtype == "bfloat16":
        x = (words << 16).view(np.float32)
    elif dtype == "float16":
        x = words.astype(np.uint16).view(np.float16).astype(np.float32)
    else:
        raise ValueError(f'dtype: expected "float16" or "bfloat16", got {dtype!r}')
    return x[np.isfinite(x)]


POWERS = """
@gluon.jit
def powers(x_ptr, y_ptr):  # y = 2^x, as the kernel computes it, a tile of 64 x 64 for each program
    columns: gl.constexpr = gl.SliceLayout(0, ten.accumulator(64))
    rows: gl.constexpr = gl.SliceLayout(1, ten.accumulator(64))
    o_m = gl.program_id(0) * 64 + gl.arange(0, 64, layout=rows)  # [64]
    o = o_m[:, None] * 64 + gl.arange(0, 64, layout=columns)[None, :]  # [64, 64]
    p = weights(gl.load(x_ptr + o), gl.zeros([64], gl.float32, rows), 1.0)  # [64, 64]
    gl.store(y_ptr + o, p.to(gl.float32))
"""
"""A kernel of a variant's `weights` alone: appended to its text, it computes any powers, in the emulator and
on a GPU."""
