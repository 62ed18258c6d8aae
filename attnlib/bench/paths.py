"""Where things are in a checkout: the package's parent is its root."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
TESTS = ROOT / "tests"
