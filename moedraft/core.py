"""The central types and the errors. Knows no model, no file and no network; torch for annotations only."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from moedraft.speculation import SpeculationStats, Standing

if TYPE_CHECKING:
    import torch

    TopK = tuple[torch.Tensor, torch.Tensor]  # token ids int64 [n, k] and log-probabilities float32 [n, k]

SHARED = "shared"  # the arm without an expert: draft base + shared adapter
MAX_LOGPROBS = 20  # alternatives that may be asked for at each token
HOTTEST = 10_000  # the highest temperature: above it the answer is noise, and far above float32 ends
KEY_VARIABLE = "MOEDRAFT_API_KEY"  # of the environment: the key that the command line shows to a server
DOMAIN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
FinishReason = Literal["stop", "length", "abort", "error"]
# Published as better; published with the shared adapter, without a gain of its own; trained on, unpublished;
# thrown away; an expert put back to none; and a version taken back that did worse on later requests.
GateDecision = Literal["promote", "along", "keep", "discard", "reset", "withdraw"]


class MoedraftError(Exception):
    """Something a user can cause or mend; the message is one clear sentence that says what to do."""


class InvalidRequest(MoedraftError):
    """A prompt, parameter, name or file that cannot be accepted. Nothing was changed."""


class UnknownName(InvalidRequest):
    """No domain, expert or version of that name."""


class PromptTooLong(InvalidRequest):
    """More tokens than the context, or the server, takes."""


class UnsupportedModel(MoedraftError):
    """A model whose layout the engine would run wrongly, or a pair that does not fit together."""


class StorageError(MoedraftError):
    """The home cannot be read or written (locked, too new, full, damaged)."""


class CorruptAdapter(StorageError):
    """An adapter folder whose files do not match its manifest."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch filters off.

    `seed` fixes the answer whatever the batch around it; without one the engine draws a seed. `logprobs`
    asks for the target's log-probability of each token and of so many most likely ones (None: none).
    Raises InvalidRequest for values that mean nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature <= HOTTEST):
            wrong = _shown(self.temperature)
            raise InvalidRequest(f"temperature must be a finite number >= 0 and <= {HOTTEST}, not {wrong}.")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise InvalidRequest(f"top_p must lie in (0, 1], not {_shown(self.top_p)}.")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise InvalidRequest(f"min_p must lie in [0, 1], not {_shown(self.min_p)}.")
        if not (_is_int(self.top_k) and 0 <= self.top_k < 2**31):
            wrong = _shown(self.top_k)
            raise InvalidRequest(f"top_k must be >= 0 (0 switches it off) and < 2^31, not {wrong}.")
        if not (_is_int(self.max_tokens) and 1 <= self.max_tokens < 2**31):
            raise InvalidRequest(f"max_tokens must be >= 1 and < 2^31, not {_shown(self.max_tokens)}.")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            raise InvalidRequest(f"seed must lie in [0, 2^63), not {_shown(self.seed)}.")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, not {_shown(self.ignore_eos)}.")
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise InvalidRequest(f"logprobs must lie in [0, {MAX_LOGPROBS}], not {_shown(self.logprobs)}.")
        stops: Any = self.stop  # of whatever type a caller gave
        stops = (stops,) if isinstance(stops, str) else stops
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise InvalidRequest("stop must be a string or a list of strings.")
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty.")
        object.__setattr__(self, "stop", tuple(stops))


class TokenLogprobs(NamedTuple):
    """The target's own opinion of one emitted token, before temperature and filters. Natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability) of the most likely ones, best first


class CapturedTopK(Protocol):
    """The target's most likely tokens at some positions of one row; picked out when they are asked for."""

    def top(self) -> TopK: ...


@dataclass
class Sequence:
    """One request on its way through the engine: the only mutable thing that travels."""

    request_id: str
    token_ids: list[int]  # prompt, then what was generated
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # params.seed, or one drawn at admission
    prompt: str = ""
    expert: str = SHARED  # set by the selector at admission
    confidence: float | None = None  # the router's probability of its domain; None where it was not asked
    routed: str | None = None  # what the router chose; evidence may have chosen another expert since
    owner: str | None = None  # who drafts best by this answer and its prompt alone; None: as `expert`
    unlearned: bool = False  # that domain has no trained expert that could be compared with others
    prior: dict[str, float] = field(default_factory=dict)  # the router's probabilities, by domain
    standings: list[Standing] = field(default_factory=list)  # the first of them, as they followed each other
    uncompared: str = ""  # a sentence: why the drafts of the answer were not compared, though they could be
    weights: dict[str, float] = field(default_factory=dict)  # see `ReplayRecord`; set when it ends
    heard: dict[str, float] = field(default_factory=dict)  # the same
    pinned: bool = False  # the caller chose the expert
    source: str = ""  # who asked: the id of a key; "" where it is not known
    capture: bool = False  # may be learned from
    counted: bool = True  # its statistics are kept when it ends
    draft: bool = True  # False: plain decoding
    coupled: bool = False  # verified so that its seed fixes the answer whatever is drafted
    asked: bool = False  # the selector was asked for its expert, and has answered or will
    slot: int = -1  # row in both caches; -1 while waiting
    target_cached: int = 0  # leading tokens whose keys and values the target's cache holds
    draft_cached: int = 0  # the same for the draft's cache
    text: str = ""  # detokenised answer so far
    captured: list[CapturedTopK] = field(default_factory=list)  # of each round, for learning
    states: list[torch.Tensor] = field(default_factory=list)  # what a drafter read, kept for learning
    rejected: list[int] = field(default_factory=list)  # indices into the answer where a draft was refused
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # by answer token, where asked for
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    adapter_version: int = 0  # of the expert, at the last draft; 0 is the untrained expert
    finish_reason: FinishReason | None = None
    arrived_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def reproducible(self) -> bool:
        """Seeded sampling, not coupled: who drafts, and how far, must not depend on timing or the batch."""
        return self.params.seed is not None and self.params.temperature > 0 and not self.coupled

    @property
    def overruled(self) -> bool:
        """Whether its evidence has put another expert in the place of the one that the router chose."""
        return self.routed is not None and self.routed != (self.owner or self.expert)

    @property
    def domain(self) -> str:
        """Whose text this is: the expert's, or the router's where its domain has none, or none is better."""
        owner = self.owner or self.expert
        return self.routed or SHARED if owner == SHARED or self.unlearned else owner

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class ReplayRecord:
    """One answered request, with the target's distribution at each token, which need not be computed again.

    Position i of `topk_*` is the target's distribution from which `token_ids[num_prompt_tokens + i]`
    was taken, that is the distribution the draft's logits at `num_prompt_tokens + i − 1` must match.
    Tail mass is 1 − Σ exp(topk_logprobs).
    """

    domain: str  # whose text it is; its expert learns from it
    expert: str  # who drafted at the end: evidence may have put the shared draft in the domain's place
    adapter_version: int
    target_id: str
    token_ids: list[int]  # prompt and answer
    num_prompt_tokens: int
    topk_ids: list[list[int]]  # [answer, k]
    topk_logprobs: list[list[float]]  # [answer, k], natural log
    rejected: list[int]  # indices into the answer where a draft token was refused
    drafted: int
    accepted: int
    created_at: float = field(default_factory=time.time)
    source: str = ""  # whose request it was: the id of a key; "" where it is not known
    pinned: bool = False  # the client chose the domain
    # Whose text it may be, 0 to 1 by domain ("": some other one), by the router and what the drafts guessed.
    weights: dict[str, float] = field(default_factory=dict)  # empty: it is its domain's
    heard: dict[str, float] = field(default_factory=dict)  # by evidence alone; empty: not compared
    id: int = field(default=0, compare=False)  # in storage; 0 before it is there
    held_out: bool | None = field(default=None, compare=False)  # only measures updates; None: not decided yet
    temperature: float = 0.0  # at which the answer was sampled; 0: greedy, or not known

    @property
    def belief(self) -> float:
        """How sure it is that the text is its domain's, 0 to 1; 1 where `weights` is empty.

        What stands for the shared draft speaks for no other domain, so it does not count against this one.
        """
        others = sum(weight for arm, weight in self.weights.items() if arm not in (self.domain, SHARED))
        return max(0.0, 1.0 - others)


@dataclass(frozen=True)
class KeptStates:
    """What a feature drafter has read of the target at each position of a text, all but the last.

    These are the target's hidden states, joined by the drafter's frozen `fc`: bfloat16 [tokens − 1, H].
    """

    base_hash: str  # of the draft base whose `fc` it was
    states: torch.Tensor


@dataclass(frozen=True)
class Domain:
    """A registered domain. `examples` are what the router was fitted on."""

    name: str
    description: str
    examples: tuple[str, ...]
    created_at: float


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable set of LoRA weights. Version 0 does not exist on disk: it is the zero adapter."""

    domain: str  # a domain, or SHARED
    version: int
    parent: int
    path: str  # folder, relative to the home
    base_hash: str  # of the draft base it belongs to
    acceptance: float | None  # on held-out records when it was made
    created_at: float
    state: Literal["live", "retired", "rolled_back"]
    stood_on: int | None = None  # an expert's: the version of the shared adapter that it was trained on
    last_record: int = 0  # the id of the newest replay record when it was published; set by the registry


@dataclass(frozen=True)
class RequestStats:
    """What is kept of a finished request; no text."""

    request_id: str
    expert: str
    adapter_version: int
    lang: str
    num_prompt_tokens: int
    num_tokens: int
    speculation: SpeculationStats
    seconds: float
    finish_reason: str
    created_at: float = field(default_factory=time.time)
    confidence: float | None = None  # the router's
    time_to_first_token: float | None = None  # seconds since arrival
    overruled: bool = False  # evidence put another expert in the place of the router's


@dataclass(frozen=True)
class UpdateRecord:
    """One finished update of an adapter. The gate's figures are None where no gate decided."""

    expert: str
    version: int  # that serves after it: the new one, or still the one before where it was not published
    records: int
    steps: int
    loss: float  # mean over the update, nats per token
    seconds: float
    acceptance_before: float | None  # of first guesses on held-out records
    acceptance_after: float | None
    created_at: float = field(default_factory=time.time)
    decision: GateDecision | None = None
    gain: float | None = None  # in expected tokens per target step, on held-out records
    gain_low: float | None = None  # it lies between these with a probability of 80 %
    gain_high: float | None = None
    gate_records: int | None = None  # held-out records that the gate measured it by
    parent: int | None = None  # the version that the update began with
    stood_on: int | None = None  # an expert's: the version of the shared adapter that it was trained on
    static_gain: float | None = None  # as `gain`, over the draft base without any adapter
    witness: float | None = None  # probability that the right tokens became more probable; None: not judged
    reason: str | None = None  # why the gate decided so, where the figures alone do not say it


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one request, whole or so far."""

    request_id: str
    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    expert: str
    adapter_version: int
    speculation: SpeculationStats  # a copy of the sequence's
    num_rejections: int  # verifications that refused a token of the draft model
    seconds: float  # since arrival
    delta: str = ""  # text added since the previous output of this request
    num_prompt_tokens: int = 0
    confidence: float | None = None  # the router's probability of the domain; None: pinned or not routed
    time_to_first_token: float | None = None  # seconds since arrival
    logprobs: list[TokenLogprobs] | None = None  # by token of `token_ids`, where asked for
    overruled: bool = False  # evidence put another expert in the place of the router's
    standings: tuple[Standing, ...] = ()  # of a whole answer whose drafts were compared
    uncompared: str = ""  # the sequence's

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of the answer per target forward: 1 is plain decoding; None before the first."""
        steps = self.speculation.num_steps
        return len(self.token_ids) / steps if steps else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_int(value)


def _shown(value: object) -> str:
    try:
        return repr(value)[:40]
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number this long"
