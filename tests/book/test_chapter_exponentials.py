"""Chapter 37: its NumPy models against the kernels' own `weights` in the emulator, bit for bit; the kernels;
mistakes planted in them; and that those which are wrong on purpose are wrong."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from attnlib.bench import budget, exponentials, sources
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.emulator import emulated

STEP, BASE = "37_exponentials", "15_teaching"
TEXTS = sources.variant_sources(sources.notebook_of(STEP), BASE)
RIGHT = ("whole", "poly3", "poly4", "pairs", "keys_128", "two", "two_q",
         "three", "poly6", "staggered", "twice", "thrice")  # fmt: skip
ROUGH = {"poly2": 1e-3, "schraudolph": 3e-2, "vexp": 4e-3, "pairs_bf16": 2e-2}
"""Kernels that approximate, and what the RMS error of their output stays below, relative to the output."""
WRONG = [name for name in TEXTS if name.startswith("no_")]


def module_of(text: str, name: str = "variant") -> ModuleType:
    return sources.load_source(f"37_{name}", text)


def powers(text: str, x: np.ndarray) -> np.ndarray:
    """What a variant's `weights` makes of exponents."""
    module = module_of(text + exponentials.POWERS, "powers")
    padded = torch.zeros(-(-len(x) // 4096) * 4096)
    padded[: len(x)] = torch.from_numpy(x)
    found = torch.empty_like(padded)
    with emulated(vars(module), "eager", 0):
        module.powers[(len(padded) // 4096,)](padded, found, num_warps=4)
    return found.numpy()[: len(x)]


def relative(text: str, kind: str = "normal", order: str = "random") -> tuple[float, Oracle, torch.Tensor]:
    tensors = make_inputs(Shape(1, 2, 200, 64), kind, device="cpu")
    module = module_of(text)
    with emulated(vars(module), order, 0):
        out = module.attention(*tensors, True)
    oracle = Oracle(*tensors, causal=True)
    off = (out.double() - oracle.out).norm() / oracle.out.norm()
    return off.item(), oracle, out


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (
        (rng.standard_normal(20000) * 2.0 ** rng.integers(-20, 20, 20000)).astype(np.float32) for _ in "abc"
    )
    exact = a.astype(np.longdouble) * b + c  # 64 bits: a tie of 24 bits is one of 64 only if it is exact
    assert np.array_equal(exponentials.fma(a, b, c), exact.astype(np.float32))
    # The product is 2^-24 (1 - 2^-46), a little less than half of c's last bit. In 53 bits the sum is half
    # way, and would go up to the even number.
    c = np.float32(1 + 2.0**-23)
    assert exponentials.fma(np.float32(2.0**-24) * c, np.float32(1 - 2.0**-23), c) == c
    assert exponentials.fma(np.float32(2.0**-24) * c, np.float32(1 - 2.0**-23), c, fused=False) > c


def test_coefficients() -> None:
    """Least largest error: it is reached degree + 2 times, and the kernels have these numbers."""
    f = np.linspace(-0.5, 0.5, 100001)
    for degree, most in ((1, 2.99e-2), (2, 1.73e-3), (3, 7.5e-5), (4, 2.7e-6)):
        c = exponentials.coefficients(degree)
        error = np.polyval(np.array(c[::-1]), f) * np.exp2(-f) - 1
        assert 0.9 * most < np.abs(error).max() <= most
        peaks = np.abs(error) > 0.9 * np.abs(error).max()
        assert np.count_nonzero(np.diff(peaks.astype(int)) == 1) + peaks[0] == degree + 2
        if degree > 1:
            module = module_of(TEXTS[f"poly{degree}"])
            assert tuple(module.COEFFICIENTS.value) == c
    assert tuple(module_of(TEXTS["poly6"]).COEFFICIENTS.value) == exponentials.coefficients(6)
    with pytest.raises(ValueError, match="degree: expected 1 to 6, got 0"):
        exponentials.coefficients(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", list(exponentials.MODELS))
def test_kernels_agree_with_their_models_bit_for_bit(name: str, dtype: str) -> None:
    x = exponentials.every(dtype)
    found, model = powers(TEXTS[name], x), exponentials.MODELS[name](x, fused=False)
    assert np.array_equal(found.view(np.int32), model.view(np.int32))


def test_errors_over_all_numbers() -> None:
    """The paper's 0.78% for e^x in bfloat16 among them."""
    x = exponentials.every("bfloat16")
    seen = x[x >= -80].astype(np.float64)
    error = exponentials.vexp((seen * np.log2(np.e)).astype(np.float32)) / np.exp(seen) - 1
    assert 0.0078 < np.abs(error).max() < 0.00785
    for name, most in (("schraudolph", 0.035), ("vexp", 0.009), ("poly2", 1.73e-3), ("poly4", 2.9e-6)):
        for dtype in ("bfloat16", "float16"):
            x = exponentials.every(dtype)
            x = x[x >= -125]
            off = np.abs(exponentials.MODELS[name](x) / np.exp2(x.astype(np.float64)) - 1).max()
            assert 0.5 * most < off < most, (name, dtype)
    with pytest.raises(ValueError, match='dtype: expected "float16" or "bfloat16"'):
        exponentials.every("float32")


def test_small_exponents_give_nothing() -> None:
    """A masked score has the exponent -inf."""
    x = np.array([-np.inf, -1e30, -4000.0, -200.0], np.float32)
    for name, power in exponentials.MODELS.items():
        assert (power(x) <= 2.0**-125).all() and (power(x) >= 0).all(), name
    assert not exponentials.schraudolph(x).any() and not exponentials.vexp(x).any()


@pytest.mark.parametrize("name", RIGHT)
def test_kernels_within_the_budget(name: str) -> None:
    for kind, order in (("normal", "random"), ("large", "late"), ("sink", "eager")):
        _, oracle, out = relative(TEXTS[name], kind, order)
        verdict = oracle.judge(out)
        assert verdict.ok, f"{kind}: {verdict.reason}"


@pytest.mark.parametrize(("name", "most"), ROUGH.items())
def test_kernels_that_approximate(name: str, most: float) -> None:
    for kind in ("normal", "large"):
        off, _, _ = relative(TEXTS[name], kind)
        assert off < most, kind
    assert relative(TEXTS[name])[0] > most / 20


@pytest.mark.parametrize("name", WRONG)
def test_kernels_that_are_wrong_on_purpose(name: str) -> None:
    with np.errstate(all="ignore"):
        off, _, _ = relative(TEXTS[name], "large" if name == "no_maximum" else "normal")
    assert not off < 0.02
    assert "WRONG on purpose" in TEXTS[name]


PLANTED = (
    ("schraudolph", "127 * 128", "126 * 128"),
    ("schraudolph", "qk_scale) + zero, ONE_AND_HALF)", "qk_scale) + zero, -1e30)"),
    ("vexp", "m + 363", "m + 353"), ("vexp", "m < 64", "m < 60"), ("vexp", "bits & -128", "bits & -256"),
    ("poly3", "<< 23", "<< 22"), ("poly3", "DEGREE - i]", "DEGREE - 2]"), ("poly3", "-126.0", "-1e30"),
    ("poly3", "f * COEFFICIENTS[DEGREE] +", "f * f * COEFFICIENTS[DEGREE] +"),
    ("pairs", "x.to(gl.float16)", "(x + 1).to(gl.float16)"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), PLANTED)
def test_a_planted_mistake_changes_bits(name: str, old: str, new: str) -> None:
    """Against the model; or integers overflow, which the emulator does not let pass."""
    text = TEXTS[name].replace(old, new)
    assert text != TEXTS[name]
    x = np.concatenate([exponentials.every("bfloat16"), np.array([-np.inf, -3000.0], np.float32)])
    model = exponentials.MODELS[name](x, fused=False)
    with np.errstate(all="ignore"):
        try:
            found = powers(text, x)
        except OverflowError:
            return
    assert not np.array_equal(found, model)


def test_budget_of_a_product() -> None:
    assert budget.product("HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT") == (32, 4096)
    assert budget.product("HGMMA.64x128x16.F32 R24, gdesc[UR8], R24") == (64, 6144)
    assert budget.product("HGMMA.64x64x16.F32 R56, R100, gdesc[UR8].tnspB, R56") == (32, 2048)


def test_variant_sources_name_what_is_missing(tmp_path) -> None:
    import json

    def notebook(name: str, tag: str, source: str) -> None:
        cell = {"cell_type": "code", "source": [source], "metadata": {"tags": [tag]}}
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": [cell]}))

    notebook("01_base", "kernel", "def f():\n    return 1\n\n\ndef attention():\n    return f()\n")
    two = "# variant a\ndef f():\n    return 2\n\n\n# variant b, of a\ndef f():\n    return 3\n"
    notebook("02_of", "variant", two)
    found = sources.variant_sources(tmp_path / "02_of.ipynb", "01_base")
    assert list(found) == ["01_base", "a", "b"] and "return 3" in found["b"] and "return 2" in found["a"]
    notebook("03_bad", "variant", "# variant b, of c\ndef f():\n    return 3\n")
    with pytest.raises(ValueError, match="', of' one of 01_base, got '# variant b, of c'"):
        sources.variant_sources(tmp_path / "03_bad.ipynb", "01_base")
