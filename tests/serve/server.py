"""A real server in this process: uvicorn in a thread, on a free port of this machine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from serve_fakes import tiny_system
from waiting import wait_for

from moedraft.config import Settings, load_settings
from moedraft.serve.app import create_app
from moedraft.serve.run import GracefulServer
from moedraft.serve.supervisor.follower import TrainerBeside
from moedraft.serve.supervisor.supervisor import TrainerState
from moedraft.serve.worker.worker import Worker
from moedraft.system.build import System

TARGET = "mini"
QUIET = {"learning": False, "dashboard": False, "port": 0}


@dataclass
class Served:
    url: str
    app: FastAPI
    server: GracefulServer
    worker: Worker
    system: System
    settings: Settings

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port
        return url.host, url.port

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, **options)

    @property
    def requests(self) -> int:
        """Those accepted and not ended."""
        now = self.worker.snapshot()
        return now.running + now.waiting

    def idle(self) -> bool:
        return not self.requests


@dataclass
class FakeSupervisor:
    """A trainer that does what it is told."""

    now: TrainerState

    def state(self) -> TrainerState:
        return self.now

    def pause(self) -> None:
        self.now = replace(self.now, paused=True)

    def resume(self) -> None:
        self.now = replace(self.now, paused=False)


def unwatched(worker: Worker, settings: Settings) -> TrainerBeside:
    """In place of the trainer's supervisor, for a server that does not learn."""
    return TrainerBeside(settings.home, worker.system.store.registry)


@contextmanager
def served(
    home: Path,
    *,
    system: System | None = None,
    supervisor: Any = None,
    max_waiting: int = 64,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Iterator[Served]:
    """A server over `system` (default: a tiny one). `clock` is the worker's; `options` are settings."""
    settings = load_settings(home=home, **{**QUIET, **options})
    system = system or tiny_system(home)
    worker = Worker(system, max_waiting=max_waiting, clock=clock)
    app = create_app(worker, supervisor or unwatched(worker, settings), settings)
    server = GracefulServer(app, worker, settings)
    worker.start()
    try:
        with listening(server) as url:
            yield Served(url, app, server, worker, system, settings)
    finally:
        worker.stop()
        system.close()


@contextmanager
def listening(server: GracefulServer) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def slowed(system: System, seconds: float = 0.02) -> None:
    """Each step takes that much longer."""
    system.engine.refresh = lambda: time.sleep(seconds)


def events(response: httpx.Response) -> list[Any]:
    """The data of all server-sent events; the last must be [DONE] or an error."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    if lines[-1] == "[DONE]":
        return [json.loads(line) for line in lines[:-1]]
    rows = [json.loads(line) for line in lines]
    assert "error" in rows[-1]
    return rows


def check_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    """It is an error in OpenAI's shape; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    return str(error["message"])


def send_raw(address: tuple[str, int], data: bytes) -> bytes:
    """Write bytes, read until the server closes."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)
