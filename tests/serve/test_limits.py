"""What the layers around the routes do: ids, sizes, deadlines, and errors in one shape."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from server import TARGET, Served, check_error, read_all, send_raw, served
from waiting import wait_for

from moedraft.core import StorageError
from moedraft.serve.app import PUBLIC_BYTES
from moedraft.serve.http.log import configure, get_logger, places, without_messages

SHORT = {"header_timeout": 0.5, "body_timeout": 0.5, "max_body_bytes": 10_000, "max_connections": 12}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tiny"), **SHORT) as found:
        _add_faults(found.app)
        yield found


@pytest.fixture
def client(tiny: Served) -> Iterator[httpx.Client]:
    with tiny.client() as client:
        yield client
        assert client.get("/health").status_code == 200


def _add_faults(app: FastAPI) -> None:
    async def fails() -> None:
        raise RuntimeError("the secret is hunter2")

    async def no_storage() -> None:
        raise StorageError("The home /somewhere/secret cannot be used.")

    app.add_api_route("/v1/fails", fails)
    app.add_api_route("/v1/storage", no_storage)


def answer_of(raw: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, json.loads(body)


# -- one shape -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("BREW", "/v1/models", 405),
        ("POST", "/v1/completions", 415),
        ("GET", "/v1/models/%00%ff%c3%28", 404),
        ("GET", "/admin/domains/%2e%2e%2fetc", 404),
        ("GET", "/admin/domains/%2e%2e", 404),
        ("GET", "/admin/adapters?name=%ff", 404),
    ],
)
def test_errors_have_one_shape(client: httpx.Client, method: str, path: str, status: int) -> None:
    check_error(client.request(method, path), status)


def test_a_fault_of_ours_tells_nothing(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    response = client.get("/v1/fails")
    check_error(response, 500)
    assert "hunter2" not in response.text
    assert "Traceback" not in response.text
    assert "hunter2" not in caplog.text
    stored = client.get("/v1/storage")
    check_error(stored, 503)
    assert "/somewhere" not in stored.text


def test_probes_may_ask_for_the_head_alone(client: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == client.get(path).headers["content-length"]


def test_every_response_has_an_id(client: httpx.Client) -> None:
    first, second = (client.get(path).headers["x-request-id"] for path in ("/health", "/nothing"))
    assert first != second
    assert client.get("/health", headers={"x-request-id": "my-id.7"}).headers["x-request-id"] == "my-id.7"
    for bad in ("a b", "x" * 65, "<script>", "a;b", ""):
        assert client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")


def test_a_path_cannot_speak_to_the_terminal_of_the_log(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client.get("/%1b%5b31mred%0d%0aforged")

    def shown() -> list[str]:
        return [record.msg["path"] for record in caplog.records if isinstance(record.msg, dict)]

    wait_for(shown)  # the line is written after the answer has gone
    assert shown()[0] == r"/\x1b[31mred\r\nforged"


def test_headers_that_browsers_heed(client: httpx.Client) -> None:
    headers = client.get("/v1/models").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "server" not in headers
    assert not any(name.startswith("access-control") for name in headers)


# -- size ----------------------------------------------------------------------------------------


def test_a_body_too_large_is_refused_before_it_is_read(tiny: Served, client: httpx.Client) -> None:
    check_error(client.post("/v1/completions", content=b"x" * 20_000), 413)
    with socket.create_connection(tiny.address, timeout=5) as connection:
        connection.sendall(HEAD + b"content-length: 99999999999\r\n\r\n")
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]


def test_a_body_without_a_length_is_counted(client: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    check_error(client.post("/v1/completions", content=parts()), 413)


@pytest.mark.parametrize("path", ["/login", "/logout", "/health", "/ready"])
def test_without_a_key_bodies_are_small(client: httpx.Client, path: str) -> None:
    """Paths that everybody reaches cost the server neither memory nor time for a large form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    check_error(client.post(path, content=b"a=" + b"x" * PUBLIC_BYTES, headers=form), 413)
    check_error(client.post(path, content=(b"x" * 1000 for _ in range(9)), headers=form), 413)
    assert client.post("/login", content=b"key=" + b"x" * 3000, headers=form).status_code != 413


def test_a_body_as_large_as_allowed_is_read(client: httpx.Client) -> None:
    row = {"model": TARGET, "prompt": "7", "max_tokens": 1}
    content = json.dumps(row).encode().ljust(10_000)
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200
    response = client.post(
        "/v1/completions", content=content + b" ", headers={"content-type": "application/json"}
    )
    assert response.status_code == 413


def test_unfinished_large_bodies_take_a_bounded_room(tmp_path: Path) -> None:
    """They arrive before there is a queue that could be full. Small ones are taken all the same."""
    few = {"max_body_bytes": 300_000, "max_batch_size": 1, "max_connections": 30}  # 600 kB
    small = {"model": TARGET, "prompt": "1 2 3", "max_tokens": 2}
    large = json.dumps(small).encode().ljust(290_000)
    with served(tmp_path, max_waiting=1, **few) as found, found.client() as client:
        start = HEAD + f"content-length: {len(large)}\r\n\r\n".encode() + large[:280_000]
        crowd = [socket.create_connection(found.address, timeout=10) for _ in range(10)]
        for connection in crowd:
            connection.sendall(start)
        refused = 0
        for connection in crowd:
            connection.settimeout(1)
            with suppress(TimeoutError):
                refused += connection.recv(65536).startswith(b"HTTP/1.1 429")
        assert 8 <= refused < 10
        headers = {"content-type": "application/json"}
        assert client.post("/v1/completions", json=small).status_code == 200
        for connection in crowd:
            connection.close()

        def taken() -> bool:
            return client.post("/v1/completions", content=large, headers=headers).status_code == 200

        wait_for(taken)
        assert all(taken() for _ in range(5))  # each gives its room back


def test_huge_headers_are_refused(tiny: Served) -> None:
    raw = send_raw(tiny.address, b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100_000)
    status, headers, body = answer_of(raw)
    assert status == 400
    assert headers["x-request-id"]
    assert body["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nbad header: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(tiny: Served, client: httpx.Client, raw: bytes) -> None:
    found = send_raw(tiny.address, raw)
    assert found == b"" or int(found.split()[1]) == 400  # after the headers were good, the rest just ends


# -- patience ------------------------------------------------------------------------------------


def drip(address: tuple[str, int], start: bytes, letters: bytes = b"a") -> tuple[bytes, float]:
    """Write `start`, then a letter now and then until the server has enough: what it said, after how long."""
    began = time.monotonic()
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(start)
        connection.settimeout(0.1)
        said = b""
        while time.monotonic() - began < 30:
            try:
                part = connection.recv(65536)
                if not part:
                    return said, time.monotonic() - began
                said += part
            except TimeoutError:
                pass
            except OSError:
                return said, time.monotonic() - began
            try:
                connection.sendall(letters)
            except OSError:
                return said, time.monotonic() - began
    raise AssertionError("the server waits for ever")


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nx: "])
def test_headers_must_come_in_time(tiny: Served, start: bytes) -> None:
    said, seconds = drip(tiny.address, start)
    assert 0.4 < seconds < 20
    status, _, body = answer_of(said)
    assert (status, body["error"]["code"]) == (408, "header_timeout")


def test_the_headers_of_a_second_request_must_come_in_time(tiny: Served) -> None:
    said, seconds = drip(tiny.address, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /health HTTP/1.1\r\nx: ")
    assert said.startswith(b"HTTP/1.1 200")
    assert b"header_timeout" in said
    assert 0.4 < seconds < 20


def test_a_body_must_come_in_time(tiny: Served) -> None:
    said, seconds = drip(tiny.address, HEAD + b"content-length: 5000\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 408")
    assert 0.4 < seconds < 20


def test_a_body_that_nobody_wants_must_end_too(tiny: Served) -> None:
    said, seconds = drip(tiny.address, HEAD + b"content-length: 999999\r\n\r\n", b"a" * 10)
    assert said.startswith(b"HTTP/1.1 413")
    assert seconds < 20


def test_a_connection_that_is_kept_is_not_hurried(tmp_path: Path) -> None:
    with (
        served(tmp_path, header_timeout=2.0) as found,
        socket.create_connection(found.address, timeout=30) as connection,
    ):
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):  # its head and its body may come one after the other
                answer += connection.recv(65536)
            assert answer_of(answer)[0] == 200
            time.sleep(2.3)  # longer than headers may take


def test_one_connection_too_many_is_sent_away(tmp_path: Path) -> None:
    with served(tmp_path, max_connections=12) as found:
        connections = found.server.server_state.connections
        open_ones = [socket.create_connection(found.address, timeout=30) for _ in range(12)]
        try:
            wait_for(lambda: len(connections) == 12)
            with socket.create_connection(found.address, timeout=30) as connection:
                status, headers, body = answer_of(read_all(connection))
            assert status == 429
            assert headers["retry-after"] == "1"
            assert body["error"]["type"] == "rate_limit_error"
        finally:
            for one in open_ones:
                one.close()
        wait_for(lambda: not connections)
        with found.client() as client:
            assert client.get("/health").status_code == 200


def test_a_reader_that_stops_is_left(tmp_path: Path) -> None:
    """The pieces that a reader does not take fill the buffers; then its slot is freed."""
    with served(tmp_path, send_timeout=0.3, max_output_tokens=10**6) as found:
        found.system.engine.max_model_len = 10**9  # answers without end, by a cache that only counts
        row = {"model": TARGET, "prompt": "7", "max_tokens": 10**6, "stream": True, "logprobs": 20, "n": 4}
        content = json.dumps({**row, "temperature": 1}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(found.address)
            connection.sendall(HEAD + f"content-length: {len(content)}\r\n\r\n".encode() + content)
            wait_for(lambda: found.worker.snapshot().running == 4)
            wait_for(found.idle, 90)


# -- the log -------------------------------------------------------------------------------------


def test_a_failure_is_logged_without_its_message() -> None:
    try:
        raise ValueError("hunter2")
    except ValueError as error:
        event = without_messages(None, "error", {"event": "x", "exc_info": True})
        where = places(error)
    assert event["error"] == "ValueError"
    assert "hunter2" not in str(event)
    assert event["at"] == where
    assert re.fullmatch(r"test_limits\.py:\d+ test_a_failure_is_logged_without_its_message", where[-1])


def test_the_log_is_json_lines_without_messages_of_exceptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        configure()
        try:
            raise ValueError("hunter2")
        except ValueError as error:
            logging.getLogger("uvicorn.error").error("Exception in %s", "ASGI", exc_info=error)
            logging.getLogger("moedraft.x").exception("worse")
        get_logger("moedraft.y").info("request", path="\u001b[31m", status=200)
    finally:
        root.setLevel(level)
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [row["event"] for row in rows] == ["Exception in ASGI", "worse", "request"]
    assert rows[0]["error"] == rows[1]["error"] == "ValueError"
    assert rows[2]["status"] == 200
    assert all("timestamp" in row and "logger" in row for row in rows)
    assert "hunter2" not in str(rows)


def test_what_libraries_quote_of_clients_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NiceGUI logs what a browser asks it to, asyncio an exception's text, and engine.io by itself."""
    engineio = logging.getLogger("engineio.server")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(engineio, "handlers", [logging.StreamHandler(sys.stderr)])
    levels = {name: logging.getLogger(name).level for name in ("", "engineio.server", "socketio.server")}
    try:
        configure()
        for name in ("nicegui", "asyncio", "engineio.server", "socketio.server"):
            try:
                raise KeyError("hunter2")
            except KeyError as error:
                logging.getLogger(name).error("exception=%r", error, exc_info=error)
        logging.getLogger("uvicorn.error").info('%s - "WebSocket %s" [accepted]', "::1", "/x?id=hunter2")
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    text = capsys.readouterr().err
    rows = [json.loads(line) for line in text.splitlines()]
    assert "hunter2" not in text
    assert [row.get("error") for row in rows] == ["KeyError"] * 4 + [None]
    assert rows[-1]["event"].startswith('::1 - "WebSocket /x?…')
