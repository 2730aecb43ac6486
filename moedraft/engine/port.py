"""What the engine and those around it agree on: its methods, where adapters come from, where answers go.

Also what a round needs of those who guess, verify, learn and commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moedraft.core import RequestOutput, SamplingParams, Sequence
from moedraft.evidence import Evidence, Proposal, Rows

if TYPE_CHECKING:
    from moedraft.routing.router import Route

OnOutput = Callable[[RequestOutput], None]
Sink = Callable[[Sequence], None]  # gets every finished request
Commit = Callable[[Evidence, int], None]  # takes one row's verified tokens into its sequence
# Draft and target logits → each row's tokens, how many guesses it accepted, whether its logits were broken.
Verify = Callable[[Rows, Proposal, torch.Tensor], tuple[list[list[int]], list[int], list[bool]]]


class Proposer(Protocol):
    """Guesses tokens for all rows of a round: `drafting.chooser.Chooser`, which combines several drafters."""

    def propose(self, rows: Rows) -> Proposal: ...


class Learner(Protocol):
    """Learns from what a verification showed: the chooser, for its drafters and its budget, and others."""

    def observe(self, evidence: Evidence) -> None: ...


class AdapterSource(Protocol):
    """Brings what changes in the home into the engine: adapter versions, and what else drafting goes by."""

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        """Called between two steps; resets `draft_cached` of sequences whose draft cache became stale."""


class Sources:
    """Several of these, asked one after another; none for an engine without a home."""

    def __init__(self, *sources: AdapterSource) -> None:
        self.sources = sources

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        for source in self.sources:
            source.refresh(running, now=now)


class ServingEngine(Protocol):
    """What a server needs of an engine. `engine.Engine` has it; another engine with it can stand below.

    One thread calls all of it. `add` and the meaning of its arguments are described at `engine.Engine`.
    """

    tokenizer: Any
    max_model_len: int  # tokens of prompt and answer

    @property
    def vocab_size(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def request_ids(self) -> Set[str]: ...
    @property
    def figures(self) -> EngineFigures: ...

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Have `sink` called with every request that finishes; call what is returned to end that."""

    def work_beside(self) -> None:
        """Called once, before the first request: other threads may prepare what is kept for learning."""

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        expert: str | None = None,
        draft: bool = True,
        capture: bool = False,
        topic: str | None = None,
        ids: list[int] | None = None,
        routed: Route | None = None,
        source: str = "",
        on_output: OnOutput | None = None,
    ) -> str:
        """Queue a prompt; `on_output` gets its outputs. Raises InvalidRequest."""

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once. Never raises."""

    def step(self) -> list[RequestOutput]:
        """Do a piece of work for the requests there are."""

    def recover(self) -> None:
        """Called after a step that raised: end the requests that it concerned, so that others can go on."""

    def refresh(self, *, now: bool = False) -> None:
        """Look for new adapter versions. now: return when the newest stored ones are loaded."""

    def close(self) -> None:
        """Abort what runs and let go of the home."""


@dataclass(frozen=True)
class EngineFigures:
    """How busy the engine is at one moment, and what speculation brings."""

    slots: int
    running: int  # requests in a slot
    waiting: int
    speedup: float | None  # of the last rounds over plain decoding; None until both kinds were timed
