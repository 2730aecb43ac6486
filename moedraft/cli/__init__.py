"""The command line. `main` runs a command and turns what can go wrong into one sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from moedraft.cli.app import app
from moedraft.cli.common import say_error
from moedraft.core import MoedraftError

__all__ = ["app", "main"]

BAD_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `moedraft` with `arguments` (default: the process's own); returns the exit code.

    0: done, 1: a check of `doctor` or an answer failed, 2: bad input, 130: interrupted.
    """
    try:
        code = app(args=arguments, prog_name="moedraft", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except SystemExit as leaving:
        _drop_stdout()  # only a reader that went away ends a command like this
        return int(leaving.code or 0)
    except Exception as error:
        return _explain(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        say_error("interrupted; the home is closed and whole.")
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """One sentence on stderr for what a user can cause or mend; a fault of ours is raised on."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}{error.strerror or error}.")
    elif isinstance(error, MoedraftError):
        say_error(str(error))
    elif hasattr(error, "format_message"):  # the command-line parser's own; typer exports no base class
        context = getattr(error, "ctx", None)
        see = f" See `{context.command_path} --help`." if context else ""
        say_error(f"{error.format_message().rstrip('.')}.{see}")
    else:
        raise error
    return BAD_INPUT


def _drop_stdout() -> None:
    """Nobody reads any more: what is still buffered must not be flushed at exit, with a complaint."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
