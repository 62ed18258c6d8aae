"""`make compat` finds what it compiles: its script runs by itself, without what pytest puts on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_cases_of_other_versions_of_triton_can_be_imported() -> None:
    script = ROOT / "tests" / "compile" / "compat.py"
    code = f"import sys; sys.path[0] = {str(script.parent)!r}; import compat; print(len(compat.families()))"
    unset = "PYTHONPATH", "TRITON_INTERPRET"
    env = {name: value for name, value in os.environ.items() if name not in unset}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert int(found.stdout) > 20
