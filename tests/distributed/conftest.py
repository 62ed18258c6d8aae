"""Two processes that the files of this folder share, unless one has its own."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()
