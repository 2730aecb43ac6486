"""The names that clients give to models: the target's, and `target:domain` for one expert of it."""

from __future__ import annotations

from pathlib import Path

from moedraft.config import Settings
from moedraft.core import SHARED
from moedraft.serve.http.errors import ApiError, shown


def target_name(settings: Settings) -> str:
    """The target's name in the API; for a local folder or file only its last part, not its path."""
    place = Path(settings.target).expanduser()
    if place.is_file():
        return place.stem
    return place.resolve().name if place.is_dir() else settings.target


def expert_of(model: str, target: str, domains: tuple[str, ...]) -> str | None:
    """The expert that a model name such as `target:domain` asks for; None: the router chooses.

    Raises ApiError 404 for an unknown name.
    """
    if model == target:
        return None
    name, _, expert = model.rpartition(":")
    if name != target or expert not in (*domains, SHARED):
        sentence = f"There is no model '{shown(model)}'; /v1/models lists those there are."
        raise ApiError(404, sentence, param="model", code="model_not_found")
    return expert
