"""Damaged adapters, two processes on a home, and homes of another time."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fault_kills import first_schema
from fault_tools import Row, candidate, new_home, record, timed, until_its_end

from moedraft.config import load_settings
from moedraft.core import Domain, MoedraftError, RequestStats
from moedraft.drafting.experts.adapter import PREFIX
from moedraft.speculation import SpeculationStats
from moedraft.storage import db
from moedraft.storage.db import DATABASE, Home
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate
from moedraft.system.build import System, build

OUTPUT = "lm_head"


def files(folder: Path, cuts: int, flips: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    return [
        timed(lambda: damaged(folder / "damaged", cuts, flips, rng)),
        timed(lambda: unfit(folder / "unfit")),
        timed(lambda: two_at_once(folder / "two")),
        timed(lambda: clock(folder / "clock")),
        timed(lambda: earlier(folder / "earlier")),
    ]


# -- adapters ------------------------------------------------------------------------------------


def damaged(path: Path, cuts: int, flips: int, rng: random.Random) -> Row:
    """The second of two versions is damaged; each time the first has to serve, and the second is refused."""
    row = Row("an adapter's files cut, or a bit flipped", "refused with a reason; the version before serves")
    store = Store.open(new_home(path))
    first = store.adapters.publish(candidate(1.0))
    second = store.adapters.publish(candidate(2.0, parent=first.version))
    own = store.adapters.folder("sql", second.version)
    whole = {file: file.read_bytes() for file in own.iterdir()}
    weights = next(data for file, data in whole.items() if file.suffix == ".safetensors")
    damages: list[tuple[Path, bytes]] = []
    for file, data in whole.items():
        if data is weights:
            damages += [(file, data[: len(data) * i // cuts]) for i in range(cuts)]
    for _ in range(flips):
        file, data = rng.choice(sorted(whole.items()))
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damages.append((file, bytes(flipped)))
    for file, data in damages:
        file.write_bytes(data)
        try:
            same = store.adapters.load(second).tensors["lora_A"].eq(2.0).all()
            row.check(False, f"{file.name} is taken though damaged (its weights are the same: {bool(same)})")
        except MoedraftError as error:
            row.check(str(error).endswith("."), f"no reason: {error}")
        file.write_bytes(whole[file])
        row.cases += 1
    file, data = damages[0]
    file.write_bytes(data)
    served = store.adapters.load_live("sql")
    row.check(served is not None and served[0].version == first.version, "the version before does not serve")
    store.close()
    return row


def unfit(path: Path) -> Row:
    """Adapters whose files are whole and whose contents do not fit the draft model of the shipped pair."""
    row = Row("adapters with NaN, another rank, base, module, shape or vocabulary", "as above, by the engine")
    store = Store.open(new_home(path))
    store.close()
    system = build(load_settings(home=path))
    try:
        good = fitting(system)
        system.store.adapters.publish(good)
        system.loader.refresh([], now=True)
        row.check(system.bank.version("sql") == 1, "the sound version does not serve")
        for name, bad in unfitting(good).items():
            row.check(not taken(system, bad), f"{name}: it serves")
            row.cases += 1
        row.check(
            taken(system, Candidate(**{**vars(good), "parent": 1})), "the sound one does not serve again"
        )
    finally:
        system.close()
    return row


def taken(system: System, new: Candidate) -> bool:
    """Whether a version that is published serves."""
    try:
        version = system.store.adapters.publish(new).version
    except MoedraftError:
        return False
    system.loader.refresh([], now=True)
    return system.bank.version("sql") == version


def fitting(system: System) -> Candidate:
    tensors = {}
    for module in sorted(system.bank.tail):
        out, inner = system.bank.layers[module].base_weight().shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(4, inner)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.zeros(out, 4)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    return candidate(1.0, base_hash=system.bank.base_hash, rank=4, config=config, tensors=tensors)


def unfitting(good: Candidate) -> dict[str, Candidate]:
    name, tensor = next(iter(good.tensors.items()))

    def changed(**changes: Any) -> Candidate:
        return Candidate(**{**vars(good), "parent": 1, **changes})

    def with_tensor(key: str, value: torch.Tensor) -> Candidate:
        return changed(tensors={**good.tensors, key: value})

    def rows(more: int) -> Candidate:
        """As of a draft model whose tokenizer has so many more tokens."""
        head = {key: value for key, value in good.tensors.items() if f"{OUTPUT}.lora_B" in key}
        other = {key: torch.zeros(value.shape[0] + more, value.shape[1]) for key, value in head.items()}
        assert other, "the good one does not change the output layer"
        return changed(tensors={**good.tensors, **other})

    return {
        "NaN": with_tensor(name, tensor * float("nan")),
        "infinite": with_tensor(name, tensor / 0),
        "another rank": changed(config={**good.config, "r": 8}),
        "another shape": with_tensor(name, torch.zeros(4, 3)),
        "no module": changed(tensors={}),
        "an unknown module": with_tensor(f"{PREFIX}nowhere.lora_A.weight", tensor.clone()),
        "half a module": changed(tensors={k: v for k, v in good.tensors.items() if k != name}),
        "another vocabulary": rows(-1),
        "a vocabulary of its own": changed(vocabulary=torch.arange(16, dtype=torch.int32)),
        "another base, tokenizer or weights": changed(base_hash="sha256:another"),
        "no adapter at all": changed(config={"peft_type": "IA3"}),
    }


# -- two processes, another time -----------------------------------------------------------------


def two_at_once(path: Path) -> Row:
    row = Row("a second writer; a home from the future", "refused with a reason, and unchanged")
    home = new_home(path)
    with Home.open(home):
        second = until_its_end(lambda say: say(refused(home) or "opened"))
        row.check(second not in ([], ["opened"]), f"two processes write one home: {second}")
    connection = sqlite3.connect(home / DATABASE)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    before = (home / DATABASE).read_bytes()
    reason = refused(home) or ""
    row.check("newer moedraft" in reason, f"a home from the future: {reason or 'opened'}")
    row.check((home / DATABASE).read_bytes() == before, "a home from the future was changed")
    row.cases = 2
    return row


def clock(path: Path) -> Row:
    """The clock is set in between: each time a home is opened, written and read at a year's distance."""
    row = Row("the clock set forward and back a year, a home opened each time", "all is there, in its order")
    home, real = new_home(path), time.time
    for number, years in enumerate((0, 1, 0, -1, 0, 1, -1), 1):
        with mock.patch.object(time, "time", lambda years=years: real() + years * 365 * 86400):
            store = Store.open(home)
            store.registry.add_domain(Domain(f"d{number}", "", ("x",) * 8, time.time()))
            store.replay.add([record(number)])
            version = store.adapters.publish(candidate(float(number), parent=number - 1))
            store.requests.add([answered(number)])
            live, newest = store.registry.live("sql"), store.replay.records("sql", limit=1)
            row.check(live is not None and live.version == version.version == number, f"{live} is live")
            row.check(live is not None and live.last_record == number, "later records are taken for earlier")
            row.check(
                [one.token_ids for one in newest] == [record(number).token_ids], "not the newest record"
            )
            row.check(store.replay.count("sql") == number, "a record is hidden")
            row.check(len(list(store.replay.sample("sql", 100, 0))) == number, "a record is not learned from")
            row.check(store.requests.summary()["sql"].requests == number, "a request is not counted")
            names = [name for name, _ in store.registry.domain_names()]
            row.check(len(names) == number + 1, f"domains: {names}")
            store.adapters.prune("sql", keep=3)
            row.check(store.adapters.load_live("sql") is not None, "pruning took what serves")
            store.close()
        row.cases += 1
    store = Store.open(home)
    store.registry.rollback("sql")
    live = store.registry.live("sql")
    row.check(live is not None and live.version == 6, f"after a rollback {live} is live")
    store.close()
    return row


def answered(number: int) -> RequestStats:
    """A finished request that is named by its number."""
    stats = SpeculationStats()
    return RequestStats(str(number), "sql", 1, "en", 6, 1, stats, 0.1, "stop", time.time(), confidence=0.2)


def earlier(path: Path) -> Row:
    row = Row("homes of each earlier schema", "opened; all rows are there; a copy is kept")
    path.mkdir()
    revisions = sorted(file.name[:4] for file in db.MIGRATIONS.glob("versions/0*.py"))
    for revision in revisions:
        home = path / revision
        first_schema(home)
        later = [f"{one}*" for one in revisions if one > revision]
        scripts = path / f"migrations-{revision}"
        shutil.copytree(db.MIGRATIONS, scripts, ignore=shutil.ignore_patterns(*later, "__pycache__"))
        with mock.patch.object(db, "MIGRATIONS", scripts):
            Home.open(home).close()
        store = Store.open(home)
        whole = store.replay.count("sql") == 1 and len(store.registry.versions("sql")) == 2
        row.check(whole, f"rows of a home of schema {revision} are lost")
        store.close()
        kept = (home / f"{DATABASE}.{revision}").exists()
        row.check(kept or revision == revisions[-1], f"no copy of schema {revision} is kept")
        row.cases += 1
    return row


def refused(home: Path) -> str | None:
    """Why the home cannot be opened for writing."""
    try:
        Store.open(home).close()
    except MoedraftError as error:
        return json.dumps(str(error))
    return None
