"""Makes the tables of what a step costs and of how fast other systems decode, from what is in results/."""

from __future__ import annotations

from typing import Any

from markdown_tables import table

OWN = "moedraft bfloat16"  # beside which the other systems are put
NAMES = {
    "vllm-ngram": "vLLM, n-gram speculation,",
    "vllm": "vLLM",
    "llama.cpp-ngram": "llama.cpp, n-gram speculation,",
    "openvino-lookup": "OpenVINO, lookup in the prompt,",
    "openvino": "OpenVINO",
}
FOUR_BITS = {"as it is": "four bits"}


def step(found: dict[str, Any]) -> str:
    """Milliseconds of one forward by rows, tokens, system and precision; what five tokens cost beside one."""
    shapes = found["step_ms"]
    systems = list(next(iter(shapes.values())))

    def shown(one: dict[str, float], digits: int) -> str:
        return f"{one['ms']:.{digits}f} ({one['least']:.{digits}f})"

    rows = [
        [shape.replace("x", " x "), *(shown(each[name], 1) for name in systems)]
        for shape, each in shapes.items()
    ]
    for count, words in ((1, "five tokens against one, one row"), (8, "the same, eight rows")):
        one, five = shapes[f"{count}x1"], shapes[f"{count}x5"]
        ratios = ({what: five[name][what] / one[name][what] for what in one[name]} for name in systems)
        rows.append([words, *(shown(each, 2) for each in ratios)])
    again = "; ".join(
        f"{found['answers'] - wrong} in {name.removeprefix('moedraft ')}"
        for name, wrong in found["differing"].items()
    )
    note = (
        f"{found['context']} tokens in the cache, {found['threads']} threads; milliseconds, the median of "
        "the turns, and in brackets the least of them. With five tokens verified at once the greedy answers "
        f"of plain decoding were found again: of {found['answers']} answers, {again}."
    )
    return f"{table(['rows x tokens', *systems], rows)}\n\n{note}"


def peers(found: dict[str, Any]) -> str:
    """Tokens per second of each system, and how many times those of our own plain decoding these are."""
    systems = found["systems"]
    own = systems[OWN]
    rows = [
        [called(name), *(rate for batch in each for rate in beside(each[batch], own[batch]))]
        for name, each in systems.items()
    ]
    head = ["system", *(words for batch in own for words in (f"{batch}, tokens/s", f"× {OWN}"))]
    note = (
        f"{found['tokens']} greedy tokens for each prompt, {found['threads']} threads: the median of "
        f"{len(own['batch 1']['rounds'])} rounds, and in brackets the slowest and the fastest of them. Each "
        "round has other prompts, so systems that speculate differ most from round to round. moedraft "
        "decodes plainly here; its lookup and its drafter were not measured in this run."
    )
    return f"{table(head, rows)}\n\n{note}"


def beside(one: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Tokens per second with their range, and as a multiple of our own."""
    rate, rounds = one["tokens_per_second"], one["rounds"]
    return [f"{rate:.1f} ({min(rounds):.1f}–{max(rounds):.1f})", f"{rate / own['tokens_per_second']:.2f}"]


def called(name: str) -> str:
    """The system in words: `openvino as it is` reads the file's weights of four bits."""
    system, _, precision = name.partition(" ")
    return f"{NAMES.get(system, system)} {FOUR_BITS.get(precision, precision)}"
