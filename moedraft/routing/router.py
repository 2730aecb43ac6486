"""Which domain a prompt belongs to: `Router`, over a `TwoStage` model and an embedder's vectors.

Knows domains as names with example prompts; knows no expert, no engine and no database.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from moedraft.core import SHARED, InvalidRequest, StorageError
from moedraft.folders import sync
from moedraft.routing.embedder import (
    FEW,
    MAX_TOKENS,
    STEP,
    EmbeddingCache,
    Floats,
    TextEmbedder,
    char_ngrams,
    features,
    read_tensors,
    write_tensors,
)
from moedraft.routing.fitting import Copies
from moedraft.routing.labels import Label, Refit, beside, counted, joined, loses, plausible
from moedraft.routing.rewording import copies
from moedraft.routing.stages import TwoStage

ROUTER_VERSION = 3  # 1 had no first stage, 2 no reworded copies
ROUTER_FILE = "router.safetensors"
CACHE_FILE = "embeddings.safetensors"
MIN_TRIED = 3  # domains, from which on some can be left out to judge a fit
MAX_EXAMPLES = 128  # per domain; more make every refit slower and the router hardly better
MAX_COPIES = (
    32  # of a domain's examples, reworded; with 64 more strangers are taken, and a refit takes longer
)


@dataclass(frozen=True)
class Route:
    """Which domain a prompt was found to belong to.

    `confidence` is the probability of the best domain, even where that was too unlikely to be chosen.
    `probabilities` has an entry for every registered domain and for `shared` (none of them); they sum to 1.
    """

    domain: str  # a registered domain, or SHARED
    confidence: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class TriedFit:
    """A model that was fitted on labels from the traffic too; nobody is routed by it yet."""

    model: TwoStage
    examples: str  # `digest_of` those that it was fitted on
    outcome: Refit


class Router:
    """Routes prompts by what it was last fitted on, which it keeps in `folder`.

    Everything in the folder can be computed again. Where it is missing, damaged, of another version or made
    with another embedder, the router is empty and every prompt goes to `shared` until the next `fit`.

    Most prompts of well-known domains are told by their n-grams alone and not embedded, see `TwoStage`.
    With `first_stage` False every prompt is embedded, which is many times slower; it serves for comparison.
    """

    learns_from_traffic = True
    file = ROUTER_FILE  # in the folder
    fits = 0  # how often what it routes by was exchanged

    def __init__(
        self, embedder: TextEmbedder, folder: Path, threshold: float = 0.35, *, first_stage: bool = True
    ) -> None:
        self.embedder = embedder
        self.folder = folder
        self.threshold = threshold
        self.first_stage = first_stage
        self._cache = EmbeddingCache(embedder, folder / CACHE_FILE)
        self._model: TwoStage | None = None
        self._fitted_on = ""
        self._seen: tuple[int, ...] | None = None  # the file as it was read or written last
        self._vectors: dict[str, Floats] = {}  # of the labels that `refit` saw last
        self.load_or_empty()

    @property
    def domains(self) -> tuple[str, ...]:
        return self._model.names if self._model else ()

    def matches(self, examples: Mapping[str, Sequence[str]]) -> bool:
        """Whether the router was fitted on exactly these examples, with this embedder."""
        return self._fitted_on == digest_of(examples) if examples else not self.domains

    def warm_up(self) -> Iterator[None]:
        """Load the embedder and embed texts in every number and length, if there are domains to tell apart.

        All of it takes a second or two, which no request should have to wait for, so it is done in pieces:
        one each time that the iterator is advanced. The code generated for these shapes stays in memory.
        """
        if self._model is not None:
            for count in range(1, FEW + 1):
                for words in range(1, MAX_TOKENS, STEP):
                    self.embedder.embed(["a " * words] * count)
                    yield

    def fit(self, examples: Mapping[str, Sequence[str]]) -> None:
        """Learn the domains from {name: prompts}. They replace all former ones; {} leaves no domain.

        Of a domain with more than MAX_EXAMPLES prompts that many are used, evenly spread. Prompts that were
        used by the last fit are not embedded again. Raises InvalidRequest for a domain with fewer than two
        prompts, and StorageError where the folder cannot be written; the router stays as it was then.
        """
        rows = self._rows_of(examples) if examples else None
        # The products are small: sharing them out over threads takes ten times as long as computing them.
        with threadpool_limits(1, user_api="blas"):
            model = TwoStage.fit(*rows) if rows else None
        self._use(model, digest_of(examples))

    def try_labels(self, examples: Mapping[str, Sequence[str]], labels: Sequence[Label]) -> TriedFit | None:
        """Fit on labels from the traffic beside the examples, and have the examples judge it.

        Nothing serves otherwise until `take`, and the folder stays as it is. Left out in turn, the examples
        must be as well off as by a fit without the labels, see `loses`. None, and nothing tried, with fewer
        than three domains, where examples cannot be judged so, and where no label is left to use. Raises as
        `fit`.
        """
        known = set().union(*examples.values())
        labels = [label for label in labels if label.text.strip() and label.text not in known]
        if len(examples) < MIN_TRIED or not labels:
            return None
        own, split, made = self._rows_of(examples, keep=False)
        x = self._label_features(labels)
        with threadpool_limits(1, user_api="blas"):
            plain, before = TwoStage.fit_and_try(own, split, made)
            chosen = plausible(labels, plain.full.probabilities(x), plain.names)
            if not chosen:
                return None
            model, after = TwoStage.fit_and_try(own, split, joined(made, _by_domain(own, x, chosen)))
        right = (one.right(self.threshold)[0] for one in (before, after))
        better = not loses(before, after, self.threshold)
        outcome = Refit(better, counted(chosen), int(after.known.sum()), *right)
        return TriedFit(model, digest_of(examples), outcome)

    def take(self, trial: TriedFit) -> None:
        """Have what was tried serve, if the examples said so. Raises StorageError as `fit`."""
        if trial.outcome.taken:
            self._use(trial.model, trial.examples)

    def route(self, texts: Sequence[str]) -> list[Route]:
        """One Route per text, in order. Blank texts go to `shared`; without domains all do."""
        routes = [Route(SHARED, 0.0, dict.fromkeys(self.domains, 0.0) | {SHARED: 1.0}) for _ in texts]
        rows = [i for i, text in enumerate(texts) if text.strip()]
        if not self.domains or not rows:
            return routes
        names, found = self.probabilities([texts[i] for i in rows])
        for i, probabilities in zip(rows, found, strict=True):
            routes[i] = self._decide(names, probabilities)
        return routes

    def probabilities(self, texts: Sequence[str]) -> tuple[tuple[str, ...], Floats]:
        """Names of the D domains, and float32 [len(texts), D]; 1 − a row's sum is the probability of none."""
        model = self._model  # another thread may fit a new one meanwhile
        if model is None:
            return (), np.zeros((len(texts), 0), dtype=np.float32)
        embed = self.embedder.embed
        return model.names, model.probabilities(
            char_ngrams(texts), lambda rows: embed([texts[row] for row in rows])
        )

    def features(self, texts: Sequence[str]) -> Floats:
        """What the classifier sees of texts, unit vectors [n, F] with n >= 1. The folder stays as it is."""
        return features(self._cache.embed(texts, keep=False), texts)

    def load_or_empty(self) -> None:
        """Use what the folder holds. The router becomes empty where that is nothing usable."""
        self._seen = self._stamp()
        tensors, metadata = read_tensors(self.folder / ROUTER_FILE) or ({}, {})
        ours = metadata.get("version") == str(ROUTER_VERSION) and metadata.get("embedder") == self.embedder.id
        model = TwoStage.unpack(tensors, metadata) if ours else None
        self._fitted_on = metadata.get("examples", "") if model else ""
        self._model = self._deciding(model)  # one assignment: other threads read `domains` meanwhile
        self.fits += 1

    def reload(self) -> None:
        """As `load_or_empty`, where the file is not the one that was read or written last."""
        if self._stamp() != self._seen:
            self.load_or_empty()

    def _stamp(self) -> tuple[int, ...] | None:
        """What tells two files of that name apart; None where there is none."""
        try:
            found = (self.folder / self.file).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size

    def _use(self, model: TwoStage | None, digest: str) -> None:
        self._save(model, digest)
        self._seen = self._stamp()
        self._model, self._fitted_on = self._deciding(model), digest
        self.fits += 1

    def _deciding(self, model: TwoStage | None) -> TwoStage | None:
        return model.deciding(self.threshold) if model and self.first_stage else model

    def _rows_of(
        self, examples: Mapping[str, Sequence[str]], *, keep: bool = True
    ) -> tuple[dict[str, Floats], int, dict[str, Copies]]:
        """`_features_of` of what is used of the examples. Raises InvalidRequest."""
        for name, texts in examples.items():
            if len(texts) < 2:
                raise InvalidRequest(f"domain {name!r} needs at least two example prompts.")
        return self._features_of({name: spread(texts) for name, texts in examples.items()}, keep=keep)

    def _label_features(self, labels: Sequence[Label]) -> Floats:
        """[n, F]. Vectors of the last call are kept in memory; the folder never holds any of the traffic."""
        texts = [label.text for label in labels]
        missing = list(dict.fromkeys(text for text in texts if text not in self._vectors))
        found = self.embedder.embed(missing) if missing else ()
        vectors = self._vectors | dict(zip(missing, found, strict=True))
        self._vectors = {text: vectors[text] for text in texts}
        return features(np.stack([vectors[text] for text in texts]), texts)

    def _features_of(
        self, examples: Mapping[str, Sequence[str]], *, keep: bool
    ) -> tuple[dict[str, Floats], int, dict[str, Copies]]:
        """Features of examples {name: [n, d + n-grams]} in the order of names; d, the embedding's width; and
        the features of their reworded copies. keep: the folder then holds these embeddings alone."""
        names = sorted(examples)
        made = {name: copies(examples[name], MAX_COPIES) for name in names}
        groups = [list(examples[name]) for name in names] + [
            [text for _, text in made[name]] for name in names
        ]
        texts = [text for group in groups for text in group]
        embeddings = self._cache.embed(texts, keep=keep)
        rows = np.split(features(embeddings, texts), np.cumsum([len(group) for group in groups])[:-1])
        places = [np.array([place for place, _ in made[name]], dtype=np.int64) for name in names]
        copied = map(Copies, rows[len(names) :], places)
        own = dict(zip(names, rows[: len(names)], strict=True))
        return own, embeddings.shape[1], dict(zip(names, copied, strict=True))

    def _save(self, model: TwoStage | None, digest: str) -> None:
        origin = {"version": str(ROUTER_VERSION), "embedder": self.embedder.id, "examples": digest}
        tensors, metadata = model.pack() if model else ({}, {})
        write_tensors(self.folder / ROUTER_FILE, tensors, origin | metadata)

    def _decide(self, names: tuple[str, ...], row: Floats) -> Route:
        best = int(row.argmax())
        confidence = float(row[best])
        probabilities = {name: float(p) for name, p in zip(names, row, strict=True)}
        probabilities[SHARED] = max(0.0, 1.0 - sum(probabilities.values()))
        domain = names[best] if confidence >= self.threshold else SHARED
        return Route(domain, confidence, probabilities)


def _by_domain(
    own: Mapping[str, Floats], x: Floats, chosen: Sequence[tuple[int, Label]]
) -> dict[str, Copies]:
    """The chosen rows of `x` as further texts of their domains, whose examples are `own`."""
    found = {}
    for name in counted(chosen):
        pairs = [(place, label.sure) for place, label in chosen if label.domain == name]
        places, sure = [place for place, _ in pairs], np.array([one for _, one in pairs], np.float32)
        found[name] = beside(own[name], x[places], sure)
    return found


def forget(folder: Path) -> None:
    """Delete what a `Router` keeps in the folder, and may be fitted on traffic. Raises StorageError."""
    path = folder / ROUTER_FILE
    try:
        if path.exists():
            path.unlink()
            sync(folder)
    except OSError as error:
        raise StorageError(f"the router's file {path} cannot be deleted: {error.strerror}.") from error


def spread(texts: Sequence[str]) -> list[str]:
    """At most MAX_EXAMPLES of them, evenly spread over the whole, in order."""
    count = min(len(texts), MAX_EXAMPLES)
    return [texts[i * len(texts) // count] for i in range(count)]


def digest_of(examples: Mapping[str, Sequence[str]]) -> str:
    text = json.dumps({name: list(examples[name]) for name in sorted(examples)})
    return hashlib.sha256(text.encode()).hexdigest()
