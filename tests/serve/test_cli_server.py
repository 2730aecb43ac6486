"""The command line beside a running server: found through the home, or by --server; and the server itself."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fakes import WordEmbedder, tiny_system
from server import TARGET, FakeSupervisor, Served, check_error, events, listening, served, unwatched
from waiting import wait_for

from moedraft.cli import main
from moedraft.cli.remote import Remote, Unreachable, owner_of
from moedraft.config import load_settings
from moedraft.core import InvalidRequest, RequestOutput
from moedraft.learning_state import waiting
from moedraft.routing.router import Router
from moedraft.serve.app import create_app
from moedraft.serve.run import SERVER_FILE, EngineEnded, GracefulServer, _found, serve, url_of
from moedraft.serve.supervisor.supervisor import TrainerState
from moedraft.serve.worker.worker import Worker
from moedraft.storage.keys import KeyFile, new_key, write_private

LAW = [f"the court of appeal held that clause {i}" for i in range(9)]


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("MOEDRAFT_HOME", raising=False)
    monkeypatch.delenv("MOEDRAFT_API_KEY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not on the way to this machine
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda source, **_: WordEmbedder())

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def law(tmp_path: Path) -> Path:
    path = tmp_path / "law.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in LAW))
    return path


@pytest.fixture
def found(home: Path) -> Iterator[Served]:
    """A server that has told its home where it is, as `moedraft serve` does, with keys and all."""
    system = tiny_system(home)
    KeyFile(home).create(["infer"])
    settings = load_settings(home=home, learning=False, dashboard=False)
    own, secret = new_key(["admin"])
    worker = Worker(system, max_waiting=8)
    app = create_app(worker, unwatched(worker, settings), settings, own)
    server = GracefulServer(app, worker, settings)
    worker.start()
    with listening(server) as url:
        write_private(home / SERVER_FILE, {"url": url, "pid": os.getpid(), "key": secret})
        yield Served(url, app, server, worker, system, settings)
    worker.stop()
    system.close()


def test_a_server_is_found_through_the_home(run: Run, found: Served, home: Path, law: Path) -> None:
    registered = run("domain", "register", "law", "--examples", law, "--home", home, "--json")
    assert registered.code == 0, registered.err
    assert registered.data["examples"] == 9
    assert registered.data["warm_start"] is None
    assert "law" in found.system.router.domains
    listed = run("domain", "list", "--home", home, "--json").data["domains"]
    assert [row["name"] for row in listed] == ["code", "prose", "law"]
    assert run("adapter", "promote", "law", 0, "--home", home, "--json").data == {
        "domain": "law",
        "version": 0,
    }
    assert run("replay", "purge", "law", "--home", home, "--json").data == {
        "domain": "law",
        "purged": 0,
        "overwritten": True,
        "router": True,
        "copies": [],
    }
    assert "is removed" in run("domain", "remove", "law", "--home", home).out
    assert "law" not in found.system.router.domains
    assert run("dashboard", "--home", home, "--json").data == {"url": f"{found.url}/dashboard"}


def test_the_server_says_what_was_wrong(run: Run, found: Served, home: Path, law: Path) -> None:
    refused = run("domain", "register", "code", "--examples", law, "--home", home)
    assert refused.code == 2
    assert "exists already" in refused.err
    for command in (("domain", "remove", "tax"), ("adapter", "rollback", "code"), ("replay", "purge", "tax")):
        refused = run(*command, "--home", home)
        assert refused.code == 2
        assert refused.err.startswith("Error: ")
        assert refused.err.count("\n") == 1
    warm = run("domain", "register", "law", "--examples", law, "--warm-start", 8, "--home", home)
    assert warm.code == 2
    assert "--warm-start" in warm.err


def test_learning_is_held_from_the_command_line(
    run: Run, found: Served, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run("learning", "show", "--home", home).out
    assert "without learning; no other process learns for its home." in shown
    assert "learning is paused" in run("learning", "pause", "--home", home).out
    assert "learning is paused" not in run("learning", "resume", "--home", home).out
    monkeypatch.setattr(TrainerState, "data", lambda self: {"enabled": False})  # as an older server says it
    assert run("learning", "show", "--home", home).out.strip() == "This server runs without learning."
    monkeypatch.undo()
    nobody = run("learning", "resume", "--home", tmp_path / "other")
    assert nobody.code == 2
    assert "No server runs" in nobody.err
    supervisor = FakeSupervisor(TrainerState(waiting("")))
    monkeypatch.setattr(found.app.state, "context", replace(found.app.state.context, trainer=supervisor))
    assert run("learning", "pause", "--home", home, "--json").data["paused"] is True
    assert supervisor.now.paused
    assert "Learning is paused, waiting" in run("learning", "show", "--home", home).out
    assert run("learning", "resume", "--home", home, "--json").data["paused"] is False


def test_a_server_elsewhere(
    run: Run, found: Served, law: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("--home", tmp_path / "other", "--server", f"{found.url}/")
    refused = run("domain", "list", *own)
    assert refused.code == 2
    assert "MOEDRAFT_API_KEY" in refused.err
    monkeypatch.setenv("MOEDRAFT_API_KEY", KeyFile(found.settings.home).create(["admin"])[1])
    assert run("domain", "register", "law", "--examples", law, *own).code == 0
    assert "law" in run("domain", "list", *own).out
    assert run("domain", "show", "law", *own, "--json").data["examples"] == LAW
    assert run("adapter", "list", "law", *own, "--json").data == {"adapters": [], "updates": []}
    assert run("replay", "show", *own, "--json").data["records"]["law"] == 0
    purged = run("replay", "purge", "--all", *own, "--json").data
    assert purged == {"domain": None, "purged": 0, "overwritten": True, "router": True, "copies": []}
    assert run("domain", "remove", "law", *own, "--json").data == {
        "removed": "law",
        "overwritten": True,
        "router": True,
        "copies": [],
    }
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a?b", "http://a\n", "file:///etc"]
)
def test_a_bad_url_is_refused(run: Run, home: Path, url: str) -> None:
    result = run("domain", "list", "--home", home, "--server", url)
    assert result.code == 2
    assert "--server takes a URL" in result.err


def test_nobody_there(run: Run, home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = run("domain", "list", "--home", home, "--server", url)
    assert result.code == 2
    assert "No moedraft server answers" in result.err
    assert run("dashboard", "--home", home).code == 2


@pytest.mark.parametrize(
    "content",
    [
        '{"url": "http://127.0.0.1:9", "pid": 1, "key": "a"}', '{"url": "junk", "pid": 1, "key": "a"}',
        "{", "[]", '{"url": 1}', '{"pid": -9e99}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_left_behind_is_no_server(run: Run, home: Path, law: Path, content: str) -> None:
    home.mkdir()
    (home / SERVER_FILE).write_text(content)
    assert run("domain", "register", "law", "--examples", law, "--home", home).code == 0


def test_a_key_is_not_carried_to_where_a_redirect_points(run: Run, home: Path) -> None:
    """A server that answers with a redirect is told nothing more, and neither is its target."""
    seen: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        seen.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        result = run(
            "domain", "list", "--home", home, "--server", f"http://127.0.0.1:{listener.getsockname()[1]}"
        )
        thread.join(5)
    assert result.code == 2
    assert "is no moedraft server" in result.err
    assert len(seen) == 1


REMOTE = """
domain list; domain list --overlap; domain show law; domain remove law; domain suggest; adapter list;
adapter promote law 1; adapter rollback law; adapter pin law; learning show; replay show; replay purge --all
"""


@pytest.mark.parametrize("command", [one.strip() for one in REMOTE.split(";")])
def test_another_service_is_not_taken_for_a_server(run: Run, home: Path, command: str) -> None:
    """It answers everything with 200 and a JSON object, and yet nothing was done."""

    class Other(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

    for method in ("GET", "POST", "DELETE"):
        setattr(Other, f"do_{method}", Other.answer)
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        result = run(*command.split(), "--home", home, "--server", url)
        other.shutdown()
    assert (result.code, result.out) == (2, "")
    assert f"Error: What answers at {url} is no moedraft server." in result.err


# -- replay on its own ---------------------------------------------------------------------------


def test_a_server_of_this_home_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Its file holds an admin key, which is nobody else's."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(Remote, "answers", lambda remote: True)
    home.mkdir()
    (home / SERVER_FILE).write_text(
        json.dumps({"url": "http://192.0.2.5:8000", "key": "k", "pid": os.getpid()})
    )
    found = owner_of(load_settings(home=home), None)
    assert found is not None
    assert not any(getattr(handler, "proxies", None) for handler in found.opener().handlers)
    elsewhere = Remote(found.url, "k").opener()
    assert any(getattr(handler, "proxies", None) for handler in elsewhere.handlers)


def test_a_server_that_takes_longer_than_it_is_waited_for_may_still_be_working() -> None:
    """It took the request, so it would be false to say that none is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = Remote(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        with pytest.raises(Unreachable, match=r"not answered for .* be working.*`moedraft domain list`"):
            remote._ask("POST", "/admin/domains", {"name": "law"}, seconds=0.3)


def test_a_body_that_a_server_does_not_take_is_told(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        remote = Remote(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        with pytest.raises(Unreachable, match="while 8000012 bytes were sent; it refuses more"):
            remote.post("admin", "domains", data={"name": "字" * (8_000_000 // 3) + "ab"})
        thread.join()


def test_replay_is_shown_taken_out_and_deleted(run: Run, home: Path, tmp_path: Path) -> None:
    with served(home) as found, found.client() as client:
        row = {"model": TARGET, "prompt": "def function number 3", "max_tokens": 3}
        assert client.post("/v1/completions", json=row).status_code == 200
    assert run("replay", "show", "--home", home, "--json").data["records"] == {
        "shared": 0,
        "code": 1,
        "prose": 0,
    }
    out = tmp_path / "out.jsonl"
    assert run("replay", "export", "code", "--out", out, "--home", home, "--json").data["exported"] == 1
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["domain"] == "code"
    assert len(record["token_ids"]) == 7
    assert run("replay", "export", "code", "--out", out, "--home", home).code == 2  # nothing is overwritten
    missing = run("replay", "export", "--out", tmp_path / "new", "--home", tmp_path / "typo")
    assert (missing.code, (tmp_path / "new").exists()) == (2, False)
    assert "There is no home" in missing.err
    assert run("replay", "purge", "--home", home).code == 2
    assert run("replay", "purge", "code", "--all", "--home", home).code == 2
    assert run("replay", "purge", "law", "--home", home).code == 2
    assert "1 records of code" in run("replay", "purge", "code", "--home", home).out
    assert run("replay", "show", "--home", home, "--json").data["records"]["code"] == 0


# -- the server's own life -----------------------------------------------------------------------


def test_what_must_hold_before_a_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.serve.run.build", None)  # not as far as that
    with pytest.raises(InvalidRequest, match="no key"):
        serve(load_settings(home=tmp_path, host="0.0.0.0"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match="cannot be used"):
            serve(load_settings(home=tmp_path, port=port))
        assert url_of(taken, "0.0.0.0") == url_of(taken, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(taken, "::") == url_of(taken, "[::1]") == f"http://[::1]:{port}"
    with pytest.raises(InvalidRequest, match="cannot be used"):
        serve(
            load_settings(home=tmp_path, host="localhost.invalid")
            if KeyFile(tmp_path).create(["infer"])
            else None
        )
    assert not (tmp_path / SERVER_FILE).exists()


def test_a_server_whose_engine_has_died_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever supervises it starts a new one; a process that lives on would answer nobody."""
    home, system = tmp_path / "home", tiny_system(tmp_path / "home")
    for name in ("keep_what_is_loaded", "log.configure"):
        monkeypatch.setattr(f"moedraft.serve.run.{name}", lambda: None)
    monkeypatch.setattr(Router, "warm_up", lambda router: iter(()))
    monkeypatch.setattr("moedraft.serve.run.build", lambda settings: system)
    monkeypatch.setattr("moedraft.serve.run.calibrate", lambda engine: None)
    answers: list[httpx.Response] = []

    def fatal() -> list[RequestOutput]:
        raise SystemExit

    def ask(url: str) -> None:
        row = {"model": TARGET, "prompt": "7", "max_tokens": 3}
        answers.append(httpx.post(f"{url}/v1/completions", json=row, timeout=30, trust_env=False))

    monkeypatch.setattr(system.engine, "step", fatal)
    settings = load_settings(home=home, port=0, learning=False, dashboard=False)
    with pytest.raises(EngineEnded, match=r"thread has ended \(SystemExit"):
        serve(settings, lambda url: threading.Thread(target=ask, args=(url,)).start())
    wait_for(lambda: answers)
    check_error(answers[0], 503)
    assert not (home / SERVER_FILE).exists()


def test_a_disk_without_room_for_the_servers_file_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("moedraft.serve.run.write_private", full)
    with _found(tmp_path, "http://127.0.0.1:1", *new_key(["admin"])):
        assert "commands do not find the server: No space left" in caplog.text


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    home, log = tmp_path / "home", (tmp_path / "log").open("wb")
    start = "import sys; from moedraft.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "serve", "--port", "0", "--no-learning", "--home", str(home)]
    with log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        yield process, home
        process.kill()


def test_a_server_from_start_to_end(run: Run, process: tuple[subprocess.Popen[bytes], Path]) -> None:
    """SIGTERM: what runs is finished, what is new is refused, nothing is left behind."""
    server, home = process
    wait_for((home / SERVER_FILE).exists, 60)
    assert os.stat(home / SERVER_FILE).st_mode & 0o077 == 0
    url = json.loads((home / SERVER_FILE).read_text())["url"]
    assert url.startswith("http://127.0.0.1:")
    row = {"model": TARGET, "prompt": "SELECT", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        wait_for(lambda: _answers(client), 60)
        assert run("dashboard", "--home", home).out.strip() == f"{url}/dashboard"
        with client.stream("POST", "/v1/completions", json=row) as response:
            server.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/ready").status_code == 503)
            check_error(client.post("/v1/completions", json={**row, "stream": False}), 503)
            pieces = events(response)
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait(20) == 0
    assert not (home / SERVER_FILE).exists()
    log = (home.parent / "log").read_text()
    assert "SELECT" not in log
    assert '"status": 503' in log
    assert "Traceback" not in log


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False
