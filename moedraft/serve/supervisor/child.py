"""A child process that exchanges lines with this one. Reading never blocks; `close` always ends it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

CHUNK = 65_536  # bytes read at once
LONGEST_LINE = 2**20  # bytes; a longer line is treated as a broken child
KEPT_LINES = 20  # how many lines of stderr are remembered
TICK = 0.05  # seconds between two looks while waiting for the end
REAP_SECONDS = 5.0
LAST_WORDS = 8  # chunks that are read after the process has ended


class ChildFailed(Exception):
    """The child can no longer be talked to; the message says why."""


class Child:
    """A child process with pipes to its stdin, stdout and stderr. Not thread-safe.

    Always call `close`; afterwards neither the process nor a pipe is left.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`. Raises OSError if it cannot be started."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(environment),
            # The child gets its own process group, so that Ctrl-C in the terminal reaches only the server. It
            # stays in the same session, because Linux shares the cores between sessions first and looks at
            # priorities only within one session.
            process_group=0,
        )
        self.silent = False  # whether its stdout is closed
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)  # the last lines of its stderr
        self._out, self._err = b"", b""
        self._selector = selectors.DefaultSelector()
        for pipe in (self._pipe("stdin"), self._pipe("stdout"), self._pipe("stderr")):
            os.set_blocking(pipe.fileno(), False)
        self._selector.register(self._pipe("stdout"), selectors.EVENT_READ, self._take_out)
        self._selector.register(self._pipe("stderr"), selectors.EVENT_READ, self._take_err)
        self._lines: list[bytes] = []

    def send(self, line: bytes) -> None:
        """Write a line. If the child does not read, this raises ChildFailed instead of waiting."""
        try:
            written = self._pipe("stdin").write(line)
        except OSError as error:
            raise ChildFailed("it reads no more") from error
        if written != len(line):
            raise ChildFailed("it does not read")

    def read(self, timeout: float) -> list[bytes]:
        """The lines that have arrived; waits at most `timeout` seconds for the first.

        Raises ChildFailed if LONGEST_LINE bytes arrive without the end of a line.
        """
        for key, _ in self._selector.select(timeout):
            data = os.read(key.fd, CHUNK)
            if not data:
                self._selector.unregister(key.fileobj)
            key.data(data)
        lines, self._lines = self._lines, []
        return lines

    @property
    def ended(self) -> bool:
        """Whether it will write no more lines. Lines written before may still have to be read."""
        return self.silent or self.process.poll() is not None

    def processor_seconds(self) -> float | None:
        """What all its threads have used so far.

        None where the system does not tell, and while the process is suspended, because it uses none then.
        """
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] in "Tt":
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user mode, in the kernel

    def close(self, grace: float) -> None:
        """Close its stdin, end it by force after `grace` seconds, and read the rest of what it wrote."""
        with contextlib.suppress(OSError):
            self._pipe("stdin").close()
        try:
            self._end(grace)
            for _ in range(LAST_WORDS):
                self._drop(0)
        finally:
            self._selector.close()
            self._pipe("stdout").close()
            self._pipe("stderr").close()

    def why_ended(self) -> str:
        """After `close`: how the process ended, with the last line of its stderr."""
        status = self.process.returncode
        last = next((line for line in reversed(self.errors) if line.strip()), "")
        if status is None:
            how = "it could not be killed"
        elif status < 0:
            how = f"it was killed by {_signal(-status)}"
            how += ", as when memory runs out" if -status == signal.SIGKILL else ""
        else:
            how = f"it ended with status {status}"
        return f"{how}: {last.strip()[:300]}" if last else how

    def _end(self, grace: float) -> None:
        """Wait for the process to end, and read its output meanwhile, in case it waits on a full pipe."""
        for stop in (None, self.process.terminate, self.process.kill):
            if stop is not None:
                stop()
            for _ in range(max(1, int(grace / TICK))):
                if self.process.poll() is not None:
                    return
                self._drop(TICK)
        # it could not be killed, for example while blocked in the kernel
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_SECONDS)

    def _drop(self, seconds: float) -> None:
        """Read what has arrived and discard it."""
        if not self._selector.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            return
        try:
            self.read(seconds)
        except ChildFailed:
            self._out = b""

    def _take_out(self, data: bytes) -> None:
        if not data:
            self.silent = True
        *lines, self._out = (self._out + data).split(b"\n")
        self._lines += lines
        if len(self._out) > LONGEST_LINE:
            raise ChildFailed("it writes lines without an end")

    def _take_err(self, data: bytes) -> None:
        *lines, rest = (self._err + data).split(b"\n")
        self._err = rest[-CHUNK:] if data else b""
        self.errors += [line.decode(errors="replace") for line in ([*lines, rest] if not data else lines)]

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] | None = getattr(self.process, name)
        assert pipe is not None
        return pipe


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
