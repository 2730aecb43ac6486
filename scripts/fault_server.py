"""A whole server with the shipped pair: killed, left, asked nonsense, and searched for secrets."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from fault_process import MODEL, STAGES, Load, Server, keyed_home, leave, until
from fault_requests import PAGES, hostile, limits, nonsense
from fault_tools import Row, ids_of, timed
from tokenizers import Tokenizer

from moedraft.serve.auth.sessions import COOKIE
from moedraft.storage.backup import make_backup
from moedraft.storage.db import DATABASE
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store

SECRET_PROMPT = "moedraft-needle zebra quartz 7319 in the prompt"
RESTART = 10.0  # s
WARM = 1400  # clients after which memory has to be flat
TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "models" / "mini-target" / "tokenizer.json"


def server_rows(folder: Path, clients: int, bodies: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    rows = []
    home, secret = keyed_home(folder / "one")
    with Server(home, secret, "--learning") as server:
        for run in (
            lambda: leavers(server, clients),
            lambda: nonsense(server, bodies, rng),
            lambda: limits(server),
            lambda: hostile(server),
        ):
            rows.append(timed(run))
        server.answer(prompt=SECRET_PROMPT)
        rows.append(timed(lambda: secrets(server)))
    _search_files(server, rows[-1])
    return [*rows, timed(lambda: core_file(folder / "dying"))]


# -- killed under load ---------------------------------------------------------------------------


def killed_rows(folder: Path, times: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    return [timed(lambda: killed_under_load(folder / "home", times, rng))]


def killed_under_load(path: Path, times: int, rng: random.Random) -> Row:
    row = Row(
        "kill −9 of a server under load, at a random moment",
        f"all that was acknowledged is there; ready after {RESTART:.0f} s of a processor; same answers",
    )
    home, secret = keyed_home(path)
    server = Server(home, secret, "--no-learning", MOEDRAFT_REPLAY_CAPACITY="1000000")
    server.start()
    wanted, answered, starts, clock = server.answer(), 0, list[float](), list[float]()
    kept = ids_of(KeyFile(home))
    for number in range(times):
        with Load(server, 3) as load:
            records = _acknowledged(server, home, number, rng)
            server.kill()
        answered += load.answered
        server.start()
        starts.append(server.used)
        clock.append(server.started_in)
        found = server.client.get("/admin/replay").json()["records"]
        row.check(sum(found.values()) >= records, f"{records} records were acknowledged, {found} are there")
        known = {one["name"] for one in server.client.get("/admin/domains").json()["domains"]}
        row.check(f"d{number}" in known, f"domain d{number} was acknowledged and is not there")
        row.check(ids_of(KeyFile(home)) == kept, "a revoked key is back")
        row.check(server.answer() == wanted, "the answer has changed")
        row.cases += 1
    server.__exit__(None, None, None)
    row.check(max(starts) < RESTART, f"a restart took {max(starts):.1f} s of a processor")
    row.figures = f"{answered} answers; a restart took {median(starts):.1f} s of a processor in the median, "
    row.figures += f"{max(starts):.1f} s at most; by the clock {median(clock):.1f} and {max(clock):.1f} s"
    return row


def _acknowledged(server: Server, home: Path, number: int, rng: random.Random) -> int:
    """Change this and that; returns how many records were there when it was last asked."""
    time.sleep(rng.random())
    file = KeyFile(home)
    file.revoke(file.create(["infer"], "to be revoked")[0].id)
    examples = [f"example {number} {i}" for i in range(8)]
    answer = server.client.post("/admin/domains", json={"name": f"d{number}", "examples": examples})
    answer.raise_for_status()
    records = sum(server.client.get("/admin/replay").json()["records"].values())
    time.sleep(rng.random() * 0.3)
    return int(records)


# -- clients, bodies, pages ----------------------------------------------------------------------


def leavers(server: Server, clients: int) -> Row:
    row = Row("clients that leave at seven stages", "slots, files, threads, memory as before; others served")
    for stage in range(STAGES):
        leave(server, stage)
    until(lambda: server.held()["requests"] == 0, 20)
    server.answer()
    before = warm = server.held()
    for number in range(clients):
        if number == WARM:
            until(lambda: server.held()["requests"] == 0, 30)
            warm = server.held()
        leave(server, number % STAGES)
        if number % 50 == 0:
            row.check(bool(server.answer()), "another client got no answer")
        row.cases += 1
    row.check(until(lambda: server.held()["requests"] == 0, 30), "requests of those that left go on")

    def as_before() -> bool:
        now = server.held()
        return now["files"] <= before["files"] + 2 and now["threads"] <= before["threads"] + 2

    row.check(until(as_before, 45), f"files or threads: {before} → {server.held()}")
    now = server.held()
    drift = now["kilobytes"] / warm["kilobytes"] - 1
    row.check(drift <= 0.01 or clients <= WARM, f"memory drifted by {drift:.2%}")
    row.figures = f"{before['files']} → {now['files']} files, {before['threads']} → {now['threads']} threads"
    if clients > WARM:
        row.figures += f", memory after the first {WARM} {warm['kilobytes'] / 1000:.1f} MB, {drift:+.2%}"
    return row


# -- secrets -------------------------------------------------------------------------------------


def secrets(server: Server) -> Row:
    """What was sent to the server, searched for in all that it shows or logs."""
    row = Row(
        "key, session and prompt searched for in log, metrics, pages, errors; after a purge in all files",
        "found nowhere",
    )
    session = server.sign_in()
    wrong = {"authorization": f"Bearer {server.secret}x", "cookie": f"{COOKIE}={server.secret}"}
    known = {"authorization": "", "cookie": f"{COOKIE}={session}"}
    page = server.client.get(PAGES[0], headers=known).status_code
    row.check(page == 200, f"who has signed in gets {page}")
    texts = {
        "metrics": server.client.get("/metrics").text,
        "a refusal": server.client.get("/admin/domains", headers=wrong).text,
        "an error": server.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": [SECRET_PROMPT, 1]}
        ).text,
        "the status": server.client.get("/admin/learning").text,
        **{path: server.client.get(path, headers=known).text for path in PAGES},
    }
    for name, text in texts.items():
        row.cases += 1
        needles = {"key": server.secret, "session": session, "prompt": SECRET_PROMPT}
        for what, needle in needles.items():
            row.check(needle not in text, f"the {what} is in {name}")
    done = server.client.post("/admin/replay/purge", json={"domain": None}).json()
    row.check(done["overwritten"], f"the purge was not complete: {done}")
    return row


def _search_files(server: Server, row: Row) -> None:
    """After the server's end: its log and its home."""
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(SECRET_PROMPT).ids
    tokens = b"".join(int(one).to_bytes(4, "little") for one in ids)
    store = Store.open(server.home)
    store.close()
    for path in [server.log, *(one for one in server.home.rglob("*") if one.is_file())]:
        data = path.read_bytes()
        row.cases += 1
        for what, needle in (
            ("key", server.secret.encode()),
            ("session", server.session.encode()),
            ("prompt", SECRET_PROMPT.encode()),
            ("prompt's tokens", tokens),
        ):
            row.check(needle not in data, f"the {what} is in {path.name}")
    backup = server.home.parent / "backup.tar"
    make_backup(server.home, backup)
    row.check(server.secret.encode() not in backup.read_bytes(), "the key is in a backup")
    row.check(backup.stat().st_mode & 0o077 == 0, "others may read a backup")
    row.check((server.home / DATABASE).stat().st_mode & 0o077 == 0, "others may read the database")


def core_file(folder: Path) -> Row:
    """A server and, as a control, another process die of a fault where both may write core files."""
    row = Row("a server with prompts in its memory dies of SIGSEGV", "no core file is left")
    (folder / "control").mkdir(parents=True)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        command = [sys.executable, "-c", "import os; os.abort()"]
        subprocess.run(command, cwd=folder / "control", capture_output=True, timeout=60)
        home, secret = keyed_home(folder / "home")
        with Server(home, secret, "--no-learning") as server:
            server.answer(prompt=SECRET_PROMPT)
            server.process.send_signal(signal.SIGSEGV)
            server.process.wait(60)
            row.cases += 1
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    found = [path.name for path in (*folder.glob("core*"), *home.rglob("core*"))]
    row.check(not found, f"it left {found}")
    other = any((folder / "control").iterdir())
    row.figures = f"another process {'left one' if other else 'left none either: this machine keeps none'}"
    return row
