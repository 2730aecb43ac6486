"""Adapter folders in PEFT's format: published atomically, verified on every load, never pickle.

`adapters/<domain>/v<N>` holds adapter_config.json, adapter_model.safetensors and a manifest. Paths are
always computed from a checked name and a number. This module does not know what the tensors mean.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moedraft.core import SHARED, AdapterVersion, CorruptAdapter, StorageError
from moedraft.folders import sync
from moedraft.storage.db import DATABASE, Home, storage_errors
from moedraft.storage.registry import Registry, check_expert_name
from moedraft.storage.versions.adapter_files import (
    MANIFEST,
    checked,
    contents,
    manifest_of,
    parsed,
    read_manifest,
    vocabulary_in,
)
from moedraft.storage.versions.candidate import (
    VOCABULARY,
    Candidate,
    CandidateSummary,
    move_files,
    write_files,
)
from moedraft.storage.versions.version_rows import NOTHING_ELSE, Also

if TYPE_CHECKING:
    import torch

FOLDER = "adapters"
QUARANTINE = "quarantine"  # folder beside FOLDER: versions that the database does not know
TEMPORARY = ".tmp-"
VERSION_FOLDER = re.compile(r"v([0-9]+)")

Part = tuple[CandidateSummary, Callable[[Path], None]]  # a candidate, and what puts its files into a folder

log = logging.getLogger(__name__)


class LoadedAdapter(NamedTuple):
    config: dict[str, Any]  # adapter_config.json
    tensors: dict[str, torch.Tensor]  # adapter_model.safetensors, on the CPU, all finite
    manifest: dict[str, Any]
    vocabulary: torch.Tensor | None = None  # vocabulary.safetensors: token ids, where there is one


def check_database_is_there(home: Path) -> None:
    """Raises StorageError for a home with adapters but no database: a new one would know none of them.

    A database that was emptied, as a disk that fails may do, is none.
    """
    database = home / DATABASE
    is_there = database.exists() and database.stat().st_size > 0
    if not is_there and any(home.glob(f"{FOLDER}/*/v[0-9]*")):
        raise StorageError(
            f"The home {home} has adapters and no database, or an empty one; put {DATABASE} back, or move "
            f"the folder '{FOLDER}' away to begin anew."
        )


class AdapterStore:
    """The adapters of a home. Safe to share between threads. Changes nothing in a read-only home.

    Creating this object removes temporary folders that a crash left behind. Versions that the database does
    not know, for example since an older database was put back, are set aside and never deleted.
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
        return self.publish_together([candidate])[0]

    def publish_together(
        self, candidates: Sequence[Candidate], also: Also = NOTHING_ELSE
    ) -> list[AdapterVersion]:
        """As `publish`, for all these candidates or for none, and `also`: in one transaction."""
        return self._publish([(one, partial(write_files, one)) for one in candidates], also)

    def adopt(self, summary: CandidateSummary, staged: Path) -> AdapterVersion:
        """As `publish`, for a candidate whose files another process has written into the folder `staged`."""
        return self.adopt_together([(summary, staged)])[0]

    def adopt_together(
        self, staged: Sequence[tuple[CandidateSummary, Path]], also: Also = NOTHING_ELSE
    ) -> list[AdapterVersion]:
        """As `publish_together`, for candidates whose files another process has written into folders."""
        return self._publish([(summary, partial(move_files, folder)) for summary, folder in staged], also)

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
            files = contents(folder, title)
        manifest = read_manifest(files, title)
        same = ("domain", "version", "base_hash")
        if any(manifest.get(key) != getattr(version, key) for key in same):
            raise CorruptAdapter(f"{title}: its manifest belongs to another version.")
        return LoadedAdapter(*parsed(files, title), manifest, vocabulary_in(files, title))

    def vocabulary(self, version: AdapterVersion) -> torch.Tensor | None:
        """The token ids of a version's own output rows, for people to see; None: none, or unreadable."""
        file = self.folder(version.domain, version.version) / VOCABULARY
        try:
            return vocabulary_in({VOCABULARY: file.read_bytes()}, _title(version))
        except (OSError, CorruptAdapter):
            return None

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
                log.warning("%s An older one serves, or no adapter.", error)
                self.reject(version)
            except StorageError as error:
                log.warning("%s An older one serves, or no adapter.", error)
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

    def _publish(self, parts: Sequence[Part], also: Also) -> list[AdapterVersion]:
        """Write folders, then rows: a crash leaves folders without rows, for `_clean` to set aside."""
        self._home.require_writable()
        for summary, _ in parts:
            self._registry.next_version(summary.expert)  # an unknown name changes nothing
        with self._home.folder_lock, storage_errors(self._home.path):
            self._clean()
            folders: list[Path] = []  # temporary ones first, then where they were moved to
            try:
                for summary, fill in parts:
                    folders.append(self._temporary_folder(summary.expert))
                    fill(folders[-1])
                versions = self._numbered([summary for summary, _ in parts], folders)
                for temporary, version in zip(list(folders), versions, strict=True):
                    self._place(temporary, self.folder(version.domain, version.version), folders)
                return self._registry.add_versions(versions, also)
            except BaseException:
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                raise

    def _temporary_folder(self, domain: str) -> Path:
        """Make an empty temporary folder, beside the versions of `domain`."""
        parent = self.folder(domain, 0).parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))

    def _numbered(self, summaries: Sequence[CandidateSummary], folders: list[Path]) -> list[AdapterVersion]:
        """Checks the files in the folders, and gives each a number and a manifest."""
        files = [checked(folder) for folder in folders]
        numbers = {one.expert: self._registry.reserve_version(one.expert) for one in summaries}
        versions = []
        for summary, folder, content in zip(summaries, folders, files, strict=True):
            version = self._version_of(summary, numbers[summary.expert], numbers.get(SHARED))
            (folder / MANIFEST).write_text(manifest_of(version, summary, content), encoding="utf-8")
            for file in folder.iterdir():
                file.chmod(0o600)
            versions.append(version)
        return versions

    def _version_of(self, summary: CandidateSummary, number: int, shared: int | None) -> AdapterVersion:
        """shared: the version of the shared adapter that is published with it; None: the live one stays."""
        if shared is None:
            line = self._registry.lineage(SHARED, summary.base_hash)
            shared = line[0].version if line else 0
        return AdapterVersion(
            domain=summary.expert,
            version=number,
            parent=summary.parent,
            path=self.folder(summary.expert, number).relative_to(self._home.path).as_posix(),
            base_hash=summary.base_hash,
            acceptance=summary.acceptance_after,
            created_at=time.time(),
            state="live",
            stood_on=None if summary.expert == SHARED else shared,
        )

    def _place(self, temporary: Path, folder: Path, ours: list[Path]) -> None:
        """Rename the finished folder, which is `ours` then; when this returns, all of it is on the disk."""
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(folder)  # fails if an unknown version, which could not be set aside, is there
        ours.append(folder)
        for path in (folder.parent, self._root, self._home.path):
            sync(path)

    def reject(self, version: AdapterVersion) -> None:
        """Roll back a version that does not fit its base, unless it was removed or the home is read-only."""
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
        """Move the folder of a version that the database does not know, so that its number is free."""
        parent = self._home.path / QUARANTINE / folder.parent.name
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=parent))
            folder.rename(place)  # replaces the empty folder that was just made, and nothing else
        except OSError as error:
            log.warning("%s is not in the database and cannot be moved: %s.", folder, error.strerror)
        else:
            log.warning("%s is not in the database; it was moved to %s.", folder, place)


def _title(version: AdapterVersion) -> str:
    return f"Adapter version {version.version} of '{version.domain}'"
