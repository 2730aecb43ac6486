"""Which target a home's records are of: only with that one do their token ids mean anything."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from moedraft.core import InvalidRequest
from moedraft.storage.registry import Registry
from moedraft.storage.store import TARGET_ID

VOCABULARY = "vocabulary"  # meta key: hash of the tokens that the ids of that target stand for
OTHER = "The home's newest records were made by another target; name that one with --target."


def note_target(registry: Registry, target_id: str, tokenizer: Any) -> None:
    """Remember the target whose records are learned from, from now on. Raises StorageError."""
    registry.set_meta(TARGET_ID, target_id)
    registry.set_meta(VOCABULARY, hash_of_tokens(tokenizer) or None)


def check_target(registry: Registry, target_id: str) -> None:
    """Raises InvalidRequest where the target that was noted last is another one."""
    if registry.get_meta(TARGET_ID) not in (None, target_id):
        raise InvalidRequest(OTHER)


def check_tokenizer(registry: Registry, tokenizer: Any) -> None:
    """As `check_target`, where no target is loaded: by a tokenizer, the target's or a draft model's."""
    ours = hash_of_tokens(tokenizer)
    if ours and registry.get_meta(VOCABULARY) not in (None, ours):
        raise InvalidRequest(OTHER)


def hash_of_tokens(tokenizer: Any) -> str:
    """Of the vocabulary with its ids; "" for a tokenizer that does not tell it."""
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]
