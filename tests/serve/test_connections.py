"""Connections that do not behave: bodies that nobody wants, answers that nobody reads, crowds."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import TARGET, Served, check_error, read_all, served, slowed
from waiting import wait_for

from moedraft.serve.http import protocol, rest_of_body
from moedraft.storage.keys import KeyFile

LARGE = 20_000_000  # bytes, far more than all buffers between the two ends hold
POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
LONG = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"  # an answer of 40 kB
LAST = LONG.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tiny"), max_body_bytes=10_000) as found:
        yield found


def status_of(raw: bytes) -> int:
    return int(raw.split()[1])


def refused(request: urllib.request.Request) -> tuple[int, bytes]:
    """Status and body of an answer that is no success."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30)
    with caught.value as answer:
        return answer.code, answer.read()


# -- bodies that nobody wants --------------------------------------------------------------------


def test_httpx_is_told_that_its_body_is_too_large(tiny: Served) -> None:
    with tiny.client() as client:
        for _ in range(3):
            check_error(client.post("/v1/completions", content=b"x" * LARGE), 413)
        assert client.get("/health").status_code == 200


def test_httpx_is_told_so_without_a_length(tiny: Served) -> None:
    with tiny.client() as client:
        parts = (b"x" * 100_000 for _ in range(LARGE // 100_000))
        check_error(client.post("/v1/completions", content=parts), 413)


def test_urllib_is_told_that_its_body_is_too_large(tiny: Served) -> None:
    """It asks for the connection to be closed, and reads nothing before it has sent everything."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{tiny.url}/v1/completions", b"x" * LARGE, headers)
    for _ in range(3):
        status, body = refused(request)
        assert status == 413
        assert json.loads(body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_plain_socket_is_told_that_its_body_is_too_large(tiny: Served, connection: bytes) -> None:
    head = POST + b"connection: " + connection + f"\r\ncontent-length: {LARGE}\r\n\r\n".encode()
    with socket.create_connection(tiny.address, timeout=30) as sender:
        sender.sendall(head + b"x" * LARGE)
        if connection == b"keep-alive":
            sender.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        said = read_all(sender)
    assert status_of(said) == 413
    assert b"body_too_large" in said
    assert (b"HTTP/1.1 200" in said) == (connection == b"keep-alive")


def test_who_has_no_key_is_told_so_after_a_large_body(tmp_path: Path) -> None:
    KeyFile(tmp_path).create(["infer"])
    with served(tmp_path) as found:
        request = urllib.request.Request(f"{found.url}/v1/completions", b"x" * LARGE)
        assert refused(request)[0] == 401


def test_many_requests_at_once_without_a_key_cost_one_answer(tmp_path: Path) -> None:
    KeyFile(tmp_path).create(["infer"])
    with served(tmp_path) as found, socket.create_connection(found.address, timeout=30) as sender:
        sender.sendall(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 40)
        said = read_all(sender)
    assert said.count(b"HTTP/1.1 401") == 1
    assert b"invalid_api_key" in said


def test_a_body_without_end_is_dropped_up_to_a_bound(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_of_body, "DROPPED_BYTES", 1_000_000)
    sent = 0
    with socket.create_connection(tiny.address, timeout=30) as sender:
        sender.sendall(POST + b"content-length: 99999999999\r\n\r\n")
        with suppress(OSError):
            for _ in range(10_000):
                sender.sendall(b"x" * 100_000)
                sent += 100_000
    assert 1_000_000 <= sent < 50_000_000


def test_a_body_that_does_not_come_holds_the_connection_for_its_time_only(tmp_path: Path) -> None:
    with (
        served(tmp_path, body_timeout=3, max_body_bytes=10_000) as found,
        socket.create_connection(found.address, timeout=30) as sender,
    ):
        sender.sendall(POST + b"content-length: 99999999999\r\n\r\n")
        began = time.monotonic()
        assert b" 413 " in sender.recv(65536)
        assert time.monotonic() - began < 2, "the answer waits for nothing"
        wait_for(lambda: not found.server.server_state.connections, 10)


# -- answers that nobody reads -------------------------------------------------------------------


@contextmanager
def unread(found: Served, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that send `data` and read nothing."""
    with ExitStack() as stack:
        sockets = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(found.address)
            one.setblocking(False)
            sockets.append(one)
        asyncio.run(_all_sent(sockets, data))
        yield sockets


async def _all_sent(sockets: list[socket.socket], data: bytes) -> None:
    """As much of it as the other end takes within a moment."""

    async def send(one: socket.socket) -> None:
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(one, data), 2)
        except (TimeoutError, OSError):
            return

    await asyncio.gather(*(send(one) for one in sockets))


def ready(found: Served) -> int:
    """As an orchestrator asks: over a connection of its own, with little patience."""
    return httpx.get(f"{found.url}/ready", timeout=5, trust_env=False).status_code


@pytest.mark.parametrize("last", [b"", LAST])
def test_answers_that_nobody_reads_are_given_up(tmp_path: Path, last: bytes) -> None:
    """`last`: nothing, and a request after whose answer the connection is closed."""
    with served(tmp_path, send_timeout=0.5, max_connections=12) as found:
        connections = found.server.server_state.connections
        # What the kernel holds for a reader is megabytes.
        with unread(found, 12, LONG * 200 + last):
            wait_for(lambda: len(connections) == 12)
            wait_for(lambda: not connections, 30)
            with found.client() as client:
                assert client.get("/version").status_code == 200
        # A request's task leaves the set a moment after its answer was read.
        wait_for(lambda: not found.server.server_state.tasks)


def test_what_is_written_at_the_end_is_given_up_too(tmp_path: Path) -> None:
    """The last answer is larger than all buffers, and the connection is to be closed after it."""
    with served(tmp_path, send_timeout=0.5) as found:
        connections = found.server.server_state.connections

        async def large() -> Any:
            return {"text": "x" * LARGE}

        found.app.add_api_route("/v1/large", large)
        with unread(found, 1, b"GET /v1/large HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"):
            wait_for(lambda: not connections, 20)


def test_a_slow_reader_that_reads_is_served(tmp_path: Path) -> None:
    """It takes several times as long as a reader may do nothing."""
    with served(tmp_path, send_timeout=1) as found:

        async def large() -> Any:
            return {"text": "x" * LARGE}

        found.app.add_api_route("/v1/large", large)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(30)
            reader.connect(found.address)
            reader.sendall(b"GET /v1/large HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            size, began = 0, time.monotonic()
            while part := reader.recv(100_000):
                size += len(part)
                time.sleep(0.01 if time.monotonic() - began < 4 else 0)
    assert size > LARGE


# -- who does nothing makes room for others ------------------------------------------------------


def idle_of(found: Served) -> dict[protocol.PatientProtocol, float]:
    """The connections whose client is waited for, and since when."""
    kind: Any = found.server.config.http_protocol_class
    idle: dict[protocol.PatientProtocol, float] = kind.idle
    return idle


IDLERS = {
    "no request": b"",
    "half the headers": b"GET /v1/mod",
    "half the body": POST + b"content-length: 1000\r\n\r\n{",
    "a request now and then": b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "unread answers": LONG * 200,
    "thousands of requests at once": b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 5000,
}


@pytest.mark.parametrize("first", list(IDLERS.values()), ids=list(IDLERS))
def test_a_crowd_that_does_nothing_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """Long before its own deadlines pass, others take the places of those who were waited for longest."""
    monkeypatch.setattr(protocol, "LEAST_WAIT", 0.5)
    with served(tmp_path, max_connections=12, header_timeout=60, body_timeout=60, send_timeout=60) as found:
        connections, idle = found.server.server_state.connections, idle_of(found)
        with unread(found, 12, first):
            wait_for(lambda: len(idle) == 12 and time.monotonic() - max([*idle.values()]) > 0.6, 30)
            for _ in range(3):
                with found.client() as client:
                    response = client.get("/v1/models")
                    assert response.status_code == 200
                    assert response.headers.get("connection") != "close"
                    assert len(connections) <= 13


def test_who_drips_is_waited_for_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then makes nobody young again."""
    monkeypatch.setattr(protocol, "LEAST_WAIT", 0.5)
    with (
        served(tmp_path, max_connections=1, header_timeout=60) as found,
        socket.create_connection(found.address, timeout=30) as slow,
    ):
        with suppress(OSError):
            for letter in b"GET /v1/mod":
                slow.sendall(bytes([letter]))
                time.sleep(0.1)
        with found.client() as client:
            assert client.get("/v1/models").status_code == 200


def test_requests_sent_too_early_leave_time_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits longer the more connections there are; all are answered in their order."""
    monkeypatch.setattr(protocol, "PIPELINE_PAUSE", 0.05)
    paths = ("/health", "/version", "/nowhere", "/ready")
    requests = [f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n" for path in paths]
    with (
        served(tmp_path) as found,
        socket.create_connection(found.address, timeout=30),
        socket.create_connection(found.address, timeout=30) as asking,
    ):
        began = time.monotonic()
        asking.sendall(("\r\n".join(requests) + "connection: close\r\n\r\n").encode())
        said = read_all(asking)
        assert time.monotonic() - began >= 3 * 2 * 0.05
        assert [status_of(b"HTTP" + one) for one in said.split(b"HTTP")[1:]] == [200, 200, 404, 200]


def test_who_is_served_keeps_his_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes its time; a newcomer gets 429 meanwhile, and not the place of the one who waits."""
    monkeypatch.setattr(protocol, "LEAST_WAIT", 0.2)
    with served(tmp_path, max_connections=1) as found:
        slowed(found.system, 0.1)
        row = {"model": TARGET, "prompt": "7", "max_tokens": 20, "temperature": 0, "draft": False}
        content = json.dumps(row).encode()
        with socket.create_connection(found.address, timeout=30) as asking:
            asking.sendall(POST + f"content-length: {len(content)}\r\n\r\n".encode() + content)
            wait_for(lambda: found.requests == 1)
            time.sleep(0.4)
            with found.client() as client:
                check_error(client.get("/v1/models"), 429)
            assert status_of(asking.recv(65536)) == 200


# -- probes have connections of their own --------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is waited for so long that another may have its place."""
    monkeypatch.setattr(protocol, "LEAST_WAIT", 1000)


@pytest.mark.usefixtures("full")
def test_a_crowd_keeps_no_probe_out(tmp_path: Path) -> None:
    with served(tmp_path, max_connections=12, header_timeout=30) as found:
        connections = found.server.server_state.connections
        with unread(found, 12, b"GET /"), found.client() as client:
            wait_for(lambda: len(connections) == 12)
            for path in ("/health", "/ready"):
                response = client.get(path)
                assert response.status_code == 200
                assert response.headers["connection"] == "close"
            other = client.get("/v1/models")
            check_error(other, 429)
            assert other.headers["retry-after"] == "1"
            large = client.post("/v1/completions", content=b"x" * LARGE)
            check_error(large, 429)


@pytest.mark.usefixtures("full")
def test_a_crowd_at_the_probes_door_keeps_no_probe_out(tmp_path: Path) -> None:
    """Beside those who fill the server, five hundred who wait at the door and say nothing."""
    with served(tmp_path, max_connections=12, header_timeout=30) as found:
        connections = found.server.server_state.connections
        with unread(found, 500, b"GET /hea"):
            for _ in range(5):
                assert ready(found) == 200
            assert len(connections) <= 12 + 17


@pytest.mark.usefixtures("full")
def test_a_silent_connection_too_many_is_sent_away_after_a_second(tmp_path: Path) -> None:
    with (
        served(tmp_path, max_connections=12, header_timeout=30) as found,
        unread(found, 12, b"GET /"),
        socket.create_connection(found.address, timeout=10) as connection,
    ):
        assert status_of(read_all(connection)) == 429


@pytest.mark.usefixtures("full")
def test_the_dashboards_websocket_is_no_way_in(tmp_path: Path) -> None:
    upgrade = (
        b"GET /dashboard/live HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with (
        served(tmp_path, max_connections=12, header_timeout=30) as found,
        unread(found, 12, b"GET /"),
        socket.create_connection(found.address, timeout=10) as connection,
    ):
        connection.sendall(upgrade)
        assert status_of(read_all(connection)) == 429
