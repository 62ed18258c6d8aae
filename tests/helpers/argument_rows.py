"""Tables of wrong arguments, one row for each mistake: (change, error, message). Tests check the messages
word for word, and that every argument has a row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import pytest

Row = tuple[dict, type[Exception], str]
Table = tuple[Callable, dict, list[Row]]
"""A function, arguments that are right, and what goes wrong where some of them change."""


def mistakes(tables: Iterable[Table]) -> pytest.MarkDecorator:
    """Parametrizes a test by `mistake`, for `check_mistake`."""
    rows = [(function, good | change, error, message)
            for function, good, rows in tables for change, error, message in rows]  # fmt: skip
    ids = [f"{getattr(function, '__name__', function)}-{message}" for function, _, _, message in rows]
    return pytest.mark.parametrize("mistake", rows, ids=ids)


def check_mistake(mistake: tuple[Callable, dict, type[Exception], str]) -> None:
    function, arguments, error, message = mistake
    with pytest.raises(error) as raised:
        function(**arguments)
    assert str(raised.value) == message


def check_every_argument_has_a_row(tables: Iterable[Table]) -> None:
    for function, good, rows in tables:
        function(**good)
        assert {name for change, *_ in rows for name in change} == set(inspect.signature(function).parameters)
