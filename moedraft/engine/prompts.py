"""Prompts on their way into the caches, piece by piece."""

from __future__ import annotations

from moedraft.drafting.chooser import Chooser
from moedraft.engine.scheduler import Scheduler
from moedraft.engine.target import TargetRunner
from moedraft.evidence import Reading


class Prompts:
    """Reads the prompts of the sequences that have a slot and are not ready to decode."""

    def __init__(self, scheduler: Scheduler, target: TargetRunner, chooser: Chooser, chunk: int) -> None:
        """chunk: the most tokens to read in one step."""
        self.scheduler, self.target, self.chooser, self.chunk = scheduler, target, chooser, chunk

    def begin(self) -> Reading | None:
        """Read the next piece of each prompt; or return it, for the coming round to read it on the way.

        A forward reads all weights, so a round and a prompt in one cost less than one after the other, where
        the target can do that.
        """
        reading = Reading(self.scheduler.pieces(self.chunk))
        if reading.wanted and self.target.mixes and self.scheduler.num_ready:
            return reading
        if reading.wanted:
            self.target.read(reading)
        self.end(reading)
        return None

    def end(self, reading: Reading) -> None:
        """Called when the target has read these pieces: give them to the drafter, and count them.

        A sequence whose prompt has been read to its end is ready to decode.
        """
        if reading.wanted:
            self.chooser.read_prompt(reading.pieces, reading.states)
        for sequence, count in reading.pieces:
            sequence.target_cached += count
            if sequence.target_cached == sequence.num_prompt_tokens - 1:
                self.scheduler.mark_ready(sequence)
