"""`moedraft doctor`: checks the installation and the home. It changes nothing and loads no model."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.text import Text

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    HomeOption,
    JsonOption,
    TargetOption,
    bar,
    busy,
    emit,
    is_missing,
    print_table,
    reading,
    settings_for,
)
from moedraft.config import Settings
from moedraft.core import CorruptAdapter, InvalidRequest, MoedraftError, StorageError

if TYPE_CHECKING:
    from moedraft.storage.store import Store

Outcome = Literal["ok", "warn", "fail"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
PACKAGES = ("torch", "transformers", "peft", "safetensors", "scikit-learn", "sentence-transformers")
LOW_DISK, FULL_DISK = 2**30, 100 * 2**20  # bytes


@dataclass(frozen=True)
class Check:
    name: str
    state: Outcome
    detail: str


def doctor(
    ctx: typer.Context,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, the device, the home, the router and the adapters. Exit code 1 if one fails."""
    settings = settings_for(ctx, home=home, target=target, draft=draft, device=device)
    with busy("Looking around"):
        found = [*_software(), *_machine(settings), *_models(settings)]
    found += _home(settings)
    failed = any(check.state == "fail" for check in found)
    if as_json:
        emit({"ok": not failed, "checks": [asdict(check) for check in found]})
    else:
        rows = [(c.name, Text(c.state, style=COLOURS[c.state]), c.detail) for c in found]
        print_table("moedraft doctor", ["check", "state", "found"], rows)
    if failed:
        raise typer.Exit(1)


def _software() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", "ok" if sys.version_info >= (3, 11) else "fail", version)
    for package in PACKAGES:
        installed = _version(package)
        yield Check(package, "ok" if installed else "fail", installed or "not installed")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine(settings: Settings) -> Iterator[Check]:
    import torch

    from moedraft.devices import pick_device

    on_cuda = False
    try:
        device = pick_device(settings.device)
        on_cuda = device.type == "cuda"
        yield Check("device", "ok", torch.cuda.get_device_name(device) if on_cuda else str(device))
    except MoedraftError as error:
        yield Check("device", "fail", str(error))
    triton = _version("triton")
    missing = "not installed; the PyTorch kernels are used"
    yield Check("triton", "warn" if on_cuda and not triton else "ok", triton or missing)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("threads", "ok", f"{torch.get_num_threads()} of {cores} cores")


def _models(settings: Settings) -> Iterator[Check]:
    """Whether the chosen models are there; a hub id can only be checked by loading it."""
    from moedraft.drafting.base import draft_name

    for role in ("target", "draft"):
        try:
            yield _model(role, settings.target if role == "target" else draft_name(settings))
        except MoedraftError as error:
            yield Check(role, "fail", str(error))


def _model(role: str, name: str) -> Check:
    from moedraft.gguf import HUB_ID, INSTALL, SMOLLM2, has_files
    from moedraft.models import resolve

    where = Path(resolve(name, role))
    if has_files(name, where):
        size, file = (_size(where), "") if where.is_dir() else (where.stat().st_size, f"{where.name}, ")
        return Check(role, "ok", f"{name} ({file}{size / 2**20:.1f} MB)")
    if name == SMOLLM2:
        return Check(role, "warn", f"{name} is not installed; `{INSTALL}` does it, or {HUB_ID} is fetched")
    return Check(role, "warn", f"{name} is no folder here; taken for a hub id and not tried")


def _home(settings: Settings) -> Iterator[Check]:
    yield _disk(settings.home)
    if is_missing(settings):
        yield Check("home", "ok", f"{settings.home} is not there yet; registering a domain makes it")
        return
    try:
        with reading(settings) as store:
            assert store is not None
            yield _folder(settings.home)
            yield Check("schema", "ok", "as this moedraft writes it")
            yield from _records(settings, store)
            yield _router(settings, store)
            yield from _adapters(store)
    except StorageError as error:
        yield Check("home", "fail", str(error))


def _records(settings: Settings, store: Store) -> Iterator[Check]:
    """Whether the home's records have the tokens of the chosen target, where these can be read at once."""
    from moedraft.models import load_tokenizer, resolve
    from moedraft.storage.last_target import VOCABULARY, check_tokenizer

    try:
        if store.registry.get_meta(VOCABULARY) and Path(resolve(settings.target, "target")).is_dir():
            check_tokenizer(store.registry, load_tokenizer(settings))
            yield Check("records", "ok", f"have the tokens of {settings.target}")
    except InvalidRequest as error:
        yield Check("records", "warn", str(error))


def _folder(home: Path) -> Check:
    writable = os.access(home, os.W_OK | os.X_OK)
    size = f"{home} ({_size(home) / 2**20:.1f} MB)"
    return Check("home", "ok" if writable else "fail", size if writable else f"{size}: not writable")


def _disk(home: Path) -> Check:
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free
    state: Outcome = "ok" if free >= LOW_DISK else "warn" if free >= FULL_DISK else "fail"
    return Check("disk", state, f"{free / 2**30:.1f} GB free")


def _router(settings: Settings, store: Store) -> Check:
    registered = {name for name, _ in store.registry.domain_names()}
    try:
        from moedraft.system.build import open_router

        known = set(open_router(settings, store).domains)
    except MoedraftError as error:
        return Check("router", "fail", str(error))
    if known != registered:
        return Check(
            "router", "warn", "knows other domains than are registered; it is fitted at the next start"
        )
    return Check("router", "ok", f"fitted to {len(registered)} domains" if registered else "no domains yet")


def _adapters(store: Store) -> Iterator[Check]:
    """One check for all intact versions, and one for each damaged version."""
    versions = store.registry.versions()
    intact = 0
    with bar("Checking adapters", len(versions)) as advance:
        for number, version in enumerate(versions, 1):
            advance(number)
            try:
                store.adapters.load(version)
                intact += 1
            except CorruptAdapter as error:
                out_of_use = version.state == "rolled_back"
                yield Check("adapter", "warn" if out_of_use else "fail", str(error))
    state: Outcome = "ok" if intact == len(versions) else "warn"
    yield Check("adapters", state, f"{intact} of {len(versions)} versions intact")


def _size(folder: Path) -> int:
    """The size of all files below `folder`, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # the file is gone, since another process may be writing
            continue
    return total
