"""Modules that need Numba, which may be missing or not work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

log = logging.getLogger(__name__)
Made = TypeVar("Made")


def with_compiled(module: str, make: Callable[[Any], Made]) -> Made | None:
    """What `make` makes of the module of that name beside this one; None where Numba is missing or fails."""
    try:
        return make(import_module(f"moedraft.cpu.{module}"))
    except Exception as error:  # Numba loads libraries and files of its own, which may fail in many ways
        log.warning("Nothing is compiled by Numba, so a step on the CPU takes longer: %s", error)
        return None
