"""What may happen to a trainer beside a server that answers: killed, frozen, starved, garbling."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from fault_process import MODEL, Server, keyed_home, until
from fault_tools import Row, timed

SILENCE = 45  # seconds after which a trainer counts as hanging; the default is two minutes
COMES_BACK = 240.0  # s; it loads at the lowest priority
QUESTIONS = (
    "SELECT name FROM",
    "def area(r):",
    "The sum of 2 and 3",
    "SELECT count(*)",
    "import os",
    "WHERE id =",
)


def trainers(folder: Path, times: int) -> list[Row]:
    folder.mkdir()
    home, secret = keyed_home(folder / "home")
    environment: dict[str, Any] = {"MOEDRAFT_TRAINER_TIMEOUT": str(SILENCE), "MOEDRAFT_UPDATE_EVERY": "4"}
    with Server(home, secret, "--learning", **environment) as server:
        wanted = {question: server.answer(prompt=question, model=f"{MODEL}:sql") for question in QUESTIONS}
        return [
            timed(lambda fault=fault: _faulty(server, wanted, times, *FAULTS[fault], fault))  # type: ignore[misc]
            for fault in FAULTS
        ]


def _faulty(
    server: Server, wanted: dict[str, str], times: int, harm: Callable[[int], None], must: str, fault: str
) -> Row:
    row, asked = Row(f"the trainer {fault}", must), 0
    replaced = 0
    for _ in range(times):
        if not until(lambda: works(server), COMES_BACK):
            row.check(False, "there is no trainer")
            break
        first, ending = pid_of(server), time.monotonic() + COMES_BACK
        harm(first)
        while pid_of(server) in (0, first) and time.monotonic() < ending:
            if fault == "is frozen":
                freeze(first)  # again, because the server itself stops and continues it around requests
            check_answers(server, wanted, row)
            asked += len(wanted)
            time.sleep(1)  # so that it has time to train
        new = pid_of(server) not in (0, first)
        row.check(new, "no new trainer came")
        replaced += new
        row.cases += 1
    said = server.client.get("/admin/learning").json()["last_error"]
    row.figures = f"{asked} answers meanwhile; {replaced} new trainers; the last reason: {str(said)[:100]}"
    return row


def check_answers(server: Server, wanted: dict[str, str], row: Row) -> None:
    for question, answer in wanted.items():
        try:
            row.check(
                server.answer(prompt=question, model=f"{MODEL}:sql") == answer,
                f"the answer to {question!r} differs",
            )
        except httpx.HTTPError as error:
            row.check(False, f"a request failed: {type(error).__name__}")


def pid_of(server: Server) -> int:
    return int(server.client.get("/admin/learning").json()["pid"] or 0)


def works(server: Server) -> bool:
    """There is a trainer that has loaded what it computes with.

    By itself it runs only while nobody else wants a core, so other work on this machine would hold it up for
    as long as it likes; here it gets the priority of others, where this user may give it.
    """
    found = server.client.get("/admin/learning").json()
    for thread in Path(f"/proc/{found['pid']}/task").glob("*"):
        with suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    return bool(found["pid"]) and found["status"].startswith(("waiting", "training", "yielding", "measuring"))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    with suppress(ProcessLookupError):  # the server has ended it
        os.kill(pid, signal.SIGSTOP)


def starve(pid: int) -> None:
    """It gets no more memory than half of what it has, so that the next larger piece is refused."""
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
    resource.prlimit(pid, resource.RLIMIT_AS, (used // 2, hard))


def garble(pid: int) -> None:
    """Lines that are no messages, among its own."""
    with open(_messages_of(pid), "wb", buffering=0) as pipe:
        for number in range(150):
            pipe.write(b'{"kind": "publish", "expert": "\\u0000", "x": %d}\n' % number)


def _messages_of(pid: int) -> Path:
    """The pipe on which it talks to the server: the one it may write to beside those of stdout and stderr."""
    folder = Path(f"/proc/{pid}/fd")
    words = {os.readlink(folder / name) for name in ("1", "2")}
    for path in folder.iterdir():
        link = os.readlink(path)
        flags = Path(f"/proc/{pid}/fdinfo/{path.name}").read_text().split("flags:")[1].split()[0]
        if link.startswith("pipe:") and link not in words and int(flags, 8) & os.O_ACCMODE == os.O_WRONLY:
            return path
    raise FileNotFoundError("the trainer has no pipe to the server")


_MUST = "no answer differs, none fails; another one comes"
FAULTS: dict[str, tuple[Callable[[int], None], str]] = {
    "is killed": (kill, _MUST),
    "is frozen": (freeze, f"{_MUST} after {SILENCE} s of silence (default 120)"),
    "gets no more memory": (starve, _MUST),
    "writes garbage": (garble, _MUST),
}
