"""Which runs a command line asks for: its parts, patterns of traffic and arrangements, each known by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evidence.parts import PARTS, Job

WHAT = ("pattern", "arrangement")  # by its place in a job


def chosen(parts: Sequence[str], patterns: Sequence[str], arrangements: Sequence[str]) -> list[Job]:
    """The jobs of these parts, by the order in which patterns, then arrangements are named; () leaves all.

    Exits where a name is not known, or where there is nothing to run for it.
    """
    every = [job for jobs in PARTS.values() for job in jobs]
    if not parts:
        raise SystemExit(f"evidence.py: --parts names none; there are {', '.join(PARTS)}.")
    _check_known("part", parts, PARTS)
    _check_known("pattern", patterns, (pattern for pattern, _ in every))
    _check_known("arrangement", arrangements, (name for _, name in every))
    there = list(dict.fromkeys(job for part in parts for job in PARTS[part]))
    jobs = [job for job in there if job[0] in (patterns or [job[0]]) and job[1] in (arrangements or [job[1]])]
    for place, names in enumerate((patterns, arrangements)):
        for name in names:
            if all(job[place] != name for job in jobs):
                raise SystemExit(f"evidence.py: {_why(place, name, parts, there)}")
    for place, names in ((1, arrangements), (0, patterns)):
        if names:
            jobs.sort(key=lambda job: names.index(job[place]))
    return jobs


def _check_known(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    every = list(dict.fromkeys(known))
    for name in names:
        if name not in every:
            raise SystemExit(f"evidence.py: there is no {what} {name}; there are {', '.join(every)}.")


def _why(place: int, name: str, parts: Sequence[str], there: Sequence[Job]) -> str:
    """Why nothing is run for a pattern or an arrangement, in the words of the command line."""
    what, other = WHAT[place], WHAT[1 - place]
    if beside := list(dict.fromkeys(job[1 - place] for job in there if job[place] == name)):
        return (
            f"none of the {other}s that are named is run with the {what} {name}; the chosen parts have it "
            f"with {', '.join(beside)}."
        )
    having = [part for part, jobs in PARTS.items() if any(job[place] == name for job in jobs)]
    instead = "--parts instead of --quick" if "quick" in parts else "--parts"
    return (
        f"the {what} {name} is in none of the chosen parts ({', '.join(parts)}); name one that has it with "
        f"{instead}: {', '.join(having)}."
    )
