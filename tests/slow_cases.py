"""Cases of a test that repeat what others of its cases show, and so run with the slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

Param = type(pytest.param())


def case(*values: Any, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    """The values of a case for `pytest.mark.parametrize`; one that is a `pytest.param` brings its marks."""
    given = [value if isinstance(value, Param) else pytest.param(value) for value in values]
    found = [mark for one in given for mark in one.marks]
    return pytest.param(*(value for one in given for value in one.values), marks=[*found, *marks])


def slow(*values: Any) -> Any:
    """A case that runs with the slow tests."""
    return case(*values, marks=[pytest.mark.slow])
