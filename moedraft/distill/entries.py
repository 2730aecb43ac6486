"""The entries of a home's log of updates: what an update of one adapter came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moedraft.core import SHARED, AdapterVersion, UpdateRecord
from moedraft.distill.judging.gate import Verdict
from moedraft.distill.judging.watch import Withdrawal
from moedraft.storage.registry import Registry
from moedraft.storage.versions.candidate import Candidate


def update_entry(
    registry: Registry,
    made: Candidate,
    version: AdapterVersion | None,
    verdict: Verdict | None,
    seconds: float,
) -> UpdateRecord:
    """Of an update: the version that it led to, if any, and the gate's figures where there was a gate."""
    shared = registry.lineage(SHARED, made.base_hash) if made.expert != SHARED else []
    record = UpdateRecord(
        expert=made.expert,
        version=_serves(made, version, verdict),
        records=made.records,
        steps=made.steps,
        loss=made.loss,
        seconds=seconds,
        acceptance_before=made.acceptance_before,
        acceptance_after=made.acceptance_after,
        parent=made.parent,
        stood_on=None if made.expert == SHARED else shared[0].version if shared else 0,
    )
    if verdict is None:
        return record
    return replace(
        record,
        decision=verdict.decision,
        gain=verdict.gain,
        gain_low=verdict.low,
        gain_high=verdict.high,
        gate_records=verdict.records,
        static_gain=verdict.static,
        witness=verdict.witness,
        reason=verdict.reason,
    )


def live_numbers(registry: Registry, names: Iterable[str]) -> dict[str, int]:
    """The version of each that is live; 0: none."""
    live = {name: registry.live(name) for name in names}
    return {name: one.version if one else 0 for name, one in live.items()}


def reset_entry(
    registry: Registry, name: str, made: Candidate, verdict: Verdict | None, served: int
) -> UpdateRecord:
    """Of an expert that an update of other adapters, which made `made`, has reset to untrained, or left to
    the draft base. served: the version that was live before; 0: none.
    """
    none = replace(made, expert=name, parent=served, records=0, steps=0)
    none = replace(none, acceptance_before=None, acceptance_after=None)
    return update_entry(registry, none, None, verdict, 0.0)


def withdrawal_entry(found: Withdrawal, now: int) -> UpdateRecord:
    """Of a version that was taken back; `now` is the one that serves instead."""
    verdict = found.verdict
    return UpdateRecord(
        expert=found.version.domain,
        version=now,
        records=0,
        steps=0,
        loss=0.0,
        seconds=0.0,
        acceptance_before=None,
        acceptance_after=None,
        decision="withdraw",
        gain=verdict.gain,
        gain_low=verdict.low,
        gain_high=verdict.high,
        gate_records=verdict.records,
        parent=found.version.version,
        stood_on=found.version.stood_on,
        witness=verdict.witness,
        reason=verdict.reason,
    )


def _serves(made: Candidate, version: AdapterVersion | None, verdict: Verdict | None) -> int:
    """The version that is live after the update; 0 for an untrained adapter."""
    if version is not None:
        return version.version
    return 0 if verdict is not None and verdict.decision == "reset" else made.parent
