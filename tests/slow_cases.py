"""Cases of a test that repeat what others of its cases show, and so run with the slow tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """The values of a case for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)
