"""Adapter folders in PEFT's format: published atomically, verified on every load, never pickle.

`adapters/<domain>/v<N>` holds adapter_config.json, adapter_model.safetensors and a manifest. Paths are
always computed from a checked name and a number. This module does not know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from moedraft.core import AdapterVersion, CorruptAdapter, StorageError
from moedraft.storage.candidate import (
    CONFIG,
    VOCABULARY,
    WEIGHTS,
    Candidate,
    CandidateSummary,
    move_files,
    write_files,
)
from moedraft.storage.db import DATABASE, Home, storage_errors
from moedraft.storage.registry import Registry, check_expert_name

if TYPE_CHECKING:
    import torch

FOLDER = "adapters"
QUARANTINE = "quarantine"  # beside it: versions that the database does not know
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
ALLOWED = (".safetensors", ".json", ".md")
TEMPORARY = ".tmp-"
VERSION_FOLDER = re.compile(r"v([0-9]+)")

log = logging.getLogger(__name__)


class LoadedAdapter(NamedTuple):
    config: dict[str, Any]  # adapter_config.json
    tensors: dict[str, torch.Tensor]  # adapter_model.safetensors, on the CPU, all finite
    manifest: dict[str, Any]
    vocabulary: torch.Tensor | None = None  # vocabulary.safetensors: token ids, where there is one


def check_database_is_there(home: Path) -> None:
    """Raises StorageError for a home of adapters without a database: a new one would know none of them."""
    if not (home / DATABASE).exists() and any(home.glob(f"{FOLDER}/*/v[0-9]*")):
        raise StorageError(
            f"The home {home} has adapters and no database; put {DATABASE} back, or move the folder "
            f"'{FOLDER}' away to begin anew."
        )


class AdapterStore:
    """The adapters of a home. Safe to share between threads. Changes nothing in a read-only home.

    Making one removes temporary folders that a crash left behind. A version that the database does not know
    may be all that is left of it (an older database was put back): it is set aside, never deleted.
    """

    def __init__(self, home: Home, registry: Registry) -> None:
        self._home = home
        self._registry = registry
        self._root = home.path / FOLDER
        if home.writable:
            self._clean()

    def folder(self, domain: str, version: int) -> Path:
        """The folder of `version`. Raises InvalidRequest for an invalid name."""
        return self._root / check_expert_name(domain) / f"v{int(version)}"

    def publish(self, candidate: Candidate) -> AdapterVersion:
        """Writes the candidate's files and makes them the live version of its expert: whole or not at all.

        Raises InvalidRequest for an unknown expert, CorruptAdapter for files that are no intact PEFT adapter
        (such as weights that are not finite), StorageFull and StorageError; nothing was changed then.
        """
        with self._new_folder(candidate.expert) as folder:
            write_files(candidate, folder)
            return self._make_live(folder, candidate)

    def adopt(self, summary: CandidateSummary, staged: Path) -> AdapterVersion:
        """As `publish`, for a candidate whose files another process has written into the folder `staged`."""
        with self._new_folder(summary.expert) as folder:
            move_files(staged, folder)
            return self._make_live(folder, summary)

    def load(self, version: AdapterVersion, base_hash: str | None = None) -> LoadedAdapter:
        """The files of `version`, verified against its manifest.

        Raises CorruptAdapter where anything is missing, changed or not finite, and StorageError where
        `base_hash` (of the draft base that runs) is given and the adapter belongs to another.
        """
        folder, title = self.folder(version.domain, version.version), _title(version)
        if base_hash is not None and version.base_hash != base_hash:
            raise StorageError(
                f"{title} belongs to another draft base ({version.base_hash}); "
                f"use that one or train anew for {base_hash}."
            )
        with storage_errors(self._home.path):
            files = _contents(folder, title)
        manifest = _object(files.pop(MANIFEST, b""), f"{MANIFEST} of {title}")
        if manifest.get("files") != _hashes(files):
            raise CorruptAdapter(f"{title}: its files do not match its manifest.")
        same = ("domain", "version", "base_hash")
        if any(manifest.get(key) != getattr(version, key) for key in same):
            raise CorruptAdapter(f"{title}: its manifest belongs to another version.")
        return LoadedAdapter(*_parsed(files, title), manifest, _vocabulary(files, title))

    def load_live(
        self, domain: str, base_hash: str | None = None
    ) -> tuple[AdapterVersion, LoadedAdapter] | None:
        """The live version or, where it is corrupt, its nearest intact ancestor; None: the untrained expert.

        With `base_hash` only versions of that draft base count, whichever base was trained last. A corrupt
        version is logged and, in a writable home, rolled back. Raises StorageError only where the database
        fails.
        """
        line = self._registry.lineage(domain, base_hash)
        live = None if line else self._registry.live(domain)
        if live is not None:
            log.warning("%s belongs to another draft base; none of this one's serves.", _title(live))
        for version in line:
            try:
                return version, self.load(version, base_hash)
            except CorruptAdapter as error:
                log.warning("%s An older version serves.", error)
                self._reject(version)
            except StorageError as error:
                log.warning("%s An older version serves.", error)
        return None

    def remove(self, domain: str) -> None:
        """Removes all versions of `domain`, also those set aside; the untrained expert serves."""
        folder = self.folder(domain, 0).parent
        with self._home.folder_lock:
            versions = self._registry.versions(domain)
            self._registry.forget_versions(domain, [version.version for version in versions])
            with storage_errors(self._home.path):
                for one in (folder, self._home.path / QUARANTINE / domain):
                    shutil.rmtree(one, ignore_errors=not one.exists())

    def prune(self, domain: str, keep: int = 5) -> list[int]:
        """Removes, of each draft base, all but the newest `keep`, the one that serves and its fallback.

        Returns the numbers that are gone.
        """
        with self._home.folder_lock:
            versions = self._registry.versions(domain)
            needed = {version.version for version in self._registry.lineage(domain)[:2]}
            gone = []
            for base in {version.base_hash for version in versions}:
                numbers = [version.version for version in versions if version.base_hash == base]
                needed |= {version.version for version in self._registry.lineage(domain, base)[:2]}
                gone += numbers[: max(len(numbers) - keep, 0)]
            gone = sorted(set(gone) - needed)
            # rows first: a folder without a row is set aside, a row without a folder would be corrupt
            self._registry.forget_versions(domain, gone)
            for number in gone:
                shutil.rmtree(self.folder(domain, number), ignore_errors=True)
        return gone

    @contextmanager
    def _new_folder(self, domain: str) -> Iterator[Path]:
        """An empty temporary folder beside the versions of `domain`; nobody else publishes meanwhile."""
        self._home.require_writable()
        self._registry.next_version(domain)  # an unknown name is refused before anything is written
        with self._home.folder_lock, storage_errors(self._home.path):
            self._clean()
            parent = self.folder(domain, 0).parent
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_live(self, folder: Path, summary: CandidateSummary) -> AdapterVersion:
        """Checks the files in `folder`, gives them a number and a manifest, and moves them into place."""
        files = _checked(folder)
        number = self._registry.reserve_version(summary.expert)
        version = AdapterVersion(
            domain=summary.expert,
            version=number,
            parent=summary.parent,
            path=self.folder(summary.expert, number).relative_to(self._home.path).as_posix(),
            base_hash=summary.base_hash,
            acceptance=summary.acceptance_after,
            created_at=time.time(),
            state="live",
        )
        (folder / MANIFEST).write_text(_manifest(version, summary, files), encoding="utf-8")
        self._install(folder, version)
        return version

    def _install(self, temporary: Path, version: AdapterVersion) -> None:
        """Folder, then row: a crash between them leaves a folder without a row, which `_clean` sets aside."""
        folder = self.folder(version.domain, version.version)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(folder)
        try:
            for path in (folder.parent, self._root, self._home.path):
                sync(path)
            self._registry.add_version(version)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def reject(self, version: AdapterVersion) -> None:
        """Roll back a version that does not fit its base, unless it was removed or the home is read-only."""
        self._reject(version)

    def _reject(self, version: AdapterVersion) -> None:
        if not self._home.writable:
            return
        with self._home.folder_lock:
            # Rows are removed before folders. So a version without a row is not corrupt: it was just removed.
            rows = self._registry.versions(version.domain)
            if version.version in {row.version for row in rows}:
                self._registry.reject(version.domain, version.version)

    def _clean(self) -> None:
        with self._home.folder_lock:
            known = {self.folder(v.domain, v.version) for v in self._registry.versions()}
            for folder in self._root.glob("*/*"):
                if folder.name.startswith(TEMPORARY):
                    shutil.rmtree(folder, ignore_errors=True)
                elif VERSION_FOLDER.fullmatch(folder.name) and folder not in known:
                    self._set_aside(folder)

    def _set_aside(self, folder: Path) -> None:
        """Move a version that the database does not know out of the way of the next of its number."""
        parent = self._home.path / QUARANTINE / folder.parent.name
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=parent))
            folder.rename(place)  # over an empty folder of its own, so over nothing
        except OSError as error:
            log.warning("%s is not in the database and cannot be moved: %s.", folder, error.strerror)
        else:
            log.warning("%s is not in the database; it was moved to %s.", folder, place)


def _title(version: AdapterVersion) -> str:
    return f"Adapter version {version.version} of '{version.domain}'"


def _checked(folder: Path) -> dict[str, bytes]:
    """The files of a new adapter. Raises CorruptAdapter where they are not an intact one."""
    title = "The new adapter"
    files = _contents(folder, title)
    _parsed(files, title)
    _vocabulary(files, title)
    return files


def _contents(folder: Path, title: str) -> dict[str, bytes]:
    """The bytes of each file. Raises CorruptAdapter for anything but plain files of the allowed kinds."""
    files = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix not in ALLOWED or path.is_symlink() or not path.is_file():
                raise CorruptAdapter(
                    f"{title} holds '{path.name}'; only {', '.join(ALLOWED)} files are taken."
                )
            files[path.name] = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptAdapter(f"{title}: its folder is gone.") from error
    return files


def _parsed(files: dict[str, bytes], title: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    missing = [name for name in (CONFIG, WEIGHTS) if name not in files]
    if missing:
        raise CorruptAdapter(f"{title} lacks {' and '.join(missing)}.")
    try:
        tensors: dict[str, torch.Tensor] = load_tensors(files[WEIGHTS])
        finite = {name: bool(tensor.isfinite().all()) for name, tensor in tensors.items()}
    except (SafetensorError, KeyError, NotImplementedError) as error:  # the last two: unknown dtypes
        raise CorruptAdapter(f"{title}: {WEIGHTS} cannot be read: {error}.") from error
    for name in finite:
        if not finite[name]:
            raise CorruptAdapter(f"{title}: tensor '{name}' is not finite.")
    return _object(files[CONFIG], f"{CONFIG} of {title}"), tensors


def _vocabulary(files: dict[str, bytes], title: str) -> torch.Tensor | None:
    """The token ids of an adapter's own output rows; what they may be is for the draft base to say."""
    if VOCABULARY not in files:
        return None
    try:
        found: torch.Tensor = load_tensors(files[VOCABULARY])["vocabulary"]
    except (SafetensorError, KeyError, NotImplementedError) as error:
        raise CorruptAdapter(f"{title}: {VOCABULARY} cannot be read: {error}.") from error
    return found


def _object(text: bytes, title: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CorruptAdapter(f"{title} is missing or no JSON.") from error
    if not isinstance(value, dict):
        raise CorruptAdapter(f"{title} is no JSON object.")
    return value


def _manifest(version: AdapterVersion, summary: CandidateSummary, files: dict[str, bytes]) -> str:
    written = {
        "format": MANIFEST_FORMAT,
        "domain": version.domain,
        "version": version.version,
        "parent": version.parent,
        "base_hash": version.base_hash,
        "acceptance": version.acceptance,
        "created_at": version.created_at,
        "files": _hashes(files),
        "rank": summary.rank,
        "modules": list(summary.modules),
    }
    return json.dumps(written, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _hashes(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
