#!/usr/bin/env python3
"""Measure whether online learning of experts pays and does no harm, and write down what was found.

    python scripts/evidence.py --data ../shared/data --out /tmp/quick --quick
    python scripts/evidence.py --data ../shared/data --out /tmp/all      # hours

Arrangements of adapters learn from the same requests in the same order, with as many updates and as many
weights at work. Measured are the guesses of the drafter on held-out prompts, over cached answers of the
target: no figure but those of time depends on how busy the machine is. Each run has a file in OUT/runs, and
one that is there is not computed again, so that a command that was stopped goes on where it was. Plots and
a page are written from these files: OUT/evidence.md, or another one with --doc. The commands for the pages in
docs/ stand at their end.
"""

from __future__ import annotations

from evidence.command import main

if __name__ == "__main__":
    main()
