"""The cache of `attnlib.bench.inspect_sm90`: what is damaged is compiled again."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from triton import knobs

from attnlib.bench import inspect_sm90, sass

KERNEL = """import triton
import triton.language as tl


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)
"""


@pytest.mark.parametrize("damage", [b"\xff\xfe\0", b"", b"null", b"{}", b"[1]", b"[" * 200_000])
def test_what_is_damaged_is_not_there(damage, tmp_path):
    (tmp_path / "stats.json").write_bytes(damage)
    assert inspect_sm90._read(tmp_path / "stats.json") is None


def test_a_damaged_cache_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_sm90.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "double.py").write_text(KERNEL)
    call = str(tmp_path / "double.py"), "double", {"x": "*fp32", "n": "i32"}, {"BLOCK": 128}
    first = inspect_sm90.compile(*call)
    (cached,) = (tmp_path).glob("attnlib-sm90-*/*.json")
    whole = cached.read_bytes()
    cached.write_bytes(b"\xff\xfe\0")
    assert inspect_sm90.compile(*call) == first
    assert cached.read_bytes() == whole


LOOP = KERNEL.replace("double", "repeat").replace(
    "    at =", "    for i in range(n):\n        tl.store(x + i, 1.0 / tl.load(x + n - i))\n    at ="
)


def test_kernels_are_read_together_and_each_as_if_alone(tmp_path, monkeypatch):
    """What a kernel does not depend on: where it lies, and in which process it is read."""
    (tmp_path / "kernels.py").write_text(KERNEL + LOOP.partition("as tl\n")[2])
    file, types, read = str(tmp_path / "kernels.py"), {"x": "*fp32", "n": "i32"}, []
    jobs = [inspect_sm90.Job(file, name, types, {"BLOCK": 128}) for name in ("double", "repeat", "double")]
    disassemble = sass.disassemble
    monkeypatch.setattr(sass, "disassemble", lambda codes: read.append(len(codes)) or disassemble(codes))
    alone = []
    with knobs.compilation.scope(), knobs.nvidia.scope():
        for job in jobs:
            alone.append(inspect_sm90.compile_here(job))
            assert alone[-1].opcodes["EXIT"]
        together = [inspect_sm90.compile_here(job) for job in jobs]
    assert together[1].registers and len(read) == 3
    assert pickle.loads(pickle.dumps(together[2])) == alone[2]
    assert together == alone and alone[0] == alone[2] != alone[1]
    assert len(read) == 4 and read[-1] == 3
    assert alone[1].opcodes["BRA"] > alone[0].opcodes["BRA"]


def test_help():
    command = [sys.executable, "-m", "attnlib.bench.inspect_sm90", "--help"]
    shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert "usage: python -m attnlib.bench.inspect_sm90" in shown.stdout and not shown.stderr
