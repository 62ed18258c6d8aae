"""The files of this project."""

from __future__ import annotations

import subprocess
from pathlib import Path

from attnlib.bench.paths import ROOT


def committed() -> list[Path]:
    """Files of the project: what git has or would take; without git, what is not hidden or built."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
        listed = [name for name in listed if not name.startswith("build/")]
    keep = [name for name in listed if not name.startswith(".") or name.startswith((".ci/", ".git"))]
    return [ROOT / name for name in keep if not name.startswith(".git/") and (ROOT / name).is_file()]
