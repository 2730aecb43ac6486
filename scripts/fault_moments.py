"""Kill −9 exactly before and after every fsync and rename of a change to a home, one after another."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_kills import Check, Work, check_backup, check_publish, check_revoke, opened
from fault_tools import Row, Say, candidate, new_home, record, timed, until_its_end

from moedraft.storage.backup import make_backup, restore_backup
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store

CALLS = ("fsync", "fdatasync", "rename", "replace")
MOST = 200  # moments of one change


def publish_once(home: Path, say: Say) -> None:
    store = Store.open(home)
    number = store.registry.next_version("sql")
    say(str(store.adapters.publish(candidate(float(number))).version))
    store.close()


def revoke_once(home: Path, say: Say) -> None:
    file = KeyFile(home)
    key, _ = file.create(["infer"])
    say(f"+{key.id}")
    file.revoke(key.id)
    say(f"-{key.id}")


def back_up_once(home: Path, say: Say) -> None:
    file = home.parent / "once.tar"
    make_backup(home, file)
    say(file.name)


def restore_once(home: Path, say: Say) -> None:
    source = home.parent / "source.tar"
    if not source.exists():
        make_backup(home, source)
    restore_backup(source, home.parent / "restored")
    say("restored")


def check_restore(home: Path, said: list[str], row: Row) -> None:
    """Either there is a whole home, or none."""
    target = home.parent / "restored"
    row.check(target.exists() or not said, "a home that was restored is not there")
    if target.exists():
        store = opened(target, row)
        row.check(store.replay.count() == 50, "a restored home has lost records")
        store.close()
        shutil.rmtree(target)


CHANGES: dict[str, tuple[Work, Check]] = {
    "an adapter is published": (publish_once, check_publish),
    "a key is made and revoked": (revoke_once, check_revoke),
    "a backup is made": (back_up_once, check_backup),
    "a backup is restored": (restore_once, check_restore),
}


def moments(folder: Path) -> list[Row]:
    folder.mkdir()
    return [
        timed(lambda number=i, name=name: _moments(folder / str(number), name))  # type: ignore[misc]
        for i, name in enumerate(CHANGES)
    ]


def _moments(folder: Path, name: str) -> Row:
    work, check = CHANGES[name]
    row = Row(f"kill −9 before and after each fsync and rename while {name}", "nothing half, nothing lost")
    folder.mkdir()
    home = new_home(folder / "home")
    store = Store.open(home)
    store.replay.add([record(i) for i in range(50)])
    store.close()
    for moment in range(1, MOST):
        said = until_its_end(lambda say, moment=moment: _die_at(moment, lambda: work(home, say), say))  # type: ignore[misc]
        check(home, [line for line in said if line != "end"], row)
        if "end" in said:
            break
        row.cases += 1
    else:
        row.check(False, f"there are more than {MOST} moments")
    return row


def _die_at(moment: int, work: Callable[[], None], say: Say) -> None:
    """Run `work` and say so, unless the process dies first: moment 1 is before its first call, 2 after it."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 2  # before it and after it
            if count == moment + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    work()
    say("end")
