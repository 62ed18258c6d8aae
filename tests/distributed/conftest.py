"""Two processes that the files of this folder share, unless one has its own."""

import pytest


@pytest.fixture(scope="session")
def two():
    # Not above: `pytest tests/distributed` reads this file before tests/conftest.py chooses the interpreter.
    from ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.close()
