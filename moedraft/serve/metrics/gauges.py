"""Figures that are read at the moment of a scrape, from the worker, the supervisor and the home."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moedraft.core import SHARED, GateDecision, StorageError, UpdateRecord
from moedraft.serve.supervisor.follower import Trainer
from moedraft.serve.worker.worker import Worker
from moedraft.storage.updates import Decided


class Gauges(Collector):
    """Figures that are read from the worker, the supervisor and the home at the moment of a scrape."""

    def __init__(self, model_name: str, worker: Worker, trainer: Trainer) -> None:
        self._model_name, self._worker, self._trainer = model_name, worker, trainer
        self._decided = Decided(worker.system.store.updates)

    def describe(self) -> list[Metric]:
        return []  # the worker may not have started when the collector is registered

    def collect(self) -> Iterator[Metric]:
        now = self._worker.snapshot()
        yield self._gauge("num_requests_running", "Requests in a slot", now.running)
        yield self._gauge("num_requests_waiting", "Requests without a slot yet", now.waiting)
        yield self._gauge("engine_steps", "Steps since the start", now.steps)
        yield self._gauge("engine_idle_share", "Share of the last seconds without work", now.idle_share)
        yield self._gauge("tokens_per_second", "Over the last seconds", now.tokens_per_second)
        yield self._gauge("engine_failed", "1 where the engine cannot serve", float(now.failed is not None))
        yield self._gauge("draining", "1 while the server shuts down", float(now.draining))
        if now.speedup is not None:
            yield self._gauge("speedup", "Against plain decoding, measured by plain steps", now.speedup)
        state = self._trainer.state()
        yield self._gauge("trainer_running", "1 while a trainer lives", float(state.pid is not None))
        if state.own:
            yield self._gauge("trainer_restarts", "Since the start of the server", state.restarts)
            yield self._gauge("trainer_updates", "Since the start of the server", state.updates)
        with suppress(StorageError):  # whoever learns for this home, another process perhaps
            yield self._decisions()
            yield self._gains()

    def _decisions(self) -> Metric:
        counts = self._decided.counts()
        text = "What the gate decided on candidates since the start of the server"
        family = CounterMetricFamily("moedraft_gate_decisions", f"{text}.", labels=["model_name", "decision"])
        for decision in get_args(GateDecision):
            family.add_metric([self._model_name, decision], counts.get(decision, 0))
        return family

    def _gains(self) -> Metric:
        """Of each expert's newest candidate with figures; those that were not judged lately have none."""
        text = "Tokens per step that the newest judged candidate gains on held-out records, and its bounds"
        labels = ["model_name", "expert", "bound"]
        family = GaugeMetricFamily("moedraft_gate_gain_tokens", f"{text}.", labels=labels)
        for name, one in self._judged().items():
            for bound, value in (("estimate", one.gain), ("low", one.gain_low), ("high", one.gain_high)):
                if value is not None:
                    family.add_metric([self._model_name, name, bound], value)
        return family

    def _judged(self) -> dict[str, UpdateRecord]:
        store = self._worker.system.store
        known = {SHARED, *(name for name, _ in store.registry.domain_names())}
        judged = (one for one in store.updates.recent() if one.gain is not None)
        return {one.expert: one for one in judged if one.decision != "withdraw" and one.expert in known}

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"moedraft_{name}", f"{text}.", labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
