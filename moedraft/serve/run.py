"""Runs a server: checks before the start, the start itself, signals, and cleaning up at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from moedraft.config import Settings
from moedraft.core import InvalidRequest, MoedraftError
from moedraft.cpu.memory import keep_what_is_loaded
from moedraft.engine.calibration import calibrate
from moedraft.engine.warming import warm_up
from moedraft.privacy import write_no_core_file
from moedraft.serve.app import create_app
from moedraft.serve.auth.access import is_loopback
from moedraft.serve.http import log
from moedraft.serve.http.protocol import LARGEST_HEAD, protocol_of
from moedraft.serve.supervisor.follower import Trainer, TrainerBeside
from moedraft.serve.supervisor.mailroom import Mailroom
from moedraft.serve.supervisor.publisher import Publisher
from moedraft.serve.supervisor.supervisor import TrainerSupervisor
from moedraft.serve.worker.refits import Refits
from moedraft.serve.worker.worker import Worker
from moedraft.storage.keys import Key, KeyFile, new_key, write_private
from moedraft.system.build import build

SERVER_FILE = "server.json"
CLOSE_SECONDS = 5  # how long connections get to close after the last answer has been sent
WEBSOCKET_BYTES = 1_000_000

logger = logging.getLogger(__name__)


class EngineEnded(MoedraftError):
    """The engine's thread died: the process ends with an error, to be started again by whoever watches it."""


def serve(settings: Settings, announce: Callable[[str], None] = lambda url: None) -> None:
    """Serve until a signal comes. `announce` is called with the URL once requests are accepted.

    Raises InvalidRequest for a public address without a key and for an address that cannot be bound, and
    whatever `build` raises. In all these cases nothing was started. Raises EngineEnded if the engine's thread
    died.
    """
    check_address(settings)
    log.configure()
    write_no_core_file()
    with ExitStack() as stack:
        stack.callback(gc.enable)
        gc.disable()  # while loading
        listener = stack.enter_context(_bound(settings))
        system = build(settings)
        stack.callback(system.close)
        system.store.replay.trim_states()  # what is kept may be more than the settings allow now
        warm_up(system.engine)
        calibrate(system.engine)
        worker = Worker(system, max_waiting=settings.max_waiting)
        stack.callback(worker.stop)
        worker.start()
        trainer = _supervised(settings, worker, stack)
        _refitted(settings, worker, trainer, stack)
        _mailed(settings, worker, stack)
        own_key, secret = new_key(["admin"], "command line")
        app = create_app(worker, trainer, settings, own_key)
        url = url_of(listener, settings.host)
        worker.warm_up_router()
        if settings.cpu_fast_paths:
            keep_what_is_loaded()
        gc.enable()
        stack.enter_context(_found(settings.home, url, own_key, secret))
        GracefulServer(app, worker, settings, lambda: announce(url)).run(sockets=[listener])
        if worker.dead:
            raise EngineEnded(f"The server has ended: {worker.snapshot().failed}")


def check_address(settings: Settings) -> None:
    """Raises InvalidRequest if other machines could reach the server although no key exists."""
    if not is_loopback(settings.host) and not KeyFile(settings.home).keys():
        raise InvalidRequest(
            f"The address {settings.host} can be reached by others and there is no key; make one with "
            "`moedraft key create`, or serve on 127.0.0.1."
        )


# A stream may still send its last event while the server shuts down.
AppStatus.enable_automatic_graceful_drain = False


class GracefulServer(uvicorn.Server):
    """A uvicorn server that stops in two steps: the first signal lets answers finish, the second ends them.

    While answers finish, new requests are still answered, with status 503.
    """

    def __init__(
        self, app: FastAPI, worker: Worker, settings: Settings, on_start: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config_of(app, settings))
        self._on_start = on_start
        self._worker, self._patience = worker, settings.shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._signals = 0

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super()._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server."""
        self.should_exit = self.should_exit or self._worker.dead
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by Python's signal handling in the main thread, possibly in the middle of anything."""
        self._signals += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Called in the event loop. The first call starts draining, the second stops at once."""
        if self._drain is None:
            logger.info("draining")
            self._drain = asyncio.get_running_loop().create_task(self._drained())
        else:
            self._worker.abort_all()
            self.should_exit = self.force_exit = True

    async def _drained(self) -> None:
        try:
            await self._worker.drain(self._patience)
        finally:
            self.should_exit = True


def config_of(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        http=protocol_of(settings),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        ws_max_size=WEBSOCKET_BYTES,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


def url_of(listener: socket.socket, host: str) -> str:
    """The URL under which a client on this machine reaches the server."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


@contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    """A socket bound to the address, before the slow loading of models; uvicorn starts listening later."""
    host = settings.host.strip("[]")
    with ExitStack() as stack:
        try:
            found = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, UnicodeError) as error:
            where, reason = f"{settings.host}:{settings.port}", getattr(error, "strerror", None) or error
            raise InvalidRequest(f"The address {where} cannot be used: {reason}.") from error
        yield listener


@contextmanager
def _found(home: Path, url: str, own_key: Key, secret: str) -> Iterator[None]:
    """Write the file by which this user's command line finds the server, and remove it at the end.

    The file holds the URL and a key that is valid only while this process runs. Whoever can read it could
    also change the home directly, so the key gives nobody new rights. If the file cannot be written, for
    example because the disk is full, the server serves without it; commands then need `--server`.
    """
    path = home / SERVER_FILE
    try:
        write_private(path, {"url": url, "pid": os.getpid(), "key": secret})
    except OSError as error:
        logger.warning("%s cannot be written, so commands do not find the server: %s", path, error.strerror)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _mailed(settings: Settings, worker: Worker, stack: ExitStack) -> None:
    """Answer a trainer that follows this server, if one does."""
    system = worker.system
    mailroom = Mailroom(settings.home, Publisher(system.store, system.bank.base_hash, worker.load_new))
    stack.callback(mailroom.stop)
    mailroom.start()


def _supervised(settings: Settings, worker: Worker, stack: ExitStack) -> Trainer:
    if not settings.learning:
        return TrainerBeside(settings.home, worker.system.store.registry)
    steps_aside = settings.train_idle_share > 0  # 0 means that the trainer never pauses for requests
    supervisor = TrainerSupervisor(
        settings,
        worker.system.store,
        base_hash=worker.system.bank.base_hash,
        busy=lambda: steps_aside and worker.busy,
        published=worker.load_new,
    )
    if steps_aside:
        worker.when_work_comes(supervisor.make_way)
    stack.callback(supervisor.stop)
    supervisor.start()
    return supervisor


def _refitted(settings: Settings, worker: Worker, trainer: Trainer, stack: ExitStack) -> None:
    """Have the router refitted on the traffic, and records filed, when experts may be trained too."""

    def may() -> bool:
        now, learns = worker.snapshot(), trainer.state()
        calm = now.idle_share >= settings.train_idle_share and now.waiting <= settings.train_max_waiting
        return calm and not learns.paused and (learns.own or learns.pid is not None)

    refits = Refits(worker.system, may)
    stack.callback(refits.stop, CLOSE_SECONDS)
    refits.start()
