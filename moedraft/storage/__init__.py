"""The state of a home on disk: domains, adapter versions, replay, request statistics. Knows no model."""

from moedraft.storage.db import Home, StorageFull
from moedraft.storage.records.replay import ReplayBuffer
from moedraft.storage.registry import Registry
from moedraft.storage.requests import ExpertStats, RequestLog
from moedraft.storage.retention.eviction import Policy
from moedraft.storage.store import Store
from moedraft.storage.updates import UpdateLog
from moedraft.storage.versions.adapters import AdapterStore, LoadedAdapter
from moedraft.storage.versions.candidate import Candidate, CandidateSummary

__all__ = [
    "AdapterStore",
    "Candidate",
    "CandidateSummary",
    "ExpertStats",
    "Home",
    "LoadedAdapter",
    "Policy",
    "Registry",
    "ReplayBuffer",
    "RequestLog",
    "StorageFull",
    "Store",
    "UpdateLog",
]
