"""Settings: defaults < file in the home < environment (MOEDRAFT_…) < arguments. Unknown keys are errors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path, user_data_path
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from moedraft.core import KEY_VARIABLE, InvalidRequest, StorageError

CONFIG_FILE = "config.toml"
PREFIX = "MOEDRAFT_"


class Settings(BaseSettings):
    """Everything a user may set. Each field can be set as `MOEDRAFT_<FIELD>` too."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    home: Path = Field(default_factory=lambda: user_data_path("moedraft"), description="state folder")
    target: str = Field("mini", description="`mini`, `smollm2`, a local folder, a GGUF file or a hub id")
    draft: str = Field("mini", description="named like the target")
    cache_dir: Path = Field(
        default_factory=lambda: user_cache_path("moedraft"), description="for GGUF files that were converted"
    )
    device: str = Field("auto", description="`auto`, `cpu`, `cuda`, `cuda:1` …")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: the checkpoint's own on CUDA; on a CPU float32, or bfloat16 for a large target "
        "where the CPU multiplies it and answers do not depend on the batch",
    )
    threads: int = Field(
        0, ge=0, description="CPU threads; 0: one for small models, which lose by sharing, else PyTorch's"
    )
    embedder: str = Field("minilm", description="`minilm` (carried) or a sentence-transformers folder or id")

    max_batch_size: int = Field(8, ge=1, le=1024, description="sequences decoded at once")
    max_model_len: int | None = Field(None, ge=2, description="tokens; default: what the target allows")
    prefill_chunk: int = Field(512, ge=1, description="prompt tokens read in one step, of all rows")
    long_prompts: Literal["refuse", "truncate"] = Field(
        "refuse", description="truncate keeps the end of the prompt (and a mark of its beginning)"
    )
    num_speculative_tokens: int = Field(
        4, ge=0, le=32, description="draft length of seeded sampling, which must not depend on timing"
    )
    max_speculative_tokens: int = Field(8, ge=0, le=32, description="longest draft the budget may choose")
    adaptive_budget: bool = Field(
        True, description="False: always num_speculative_tokens, by the draft model"
    )
    draft_source: Literal["auto", "model", "lookup"] = Field(
        "auto",
        description="guesses by the draft model, or looked up in the text itself; auto: by row, the better",
    )

    adapter_scope: Literal["tail", "full"] = Field("tail", description="what an expert may touch")
    adapter_rank: int = Field(64, ge=1, le=1024)
    shared_rank: int = Field(64, ge=1, le=1024)
    merged_cache_mb: int = Field(512, ge=0, description="memory for experts merged into weights")

    unknown_threshold: float = Field(0.35, ge=0, le=1, description="below it a prompt fits no domain")

    replay_capacity: int = Field(2000, ge=8, description="records kept per domain")
    topk: int = Field(16, ge=1, le=256, description="target's top-k kept per position")
    learning_rate: float = Field(1e-3, gt=0)
    update_every: int = Field(16, ge=1, description="new records of a domain that make an update due")
    update_steps: int = Field(16, ge=1, description="optimiser steps per update")
    update_tokens: int = Field(2048, ge=64, description="tokens per optimiser step, padding included")

    host: str = Field(
        "127.0.0.1", min_length=1, description="address of the server; a public one needs a key"
    )
    port: int = Field(8000, ge=0, le=65535, description="0: any that is free")
    allowed_origins: tuple[str, ...] = Field(
        (), description="other origins of the dashboard, such as `https://moedraft.example`, behind a proxy"
    )
    dashboard: bool = Field(True, description="serve the dashboard")
    capture: bool = Field(True, description="keep served requests to learn from; a request may say no")
    learning: bool = Field(True, description="run the trainer beside the server")
    max_waiting: int = Field(64, ge=0, description="requests in the queue; one more is answered with 429")
    max_connections: int = Field(512, ge=1, description="open connections; one more is answered with 429")
    max_body_bytes: int = Field(2_000_000, ge=1024, description="of a request")
    max_prompt_tokens: int | None = Field(None, ge=1, description="default: what the context takes")
    max_output_tokens: int = Field(4096, ge=1, description="of one answer")
    max_n: int = Field(16, ge=1, description="answers to one request: its prompts times n")
    max_stop_strings: int = Field(4, ge=0, description="of one request")
    header_timeout: float = Field(10, gt=0, description="seconds for the headers of a request to arrive")
    body_timeout: float = Field(30, gt=0, description="seconds for the body of a request to arrive")
    send_timeout: float = Field(30, gt=0, description="seconds that a reader may take no byte of a stream")
    request_timeout: float = Field(600, gt=0, description="seconds for a whole answer, waiting included")
    shutdown_timeout: float = Field(30, ge=0, description="seconds that running answers get at SIGTERM")
    stall_seconds: float = Field(30, gt=0, description="seconds without a step until `/ready` says no")
    trainer_timeout: float = Field(
        120, gt=0, description="seconds of silence after which the trainer is killed"
    )
    train_idle_share: float = Field(
        0.5, ge=0, le=1, description="share of idle time from which there is room to train; 0: always"
    )
    train_max_waiting: int = Field(0, ge=0, description="requests in the queue up to which there is room")

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
        file = TomlConfigSettingsSource(settings_cls, Path(home).expanduser() / CONFIG_FILE)
        return init_settings, env_settings, file


def load_settings(**overrides: Any) -> Settings:
    """Settings from all sources; `None` overrides are left out. Raises InvalidRequest, one sentence."""
    known = {KEY_VARIABLE, *(f"{PREFIX}{name}".upper() for name in Settings.model_fields)}
    if unknown := [
        name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known
    ]:
        raise InvalidRequest(f"the environment's {unknown[0]} is no setting.")
    try:
        settings = Settings(**{k: v for k, v in overrides.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "settings"
        raise InvalidRequest(f"setting {field!r}: {first['msg']}.") from error
    except SettingsError as error:
        variable = PREFIX + "".join(re.findall(r'field "(\w+)"', str(error))).upper()
        raise InvalidRequest(
            f'the environment\'s {variable} must be JSON, such as \'["a", "b"]\'.'
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"{CONFIG_FILE} cannot be read: {error}.") from error
    except (RuntimeError, TypeError) as error:  # `~nobody/…`, or no path at all
        raise InvalidRequest(f"setting 'home': {str(error).rstrip('.')}.") from error
    return settings.model_copy(
        update={name: getattr(settings, name).expanduser().resolve() for name in ("home", "cache_dir")}
    )


def check_home(home: Path) -> None:
    """StorageError where a file stands in the home's place."""
    if home.exists() and not home.is_dir():
        raise StorageError(f"There is no moedraft home at {home}: that is a file, not a folder.")
