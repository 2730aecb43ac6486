#!/usr/bin/env python3
"""Compare the two kinds of router on the same real prompts: n-grams and embedding, and a fine-tuned BERT.

    python scripts/bench_bert_router.py --data ../shared/data --out results/bert_router.json

Each is fitted on the same examples of the same domains, and asked about prompts that it has not seen: of
these domains as they are and reworded, and of domains that are not registered. What is in the file is
not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from feature_answers import prompts_of
from reworded import KINDS

from moedraft.core import SHARED
from moedraft.routing.bert import BertRouter
from moedraft.routing.embedder import Embedder
from moedraft.routing.router import Router

DOMAINS = "sql_en,code_python,math_en,medical_en,docs_de,docs_fr,docs_ja,docs_ru"
STRANGE = "general_en,textbook_en,docs_en,docs_ko,docs_zh"


def asked(router: Router, prompts: dict[str, list[str]]) -> dict[str, int]:
    """How many prompts go to their own domain, to another one, and to none; for how many it is likeliest."""
    counts = {"right": 0, "wrong": 0, "refused": 0, "likeliest_right": 0, "prompts": 0}
    for name, texts in prompts.items():
        for route in router.route(texts):
            likeliest = max((p, d) for d, p in route.probabilities.items() if d != SHARED)[1]
            kind = "right" if route.domain == name else "refused" if route.domain == SHARED else "wrong"
            counts[kind] += 1
            counts["likeliest_right"] += likeliest == name
            counts["prompts"] += 1
    return counts


def measured(router: Router, data: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    began = time.perf_counter()
    router.fit(data["examples"])
    found: dict[str, Any] = {"fit_seconds": round(time.perf_counter() - began, 1)}
    for kind, change in KINDS.items():
        reworded = {
            name: [change(text, random.Random(f"{name} {i} {kind}")) for i, text in enumerate(texts)]
            for name, texts in data["unseen"].items()
        }
        found[kind] = asked(router, reworded)
    found["strangers"] = asked(router, data["strange"])
    alone = [text for texts in data["unseen"].values() for text in texts[:4]]
    began = time.perf_counter()
    for text in alone:
        router.route([text])
    return found | {"ms_per_prompt": round(1000 * (time.perf_counter() - began) / len(alone), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domains", default=DOMAINS)
    parser.add_argument("--strange", default=STRANGE, help="domains that are not registered")
    parser.add_argument("--examples", type=int, default=60, help="of each domain")
    parser.add_argument("--heldout", type=int, default=25, help="prompts of each domain and kind")
    parser.add_argument("--models", default="minilm", help="BERTs to fine-tune: minilm, folders or hub ids")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    data = {
        "examples": {n: prompts_of(args.data, n, "stream", args.examples) for n in args.domains.split(",")},
        "unseen": {n: prompts_of(args.data, n, "dev", args.heldout) for n in args.domains.split(",")},
        "strange": {n: prompts_of(args.data, n, "dev", args.heldout) for n in args.strange.split(",")},
    }
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("data", "out", "models")}
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    if report.get("settings") != settings:
        report = {"settings": settings, "routers": {}}
    embedder = Embedder()
    for name in ("embedding", *args.models.split(",")):
        if name in report["routers"]:
            continue
        with tempfile.TemporaryDirectory(prefix="moedraft-") as folder:
            if name == "embedding":
                router = Router(embedder, Path(folder))
            else:
                router = BertRouter(embedder, Path(folder), source=name, epochs=args.epochs)
            report["routers"][name] = measured(router, data)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(report["routers"][name]), flush=True)


if __name__ == "__main__":
    main()
