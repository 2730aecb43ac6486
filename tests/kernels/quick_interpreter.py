"""Triton's interpreter without half of its work: it prepares the language anew for each call of a function.

Preparing looks through all members of `triton.language`, and a kernel of ours calls a thousand functions.
Within a launch the language stays as it was prepared; nothing but time depends on doing that again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


class Prepared:
    """What preparing again returns: nothing is to be restored after the call."""

    def restore(self) -> None:
        pass


def prepare_once_in_a_launch(interpreter: Any) -> None:
    """Changes the module `triton.runtime.interpreter`."""
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[frozenset[str]] = set()

    @cache
    def languages(function: Callable[..., Any]) -> frozenset[str]:
        """By which modules it knows the language; these are what is prepared for it."""
        known = (one.__name__ for one in function.__globals__.values() if isinstance(one, ModuleType))
        return frozenset(name for name in known if name in ("triton.language", "triton.language.core"))

    def prepare_once(function: Callable[..., Any]) -> Any:
        if (wanted := languages(function)) in prepared:
            return Prepared()
        prepared.add(wanted)
        return prepare(function)

    def launch_alone(self: Any, *arguments: Any, **named: Any) -> None:
        prepared.clear()
        try:
            launch(self, *arguments, **named)
        finally:
            prepared.clear()

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_alone
