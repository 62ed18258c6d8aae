"""Compiling for sm_90: what a cached result depends on, the limit of one kernel's time, loops in SASS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnlib.bench import compiler, inspect_sm90, sass, sources
from attnlib.bench.files import write_atomically
from attnlib.bench.inspect_sm90 import Job

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def copy(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Results go to a folder of this test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the child
    monkeypatch.setattr(inspect_sm90.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def job(path: Path, name: str = "copy", **options) -> Job:
    return Job(str(path), name, {"x": "*fp32:16", "y": "*fp32:16"}, {"N": 128}, **options)


def test_a_kernel_is_compiled_once_and_an_error_keeps_what_was_compiled(cache, monkeypatch):
    """All in one child, as each takes seconds to begin; the error names its kernel."""
    monkeypatch.setattr(inspect_sm90.os, "cpu_count", lambda: 2)
    file = cache / "kernel.py"
    file.write_text(KERNEL + KERNEL.replace("copy", "broken").replace("tl.load", "tl.lode"))
    both = job(file, num_warps=1), job(file, num_warps=4)
    with pytest.raises(
        RuntimeError, match=r"broken for sm_90 failed \(after 2 of 4 kernels\):\n(.*\n)*.*lode"
    ):
        inspect_sm90.compile_all([*both, job(file, "broken"), job(file, num_warps=8)])
    assert len(list(cache.glob("attnlib-sm90-*/*.json"))) == 2
    monkeypatch.setattr(inspect_sm90, "_compile_in_child", lambda jobs: pytest.fail("compiled again"))
    few, many = inspect_sm90.compile_all(both)
    assert few.num_warps == 1 and few.opcodes["LDG"] == many.opcodes["LDG"] == 1
    assert "LDG.E.128" in " ".join(few.listing) and few.loops == () and few.spills == 0
    assert inspect_sm90.compile_all(both[1:]) == [many]


def test_a_file_that_changes_while_it_is_compiled_is_named(cache, monkeypatch):
    """What came of it is the new text's, and stands under another key."""
    file = cache / "kernel.py"
    file.write_text(KERNEL)

    def meanwhile(jobs):
        file.write_text(KERNEL + "# edited\n")
        write_atomically(inspect_sm90._cache_file(jobs[0]), "{}")

    monkeypatch.setattr(inspect_sm90, "_compile_in_child", meanwhile)
    with pytest.raises(RuntimeError, match="copy for sm_90: a file that it is made of changed meanwhile"):
        inspect_sm90.compile_all([job(file)])


def test_a_time_out_names_the_kernel(cache, monkeypatch):
    file = cache / "kernel.py"
    file.write_text("import time\ntime.sleep(600)\n" + KERNEL)
    monkeypatch.setattr(inspect_sm90, "KERNEL_SECONDS", 1)
    with pytest.raises(RuntimeError, match=r"copy for sm_90 took more than 1 s \(after 0 of 1 kernels\)"):
        inspect_sm90.compile_all([job(file)])


def test_a_server_forks_what_compiles(cache, monkeypatch):
    """As a child does: the same results, errors, and limit of time. The server is this test's own."""
    monkeypatch.setattr(compiler, "_name", None)
    monkeypatch.setenv(compiler.SERVER, compiler.serve())
    monkeypatch.setattr(compiler.subprocess, "Popen", lambda *args, **options: pytest.fail("a child"))
    file, slow = cache / "kernel.py", cache / "slow.py"
    file.write_text(KERNEL + KERNEL.replace("copy", "broken").replace("tl.load", "tl.lode"))
    slow.write_text("import time\ntime.sleep(600)\n" + KERNEL)
    (stats,) = inspect_sm90.compile_all([job(file)])
    assert stats.opcodes["LDG"] == 1
    with pytest.raises(
        RuntimeError, match=r"broken for sm_90 failed \(after 1 of 2 kernels\):\n(.*\n)*.*lode"
    ):
        inspect_sm90.compile_all([job(file, num_warps=8), job(file, "broken")])
    monkeypatch.setattr(inspect_sm90, "KERNEL_SECONDS", 1)
    with pytest.raises(RuntimeError, match=r"copy for sm_90 took more than 1 s \(after 0 of 1 kernels\)"):
        inspect_sm90.compile_all([job(slow)])


def test_the_limit_is_of_one_piece_of_work(monkeypatch):
    """Six pieces of 0.5 s within a limit of 2 s each; then one that takes too long, and one that fails."""
    work = "import os, time\nfor i in range({}): time.sleep(0.5); os.write(1, b'.')\n"
    for pieces, more, status in ((6, "", 0), (1, "time.sleep(600)", None), (1, "raise SystemExit(3)", 3)):
        source = work.format(pieces) + more
        child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, bufsize=0)
        assert inspect_sm90._follow(child, 2) == (pieces, status)


def test_the_key_follows_imports_and_kernel_cells(tmp_path, monkeypatch):
    """A file two imports away counts, and a kernel cell two cells away; what is beside them does not."""

    def notebook(step: str, *cells: tuple[str, list[str]]) -> None:
        found = [{"cell_type": "code", "source": text, "metadata": {"tags": tags}} for text, tags in cells]
        write_atomically(tmp_path / "notebooks" / f"{step}.ipynb", json.dumps({"cells": found}))

    def write(name: str, text: str) -> None:
        write_atomically(tmp_path / name, text)

    monkeypatch.setattr(sources, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(inspect_sm90, "ROOT", tmp_path)
    write("attnlib/kernels/one/kernel.py", "from attnlib.kernels.one import near\n")
    write("attnlib/kernels/one/near.py", "from attnlib.kernels.common.far import f\n")
    write("attnlib/kernels/common/far.py", "f = 1\n")
    write("attnlib/kernels/one/beside.py", "")
    notebook("08_first", ("first = 1", ["kernel"]), ("print()", []))
    notebook("09_second", ('load_step("08_first")', ["kernel"]))
    write("cell.py", 'from attnlib.kernels.one import near\nload_step("09_second")')

    def keys() -> tuple[str, str]:
        return job(tmp_path / "attnlib/kernels/one/kernel.py").key(), job(tmp_path / "cell.py").key()

    before = keys()
    write("attnlib/kernels/one/beside.py", "g = 1\n")
    notebook("08_first", ("first = 1", ["kernel"]), ("print(2)", []))
    assert keys() == before
    notebook("08_first", ("first = 2", ["kernel"]), ("print(2)", []))
    kernel, cell = keys()
    assert kernel == before[0] and cell != before[1]
    write("attnlib/kernels/common/far.py", "f = 2\n")
    assert keys()[0] != kernel and keys()[1] != cell


def test_the_key_has_every_field_of_a_job(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    several = [
        job(file), job(file, "other"), job(file, num_warps=8), job(file, num_stages=2),
        job(file, max_registers=128), Job(str(file), "copy", {"x": "*fp32"}, {"N": 128}),
        Job(str(file), "copy", {"x": "*fp32:16", "y": "*fp32:16"}, {"N": 64}),
    ]  # fmt: skip
    assert len({one.key() for one in several}) == len(several)


def test_loops_of_sass():
    """Two loops with tensor-core instructions, one of them inside of another; a wait behind EXIT is none."""
    text = """
    /*0000*/                   MOV R1, c[0x0][0x28] ;
    /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
    /*0020*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
    /*0030*/                   MUFU.EX2 R3, R3 ;
    /*0040*/              @!P0 BRA 0x20 ;
    /*0050*/              @P1  BRA 0x10 ;
    /*0060*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
    /*0070*/                   NOP ;
    /*0080*/               @P2 BRA 0x60 ;
    /*0090*/                   EXIT ;
    /*00a0*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
    /*00b0*/               @P2 BRA 0x10 ;
"""
    found = sass.read_sass(text)
    assert found.loops == ({"BRA": 1, "HGMMA": 1, "MUFU.EX2": 1}, {"BRA": 1, "HMMA": 1})
    assert found.opcodes["HGMMA"] == 2 and "NOP" not in found.opcodes and len(found.listing) == 11
    assert [len(listing) for listing in found.loop_listings] == [3, 2]
    assert found.loop_stalls == ((), ())


def test_stalls_of_sass():
    """Bits 41 to 44 of the upper half of an instruction."""
    text = """
    /*0020*/      HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;      /* 0x00e00000041879f0 */
                                                                 /* 0x000fe6000ff00818 */
    /*0030*/      NOP ;                                          /* 0x0000000000007918 */
                                                                 /* 0x000fd00000000000 */
    /*0040*/      MUFU.EX2 R3, R3 ;                              /* 0x0000000300037308 */
                                                                 /* 0x000ff00000000800 */
    /*0050*/ @!P0 BRA 0x20 ;                                     /* 0x000000c4005c8947 */
                                                                 /* 0x002fea0003800000 */
    /*0060*/      EXIT ;                                         /* 0x000000000000794d */
                                                                 /* 0x000fea0003800000 */
"""
    assert sass.read_sass(text).loop_stalls == ((3, 8, 5),)
