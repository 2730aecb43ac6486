"""The draft base that a target is served with: an independent model, or a feature drafter."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import torch

from moedraft import cpu
from moedraft.cache import SlotCache
from moedraft.config import Settings
from moedraft.core import InvalidRequest, MoedraftError, UnsupportedModel
from moedraft.cpu.optional import with_compiled
from moedraft.drafting.drafter import ExpertDrafter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.kept import ReadStates, StateKeeper
from moedraft.drafting.model import ModelDrafter
from moedraft.evidence import HiddenStates
from moedraft.feature.checkpoint import CONFIG, TARGET, load_draft, save_draft, stored_as
from moedraft.feature.model import FeatureDraft
from moedraft.feature.text_tokens import GrowingText
from moedraft.gguf import HUB_ID, SMOLLM2, conversion, is_gguf, public_name
from moedraft.loading.checks import check_pair
from moedraft.loading.hashes import hash_files
from moedraft.models import LanguageModel, folder_of, load_by, resolve, snapshot_folder

AUTO, MINI = "auto", "mini"
SHIPPED = {SMOLLM2: "smollm2-eagle3", HUB_ID: "smollm2-eagle3"}  # by target, in moedraft.data
TRAINED = "draft-base"  # folder of the home with a drafter that was trained there


class FeatureBase:
    """A feature drafter with what the bank and others ask of a draft base."""

    def __init__(self, draft: FeatureDraft, target: LanguageModel, folder: Path) -> None:
        self.hf = draft
        self.folder = folder
        self.name = str(folder)
        self.tokenizer = target.tokenizer
        self.vocab_size = target.vocab_size
        self.num_layers = 1
        self.max_len = draft.config.max_len
        self.num_parameters = sum(parameter.numel() for parameter in draft.parameters())
        self.cpu_fast_paths = target.cpu_fast_paths

    @property
    def device(self) -> torch.device:
        return self.hf.fc.weight.device

    def new_cache(self, slots: int) -> SlotCache:
        return self.hf.new_cache(slots)

    def weights_hash(self) -> str:
        """As `LanguageModel.weights_hash`: adapters belong to exactly one base."""
        return hash_files(self.folder) or hash_files(self.folder, "*.safetensors")


DraftBase = LanguageModel | FeatureBase


def draft_name(settings: Settings) -> str:
    """What `settings.draft` stands for where it is "auto" or the name of a drafter that is shipped.

    "auto" is a drafter that was trained in the home for this target; else what is shipped for it. Raises
    InvalidRequest where nothing is known.
    """
    if settings.draft in SHIPPED.values():
        return shipped(settings.draft)
    if settings.draft != AUTO:
        return settings.draft
    trained = settings.home / TRAINED
    if is_for(trained, settings):
        return str(trained)
    if settings.target == MINI:
        return MINI
    if settings.target in SHIPPED:
        return shipped(SHIPPED[settings.target])
    other = ", and the one in the home was trained for another" if (trained / CONFIG).exists() else ""
    raise InvalidRequest(
        f"no draft base is known for the target {settings.target!r}{other}; name one with --draft: a small "
        "model with the same tokenizer, a folder with an EAGLE-3 checkpoint (`moedraft draft train` makes "
        f"one), or one shipped for another copy of the target ({', '.join(sorted(set(SHIPPED.values())))})."
    )


def is_for(folder: Path, settings: Settings) -> bool:
    """Whether the drafter in this folder was trained for the target: the same weights, wherever they lie.

    One that does not say, because it is older, is taken for any target but the embedded one.
    """
    if not (folder / CONFIG).exists():
        return False
    try:
        note = json.loads((folder / TARGET).read_text(encoding="utf-8"))
        name, known = note["name"], note["weights_hash"]
    except (OSError, ValueError, KeyError, TypeError):
        return settings.target != MINI
    found = target_hash(settings)
    return bool(found == known if found else name == public_name(settings.target))


def target_hash(settings: Settings) -> str:
    """`weights_hash` of the target, which is not loaded; "" where its files do not tell or are not here."""
    try:
        where = resolve(settings.target, "target")
        gguf = is_gguf(where)
        folder = conversion(Path(where), settings.cache_dir)[0] if gguf else folder_of(where)
        return hash_files(folder) if folder else ""
    except (MoedraftError, OSError, ValueError):
        return ""


def shipped(name: str) -> str:
    """The folder of a drafter that comes with the package. Raises InvalidRequest where it was left out."""
    folder = importlib.resources.files("moedraft.data") / "models" / name
    if not (folder / CONFIG).is_file():
        raise InvalidRequest(f"the drafter {name} is not part of this installation.")
    return str(folder)


def load_base(settings: Settings, target: LanguageModel, *, learns: bool = False) -> DraftBase:
    """The draft base for this target. Raises InvalidRequest or UnsupportedModel.

    learns: whether experts will be trained on it; a feature drafter is in float32 then.
    """
    name = draft_name(settings)
    folder = feature_folder(name)
    if folder is None:
        draft = load_by(settings, "draft", name=name)
        check_pair(target, draft)
        return draft
    return load_feature_base(folder, target, torch.float32 if learns else None)


def load_feature_base(folder: Path, target: LanguageModel, dtype: torch.dtype | None = None) -> FeatureBase:
    """The feature drafter in `folder`, on this target and in its precision, unless another is named."""
    layers = (target.hf.get_input_embeddings(), target.hf.get_output_embeddings())
    embeddings, output = (layer.weight.detach() for layer in layers)
    try:
        draft = load_draft(folder, embeddings, output, target.num_layers)
        if max(draft.config.feature_layers) >= target.num_layers:
            raise UnsupportedModel(f"{folder}: the drafter reads states behind the target's last layer.")
    except MoedraftError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InvalidRequest(f"the drafter in {folder} does not fit {target.name}: {error}") from error
    draft = draft.to(target.device, dtype or target.dtype)
    base = FeatureBase(draft.eval().requires_grad_(False), target, folder)
    if dtype is None and cpu.allows(base):
        draft.faster = with_compiled("feature_layer", lambda module: module.fused_for(draft))
    return base


def feature_folder(name: str) -> Path | None:
    """Where the feature drafter of this name lies, a folder or a hub id; None where it is something else.

    Raises InvalidRequest for a drafter on the hub whose weights cannot be fetched.
    """
    folder = None if name in (MINI, SMOLLM2) or is_gguf(name) else snapshot_folder(name)
    if folder is None or not is_feature_checkpoint(folder):
        return None
    if not Path(name).expanduser().is_dir() and not any(folder.glob("*.safetensors")):
        raise InvalidRequest(
            f"the hub gives no model.safetensors of the drafter {name}; download one that is stored in parts "
            "into a folder and name that; .bin files are not read."
        )
    return folder


def export_base(settings: Settings, out: Path) -> FeatureBase:
    """Write the feature drafter that the settings name to `out`, with output rows; what was written.

    Engines with a reduced vocabulary want these rows; they are the target's unless it has its own. Raises
    InvalidRequest where the draft is of another kind or `out` is in use, and as loading and `save_draft` do.
    """
    name = draft_name(settings)
    folder = feature_folder(name)
    if folder is None:
        raise InvalidRequest(f"the draft {name} is no feature drafter; only those are exported.")
    if out.resolve() in (folder.resolve(), (settings.home / TRAINED).resolve()):
        raise InvalidRequest(
            f"{out} is where drafters are served from, and experts belong to them; name another."
        )
    exact = settings.model_copy(update={"cpu_fast_paths": False})  # `auto` could round the rows else
    target = load_by(exact, "target")
    base = load_feature_base(folder, target, torch.float32)
    dtype, steps = stored_as(folder)
    save_draft(
        base.hf,
        out,
        target=public_name(target.name),
        target_hash=target.weights_hash(),
        architectures=(type(target.hf).__name__,),
        dtype=dtype,
        rows=True,
        steps=steps,
    )
    return base


def is_feature_checkpoint(folder: Path) -> bool:
    """Whether the folder's configuration is that of an EAGLE-3 drafter, in one of its layouts."""
    try:
        config: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    return "speculators_model_type" in config or "eagle3" in str(config.get("architectures")).lower()


@torch.inference_mode()
def features_of(base: DraftBase, target: LanguageModel, token_ids: list[int]) -> torch.Tensor | None:
    """What a feature drafter reads of a text: the target's states [1, T - 2, 3 * H]. None for other bases."""
    if isinstance(base, LanguageModel):
        return None
    wanted = HiddenStates(base.hf.config.feature_layers)
    ids = torch.tensor([token_ids], device=target.device)
    target.forward(target.new_cache(1), 0, ids, [0], keep=1, hidden=wanted)
    features = torch.cat([wanted.states[i] for i in wanted.layers], dim=-1)[:, :-2]
    return features.to(base.hf.fc.weight.dtype)


@torch.inference_mode()
def first_guesses(base: DraftBase, token_ids: list[int], features: torch.Tensor | None) -> list[int]:
    """By position of a text, what the base would have guessed there as its first token; −1: it cannot.

    `features`: those of this text, `features_of`. The bank decides which expert guesses.
    """
    ids = torch.tensor([token_ids], device=base.device)
    if isinstance(base, LanguageModel):
        logits = base.forward(base.new_cache(1), 0, ids, [0])
        return [-1, *logits[0, :-1].argmax(-1).tolist()]
    assert features is not None
    draft = base.hf
    hidden = draft.advance(draft.new_cache(1), 0, draft.fuse(features), ids[:, 1:-1], [0])
    normed, text = draft.normed(hidden), GrowingText(draft, token_ids).beside(draft.vocabulary)
    known = torch.arange(2, len(token_ids), device=base.device)
    logits = text.add(draft.guess(normed)[0], normed[0], known)
    return [-1, -1, *text.names[logits.argmax(-1)].tolist()]


def drafter_of(base: DraftBase, bank: ExpertBank, settings: Settings, vocab_size: int) -> ExpertDrafter:
    """The drafter that runs this base in an engine."""
    slots = settings.max_batch_size
    if isinstance(base, FeatureBase):
        keeper = StateKeeper(base.hf.config.hidden_size) if settings.states_bytes else None
        states = None if settings.draft_source == "lookup" else ReadStates()
        return FeatureDrafter(base.hf, bank, slots, vocab_size, states=states, keeper=keeper)
    return ModelDrafter(base, bank, slots, vocab_size, settings.prefill_chunk)
