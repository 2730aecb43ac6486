"""Modules that need Numba, which may be missing."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)


@cache
def compiled(module: str) -> Any:
    """The module of that name beside this one; None where Numba is not installed or does not work here."""
    try:
        return import_module(f"moedraft.cpu.{module}")
    except ImportError as error:
        log.info("Small operations on the CPU are not compiled, so a step takes longer: %s", error)
        return None
