"""A whole server with the shipped pair: killed, left, asked nonsense, and searched for secrets."""

from __future__ import annotations

import csv
import io
import json
import random
import string
import time
from pathlib import Path
from typing import Any

import httpx
from fault_process import MODEL, PROMPT, STAGES, Load, Server, keyed_home, leave, until
from fault_tools import Row, ids_of, timed
from tokenizers import Tokenizer

from moedraft.storage.db import DATABASE
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store

HOSTILE = '<script>alert("moedraft-needle")</script>'
SECRET_PROMPT = "moedraft-needle zebra quartz 7319 in the prompt"
CSV_TABLES = [
    "throughput",
    "sources",
    "tokens_per_step",
    "experts",
    "progress",
    "by_position",
    "by_language",
    "versions",
    "shares",
    "confidences",
    "unknown",
    "updates",
    "updates_by_expert",
]
PAGES = ("/dashboard/", "/dashboard/experts", "/dashboard/router", "/dashboard/learning")
RESTART = 10.0  # s
TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "models" / "mini-target" / "tokenizer.json"


def server_rows(folder: Path, clients: int, bodies: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    rows = []
    home, secret = keyed_home(folder / "one")
    with Server(home, secret, "--learning") as server:
        for run in (
            lambda: leavers(server, clients),
            lambda: nonsense(server, bodies, rng),
            lambda: hostile(server),
        ):
            rows.append(timed(run))
        server.answer(prompt=SECRET_PROMPT)
        rows.append(timed(lambda: secrets(server)))
    _search_files(server, rows[-1])
    return rows


# -- killed under load ---------------------------------------------------------------------------


def killed_rows(folder: Path, times: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    return [timed(lambda: killed_under_load(folder / "home", times, rng))]


def killed_under_load(path: Path, times: int, rng: random.Random) -> Row:
    row = Row(
        "kill −9 of a server under load, at a random moment",
        f"all that was acknowledged is there; ready within {RESTART:.0f} s; the same answers",
    )
    home, secret = keyed_home(path)
    server = Server(home, secret, "--no-learning", MOEDRAFT_REPLAY_CAPACITY="1000000")
    server.start()
    wanted, answered, slowest = server.answer(), 0, 0.0
    kept = ids_of(KeyFile(home))
    for number in range(times):
        with Load(server, 3) as load:
            records = _acknowledged(server, home, number, rng)
            server.kill()
        answered += load.answered
        server.start()
        slowest = max(slowest, server.started_in)
        found = server.client.get("/admin/replay").json()["records"]
        row.check(sum(found.values()) >= records, f"{records} records were acknowledged, {found} are there")
        known = {one["name"] for one in server.client.get("/admin/domains").json()["domains"]}
        row.check(f"d{number}" in known, f"domain d{number} was acknowledged and is not there")
        row.check(ids_of(KeyFile(home)) == kept, "a revoked key is back")
        row.check(server.answer() == wanted, "the answer has changed")
        row.cases += 1
    server.__exit__(None, None, None)
    row.check(slowest < RESTART, f"a restart took {slowest:.1f} s")
    row.figures = f"{answered} answers under load; slowest restart {slowest:.1f} s"
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
    row = Row("clients that leave at seven stages", "slots, files and threads as before; others are served")
    for stage in range(STAGES):
        leave(server, stage)
    until(lambda: server.held()["requests"] == 0, 20)
    server.answer()
    before = server.held()
    for number in range(clients):
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
    row.figures = f"{before['files']} → {now['files']} files, {before['threads']} → {now['threads']} threads"
    return row


def nonsense(server: Server, bodies: int, rng: random.Random) -> Row:
    row = Row("bodies that a grammar makes, and bytes that are no JSON", "no 5xx; the engine lives")
    statuses: dict[int, int] = {}
    for _ in range(bodies):
        path = rng.choice(
            ["/v1/completions", "/v1/chat/completions", "/admin/domains", "/admin/replay/purge"]
        )
        content = _body(rng)
        try:
            response = server.client.post(
                path, content=content, headers={"content-type": "application/json"}, timeout=30
            )
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            row.check(response.status_code < 500, f"{response.status_code} for {content[:200]!r}")
        except httpx.HTTPError as error:
            row.check(False, f"{type(error).__name__} for {content[:200]!r}")
        row.cases += 1
    row.check(server.client.get("/ready").status_code == 200, "the engine is not ready afterwards")
    row.figures = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
    return row


def _body(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    fields = [
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "stop",
        "seed",
        "stream",
        "logprobs",
        "model",
        "draft",
        "stream_options",
        "name",
        "examples",
        "domain",
        "echo",
        "suffix",
        "store",
    ]
    body = {name: _value(rng, 0) for name in rng.sample(fields, rng.randrange(1, 9))}
    if rng.random() < 0.7:
        body |= {"model": MODEL, "max_tokens": rng.choice([1, 2, 8])}
    if rng.random() < 0.5:
        body |= {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
        body.pop(rng.choice(["prompt", "messages"]))
    text = json.dumps(body)
    return text[: rng.randrange(len(text))].encode() if rng.random() < 0.1 else text.encode()


def _value(rng: random.Random, depth: int) -> Any:
    plain = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        -(2**70),
        0.0,
        1e308,
        -0.5,
        "",
        "a",
        HOSTILE,
        "\x00",
        "\ud7ff\u2028",
        "🙂" * 50,
        "=1+1",
        "x" * 5000,
        [],
        {},
    ]
    if depth < 3 and rng.random() < 0.3:
        size = rng.randrange(4)
        if rng.random() < 0.5:
            return [_value(rng, depth + 1) for _ in range(size)]
        return {rng.choice(string.ascii_letters): _value(rng, depth + 1) for _ in range(size)}
    return rng.choice(plain)


def hostile(server: Server) -> Row:
    row = Row("hostile names, descriptions and prompts on every page and in every CSV", "nothing executes")
    names = [
        HOSTILE,
        "=cmd|' /C calc'!A0",
        "../../etc",
        "a\x00b",
        "SQL",
        "x" * 65,
        "sql\u202elqs",
        "-1+1",
        "@a",
    ]
    examples = [f"{HOSTILE} {i}" for i in range(8)]
    for name in names:
        answer = server.client.post("/admin/domains", json={"name": name, "examples": examples})
        row.check(answer.status_code == 400, f"the name {name!r} got {answer.status_code}")
        row.cases += 1
    row_of = {"name": "harmless", "examples": examples, "description": HOSTILE}
    row.check(server.client.post("/admin/domains", json=row_of).status_code == 201, "a plain name is refused")
    for prompt in (HOSTILE, "=1+1", "+1", "@SUM(A1)", "\t=1"):
        server.answer(prompt=prompt, model=f"{MODEL}:harmless", max_tokens=4)
    for path in [*PAGES, *(f"/dashboard/csv/{name}?expert=harmless" for name in CSV_TABLES)]:
        page = server.client.get(path)
        row.cases += 1
        row.check(page.status_code == 200, f"{path} gave {page.status_code}")
        row.check(HOSTILE not in page.text, f"{path} shows what a client wrote")
        if "/csv/" in path:
            cells = [cell for line in csv.reader(io.StringIO(page.text)) for cell in line]
            wrong = [cell for cell in cells if (cell[:1] in "=+@\t\r" and cell) or _formula(cell)]
            row.check(not wrong, f"{path} has cells that a spreadsheet computes: {wrong[:2]}")
    return row


def _formula(cell: str) -> bool:
    """It begins with a minus and is no number."""
    try:
        float(cell)
    except ValueError:
        return cell.startswith("-")
    return False


# -- secrets -------------------------------------------------------------------------------------


def secrets(server: Server) -> Row:
    """What was sent to the server, searched for in all that it shows or logs."""
    row = Row(
        "key and prompt searched for in log, metrics, pages, errors; after a purge in all files",
        "found nowhere",
    )
    wrong = {"authorization": f"Bearer {server.secret}x", "cookie": f"moedraft={server.secret}"}
    texts = {
        "metrics": server.client.get("/metrics").text,
        "a refusal": server.client.get("/admin/domains", headers=wrong).text,
        "an error": server.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": [SECRET_PROMPT, 1]}
        ).text,
        "the status": server.client.get("/admin/learning").text,
        **{path: server.client.get(path).text for path in PAGES},
    }
    for name, text in texts.items():
        row.cases += 1
        for what, needle in (("key", server.secret), ("prompt", SECRET_PROMPT)):
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
            ("prompt", SECRET_PROMPT.encode()),
            ("prompt's tokens", tokens),
        ):
            row.check(needle not in data, f"the {what} is in {path.name}")
    row.check((server.home / DATABASE).stat().st_mode & 0o077 == 0, "others may read the database")
