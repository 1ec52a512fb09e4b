"""The fast way through a simulation: it touches a sequence only when something happens to it.

Every running sequence stores one token a step. One that came in at step a with s tokens has
t + (s - a) of them at the start of step t; call s - a its lead. It needs a block in the steps in
which t + lead is a multiple of the block size. So a step's demand is the number of running
sequences of one lead modulo the block size. What is left are events: admissions, departures, and
steps whose demand passes the free blocks. The victim is the newest.
"""

import numpy as np

from labcore.blocks import blocks_needed
from labcore.jobs import Counts, Jobs


class PhaseLoop:
    """One simulated run. Cost: O(1) a step, admission, departure and preemption. Given."""

    def __init__(self, jobs: Jobs, counts: Counts) -> None:
        self.jobs, self.counts = jobs, counts
        self.free = jobs.limits.num_blocks
        self.waiting = jobs.accepted[::-1]  # the head comes last
        self.stored = jobs.prompts.copy()  # the tokens with which each came in, or was sent back
        blocks = [jobs.room] * 2
        if jobs.room is None:
            tokens = np.array([jobs.prompts, jobs.lengths], dtype=np.int64)
            blocks = blocks_needed(tokens, jobs.limits.block_size).tolist()
        self.needs, self.held_at_end = blocks  # for so many tokens, and for all
        self.leads: dict[int, int] = {}  # the running sequences in order of admission
        self.phases = [0] * jobs.limits.block_size  # how many have lead k modulo block_size
        self.ends: dict[int, list[int]] = {}  # step: those that may leave at its end

    def run(self) -> None:
        """Run to the end; fills the counts."""
        phases, ends, leads = self.phases, self.ends, self.leads
        block_size = self.jobs.limits.block_size
        step, max_steps = 0, self.jobs.max_steps
        ends[max_steps] = []  # nobody leaves then, but no search for the next event goes on longer
        self.admit(step)
        while leads:
            first, free = step, self.free
            while (demand := phases[-step % block_size]) <= free and step not in ends:
                free -= demand
                step += 1
            if demand > free:
                if step > first:
                    self.count(first, step)
                self.free, first = free, step
                self.preempt(step)
                if not leads:  # the last one has ended for want of a block
                    self.admit(step)
                    continue
                free, demand = self.free, phases[-step % block_size]
            self.count(first, step + 1)
            self.free = free - demand
            if step in ends:
                self.leave(step)
            step += 1
            if step > max_steps:
                raise RuntimeError(f"a run that should end did not, in {max_steps:,} steps")
            self.admit(step)

    def admit(self, step: int) -> None:
        """Let in the head of the queue while its blocks, and the watermark's, are free."""
        jobs, waiting, leads, needs = self.jobs, self.waiting, self.leads, self.needs
        block_size, headroom = jobs.limits.block_size, jobs.limits.headroom
        while waiting:
            i = waiting[-1]
            if self.free - needs[i] < headroom and leads:  # `has_room`, written out
                break
            waiting.pop()
            self.free -= needs[i]
            leads[i] = lead = self.stored[i] - step
            if jobs.room is None:
                self.phases[lead % block_size] += 1
            self.ends.setdefault(jobs.lengths[i] - 1 - lead, []).append(i)
            if self.counts.history:
                self.counts.history.admitted.append((step, i))

    def preempt(self, step: int) -> None:
        """Send the newest away until the rest finds the blocks that this step needs."""
        jobs, counts, phases = self.jobs, self.counts, self.phases
        block_size = jobs.limits.block_size
        while phases[-step % block_size] > self.free:
            i, lead = self.leads.popitem()
            tokens = step + lead
            phases[lead % block_size] -= 1
            self.needs[i] = jobs.blocks(i, tokens)
            self.free += self.needs[i]
            if not self.leads:  # alone, and still no block: there is nobody to wait for
                counts.ended_early[i] = tokens
                break
            counts.preemptions += 1
            counts.empty_preemptions += tokens == self.stored[i]
            self.stored[i] = tokens
            self.waiting.append(i)
            if counts.history:
                counts.history.victims.append((step, i))

    def leave(self, step: int) -> None:
        """Free the blocks of those that have reached their length."""
        jobs, leads, block_size = self.jobs, self.leads, self.jobs.limits.block_size
        for i in self.ends.pop(step):
            lead = jobs.lengths[i] - 1 - step
            if leads.get(i) == lead:  # else it was preempted meanwhile, and ends later
                del leads[i]
                self.free += self.held_at_end[i]
                self.counts.finished += 1
                if jobs.room is None:
                    self.phases[lead % block_size] -= 1

    def count(self, first: int, end: int) -> None:
        """Count the steps from one to before another, in which the same sequences run."""
        running, waiting, free = len(self.leads), len(self.waiting), self.free
        self.counts.measure(running, waiting, end - first)
        if self.counts.history:
            leads = sum(self.leads.values())
            for step in range(first, end):
                free -= self.phases[-step % self.jobs.limits.block_size]
                stored = leads + (step + 1) * running
                self.counts.record(self.jobs, running, waiting, free, stored)
