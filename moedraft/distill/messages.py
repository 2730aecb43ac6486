"""What the trainer process and the server say to each other: a JSON object on a line, checked on arrival."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from moedraft.core import AdapterVersion, UpdateRecord

TRAINING = "training"  # folder of the home with updates that are handed over

Expert = Annotated[str, Field(min_length=1, max_length=64)]
LONGEST = 1000  # characters of a sentence
Sentence = Annotated[str, Field(max_length=LONGEST)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


# -- from the trainer ----------------------------------------------------------------------------


class State(Message):
    """What the trainer does now; also its sign of life."""

    type: Literal["state"] = "state"
    status: Sentence
    waits: Sentence | None = None  # why it does not learn just now
    expert: Expert | None = None  # whose update is running
    step: int = Field(default=0, ge=0)  # optimiser steps done, of `steps`
    steps: int = Field(default=0, ge=0)
    loss: float | None = None  # mean over the update so far, nats per token
    error: Sentence | None = None  # what went wrong last


class Publish(Message):
    """A finished update stands in `training/<folder>`; answered by Published or Refused."""

    type: Literal["publish"] = "publish"
    folder: str = Field(pattern="^[0-9a-f]{32}$")
    expert: Expert
    parent: int = Field(ge=0)
    base_hash: str = Field(max_length=128)
    acceptance: float | None = Field(ge=0, le=1)
    rank: int = Field(ge=1)
    modules: list[str]


class Learned(Message):
    """As `Outlet.learned`; answered by Noted or Refused."""

    type: Literal["learned"] = "learned"
    expert: Expert
    last_id: int = Field(ge=0, lt=2**63)
    update: UpdateRecord | None


# -- from the server -----------------------------------------------------------------------------


class Begin(Message):
    """The first line: all settings, whether learning is paused, and whose updates ended the ones before."""

    type: Literal["begin"] = "begin"
    settings: dict[str, Any]
    paused: bool = False
    failures: dict[str, int] = {}  # by expert, in a row


class Pause(Message):
    type: Literal["pause"] = "pause"


class Resume(Message):
    type: Literal["resume"] = "resume"


class Published(Message):
    type: Literal["published"] = "published"
    version: AdapterVersion


class Noted(Message):
    type: Literal["noted"] = "noted"


class Refused(Message):
    type: Literal["refused"] = "refused"
    reason: str


FromTrainer = State | Publish | Learned
FromServer = Begin | Pause | Resume | Published | Noted | Refused
from_trainer: TypeAdapter[FromTrainer] = TypeAdapter(Annotated[FromTrainer, Field(discriminator="type")])
from_server: TypeAdapter[FromServer] = TypeAdapter(Annotated[FromServer, Field(discriminator="type")])
