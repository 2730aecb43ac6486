"""The command line. `main` runs a command; if it fails, it prints one sentence and returns an exit code."""

from __future__ import annotations

import io
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
    if sys.stdout is None:
        say_error("standard output is closed, so that nothing could be shown.")
        return BAD_INPUT
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack what tables are drawn with
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(args=arguments, prog_name="moedraft", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except SystemExit as leaving:
        _drop_stdout()  # a command exits this way only if the reader of its output went away
        return int(leaving.code or 0)
    except Exception as error:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_stdout()  # what could not be written would be tried again at the exit
        return _explain(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        say_error("interrupted; the home is closed and whole.")
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """Print one sentence on stderr for an error that the user can fix. Any other error is raised again."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}{error.strerror or error}.")
    elif isinstance(error, MoedraftError):
        say_error(str(error))
    # an error of the command-line parser; typer exports no base class for these
    elif hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        see = f" See `{context.command_path} --help`." if context else ""
        say_error(f"{error.format_message().rstrip('.')}.{see}")
    else:
        raise error
    return BAD_INPUT


def _drop_stdout() -> None:
    """Discard buffered output: its reader is gone, and the flush at exit would print an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
