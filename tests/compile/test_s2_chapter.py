"""Chapter 33's kernel compiled for sm_90."""

from __future__ import annotations

from attnlib.bench import inspect_sm90, sources


def test_nothing_spills_and_products_are_asynchronous() -> None:
    file = sources.load_step("33_s2").__file__
    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16:16")
    sizes = dict.fromkeys(("S", "H", "STRIDE"), "i32:16") | dict.fromkeys(("LOCAL", "STEP"), "i32")
    sizes["qk_scale"] = "fp32"
    (found,) = inspect_sm90.compile_all(
        [inspect_sm90.Job(file, "s2_forward", tensors | sizes, {"BLOCK": 64, "D": 128})]
    )
    assert found.fits and found.spills == 0 and found.warnings == ()
    assert "HGMMA" in " ".join(found.listing)
