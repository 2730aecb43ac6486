"""What the trainer process and the server say to each other: a JSON object on a line, checked on arrival."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from moedraft.core import AdapterVersion, UpdateRecord
from moedraft.learning_state import LearningKind, LearningState
from moedraft.storage.versions.candidate import Candidate, CandidateSummary
from moedraft.storage.versions.version_rows import Also

TRAINING = "training"  # folder of the home in which finished candidates are handed over

Expert = Annotated[str, Field(min_length=1, max_length=64)]
Rate = Annotated[float, Field(ge=0, le=1)]
LONGEST = 1000  # characters of a sentence
Sentence = Annotated[str, Field(max_length=LONGEST)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


# -- from the trainer ----------------------------------------------------------------------------


class StateReport(Message):
    """What the trainer does now (a LearningState); it also serves as a heartbeat."""

    type: Literal["state"] = "state"
    kind: LearningKind
    reason: Sentence = ""
    expert: Expert | None = None
    step: int = Field(default=0, ge=0)
    steps: int = Field(default=0, ge=0)
    loss: float | None = None
    error: Sentence | None = None  # what went wrong last

    @classmethod
    def of(cls, state: LearningState, error: str | None = None) -> Self:
        short = replace(state, reason=state.reason[:LONGEST])
        return cls(**asdict(short), error=None if error is None else error[:LONGEST])

    def state(self) -> LearningState:
        return LearningState(**self.model_dump(exclude={"type", "error"}))


class StagedCandidate(Message):
    """A candidate whose files stand in `training/<folder>`."""

    folder: str = Field(pattern="^[0-9a-f]{32}$")
    expert: Expert
    parent: int = Field(ge=0)
    base_hash: str = Field(max_length=128)
    rank: int = Field(ge=1)
    modules: tuple[str, ...]
    records: int = Field(ge=0)
    held_out: int = Field(ge=0)
    steps: int = Field(ge=0)
    loss: float
    acceptance_before: Rate | None
    acceptance_after: Rate | None

    @classmethod
    def of(cls, candidate: Candidate, folder: str) -> Self:
        return cls(folder=folder, **asdict(candidate.summary()))

    def summary(self) -> CandidateSummary:
        return CandidateSummary(**self.model_dump(include={one.name for one in fields(CandidateSummary)}))


class Publish(Message):
    """As `Outlet.publish`: all of it in one transaction; answered by Published or Refused."""

    type: Literal["publish"] = "publish"
    parts: tuple[StagedCandidate, ...]
    untrained: dict[Expert, Annotated[int, Field(ge=1)]] = {}  # this and the others: see `Also`
    unadapted: tuple[Expert, ...] | None = None
    purges: Annotated[int, Field(ge=0)] | None = None

    def also(self) -> Also:
        return Also(self.untrained, self.unadapted, self.purges)

    @property
    def expert(self) -> str:
        """The names of the adapters that are concerned, for a message to people."""
        return ", ".join([*(one.expert for one in self.parts), *self.untrained])


class Withdraw(Message):
    """As `Outlet.withdraw`; answered by Withdrawn or Refused."""

    type: Literal["withdraw"] = "withdraw"
    expert: Expert
    version: int = Field(ge=1)


class StandAside(Message):
    """As `Outlet.stand_aside`; answered by Noted or Refused."""

    type: Literal["stand aside"] = "stand aside"
    names: tuple[Expert, ...]

    @property
    def expert(self) -> str:
        """The names of the domains that are concerned, for a message to people."""
        return ", ".join(self.names) or "nobody"


class Learned(Message):
    """As `Outlet.learned`; answered by Noted or Refused."""

    type: Literal["learned"] = "learned"
    expert: Expert
    last_id: int = Field(ge=0, lt=2**63)
    update: UpdateRecord | None


# -- from the server -----------------------------------------------------------------------------


class Begin(Message):
    """The first message: all settings, whether learning is paused, and how often trainers have died."""

    type: Literal["begin"] = "begin"
    settings: dict[str, Any]
    paused: bool = False
    failures: dict[str, int] = {}  # consecutive updates in which a trainer has died, by expert


class Pause(Message):
    type: Literal["pause"] = "pause"


class Resume(Message):
    type: Literal["resume"] = "resume"


class Published(Message):
    """The answer to Publish: the new versions, in the order of its parts."""

    type: Literal["published"] = "published"
    versions: tuple[AdapterVersion, ...]


class Withdrawn(Message):
    """The answer to Withdraw: the version that is live now, 0 for an untrained adapter."""

    type: Literal["withdrawn"] = "withdrawn"
    version: int


class Noted(Message):
    type: Literal["noted"] = "noted"


class Refused(Message):
    type: Literal["refused"] = "refused"
    reason: str


Asked = Publish | Withdraw | StandAside | Learned
FromTrainer = StateReport | Asked
FromServer = Begin | Pause | Resume | Published | Withdrawn | Noted | Refused
from_trainer: TypeAdapter[FromTrainer] = TypeAdapter(Annotated[FromTrainer, Field(discriminator="type")])
from_server: TypeAdapter[FromServer] = TypeAdapter(Annotated[FromServer, Field(discriminator="type")])
