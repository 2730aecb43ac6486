#!/usr/bin/env python3
"""Measure the router and write JSON: accuracy on plain and reworded prompts, unknown prompts, and speed.

    python scripts/bench_router.py --data ../shared/data --out results/router.json

The data folder holds `dev/` (40 prompts a domain to fit on), `stream/` (to test on), `train/` (to fit on
where refusals are counted) and `external/` (prompts of no particular domain), each with `<domain>.jsonl` or
`.jsonl.xz`, one {"prompt": …} a line.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from router_refusals import PER_DOMAIN, example_sets, refusals

import moedraft
from moedraft.core import SHARED
from moedraft.routing.embedder import Embedder, Floats, TextEmbedder, char_ngrams, features
from moedraft.routing.fitting import new_regression
from moedraft.routing.router import Router

GENERAL = {"general_en", "textbook_en"}  # most external prompts that belong to any domain belong to these
STEPS = 32  # target steps between two prompts, one of which reads a short prompt
GREETING = (
    "Hello! I hope you are having a wonderful day. I have been thinking about something for a while and "
    "would be really glad if you could give me a good answer to it. "
)


def strip_template(text: str) -> str:
    """The prompt without its first line, unless nothing would be left."""
    rest = text.partition("\n")[2].strip()
    return rest if len(rest) > 20 else text


def second_half(text: str) -> str:
    words = text.split(" ")
    return " ".join(words[len(words) // 2 :]) if len(words) > 8 else text


REWORDINGS: dict[str, Callable[[str], str]] = {
    "help_me": lambda text: f"Please help me with this. {text}",
    "long_greeting": lambda text: GREETING + text,
    "thanks_after": lambda text: f"{text}\n\nThank you very much in advance, please be concise.",
    "lower_case": str.lower,
    "without_template": strip_template,
    "second_half": second_half,
}


class Memory:
    """An embedder that embeds each text once, so that one run can route the same prompts many times.

    `asked` holds the texts it was asked for since its user last cleared it.
    """

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self.vectors: dict[str, Floats] = {}
        self.asked: set[str] = set()

    @property
    def id(self) -> str:
        return self.embedder.id

    def embed(self, texts: Any) -> Floats:
        self.asked.update(texts)
        missing = [text for text in dict.fromkeys(texts) if text not in self.vectors]
        if missing:
            self.vectors.update(zip(missing, self.embedder.embed(missing), strict=True))
        return np.stack([self.vectors[text] for text in texts])


def read_prompts(folder: Path) -> dict[str, list[str]]:
    files = sorted(folder.glob("*.jsonl")) + sorted(folder.glob("*.jsonl.xz"))
    if not files:
        raise SystemExit(f"no .jsonl or .jsonl.xz files in {folder}; give the data folder with --data.")
    return {file.name.split(".")[0]: _rows(file) for file in files}


def _rows(file: Path) -> list[str]:
    opener = lzma.open if file.suffix == ".xz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


class Fitted(NamedTuple):
    router: Router
    full: Router  # the same router without its first stage


def fitted(embedder: TextEmbedder, examples: dict[str, list[str]], threshold: float) -> Fitted:
    with tempfile.TemporaryDirectory() as folder:
        router = Router(embedder, Path(folder), threshold)
        router.fit(examples)
        return Fitted(router, Router(embedder, Path(folder), threshold, first_stage=False))


def accuracy(router: Router, tests: dict[str, list[str]]) -> dict[str, Any]:
    """Shares routed to the right domain and to `shared`, and how often the most probable domain is right."""
    right, best, shared = {}, {}, {}
    for domain, texts in tests.items():
        routes = router.route(texts)
        right[domain] = float(np.mean([r.domain == domain for r in routes]))
        shared[domain] = float(np.mean([r.domain == SHARED for r in routes]))
        rows = router.probabilities(texts)[1]
        best[domain] = float(np.mean([router.domains[i] == domain for i in rows.argmax(axis=1)]))
    means = {"routed_right": right, "routed_shared": shared, "best_domain_right": best}
    return {name: round(float(np.mean(list(v.values()))), 4) for name, v in means.items()} | {
        "by_domain": {d: {name: round(v[d], 3) for name, v in means.items()} for d in tests}
    }


def ablation(
    embedder: TextEmbedder, fit: dict[str, list[str]], tests: dict[str, list[str]]
) -> dict[str, float]:
    """Accuracy of the classifier without a threshold, with each part of the features alone and with both."""
    parts: dict[str, Callable[[list[str]], Floats]] = {
        "embedding": embedder.embed,
        "ngrams": char_ngrams,
        "both": lambda texts: features(embedder.embed(texts), texts),
    }
    result = {}
    for name, part in parts.items():
        labels = [domain for domain, texts in fit.items() for _ in texts]
        model = new_regression().fit(np.vstack([part(texts) for texts in fit.values()]), labels)
        right = [np.mean(model.predict(part(texts)) == domain) for domain, texts in tests.items()]
        result[name] = round(float(np.mean(right)), 4)
    return result


def calibration(router: Router, tests: dict[str, list[str]]) -> float:
    """Expected calibration error over ten bins: how far `confidence` is from the share of right answers."""
    rows = [(row, domain) for domain, texts in tests.items() for row in router.probabilities(texts)[1]]
    confidence = np.array([row.max() for row, _ in rows])
    right = np.array([router.domains[int(row.argmax())] == domain for row, domain in rows])
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [
        abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in set(bins)
    ]
    return round(float(sum(gaps)), 4)


def first_stage(memory: Memory, routers: Fitted, groups: dict[str, list[str]]) -> dict[str, Any]:
    """For each group, the share of prompts not embedded, and how often the full model agrees on these."""
    result = {}
    for name, texts in groups.items():
        memory.asked.clear()
        routes = routers.router.route(texts)
        decided = np.array([text not in memory.asked for text in texts])
        same = np.array(
            [a.domain == b.domain for a, b in zip(routes, routers.full.route(texts), strict=True)]
        )
        result[name] = {
            "prompts": len(texts),
            "decided": round(float(decided.mean()), 4),
            "agreement": round(float(same.mean()), 4),
            "agreement_of_decided": round(float(same[decided].mean()), 4) if decided.any() else None,
        }
    return result


def strangers(
    embedder: TextEmbedder, fit: dict[str, list[str]], tests: dict[str, list[str]], threshold: float
) -> dict[str, Any]:
    """Leave out each domain in turn. How many of its prompts go to `shared`, and how many of the others'?"""
    refused, by_full, lost = {}, {}, {}
    for left_out in fit:
        router, full = fitted(embedder, {d: texts for d, texts in fit.items() if d != left_out}, threshold)
        refused[left_out], by_full[left_out] = (
            _shared(router, tests[left_out]),
            _shared(full, tests[left_out]),
        )
        lost[left_out] = _shared(router, [t for d in tests if d != left_out for t in tests[d][:20]])
    return {
        "left_out_to_shared": round(float(np.mean(list(refused.values()))), 4),
        "left_out_to_shared_full_model": round(float(np.mean(list(by_full.values()))), 4),
        "others_to_shared": round(float(np.mean(list(lost.values()))), 4),
        "left_out_by_domain": {d: round(v, 3) for d, v in refused.items()},
    }


def few_domains(
    embedder: TextEmbedder, fit: dict[str, list[str]], tests: dict[str, list[str]], threshold: float
) -> dict[str, Any]:
    """The same with 1, 2, 3 … domains registered, averaged over runs of neighbours in the list of domains."""
    names = list(fit)
    result: dict[str, Any] = {}
    for count in (1, 2, 3, 5, 8, 10):
        own, other, by_full = [], [], []
        for start in range(len(names)):
            chosen = [names[(start + 4 * i) % len(names)] for i in range(count)]
            router, full = fitted(embedder, {d: fit[d] for d in chosen}, threshold)
            strange = [t for d in names if d not in chosen for t in tests[d][:5]]
            own.append(np.mean([r.domain == d for d in chosen for r in router.route(tests[d][:20])]))
            other.append(_shared(router, strange))
            by_full.append(_shared(full, strange))
        result[str(count)] = {
            "own_right": round(float(np.mean(own)), 3),
            "others_to_shared": round(float(np.mean(other)), 3),
            "others_to_shared_full_model": round(float(np.mean(by_full)), 3),
        }
    return result


def _shared(router: Router, texts: list[str]) -> float:
    return float(np.mean([route.domain == SHARED for route in router.route(texts)]))


def speed(
    embedder: Embedder, fit: dict[str, list[str]], prompts: list[str], threshold: float
) -> dict[str, float]:
    """Milliseconds per prompt, alone and among eight; seconds to fit anew and with one domain added."""
    with tempfile.TemporaryDirectory() as folder:
        router = Router(embedder, Path(folder), threshold)
        embedder.embed(prompts[:1])
        names = list(fit)
        first = _seconds(lambda: router.fit({d: fit[d] for d in names[:-1]}))
        added = _seconds(lambda: router.fit(fit))
        batches = [prompts[i : i + 8] for i in range(0, len(prompts) - 7, 8)]
        cpu = time.process_time()
        eight = [_seconds(partial(router.route, b)) / 8 for b in batches]
        cpu = (time.process_time() - cpu) / (8 * len(batches))
        cpu_alone = time.process_time()
        alone = [_seconds(partial(router.route, [p])) for p in prompts]
        cpu_alone = (time.process_time() - cpu_alone) / len(prompts)
        full = Router(embedder, Path(folder), threshold, first_stage=False)
        eight_full = [_seconds(partial(full.route, b)) / 8 for b in batches]
        cpu_full = time.process_time()
        alone_full = [_seconds(partial(full.route, [p])) for p in prompts]
        cpu_full = (time.process_time() - cpu_full) / len(prompts)
    return {
        "ms_per_prompt_batch_8_median": round(1e3 * float(np.median(eight)), 2),
        "ms_per_prompt_batch_8_best": round(1e3 * min(eight), 2),
        "cpu_ms_per_prompt_batch_8": round(1e3 * cpu, 2),
        "ms_per_prompt_batch_8_median_full_model": round(1e3 * float(np.median(eight_full)), 2),
        "ms_per_prompt_alone_median": round(1e3 * float(np.median(alone)), 2),
        "ms_per_prompt_alone_mean": round(1e3 * float(np.mean(alone)), 2),
        "cpu_ms_per_prompt_alone": round(1e3 * cpu_alone, 2),
        "cpu_ms_per_prompt_alone_full_model": round(1e3 * cpu_full, 2),
        "ms_per_prompt_alone_p95": round(1e3 * float(np.percentile(alone, 95)), 2),
        "ms_per_prompt_alone_fastest_tenth": round(1e3 * float(np.percentile(alone, 10)), 2),
        "ms_per_prompt_alone_median_full_model": round(1e3 * float(np.median(alone_full)), 2),
        "fit_seconds_first": round(first, 2),
        "fit_seconds_one_domain_added": round(added, 2),
    }


def in_target_steps(
    embedder: Embedder, fit: dict[str, list[str]], prompts: list[str], threshold: float
) -> dict[str, float]:
    """What routing costs while decoding: prompts are routed between plain steps of the embedded target.

    Either finds the other's weights in the cache instead of its own, as in a server. One step is the median.
    """
    params = moedraft.SamplingParams(max_tokens=STEPS, ignore_eos=True)
    steps, times = list[float](), dict[str, list[float]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        moedraft.load(home=Path(folder) / "home", max_speculative_tokens=0) as engine,
    ):
        router = Router(embedder, Path(folder), threshold)
        router.fit(fit)
        full = Router(embedder, Path(folder), threshold, first_stage=False)
        full.load_or_empty()
        kinds = {"alone": (router, 1), "alone_full_model": (full, 1)}
        kinds |= {"batch_8": (router, 8), "batch_8_full_model": (full, 8)}
        for start in range(0, len(prompts) - 7, 8):
            for name, (used, count) in kinds.items():
                short, batch = prompts[start][:40], prompts[start : start + count]
                steps.append(_seconds(partial(engine.generate, [short], params)) / STEPS)
                times.setdefault(name, []).append(_seconds(partial(used.route, batch)) / count)
    step = float(np.median(steps))
    result = {"target_step_ms": round(1e3 * step, 2)}
    for name, seconds in times.items():
        result[f"steps_per_prompt_{name}_median"] = round(float(np.median(seconds)) / step, 2)
        result[f"steps_per_prompt_{name}_mean"] = round(float(np.mean(seconds)) / step, 2)
    return result


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    fit = {d: rng.sample(t, min(args.fit, len(t))) for d, t in read_prompts(args.data / "dev").items()}
    stream = read_prompts(args.data / "stream")
    tests = {d: stream[d][: args.test] for d in fit}
    external = read_prompts(args.data / "external")
    embedder = Embedder(args.embedder)
    mixed = rng.sample([t for texts in tests.values() for t in texts], 256)
    result: dict[str, Any] = {"settings": {**vars(args), "data": args.data.name, "out": args.out.name}}
    result["settings"] |= {"threads": torch.get_num_threads(), "load_average": round(os.getloadavg()[0], 1)}
    result["speed"] = speed(embedder, fit, mixed, args.threshold)
    result["in_target_steps"] = in_target_steps(embedder, fit, mixed, args.threshold)
    memory = Memory(embedder)
    routers = fitted(memory, fit, args.threshold)
    router = routers.router
    result["plain"] = accuracy(router, tests)
    result["features"] = ablation(memory, fit, tests)
    result["calibration_error"] = calibration(router, tests)
    result["calibration_error_full_model"] = calibration(routers.full, tests)
    short = {d: texts[: args.reworded] for d, texts in tests.items()}
    groups = {"plain": [t for texts in tests.values() for t in texts], "timed": mixed} | external
    for name, reword in REWORDINGS.items():
        reworded = {d: [reword(t) for t in short[d]] for d in short}
        result.setdefault("reworded", {})[name] = accuracy(router, reworded)
        groups[name] = [t for texts in reworded.values() for t in texts]
    result["first_stage"] = first_stage(memory, routers, groups)
    result["leave_one_domain_out"] = strangers(memory, fit, tests, args.threshold)
    result["few_domains"] = few_domains(memory, fit, tests, args.threshold)
    special = fitted(memory, {d: t for d, t in fit.items() if d not in GENERAL}, args.threshold)
    result["refusals"] = refusals(
        lambda examples: fitted(memory, examples, args.threshold).router,
        example_sets(read_prompts(args.data / "train"), args.refusal_fit, args.seed),
        {d: texts[:PER_DOMAIN] for d, texts in tests.items()},
        external,
    )
    result["external_to_shared"] = {
        name: {
            "all_domains": _shared(router, texts),
            "all_domains_full_model": _shared(routers.full, texts),
            "without_general_domains": _shared(special.router, texts),
            "without_general_domains_full_model": _shared(special.full, texts),
        }
        for name, texts in external.items()
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parents[1].parent / "shared/data"
    )
    parser.add_argument("--out", type=Path, default=Path("results/router.json"))
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--fit", type=int, default=40, help="examples per domain")
    parser.add_argument("--test", type=int, default=100, help="test prompts per domain")
    parser.add_argument("--reworded", type=int, default=30, help="test prompts per domain and rewording")
    parser.add_argument("--refusal-fit", type=int, default=60, help="examples per domain for refusals")
    parser.add_argument("--threshold", type=float, default=0.35)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.data.is_dir():
        sys.exit(f"the data folder {args.data} does not exist; give it with --data.")
    result = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    summary = {k: v for k, v in result["plain"].items() if k != "by_domain"}
    stage = result["first_stage"]["plain"]
    print(json.dumps({"plain": summary, "first_stage": stage, "speed": result["speed"]}))
    print(json.dumps(result["in_target_steps"]))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
