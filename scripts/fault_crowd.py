"""Crowds at a server's door: who reads nothing, sends slowly, asks on before the answer."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from fault_process import MODEL, PROMPT, Server, keyed_home, until
from fault_tools import Row, timed

from moedraft.serve.http.protocol import LEAST_WAIT

PATIENCE = 4  # seconds for headers, bodies and unread answers in this part; the defaults are 10, 30 and 30
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
UNKNOWN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"  # without a key
READY = 5.0  # s for a probe
SLOWER = 0.2  # share that answers to others may take longer while there is a crowd
CALM = 20  # answers without a crowd, before and after it
MANY = 500  # connections from which on times and memory are judged; a small crowd is a test that it runs
REFUSED = 1000.0
WARM = 1400  # answers after which the caches with a bound are full: docs/robustness.md
ENVIRONMENT: dict[str, Any] = {
    "MOEDRAFT_HEADER_TIMEOUT": str(PATIENCE),
    "MOEDRAFT_BODY_TIMEOUT": str(PATIENCE),
    "MOEDRAFT_SEND_TIMEOUT": str(PATIENCE),
    "MOEDRAFT_MAX_WAITING": "8",
}


def crowds(folder: Path, connections: int, seconds: float) -> list[Row]:
    """connections: of each crowd; seconds: of overload."""
    folder.mkdir()
    home, secret = keyed_home(folder / "home")
    with Server(home, secret, "--no-learning", **ENVIRONMENT) as server:
        known = f"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {secret}\r\n\r\n"
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {secret}\r\n"
            "content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        ).encode()
        kinds = {
            "pipeline 400 probes and read nothing": (HEALTH * 400, b""),
            "pipeline long answers and read nothing": (known.encode() * 40, b""),
            "pipeline 40 requests without a key": (UNKNOWN * 40, b""),
            "send their headers a byte a second": (b"GET /v1/models HTTP/1.1\r\nx: ", b"x"),
            "send their bodies a byte a second": (head, b" "),
        }
        with holding(server, connections, HEALTH * 400):
            time.sleep(PATIENCE)  # what so many connections need for the first time is allocated now
        rows = [timed(lambda kind=kind: crowd(server, connections, kind, *kinds[kind])) for kind in kinds]  # type: ignore[misc]
        rows.append(timed(lambda: pipelined(server, min(connections, 50))))
        rows.append(timed(lambda: overload(server, seconds)))
    return rows


# -- who holds connections -----------------------------------------------------------------------


def crowd(server: Server, connections: int, kind: str, first: bytes, drip: bytes) -> Row:
    row = Row(
        f"{connections} clients at once that {kind}",
        f"probes are answered in {READY:.0f} s; others are served after {LEAST_WAIT:.0f} s, within "
        f"{SLOWER:.0%} of their time; soon after {PATIENCE} s the crowd is gone; files, threads and memory "
        "as before",
    )
    wanted, before = server.answer(), settled(server)
    calm = [answered_in(server, wanted) for _ in range(CALM)]
    slowest, others = 0.0, list[float]()
    with holding(server, connections, first) as sockets:
        start = time.monotonic()
        while time.monotonic() < start + 2 * PATIENCE:
            second = time.monotonic() + 1
            began = time.monotonic()
            for path in ("/health", "/ready"):
                row.check(probe(server, path) == 200, f"{path} gave no 200 in time")
            slowest = max(slowest, time.monotonic() - began)
            while time.monotonic() < second:
                if time.monotonic() > start + LEAST_WAIT:
                    others.append(answered_in(server, wanted))
                else:
                    time.sleep(0.1)
            for one in sockets if drip else ():
                try:
                    one.send(drip)
                except OSError:
                    continue  # it was sent away
        row.check(until(lambda: server.answer() == wanted, 60), "nobody else is answered after the time")
    row.cases = connections
    row.check(until(lambda: held_at_most(server, before, 2), 30), f"files: {before} → {server.held()}")
    row.check(max(others, default=REFUSED) < REFUSED, "others were refused, or got another answer")
    calm += [answered_in(server, wanted) for _ in range(CALM)]
    ratio = median(others or [REFUSED]) / median(calm)
    row.check(ratio <= 1 + SLOWER or connections < MANY, f"others took {ratio:.2f} times as long")
    drift = settled(server)["kilobytes"] / before["kilobytes"] - 1
    row.check(drift <= 0.01 or connections < MANY, f"memory drifted by {drift:+.2%}")
    row.figures = f"slowest pair of probes {slowest:.2f} s; answers of others {median(calm):.3f} s in the "
    row.figures += f"median before and after, {ratio:.2f} times that meanwhile ({len(others)}); "
    row.figures += f"memory {drift:+.2%}"
    return row


def answered_in(server: Server, wanted: str) -> float:
    """Seconds until another client has its answer, over a connection of its own; REFUSED if it gets none."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    began = time.monotonic()
    try:
        options = {"headers": dict(server.client.headers), "timeout": 60, "trust_env": False}
        url = f"{server.client.base_url}/v1/completions"
        response = httpx.post(url, json=body, **options)  # type: ignore[arg-type]
        same = response.status_code == 200 and response.json()["choices"][0]["text"] == wanted
    except httpx.HTTPError:
        same = False
    return time.monotonic() - began if same else REFUSED


@contextmanager
def holding(server: Server, connections: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that send as much of `data` as the server takes within two seconds."""
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        sockets = []
        for _ in range(connections):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(10)
            one.connect(server.address)
            one.setblocking(False)
            selector.register(one, selectors.EVENT_WRITE, memoryview(data))
            sockets.append(one)
        ending = time.monotonic() + 2
        while selector.get_map() and time.monotonic() < ending:
            for key, _ in selector.select(0.1):
                _send_some(selector, key)
        yield sockets


def _send_some(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    one = key.fileobj
    assert isinstance(one, socket.socket)
    try:
        rest = key.data[one.send(key.data) :]
    except BlockingIOError:
        return
    except OSError:
        rest = b""
    if rest:
        selector.modify(one, selectors.EVENT_WRITE, rest)
    else:
        selector.unregister(one)


def probe(server: Server, path: str) -> int:
    """As an orchestrator asks: over a connection of its own, with little patience. 0: no answer."""
    try:
        return httpx.get(f"{server.client.base_url}{path}", timeout=READY, trust_env=False).status_code
    except httpx.HTTPError:
        return 0


def settled(server: Server) -> dict[str, int]:
    until(lambda: server.held()["requests"] == 0, 30)
    time.sleep(0.5)
    return server.held()


def held_at_most(server: Server, before: dict[str, int], more: int) -> bool:
    now = server.held()
    return now["requests"] == 0 and all(now[name] <= before[name] + more for name in ("files", "threads"))


# -- who asks much -------------------------------------------------------------------------------


def pipelined(server: Server, connections: int) -> Row:
    row = Row("requests sent before the answers to those before were read", "each is answered, in its order")
    lengths = (1, 3, 2, 4)
    parts = [request(server, length) for length in lengths]
    for _ in range(connections):
        with socket.create_connection(server.address, timeout=60) as one:
            one.sendall(b"".join(parts) + HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            data = b""
            while part := one.recv(65536):
                data += part
        bodies = [json.loads(text) for text in _bodies(data)]
        found = [body["usage"]["completion_tokens"] for body in bodies if "usage" in body]
        row.check(found == list(lengths) and len(bodies) == 5, f"answers of {found} tokens, not {lengths}")
        row.cases += 1
    return row


def request(server: Server, tokens: int) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.secret}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _bodies(data: bytes) -> Iterator[bytes]:
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        lengths = [
            line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        size = int(lengths[0])
        yield data[:size]
        data = data[size:]


class Many:
    """Clients that ask one request after another and note the statuses; those refused ask again at once."""

    def __init__(self, server: Server, clients: int, ask: Callable[[httpx.Client], int]) -> None:
        self.statuses: Counter[int] = Counter()
        self._end, self._ask = threading.Event(), ask
        self._server = server
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        options = {"base_url": self._server.client.base_url, "headers": self._server.client.headers}
        with httpx.Client(**options, timeout=60, trust_env=False) as client:  # type: ignore[arg-type]
            while not self._end.is_set():
                try:
                    status = self._ask(client)
                except httpx.HTTPError:
                    status = 0
                self.statuses[status] += 1
                if status != 200:
                    time.sleep(0.25)

    def run(self, seconds: float) -> None:
        for thread in self._threads:
            thread.start()
        self._end.wait(seconds)
        self._end.set()
        for thread in self._threads:
            thread.join(70)


def overload(server: Server, seconds: float) -> Row:
    row = Row(
        f"for {seconds:.0f} s ten times as many clients as the server has slots, who come again when refused",
        "200 or 429 only; then files and threads as before, memory within 1 % of what it was after the first "
        f"{WARM} answers",
    )
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}

    def ask(client: httpx.Client) -> int:
        return client.post("/v1/completions", json=body).status_code

    statuses: Counter[int] = Counter()

    def stage(length: float) -> dict[str, int]:
        many = Many(server, 160, ask)
        many.run(length)
        statuses.update(many.statuses)
        return settled(server)

    long = seconds >= 100
    for _ in range(10):
        warm = stage(seconds / 10)
        if not long or statuses[200] >= WARM:
            break
    figures = [warm, *(stage(seconds * 3 / 10) for _ in range(3))]
    row.cases = statuses.total()
    row.check(set(statuses) <= {200, 429}, f"other answers than 200 and 429: {dict(statuses)}")
    row.check(until(lambda: held_at_most(server, figures[0], 4), 45), f"{figures[0]} → {server.held()}")
    megabytes = [figure["kilobytes"] / 1000 for figure in figures]
    drift = megabytes[-1] / megabytes[0] - 1
    row.check(drift < 0.01 or not long, f"memory drifted by {drift:.2%}")
    row.figures = f"{statuses[200]} × 200, {statuses[429]} × 429; memory {drift:+.2%}: "
    row.figures += " → ".join(f"{one:.0f}" for one in megabytes) + " MB"
    return row
