"""Makes the tables of who drafts, from what the benchmarks of selection, streams and mixed batches write."""

from __future__ import annotations

from typing import Any

from markdown_tables import table, without_empty

WAYS = ("classifier", "evidence", "evidence as served", "permuted classifier", "permuted evidence", "shared")


def selection(found: dict[str, Any]) -> str:
    """Tokens per target step beside those of the prompts' own experts, by kind of prompt and by chooser."""
    rows = []
    for kind, part in found["tokens per step"].items():
        parts = [part[way]["times_oracle"] for way in WAYS]
        shown = [f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})" for value, low, high in parts]
        oracle = f"{part['oracle']['tokens_per_step'][0]:.2f}"
        lost = part["recovered"] is not None and part["permuted classifier"]["times_oracle"][2] < 1
        recovered = f"{part['recovered']:.0%}" if lost else "hardly anything lost"
        rows.append([kind, str(part["prompts"]), oracle, *shown, recovered])
    head = ["prompts", "number", "oracle, tokens per step", *WAYS, "recovered of a permuted prior's loss"]
    costs = [
        f"{size}: {part['share_of_time']['evidence']:.1%} of the time, "
        f"{part['evidence / classifier'][0]:.3f} × the classifier's tokens/s"
        for size, part in found.get("cost", {}).items()
    ]
    note = f"\n\nComparing takes, in {'; '.join(costs)}." if costs else ""
    return table(head, rows) + note


STREAM_WAYS = {
    "shared": "shared",
    "classifier": "classifier",
    "evidence as served": "evidence as served",
    "evidence": "evidence, unlimited time",
}


def percent(estimate: list[float]) -> str:
    value, low, high = (100 * each for each in estimate)
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def streams(found: dict[str, Any]) -> str:
    """Tokens per target step beside those of each request's best fixed drafter, by stream and by chooser."""
    rows = []
    for name, part in found["streams"].items():
        ways = part["ways"]
        best = f"{ways['best fixed']['tokens_per_step'][0]:.2f}"
        owner = percent(ways["owner"]["times_best_fixed"]) if "owner" in ways else ""
        shown = [percent(ways[way]["times_best_fixed"]) for way in STREAM_WAYS]
        served = percent(ways["evidence as served"]["times_classifier"])
        right = "" if part.get("sent_right") is None else f"{part['sent_right']:.0%}"
        rows.append([name, str(part["prompts"]), right, best, owner, *shown, served])
    head = ["stream", "prompts", "sent to the right expert", "best fixed, tokens per step", "right expert"]
    head += STREAM_WAYS.values()
    return table(*without_empty([*head, "evidence as served / classifier"], rows))


def made_good(found: dict[str, Any]) -> str:
    """As `won_back`, and from which probability on an expert pays."""
    return won_back(found) + _threshold(found["streams"])


def won_back(found: dict[str, Any]) -> str:
    """What evidence wins back of what a wrong router loses against each prompt's own expert, by arms."""
    streams = found["streams"]
    rows: list[list[str]] = []
    for name in [name for name in streams if name.startswith("permuted")]:
        ways = {way: part["tokens_per_step"][0] for way, part in streams[name]["ways"].items()}
        lost = ways["owner"] - ways["classifier"]
        back = [(ways[way] - ways["classifier"]) / lost for way in ("evidence as served", "evidence")]
        rows.append([arms_of(name, found["settings"]), *(f"{share:.0%}" for share in back)])
    rows.sort(key=lambda row: int(row[0]))
    return table(["arms", "made good as served", "with unlimited time"], rows)


def quarters(found: dict[str, Any]) -> str:
    """As `made_good`, by quarter of the requests: how what evidence wins back grows with those that ended."""
    rows = []
    for name in [name for name in found["streams"] if name.startswith("permuted")]:
        ways = found["streams"][name]["ways"]
        for way, title in (("evidence as served", "as served"), ("evidence", "unlimited time")):
            lost = [right - wrong for right, wrong in _pairs(ways, "owner", "classifier")]
            back = [won - wrong for won, wrong in _pairs(ways, way, "classifier")]
            shares = [f"{one / most:.0%}" for one, most in zip(back, lost, strict=True)]
            rows.append([arms_of(name, found["settings"]), title, *shares])
    rows.sort(key=lambda row: (int(row[0]), row[1]))
    return table(["arms", "comparing", "first quarter", "second", "third", "last"], rows)


def _pairs(ways: dict[str, Any], one: str, other: str) -> list[tuple[float, float]]:
    """Tokens per step of two ways, by quarter of the requests."""
    return [*zip(ways[one]["quarters"], ways[other]["quarters"], strict=True)]


def _threshold(streams: dict[str, Any]) -> str:
    """From which probability on a domain's expert should draft, by what right and wrong experts are worth."""
    plain, wrong = (streams.get(name, {}).get("ways", {}) for name in ("labelled", "permuted"))
    if not ({"owner", "shared"} <= plain.keys() and "classifier" in wrong):
        return ""
    shared = plain["shared"]["tokens_per_step"][0]
    gain = plain["owner"]["tokens_per_step"][0] / shared - 1
    loss = 1 - wrong["classifier"]["tokens_per_step"][0] / shared
    if min(gain, loss) <= 0:
        return ""
    return (
        f"\n\nAgainst the shared draft, the right expert brings {gain:+.1%} tokens per step, and a router "
        f"that takes every domain for another one {-loss:+.1%}. If the only choice is between the two, the "
        "likeliest domain's expert should draft where that domain's probability is above "
        f"{loss / (gain + loss):.2f}."
    )


def arms_of(stream: str, settings: dict[str, str]) -> str:
    """How many may draft: what the stream's name says, else every expert and the shared draft."""
    words = stream.split()
    return words[1] if words[-1] == "arms" else str(len(settings["domains"].split(",")) + 1)


def mix(found: dict[str, Any]) -> str:
    """What many experts cost in time, as ratios of the median step."""
    batches, many = found["batches"], found["registered"]
    names = [name for name in many if "/" in name]
    rows = [
        [
            f"a batch of {found['slots']} with {batches['different']} experts / with one",
            spread(batches["mixed / uniform"]),
            f"{batches['step_ms']['mixed']:.1f} / {batches['step_ms']['uniform']:.1f} ms",
        ],
        *(
            [
                f"{name} experts registered and in use",
                spread(many[name]),
                " / ".join(f"{many['step_ms'][count]:.1f}" for count in name.split(" / ")) + " ms",
            ]
            for name in names
        ),
    ]
    sizes = {name: size / 2**20 for name, size in many["bytes"].items()}
    note = f"Weights of the home's {found['experts']} experts take {sizes.pop('own'):.0f} MiB, " + ", ".join(
        f"those of {name} {size:.0f} MiB" for name, size in sizes.items()
    )
    return f"{table(['', 'time of a step', 'median'], rows)}\n\n{note}."


def spread(each: list[float]) -> str:
    middle, low, high = each
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


ROUTERS = {"embedding": "n-grams and embedding", "minilm": "BERT (the MiniLM that is shipped), fine-tuned"}


def routers(found: dict[str, Any]) -> str:
    """Where either kind of router sends the same prompts, as they are and reworded, and what it takes."""
    rows = []
    for name, one in found["routers"].items():
        shown = ROUTERS.get(name, name)
        for kind, counts in one.items():
            if isinstance(counts, dict) and "right" in counts and kind != "strangers":
                columns = ("right", "wrong", "likeliest_right", "refused")
                rows.append([shown, kind, *(f"{counts[c] / counts['prompts']:.1%}" for c in columns)])
        strange = one["strangers"]
        refused = f"{strange['refused'] / strange['prompts']:.1%}"
        rows.append([shown, "of no registered domain", "", "", "", refused])
    head = ["router", "prompts", "right", "wrong", "likeliest right", "refused"]
    costs = [
        f"{ROUTERS.get(name, name)}: fitted in {one['fit_seconds']:.0f} s, "
        f"{one['ms_per_prompt']:.0f} ms a prompt"
        for name, one in found["routers"].items()
    ]
    settings = found["settings"]
    domains = len(settings["domains"].split(","))
    each = (
        f"{domains} domains, {settings['examples']} examples and {settings['heldout']} unseen prompts of each"
    )
    return f"{table(head, rows)}\n\n{each}. {'; '.join(costs)}."


def draft_mix(found: dict[str, Any]) -> str:
    """A draft step of an independent draft by the experts' rank, and how a mixed batch is multiplied."""
    head = ["rank", "shared draft", "one expert"]
    mixed = [(way, batch) for way in ("merged", "joined") for batch in ("two", "four", "eight")]
    rows = [
        [rank, *(f"{ways['merged'][batch]:.1f}" for batch in ("shared", "one"))]
        + [f"{ways[way][batch]:.1f}" for way, batch in mixed]
        for rank, ways in found["draft_step_ms"].items()
    ]
    note = (
        f"{found['parameters'] / 1e6:.1f} M weights, {found['threads']} thread(s), eight rows; a step of the "
        f"target takes {found['target_step_ms']:.1f} ms."
    )
    return f"{table([*head, *(f'{batch}, {way}' for way, batch in mixed)], rows)}\n\n{note}"
