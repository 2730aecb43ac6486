"""A real server in a process of its own, for the fault campaign, and clients of it on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from fault_tools import new_home

from moedraft.serve.auth.sessions import COOKIE
from moedraft.storage.keys import SCOPES, KeyFile

START_SECONDS = 180.0  # on a machine that does other things too
PATIENCE = 200.0  # s for an answer; others may hold this machine up for minutes
MODEL = "mini"
PROMPT = "SELECT name FROM"


class Server:
    """`moedraft serve` with the shipped pair. Ended at the end of the block, if it was not killed before."""

    def __init__(
        self, home: Path, secret: str, *flags: str, log: Path | None = None, **environment: str
    ) -> None:
        self.home, self.secret = home, secret
        self.log = log or home.parent / f"{home.name}.log"
        self._command = [
            sys.executable,
            "-m",
            "moedraft",
            "serve",
            "--port",
            "0",
            "--home",
            str(home),
            *flags,
        ]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.session = ""  # the last that `sign_in` was given
        self.started_in = self.used = 0.0  # s of time and of processors until it was ready

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def start(self) -> None:
        """Raises RuntimeError where it does not become ready."""
        began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, cwd=self.log.parent
            )
        while time.monotonic() - began < START_SECONDS and self.process.poll() is None:
            url = self._url()
            if url is not None:
                self.client = httpx.Client(
                    base_url=url,
                    headers={"authorization": f"Bearer {self.secret}"},
                    timeout=PATIENCE,
                    trust_env=False,
                )
                if until(lambda: self.client.get("/ready").status_code == 200, 30):
                    self.started_in = time.monotonic() - began
                    self.used = processor_seconds(self.process.pid)
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-500:]}")

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(10)

    def _url(self) -> str | None:
        try:
            found = json.loads((self.home / "server.json").read_text())
        except (OSError, ValueError):
            return None
        return str(found["url"]) if found["pid"] == self.process.pid else None

    @property
    def address(self) -> tuple[str, int]:
        url = self.client.base_url
        assert url.port is not None
        return url.host, url.port

    def answer(self, **fields: Any) -> str:
        """The greedy answer to PROMPT. Raises httpx.HTTPError."""
        row = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
        response = self.client.post("/v1/completions", json=row)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])

    def sign_in(self) -> str:
        """The cookie that a browser gets for the key. Raises httpx.HTTPError and KeyError."""
        answer = self.client.post("/login", data={"key": self.secret}, headers={"authorization": ""})
        self.session = str(answer.cookies[COOKIE])
        self.client.cookies.clear()
        return self.session

    def held(self) -> dict[str, int]:
        """Open files, threads and kilobytes of the process, and requests in slots or waiting."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
        metrics = self.client.get("/metrics").text.splitlines()
        names = ("moedraft_num_requests_running", "moedraft_num_requests_waiting")
        requests = sum(int(float(line.split()[-1])) for line in metrics if line.startswith(names))
        return {
            "files": len(list((folder / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "kilobytes": int(status["VmRSS"].split()[0]),
            "requests": requests,
        }


def processor_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Load:
    """Clients that send one request after another until the block ends; it never raises."""

    def __init__(self, server: Server, clients: int) -> None:
        self.answered = 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server,)) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(70)

    def _ask(self, server: Server) -> None:
        while not self._end.is_set():
            try:
                server.answer(max_tokens=12)
                self.answered += 1
            except (httpx.HTTPError, RuntimeError):  # the server was killed, or its client was closed
                time.sleep(0.05)


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds within `seconds`; what cannot be asked does not hold."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if holds():
                return True
        except (httpx.HTTPError, OSError, KeyError, ValueError):
            pass
        time.sleep(0.05)
    return False


def leave(server: Server, stage: int) -> None:
    """Connect, go as far as `stage`, and leave without a word."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 64, "stream": stage >= 5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.secret}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    parts = [b"", head[:40], head, head + body[:20], head + body, head + body, head + body]
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(parts[stage])
        if stage == 5:
            connection.recv(200)
        if stage == 6:
            connection.recv(100_000)
            time.sleep(0.05)


STAGES = 7


def keyed_home(path: Path) -> tuple[Path, str]:
    """A home with two domains and a key for everything."""
    new_home(path, ("sql", "python"))
    return path, KeyFile(path).create(SCOPES)[1]
