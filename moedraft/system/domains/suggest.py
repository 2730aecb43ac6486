"""Which domains could be registered, from prompts that no expert served, and which ones could be merged.

Such prompts are read from the replay: those that fitted no domain, stayed with the shared draft, and fit none
today. So only requests that may be learned from are looked at, and a purge reaches them. What the router sent
to a domain is no other one's because its expert lost, and what an expert guessed best in the end is that
expert's. What is told is how much of the shared draft's guesses is accepted on these prompts now; what a
domain would gain takes a trial of learning (`moedraft.distill.judging.trial`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moedraft.chat import asked_text
from moedraft.core import SHARED, ReplayRecord
from moedraft.routing.clusters import clusters, overlaps, swallowed_by
from moedraft.routing.embedder import Floats
from moedraft.routing.router import Router, spread
from moedraft.storage.store import Store
from moedraft.system.domains.filing import LOOKED_AT, owners
from moedraft.system.domains.registering import MIN_EXAMPLES
from moedraft.system.recorder import script_of

if TYPE_CHECKING:  # a server does not load what learns
    from moedraft.distill.judging.trial import ExpertTrials, TriedExpert

SHOWN = 3  # examples of a group
SHOWN_CHARACTERS = 300
MOST_EXAMPLES = 200  # of a group, for the file to register it with
WORD = re.compile(r"[a-z][a-z0-9]{2,19}")
TELLING = 0.2  # how much more often a word stands in a group's prompts than in others', to name it


@dataclass(frozen=True)
class Suggestion:
    """A group of prompts that could be a domain."""

    name: str  # for the domain: the words that tell the group from the others
    prompts: tuple[str, ...]  # the most typical first, MOST_EXAMPLES at most; none where capture is off
    size: int  # different prompts
    requests: int
    share: float | None  # of the requests that the router decided in that time; None where there was none
    acceptance: float | None  # of the tokens that were drafted for them, how many were accepted
    trial: TriedExpert | None = None  # what an expert would bring, where that was tried

    @property
    def command(self) -> str | None:
        """What registers it; None where the prompts may not be written, so that there is no file to name."""
        return f"moedraft domain register {self.name} --examples {self.name}.jsonl" if self.prompts else None


@dataclass(frozen=True)
class Suggestions:
    """What was found among `looked_at` records without an expert, of the newest LOOKED_AT.

    Those that are a domain's today are left out.
    """

    looked_at: int
    unknown: float | None  # `looked_at` by the requests that the router decided in that time
    capture: bool  # whether texts may be shown
    groups: tuple[Suggestion, ...]


def suggest(
    store: Store,
    router: Router,
    tokenizer: Any,
    *,
    capture: bool,
    least: int = MIN_EXAMPLES,
    trials: ExpertTrials | None = None,
) -> Suggestions:
    """Groups of at least `least` different prompts, the largest first.

    capture: texts may be shown. trials: tries an expert for each group, which takes about half a minute.
    """
    records = store.replay.unclaimed(LOOKED_AT)
    routed = _routed_since(store, records)
    by_text: dict[str, list[ReplayRecord]] = {}
    for record in records:
        asked = asked_text(tokenizer, record.token_ids[: record.num_prompt_tokens])
        by_text.setdefault(asked, []).append(record)
    for text in owners(store, router, list(by_text)):
        del by_text[text]
    left = sum(map(len, by_text.values()))
    by_text.pop("", None)
    groups = _grouped(router, list(by_text), least)
    taken = {SHARED, *(name for name, _ in store.registry.domain_names())}
    found: list[Suggestion] = []
    names = names_of(groups if capture else [[] for _ in groups], taken)  # a name tells what is asked
    for name, texts in zip(names, groups, strict=True):
        own = [record for text in texts for record in by_text[text]]
        drafted = sum(one.drafted for one in own)
        found.append(
            Suggestion(
                name=name,
                prompts=tuple(texts[:MOST_EXAMPLES]) if capture else (),
                size=len(texts),
                requests=len(own),
                share=_part(len(own), routed),
                acceptance=sum(one.accepted for one in own) / drafted if drafted else None,
                trial=trials(name, [by_text[text] for text in texts]) if trials else None,
            )
        )
    return Suggestions(left, _part(left, routed), capture, tuple(found))


def _grouped(router: Router, texts: list[str], least: int) -> list[list[str]]:
    if not texts:
        return []
    return [[texts[i] for i in group] for group in clusters(router.features(texts), least)]


def _routed_since(store: Store, records: list[ReplayRecord]) -> int:
    """How many requests the router decided since the oldest of `records`."""
    if not records:
        return 0
    return store.requests.routed_since(min(one.created_at for one in records))


def _part(count: int, of: int) -> float | None:
    return min(1.0, count / of) if of else None


def names_of(groups: list[list[str]], taken: Collection[str]) -> list[str]:
    """A name for each group, different from all others.

    Its two most telling words without their accents; where the letters are no Latin ones, the script.
    """
    counts = [Counter(word for text in group for word in set(_words(text))) for group in groups]
    names: list[str] = []
    for group, own in zip(groups, counts, strict=True):

        def telling(word: str, own: Counter[str] = own, size: int = len(group)) -> float:
            others = sum(other[word] for other in counts if other is not own)
            return own[word] / size - others / max(1, sum(map(len, groups)) - size)

        best = sorted(own, key=lambda word: (-telling(word), word))[:2]
        name = "-".join(word for word in best if telling(word) >= TELLING) or _script(group)
        number, used = 1, {*taken, *names}
        while (made := name if number == 1 else f"{name}-{number}") in used:
            number += 1
        names.append(made)
    return names


def _words(text: str) -> list[str]:
    """As a name may hold them: "Köcheln" is kocheln, "Größe" grosse."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return WORD.findall("".join(letter for letter in plain if not unicodedata.combining(letter)))


def _script(group: list[str]) -> str:
    """The writing system of most of the texts as a name, "new" where that says nothing."""
    found = script_of(" ".join(text[:SHOWN_CHARACTERS] for text in group[:SHOWN]))
    return {"latin": "new", "other": "new", "kana": "japanese"}.get(found, found)


def suggestions_data(found: Suggestions, *, texts: bool, every_prompt: bool = False) -> dict[str, Any]:
    """The suggestions as plain data. texts: whether prompts may be seen; every_prompt: all, not cut."""
    return {
        "looked_at": found.looked_at,
        "unknown_share": found.unknown,
        "capture": found.capture,
        "suggestions": [_group_data(one, texts=texts, every_prompt=every_prompt) for one in found.groups],
    }


def _group_data(one: Suggestion, *, texts: bool, every_prompt: bool) -> dict[str, Any]:
    data = {
        "name": one.name,
        "size": one.size,
        "requests": one.requests,
        "share": one.share,
        "acceptance": one.acceptance,
        "trial": asdict(one.trial) | {"gain": one.trial.gain} if one.trial else None,
        "command": one.command,
        "examples": [text[:SHOWN_CHARACTERS] for text in one.prompts[:SHOWN]] if texts else [],
    }
    return data | ({"prompts": list(one.prompts)} if every_prompt else {})


def overlaps_data(store: Store, router: Router) -> list[dict[str, Any]]:
    """Pairs of registered domains whose examples overlap, those that share most first.

    The examples are those that the router is fitted on, so that hardly any has to be embedded.
    """
    found = overlaps(_examples(store, router))
    return [{**asdict(one), "should_merge": one.should_merge} for one in found]


def coinciding(store: Store, router: Router, name: str) -> list[str]:
    """The registered domains that hold nearly what this one holds."""
    return swallowed_by(_examples(store, router), name)


def _examples(store: Store, router: Router) -> dict[str, Floats]:
    """What the classifier sees of the examples that the router is fitted on, by domain."""
    return {one.name: router.features(spread(one.examples)) for one in store.registry.domains()}
