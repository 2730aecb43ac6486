"""All settings. Each source wins over those before it: defaults, file in the home, environment, arguments.

An unknown key is an error in every one of them.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path, user_data_path
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from moedraft.core import KEY_VARIABLE, InvalidRequest, StorageError

CONFIG_FILE = "config.toml"
PREFIX = "MOEDRAFT_"
SHOWN = 80  # how many letters of a name that is no setting an error message repeats

# where prompts would be shown
NO_TEXT = "Capture is off, so no prompt is shown or written; the setting `capture` switches it on."

# The kinds that `moedraft.kernels.divergence` knows; auto: chosen by how an answer was decoded.
DistillKind = Literal["auto", "fkl", "rkl", "jsd", "tvd"]
# the policies that `moedraft.storage.records.replay` knows
ReplayPolicy = Literal["fifo", "reservoir", "hardest", "stratified"]


class Settings(BaseSettings):
    """Everything a user may set. Each field can be set as `MOEDRAFT_<FIELD>` too."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    home: Path = Field(
        default_factory=lambda: user_data_path("moedraft"),
        description="the home: folder of everything that is remembered",
    )
    target: str = Field("mini", description="`mini`, `smollm2`, a local folder, a GGUF file or a hub id")
    draft: str = Field(
        "auto",
        description="named like the target, or an EAGLE-3 checkpoint; auto: what belongs to the target",
    )
    cache_dir: Path = Field(
        default_factory=lambda: user_cache_path("moedraft"), description="for GGUF files that were converted"
    )
    device: str = Field("auto", description="`auto`, `cpu`, `cuda`, `cuda:1` …")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number type; auto: on CUDA that of the checkpoint; on a CPU float32, but for a large "
        "target, where answers do not depend on the batch then, bfloat16, or where the CPU does not multiply "
        "that, float32 with weights in half precision",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads; 0: one for a small model, which more slow down, else PyTorch's number",
    )
    embedder: str = Field(
        "minilm", description="`minilm` (installed with moedraft) or a sentence-transformers folder or id"
    )
    cpu_fast_paths: bool = Field(
        True, description="run models on a CPU faster; False: plain PyTorch, with the same answers"
    )

    max_batch_size: int = Field(8, ge=1, le=1024, description="sequences decoded at once")
    max_model_len: int | None = Field(
        None, ge=2, description="tokens of prompt and answer; default: what the target allows"
    )
    prefill_chunk: int = Field(512, ge=1, description="prompt tokens read in one step, all prompts together")
    long_prompts: Literal["refuse", "truncate"] = Field(
        "refuse", description="too long a prompt; truncate keeps its end and the token that begins a text"
    )
    num_speculative_tokens: int = Field(
        4,
        ge=0,
        le=32,
        description="draft length of seeded sampling, whose answer must not depend on timing; the gate "
        "judges updates at this length too",
    )
    max_speculative_tokens: int = Field(8, ge=0, le=32, description="longest draft the budget may choose")
    adaptive_budget: bool = Field(
        True,
        description="choose draft lengths by measured costs; False: num_speculative_tokens, by the model "
        "unless draft_source is lookup",
    )
    draft_source: Literal["auto", "model", "lookup"] = Field(
        "auto",
        description="who guesses: the draft model or lookup in texts; auto: the better one for each row",
    )
    lookup_answers: int = Field(
        32768,
        ge=0,
        le=1 << 22,
        description="tokens of earlier answers of each domain, and of all together, that lookup searches "
        "besides the row's own text, for drafts without a fixed length; 0: none",
    )
    verification: Literal["chain", "block", "coupled"] = Field(
        "chain",
        description="the rule of sampled rows: chain judges token by token, block a whole draft, which keeps "
        "more of it; with coupled a seed fixes the answer whatever is drafted; answers follow the same "
        "distribution, but a seed gives another one by each rule",
    )

    adapter_scope: Literal["tail", "full"] = Field(
        "tail",
        description="what an expert of a draft model changes: its last layer and output layer, or all layers",
    )
    adapter_rank: int = Field(
        32,
        ge=1,
        le=1024,
        description="LoRA rank that an expert learns with; a version that was learned jointly is cut to the "
        "directions that matter",
    )
    shared_rank: int = Field(
        128,
        ge=1,
        le=1024,
        description="LoRA rank of the shared adapter, which is merged into the draft base's weights",
    )
    merged_cache_mb: int = Field(
        512, ge=0, description="memory for copies of weights with an expert added, of each of two kinds"
    )

    selector: Literal["classifier", "evidence", "fixed"] = Field(
        "evidence",
        description="who drafts: the router's choice; that, corrected by what each expert would have guessed "
        "(as classifier where an independent draft has adapter_scope full); or the shared draft for every "
        "request that names no expert",
    )
    router: Literal["embedding", "bert"] = Field(
        "embedding",
        description="what tells domains apart: n-grams and a sentence embedding, or a BERT that is "
        "fine-tuned at every registration, which takes minutes",
    )
    router_model: str = Field(
        "minilm",
        description="the BERT that is fine-tuned: `minilm` (installed with moedraft), a local folder or a "
        "hub id, with weights in safetensors",
    )
    unknown_threshold: float = Field(
        0.35, ge=0, le=1, description="a prompt fits no domain if the best one is less probable than this"
    )

    replay_capacity: int = Field(2000, ge=8, description="records kept per domain")
    replay_policy: ReplayPolicy = Field(
        "fifo",
        description="what a full buffer keeps: the newest, a sample of all, the least accepted, or as "
        "many of each client",
    )
    features: Literal["keep", "recompute"] = Field(
        "recompute",
        description="of a feature drafter, what updates read of the target: kept with the records as they "
        "are served, or computed again by the trainer",
    )
    kept_features_mb: int = Field(
        512, ge=1, description="disk for kept features; those of the oldest records go first"
    )
    topk: int = Field(
        16, ge=1, le=256, description="of the target's probabilities, how many are kept per token"
    )
    distill_kind: DistillKind = Field(
        "auto",
        description="what updates lower: forward or reverse KL, Jensen-Shannon or total variation; auto: "
        "forward KL, and with a feature drafter Jensen-Shannon on answers that were sampled",
    )
    gate: Literal["on", "off"] = Field(
        "on",
        description="publish only what is surely better on held-out records, by guesses or the probability "
        "of the right tokens; off: publish every update",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="of an update's optimiser; unset: 0.004 for a feature drafter, else 0.00015, and 0.001 "
        "where adapters learn in turns",
    )
    model_updates: Literal["joint", "turns"] = Field(
        "joint",
        description="how the adapters of an independent draft model learn: all in the same update, as those "
        "of a feature drafter always do, or in turns, the one that promises most next",
    )
    update_every: int = Field(
        16,
        ge=1,
        description="new records that make an update due: of all domains, sooner after traffic has moved and "
        "rarer while updates do not pay (`train_horizon`), or of one domain where adapters learn in turns",
    )
    update_steps: int = Field(16, ge=1, description="optimiser steps per update")
    resampled_answers: int = Field(
        2,
        ge=0,
        le=16,
        description="of a feature drafter: further answers, sampled, that the trainer's copy of the target "
        "gives to each prompt that is learned from, in spare time; 0: none",
    )
    update_tokens: int = Field(
        2048,
        ge=64,
        description="of a draft model: tokens that an update reads at a time, padding included; longer "
        "records are cut",
    )

    host: str = Field(
        "127.0.0.1", min_length=1, description="address of the server; a public one needs a key"
    )
    port: int = Field(8000, ge=0, le=65535, description="port of the server; 0: any that is free")
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="addresses of the dashboard behind a proxy, such as `https://moedraft.example`",
    )
    dashboard: bool = Field(True, description="serve the dashboard")
    capture: bool = Field(True, description="keep what requests leave for learning; a request may refuse")
    learning: bool = Field(True, description="run the trainer beside the server")
    max_waiting: int = Field(64, ge=0, description="requests in the queue; one more is answered with 429")
    max_connections: int = Field(
        512, ge=1, description="open connections; beyond them only probes are answered"
    )
    max_body_bytes: int = Field(2_000_000, ge=1024, description="longest body of a request")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longest prompt; default: what the context takes"
    )
    max_output_tokens: int = Field(4096, ge=1, description="longest answer")
    max_n: int = Field(16, ge=1, description="answers to one request, which are its prompts times n")
    max_stop_strings: int = Field(4, ge=0, description="stop strings of one request")
    header_timeout: float = Field(10, gt=0, description="seconds for the headers of a request to arrive")
    body_timeout: float = Field(30, gt=0, description="seconds for the body of a request to arrive")
    send_timeout: float = Field(30, gt=0, description="seconds until a client that reads nothing is cut off")
    request_timeout: float = Field(600, gt=0, description="seconds for a whole answer, waiting included")
    shutdown_timeout: float = Field(30, ge=0, description="seconds that running answers get at SIGTERM")
    stall_seconds: float = Field(30, gt=0, description="seconds that a step may take until `/ready` says no")
    trainer_timeout: float = Field(120, gt=0, description="seconds of silence until the trainer is killed")
    train_idle_share: float = Field(
        0.5, ge=0, le=1, description="train while the engine is idle for this share of the time; 0: always"
    )
    train_cpu_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of a core's time that learning takes while requests are served; 0: none, so that a "
        "server that is always busy does not learn",
    )
    train_horizon: int = Field(
        10_000,
        ge=1,
        le=10**9,
        description="an update pays if it saves as much time over so many later requests as it took; while "
        "updates do not pay, they wait for up to 32 times as many records, and fewer of them follow each "
        "other (with the gate, and not where adapters learn in turns)",
    )
    train_max_waiting: int = Field(0, ge=0, description="train while at most so many requests wait")

    @property
    def states_bytes(self) -> int:
        """The most bytes of features that are kept with the records; 0: none are."""
        return self.kept_features_mb * 2**20 if self.features == "keep" else 0

    @field_validator("*", mode="before")
    @classmethod
    def _check_given(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what would be taken for something else: `true` for 1, an empty home for this folder."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind is not bool:
            raise PydanticCustomError("truth", "Input should not be true or false")
        if kind is Path and not str(value).strip():
            raise PydanticCustomError("folder", "Input should name a folder, but is empty")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        home = init_settings().get("home") or env_settings().get("home") or user_data_path("moedraft")
        given = _read_file(Path(home).expanduser() / CONFIG_FILE)
        if Path(str(given.get("home", home))).expanduser() != Path(home).expanduser():
            raise ValueError("it lies in its home, so it cannot name another one; remove the line 'home'")
        return init_settings, env_settings, InitSettingsSource(settings_cls, given)


def load_settings(**overrides: Any) -> Settings:
    """Read all sources; an override of None counts as not given. Raises InvalidRequest with one sentence."""
    known = {KEY_VARIABLE, *(f"{PREFIX}{name}".upper() for name in Settings.model_fields)}
    if unknown := [one for one in os.environ if one.upper().startswith(PREFIX) and one.upper() not in known]:
        raise InvalidRequest(f"the environment's {unknown[0]} is no setting.")
    try:
        settings = Settings(**{k: v for k, v in overrides.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "settings"
        named = f"setting {field[:SHOWN]!r}{_place(field, overrides)}"
        raise InvalidRequest(f"{named}: {first['msg']}.") from error
    except SettingsError as error:
        variable = PREFIX + "".join(re.findall(r'field "(\w+)"', str(error))).upper()
        sentence = f'the environment\'s {variable} must be JSON, such as \'["a", "b"]\'.'
        raise InvalidRequest(sentence) from error
    except ValueError as error:
        raise InvalidRequest(f"{CONFIG_FILE} cannot be read: {error}.") from error
    except (RuntimeError, TypeError) as error:  # an unknown user's home (`~nobody/…`), or no path at all
        raise InvalidRequest(f"setting 'home': {str(error).rstrip('.')}.") from error
    try:
        folders = {name: getattr(settings, name).expanduser().resolve() for name in ("home", "cache_dir")}
    except (RuntimeError, ValueError) as error:  # an unknown user's, or a name that no folder can have
        raise InvalidRequest(f"setting 'home' or 'cache_dir': {str(error).rstrip('.')}.") from error
    return settings.model_copy(update=folders)


def _read_file(path: Path) -> dict[str, Any]:
    """The settings of a file; of one that is not there, none. Raises ValueError."""
    if not (path.exists() or path.is_symlink()):
        return {}
    if not path.is_file():
        raise ValueError("it is no file")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return {name.lower(): value for name, value in found.items()}
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


def _place(field: str, overrides: dict[str, Any]) -> str:
    """Where the setting was made, unless the caller made it."""
    name, at = field.split(".")[0], {one.upper(): one for one in os.environ}
    if overrides.get(name) is not None:
        return ""
    variable = f"{PREFIX}{name}".upper()
    return f" (the environment's {at[variable]})" if variable in at else f" (in {CONFIG_FILE})"


def check_home(home: Path) -> None:
    """Raise StorageError if the home is a file instead of a folder."""
    if home.exists() and not home.is_dir():
        raise StorageError(f"There is no moedraft home at {home}: that is a file, not a folder.")
