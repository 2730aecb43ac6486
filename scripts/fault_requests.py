"""Hostile requests to a server, and hostile words on its pages: what a grammar makes, what is too much."""

from __future__ import annotations

import csv
import io
import json
import random
import string
from typing import Any

import httpx
from fault_process import MODEL, PROMPT, Server
from fault_tools import Row

from moedraft.serve.http.plan import LONGEST_STOP, MOST_LOGPROBS

HOSTILE = '<script>alert("moedraft-needle")</script>'
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
AT_LIMIT: dict[str, Any] = {
    "max_tokens": 4096,
    "n": 16,
    "logprobs": 20,
    "stop": [letter * LONGEST_STOP for letter in "wxyz"],
    "seed": 2**63 - 1,
    "temperature": 2.0,
    "top_p": 1e-9,
    "top_k": 2**31 - 1,
    "min_p": 1.0,
    "ignore_eos": True,
    "suffix": "",
    "user": "u" * 100_000,
}
BEYOND: dict[str, Any] = {
    "max_tokens": 4097,
    "n": 17,
    "logprobs": 21,
    "stop": ["x" * (LONGEST_STOP + 1)],
    "temperature": -0.1,
    "top_p": 1.1,
    "min_p": 1.1,
    "prompt": [f"{PROMPT} {i}" for i in range(17)],
    "echo": True,
    "logit_bias": {"1": 100},
    "suffix": "x",
}
PAGES = ("/dashboard/", "/dashboard/experts", "/dashboard/router", "/dashboard/learning")


def nonsense(server: Server, bodies: int, rng: random.Random) -> Row:
    row = Row("bodies that a grammar makes, and bytes that are no JSON", "no 5xx; the engine lives")
    statuses: dict[int, int] = {}
    for _ in range(bodies):
        path = rng.choice([*SOUND, "/v1/completions", "/v1/chat/completions"])
        content = _body(rng, path)
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


def limits(server: Server) -> Row:
    """The most that each field may be, alone and all together, and more than that."""
    row = Row(
        "every field at its limit, alone and all together, and beyond it",
        "at the limit it is served, beyond it refused by name; the engine is ready",
    )
    together = {**AT_LIMIT, "max_tokens": MOST_LOGPROBS // (AT_LIMIT["n"] * (AT_LIMIT["logprobs"] + 1))}
    served = [*({name: value} for name, value in AT_LIMIT.items()), together]
    refused = [*({name: value} for name, value in BEYOND.items()), {**AT_LIMIT, **BEYOND}]
    for fields in [*served, *refused]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, **fields}
        wanted = (200,) if fields in served else (400, 413)
        try:
            status = server.client.post("/v1/completions", json=body, timeout=600).status_code
            row.check(status in wanted, f"{status} for {sorted(fields)}, not one of {wanted}")
        except httpx.HTTPError as error:
            row.check(False, f"{type(error).__name__} for {sorted(fields)}")
        row.check(server.client.get("/ready").status_code == 200, f"not ready after {sorted(fields)}")
        row.cases += 1
    return row


def _body(rng: random.Random, path: str) -> bytes:
    """One in four is sound; most others are sound but for one field, so that they come far."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    fields = SOUND[path]
    optional = rng.sample(sorted(fields), rng.randrange(len(fields) + 1))
    body = {name: rng.choice(fields[name]) for name in {*optional, *NEEDED[path]}}
    for _ in range(rng.choice([0, 0, 1, 1, 3])):
        body[rng.choice([*fields, "unknown", HOSTILE])] = _value(rng, 0)
    text = json.dumps(body)
    return text[: rng.randrange(len(text))].encode() if rng.random() < 0.05 else text.encode()


_ASKED: dict[str, list[Any]] = {
    "model": [MODEL, f"{MODEL}:sql", f"{MODEL}:none"],
    "max_tokens": [1, 2, 8],
    "temperature": [0, 0.7, 2],
    "top_p": [1, 0.5],
    "n": [1, 2],
    "stop": ["x", ["a", "\n"]],
    "seed": [0, -1, 2**40],
    "stream": [False, True],
    "user": ["somebody"],
}
_MESSAGE = {"role": "user", "content": PROMPT}
SOUND: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {**_ASKED, "prompt": [PROMPT, [PROMPT, "a"], "\x00🙂"], "logprobs": [0, 5]},
    "/v1/chat/completions": {**_ASKED, "messages": [[_MESSAGE], [_MESSAGE] * 3], "top_logprobs": [0, 2]},
    "/admin/domains": {"name": ["fuzz", "sql"], "examples": [["example"] * 3], "description": ["", HOSTILE]},
    "/admin/replay/purge": {"domain": ["sql", None, "none"]},
}
NEEDED: dict[str, list[str]] = {
    "/v1/completions": ["model", "prompt", "max_tokens"],
    "/v1/chat/completions": ["model", "messages", "max_tokens"],
    "/admin/domains": ["name", "examples"],
    "/admin/replay/purge": ["domain"],
}


def _value(rng: random.Random, depth: int) -> Any:
    plain: list[Any] = [
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
