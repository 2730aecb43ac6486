"""A whole training of a drafter: answers, steps, the finished base; taken up where it stopped.

The drafter goes into a folder of its own, in the format of `speculators`. Beside it lies the folder of the
work, of the same name with `-training` at its end: `texts.jsonl` with what the target answered, and
`training.safetensors` with the state of the training, and `training.json`, which tells what it began with.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.feature.checkpoint import save_draft
from moedraft.feature.config import config_for, default_layers
from moedraft.feature.features import Teacher, decoder_layers
from moedraft.feature.model import FeatureDraft
from moedraft.feature.training.corpus import TrainingText, answered, asked, choose_vocabulary, given
from moedraft.feature.training.trainer import FeatureTrainer, TrainingPlan
from moedraft.gguf import public_name
from moedraft.kernels import Kind
from moedraft.loading.checks import in_one_line
from moedraft.models import LanguageModel

TEXTS, STATE, ORIGIN = "texts.jsonl", "training.safetensors", "training.json"
HELD_OUT, MOST_HELD_OUT = 0.05, 60  # share of the texts, and most of them, that acceptance is measured on
ANSWERED = 64  # prompts between two notes of how far it is
KEPT_EVERY = 120.0  # seconds between two states on disk

Progress = Callable[[int, str | None], None]  # how much is done, and a word about it


def work_folder(out: Path) -> Path:
    """Where a training keeps what it needs to go on, for the drafter `out`."""
    return out.resolve().with_name(f"{out.resolve().name}-training")


@dataclass(frozen=True)
class Report:
    """What came of a training."""

    steps: int
    tokens: int  # read, repetitions included
    seconds: float
    acceptance: list[float]  # by depth, each given the earlier ones


def chosen_layers(wanted: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The target's layers to read: those that are wanted, or the usual three.

    Raises InvalidRequest for any whose states a running engine does not give, and for one named twice.
    """
    layers = wanted or default_layers(num_layers)
    wrong = [i for i in layers if not 0 <= i < num_layers]
    if wrong:
        raise InvalidRequest(f"a drafter reads layers 0 to {num_layers - 1} of this target, not {wrong[0]}.")
    if len(set(layers)) != len(layers):
        raise InvalidRequest(f"the layers that a drafter reads must be different ones, not {list(layers)}.")
    return layers


def begin(
    model: LanguageModel, wanted: tuple[int, ...], out: Path, max_tokens: int | None, kind: Kind = "fkl"
) -> tuple[int, ...]:
    """The layers to read, after all has been checked that can be before the target answers.

    max_tokens: of the target's answers; None where it gives none. Raises UnsupportedModel where no drafter
    can be trained for this target, and InvalidRequest where `out` is that of a training of another target,
    with other layers, another kind of loss or with answers of another length.
    """
    layers = chosen_layers(wanted, model.num_layers)
    try:
        draft = untrained(model, torch.arange(min(16, model.vocab_size)), layers)
        Teacher(model.hf, layers, draft.vocabulary)
    except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a foreign model's configuration or code raises
        name, reason = model.hf.config.model_type, in_one_line(error).split(". ")[0].rstrip(".")
        raise UnsupportedModel(f"{name}: no drafter can be trained for this target ({reason}).") from error
    folder = work_folder(out)
    facts: dict[str, Any] = {"target": model.weights_hash(), "layers": list(layers), "loss": kind}
    facts["max_tokens"] = max_tokens
    if (folder / TEXTS).exists() or (folder / STATE).exists():
        before = _origin(folder)
        facts["max_tokens"] = max_tokens or before.get("max_tokens")
        if not (folder / STATE).exists():
            before["loss"] = kind  # answers do for any
        wrong = [name for name, value in before.items() if value is not None and facts[name] != value]
        if wrong:
            raise InvalidRequest(
                f"{folder} holds a training with another {wrong[0]}; name another folder with --out."
            )
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"{ORIGIN}.tmp"
    scratch.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    scratch.rename(folder / ORIGIN)
    return layers


def _origin(folder: Path) -> dict[str, Any]:
    """What the training in `folder` began with. Raises InvalidRequest where nothing tells it."""
    try:
        found: dict[str, Any] = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
        known = {name: found[name] for name in ("target", "layers", "max_tokens")}
        return known | {"loss": found.get("loss", "fkl")}  # once there was no other
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(
            f"{folder} does not tell what its training began with, as one of an earlier version does not; "
            "name another folder with --out."
        ) from error


def check_texts(count: int) -> None:
    """Raises InvalidRequest where so many texts are too few to train on."""
    if count < 2:
        raise InvalidRequest("a drafter needs at least two texts: one to learn from, one to measure on.")


def collect(
    model: LanguageModel,
    pairs: list[tuple[str, str | None]],
    folder: Path,
    max_tokens: int,
    longest: int,
    progress: Progress = lambda done, what: None,
    size: int = 2**31,
) -> list[TrainingText]:
    """Texts of (prompt, answer); where there is no answer the target's own, which come first.

    What the target answers is kept in `folder` as it comes.

    size: of the draft vocabulary. Raises InvalidRequest for further texts where a training has begun.
    """
    known = read_texts(folder / TEXTS)
    folder.mkdir(parents=True, exist_ok=True)
    longest = min(longest, model.max_len)
    read = [given(model, prompt, answer, longest) for prompt, answer in pairs if answer is not None]
    room = min(longest, model.max_len - 1)  # an answer has one token at least
    prompts = [asked(model.tokenizer, prompt)[-room:] for prompt, answer in pairs if answer is None]
    done = {tuple(text.token_ids[: text.num_prompt_tokens]): text for text in known}
    texts = [done[key] for ids in prompts if (key := tuple(ids)) in done]
    open_ones = [ids for ids in prompts if tuple(ids) not in done]
    if open_ones and size < model.vocab_size and (folder / STATE).exists():
        raise InvalidRequest(f"{folder} holds a training on other prompts; name another folder with --out.")
    answered_before = len(pairs) - len(open_ones)
    progress(answered_before, None)
    for first in range(0, len(open_ones), ANSWERED):
        chosen = open_ones[first : first + ANSWERED]
        fresh = answered(model, chosen, max_tokens)
        with (folder / TEXTS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([t.token_ids, t.num_prompt_tokens]) + "\n" for t in fresh)
        texts += fresh
        progress(answered_before + first + len(chosen), None)
    return texts + read


def read_texts(file: Path) -> list[TrainingText]:
    """What an earlier run had answered. A line that is damaged, or was not finished, is left out."""
    texts = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            ids, count = json.loads(line)
            texts.append(TrainingText([int(token) for token in ids], int(count)))
        except (ValueError, TypeError):
            continue
    return texts


def new_draft(
    model: LanguageModel, texts: list[TrainingText], size: int, layers: tuple[int, ...] = ()
) -> FeatureDraft:
    """An untrained drafter for `model`, with the `size` tokens that its texts use most."""
    count = min(size, model.vocab_size)
    vocabulary = choose_vocabulary(texts, count, model.vocab_size, model.eos_token_ids)
    return untrained(model, vocabulary, layers or default_layers(model.num_layers))


def untrained(model: LanguageModel, vocabulary: torch.Tensor, layers: tuple[int, ...]) -> FeatureDraft:
    """A new drafter for `model` that drafts these tokens. Raises UnsupportedModel where there is none."""
    text_config, count = model.hf.config.get_text_config(), len(vocabulary)
    config = config_for(text_config, draft_vocab_size=count, feature_layers=layers, fc_norm=True)
    embeddings = model.hf.get_input_embeddings().weight.detach()
    draft = FeatureDraft(config, vocabulary, embeddings, model.hf.get_output_embeddings().weight.detach())
    begin_as_target(draft, model.hf)
    return draft.to(model.device)


@torch.no_grad()
def begin_as_target(draft: FeatureDraft, hf: Any) -> None:
    """Begin with the weights of the target's last layer but one where they fit, and its last feature.

    The part of q, k and v that reads the token's embedding begins smaller than that for the feature.
    """
    own, size = draft.layer, draft.config.hidden_size
    own.self_attn.o_proj.weight.mul_(0.1)  # where nothing fits, what is added to the feature is small
    own.mlp.down_proj.weight.mul_(0.1)
    draft.fc.weight.mul_(0.3)
    if draft.config.state_size == size:
        draft.fc.weight[:, -size:] += 0.5 * torch.eye(size)
    layers = decoder_layers(hf)
    theirs = dict(layers[max(len(layers) - 2, 0)].named_parameters())
    wide = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    alike = ["self_attn.o_proj.weight", *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))]
    pairs = {name: name for name in [*alike, "post_attention_layernorm.weight"]}
    pairs |= {"hidden_norm.weight": "input_layernorm.weight"}
    for name, value in own.named_parameters():
        if (name not in wide and name not in pairs) or pairs.get(name, name) not in theirs:
            continue
        found: torch.Tensor = theirs[pairs.get(name, name)]
        wanted = torch.cat([0.3 * found, found], dim=1) if name in wide else found
        if wanted.shape == value.shape:
            value.copy_(wanted)


def divided(texts: list[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Those to measure on, the target's own answers where there are any, and those to learn from.

    Which, depends on the texts and not on their order. So a training that goes on with more texts measures on
    none that it has learned from.
    """
    digests = [hashlib.sha256(json.dumps(text.token_ids).encode()).digest() for text in texts]
    own = [i for i, text in enumerate(texts) if not text.is_given] or range(len(texts))
    order = sorted(own, key=lambda i: digests[i])
    few = [i for i in order if digests[i][0] < 256 * HELD_OUT]
    chosen = set((few or order)[: min(len(few) or 1, MOST_HELD_OUT, max(1, len(texts) - 1))])
    held_out = [texts[i] for i in order if i in chosen]
    return held_out, [text for i, text in enumerate(texts) if i not in chosen]


class Session:
    """A drafter being trained, to be written to `out`. Raises InvalidRequest for too few texts.

    kind: of the loss; a `plan` that is given holds its own.
    """

    def __init__(
        self,
        model: LanguageModel,
        texts: list[TrainingText],
        out: Path,
        *,
        size: int,
        layers: tuple[int, ...] = (),
        kind: Kind = "fkl",
        plan: TrainingPlan | None = None,
    ) -> None:
        texts = list({tuple(text.token_ids): text for text in texts}.values())
        check_texts(len(texts))
        self.model, self.out, self.state = model, out, work_folder(out) / STATE
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.held_out, learned = divided(texts)
        draft = new_draft(model, learned, size, layers)
        teacher = Teacher(model.hf, draft.config.feature_layers, draft.vocabulary)
        self.trainer = FeatureTrainer(draft, teacher, learned, plan or TrainingPlan(kind=kind))
        if self.state.exists():
            self.trainer.load(self.state)

    def run(self, seconds: float, progress: Progress = lambda done, what: None) -> None:
        """Train until it took `seconds` in all, earlier runs included. An interrupted one is kept as well."""
        try:
            self._run(seconds, progress)
        finally:
            if self.trainer.seconds:
                self.trainer.save(self.state)

    def _run(self, seconds: float, progress: Progress) -> None:
        trainer = self.trainer
        kept = began = time.monotonic()
        before = trainer.seconds
        progress(int(before), None)
        while trainer.seconds < seconds:
            loss = trainer.step(trainer.seconds / seconds)
            now = time.monotonic()
            trainer.seconds = before + now - began
            progress(int(trainer.seconds), f"{trainer.tokens} tokens, loss {loss:.2f}")
            if now - kept > KEPT_EVERY:
                trainer.save(self.state)
                kept = now

    def finish(self, depth: int = 5, *, rows: bool = True) -> Report:
        """Measure, and write the drafter; rows: with the output rows, which other engines want."""
        trainer = self.trainer
        kinds = (type(self.model.hf).__name__,)
        with trainer.averaged() as draft:
            rates = trainer.acceptance(self.held_out, depth)
            name, known = public_name(self.model.name), self.model.weights_hash()
            save_draft(draft, self.out, target=name, target_hash=known, architectures=kinds, rows=rows)
        return Report(trainer.steps, trainer.tokens, trainer.seconds, rates)
