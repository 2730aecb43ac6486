"""The figures of `/metrics`. Requests are counted when they end; `gauges` are read for each scrape.

Requests that were aborted or failed are counted too, unlike in the store and the dashboard. Labels are the
model's name, experts and writing systems; nothing is taken from a prompt. Drafts are counted for whoever made
them, all else for the expert to which the request was routed.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from moedraft.core import SHARED, Sequence
from moedraft.serve.metrics.gauges import Gauges
from moedraft.serve.supervisor.follower import Trainer
from moedraft.serve.worker.worker import Worker
from moedraft.system.recorder import script_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EXPERT = ("model_name", "expert", "lang")
PLACE = (*EXPERT, "position")
MODEL = ("model_name",)
LOOKUPS = {  # counts of `SpeculationStats`
    "num_lookup_tokens": "Draft tokens looked up in the own text or in earlier answers",
    "num_accepted_lookup_tokens": "Draft tokens looked up anywhere and accepted",
    "num_earlier_tokens": "Draft tokens looked up in earlier answers",
    "num_accepted_earlier_tokens": "Draft tokens looked up in earlier answers and accepted",
}
LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)  # seconds
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class PrometheusMetrics:
    """The server's counters and histograms, in a registry of its own so that several servers can coexist."""

    def __init__(self, model_name: str, worker: Worker, trainer: Trainer) -> None:
        # Otherwise each counter had a second series with its creation time, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        spec = "moedraft_spec_decode_num"
        self._drafts = self._counter(f"{spec}_drafts", "Verifications of this expert's drafts", EXPERT)
        self._drafted = self._counter(f"{spec}_draft_tokens", "Draft tokens by this expert", EXPERT)
        self._accepted = self._counter(f"{spec}_accepted_tokens", "Of those, accepted", EXPERT)
        self._lookups = {
            name: self._counter(f"moedraft_spec_decode_{name}", of, EXPERT) for name, of in LOOKUPS.items()
        }
        self._accepted_at = self._counter(
            f"{spec}_accepted_tokens_per_pos", "Draft tokens accepted, by position; 0 is the first", PLACE
        )
        self._guesses = self._counter("moedraft_first_guesses", "First guesses that were looked at", EXPERT)
        self._right = self._counter("moedraft_right_first_guesses", "Of those, guessed right", EXPERT)
        self._steps = self._counter(
            "moedraft_target_steps",
            "Forwards of the target for answers, after their prompts were read",
            EXPERT,
        )
        self._prompt = self._counter("moedraft_prompt_tokens", "Prompt tokens read", EXPERT)
        self._generated = self._counter("moedraft_generation_tokens", "Tokens generated", EXPERT)
        self._finished = self._counter(
            "moedraft_request_success", "Requests that ended", ("model_name", "finished_reason")
        )
        self._routed = self._counter("moedraft_routed_requests", "Requests that the router decided", MODEL)
        self._overruled = self._counter(
            "moedraft_overruled_requests",
            "Of these, those that evidence gave to another expert, or to the shared draft",
            MODEL,
        )
        self._http = self._counter("moedraft_http_responses", "Responses", ("kind", "status"))
        self._first = self._histogram("time_to_first_token", "Arrival to the first token", LATENCIES)
        self._gap = self._histogram("inter_token_latency", "Mean gap between an answer's tokens", GAPS)
        self._whole = self._histogram("e2e_request_latency", "Arrival to the last token", LATENCIES)
        self.registry.register(Gauges(model_name, worker, trainer))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def finished(self, sequence: Sequence) -> None:
        """Count a request that has ended. The engine calls this from its thread."""
        labels = (self._model_name, sequence.domain, script_of(sequence.prompt))
        if sequence.routed is not None:
            self._routed.labels(self._model_name).inc()
            self._overruled.labels(self._model_name).inc(sequence.overruled)
        self._finished.labels(self._model_name, sequence.finish_reason or "").inc()
        self._prompt.labels(*labels).inc(sequence.num_prompt_tokens)
        self._generated.labels(*labels).inc(sequence.num_generated)
        stats = sequence.speculation
        self._steps.labels(*labels).inc(stats.num_steps)
        for name, counter in self._lookups.items():
            counter.labels(*labels).inc(getattr(stats, name))
        self._count_drafts(labels, stats.expert_drafted_at, stats.expert_accepted_at)
        shared = (self._model_name, SHARED, labels[-1])
        self._count_drafts(shared, stats.shared_drafted_at, stats.shared_accepted_at)
        if stats.first_guesses:  # all of one answer are of one draft
            guessed_by = shared if stats.shared_first_guesses else labels
            self._guesses.labels(*guessed_by).inc(stats.first_guesses)
            self._right.labels(*guessed_by).inc(stats.right_first_guesses)
        self._time(sequence)

    def _count_drafts(self, labels: tuple[str, ...], drafted: list[int], accepted: list[int]) -> None:
        """Count what one expert drafted: tokens drafted and accepted, by position."""
        if not any(drafted):
            return
        self._drafts.labels(*labels).inc(sum(drafted[:1]))
        self._drafted.labels(*labels).inc(sum(drafted))
        self._accepted.labels(*labels).inc(sum(accepted))
        for position, count in enumerate(accepted):
            self._accepted_at.labels(*labels, position).inc(count)

    def answered(self, kind: str, status: int) -> None:
        """Count an HTTP response. `kind` is one of a few labels, never a path that a client chose."""
        self._http.labels(kind, status).inc()

    def _time(self, sequence: Sequence) -> None:
        end, first = sequence.finished_at or time.monotonic(), sequence.first_token_at
        if first is None or sequence.finish_reason not in ("stop", "length"):
            return
        self._first.labels(self._model_name).observe(first - sequence.arrived_at)
        self._whole.labels(self._model_name).observe(end - sequence.arrived_at)
        if sequence.num_generated > 1:
            self._gap.labels(self._model_name).observe((end - first) / (sequence.num_generated - 1))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, f"{text}.", labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"moedraft_{name}_seconds"
        return Histogram(name, f"{text}, seconds.", ("model_name",), buckets=buckets, registry=self.registry)
