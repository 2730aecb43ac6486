"""A trainer that behaves as its first argument says; tests of the supervisor run it, so it starts fast."""

import json
import os
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path


def say(**message):
    print(json.dumps(message), flush=True)


def state(reason="", kind="waiting", **more):
    say(type="state", kind=kind, reason=reason, **more)


def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def publish(source, expert="code", parent=0, base="tiny", folder=None, **more):
    """Hand over a copy of the adapter in `source`; returns the answer."""
    folder = folder or uuid.uuid4().hex
    if source:
        shutil.copytree(source, home / "training" / folder, symlinks=True)
    say(type="publish", parts=[{**about(folder, expert, parent, base), **more}])
    return hear()


def about(folder, expert, parent, base):
    """A candidate without its files."""
    figures = {"records": 7, "held_out": 1, "steps": 3, "loss": 0.5}
    figures |= {"acceptance_before": 0.4, "acceptance_after": 0.5}
    place = {"folder": folder, "expert": expert, "parent": parent, "base_hash": base}
    return {**place, **figures, "rank": 2, "modules": ["m"]}


begin = hear()
home = Path(begin["settings"]["home"])
mode, arguments = sys.argv[1], sys.argv[2:]
if mode == "polite":
    state("paused" if begin["paused"] else "nothing to do")
    while True:
        state({"pause": "paused", "resume": "nothing to do"}[hear()["type"]])
elif mode == "crash":
    state("about to fail")
    print("Traceback …", "RuntimeError: out of luck", sep="\n", file=sys.stderr)
    sys.exit(3)
elif mode == "deadly":  # an update of `code` kills it, and is told what it killed before
    state(kind="training", expert="code", step=1, steps=2, error=str(begin["failures"]))
    hear() if begin["failures"].get("code", 0) > 1 else os.kill(os.getpid(), signal.SIGKILL)
elif mode == "killed":
    state()
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "silent":
    state("thinking")
    signal.pause()
elif mode == "frozen":
    state()
    os.kill(os.getpid(), signal.SIGSTOP)
elif mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state()
    signal.pause()
elif mode == "rubbish":
    state("sane so far")
    for line in (
        "no json",
        "{}",
        "[1]",
        '{"type": "state"}',
        '{"type": "begin"}',
        "\x00\xff",
        "[" * 50_000,
        "NaN",
    ):
        print(line)
    while True:
        print("rubbish", flush=True)
        time.sleep(0.001)
elif mode == "endless":
    while True:
        os.write(1, b"x" * 65_536)
elif mode == "noisy":
    os.write(2, b"complaint\n" * 100_000)
    state("still here")
    hear()
elif mode == "deaf":
    while True:  # asks and asks, and never takes an answer
        say(type="publish", parts=[about("0" * 32, "code", 0, "another")])
elif mode == "talks":
    while True:
        state(step=1)
elif mode == "trains":  # updates of so many steps, of a hundredth of a second each; only the last succeeds
    for number, steps in enumerate(map(int, arguments)):
        if number:
            state("the last update failed", error="out of luck")
        for step in range(steps):
            state(kind="training", expert="code", step=step, steps=steps)
            time.sleep(0.01)
    record = {"expert": "code", "version": 1, "records": 8, "steps": 1, "loss": 1.0, "seconds": 100.0}
    record |= {"acceptance_before": None, "acceptance_after": None}
    say(type="learned", expert="code", last_id=7, update=record)
    hear()
    state("nothing to do")
    hear()
elif mode == "withdraws":  # its own version, then the same once more
    answers = [publish(arguments[0], **options) for options in ({}, {"parent": 1})]
    for _ in range(2):
        say(type="withdraw", expert="code", version=2)
        answers.append(hear())
    (home / "answers.json").write_text(json.dumps(answers))
    state("done")
    hear()
elif mode == "update":
    answers = [publish(arguments[0], **options) for options in map(json.loads, arguments[1:])]
    say(type="learned", expert="code", last_id=7, update=None)
    answers.append(hear())
    (home / "answers.json").write_text(json.dumps(answers))
    state("done")
    hear()
