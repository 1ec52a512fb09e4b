"""The fast way through a simulation: it touches a sequence only when something happens to it.

Every running sequence stores one token a step. One that came in at step a with s tokens has
t + (s - a) of them at the start of step t; call s - a its lead. It needs a block in the steps in
which t + lead is a multiple of the block size. So all that has to be known of the running
sequences is how many there are of each lead modulo the block size: one of these numbers is the
demand of a step. What is left are events: admissions, departures, and steps whose demand passes
the free blocks.

The victim is the newest; for other victims see `labcore.steps`, whose results are the same.
"""

from labcore.jobs import Counts, Jobs


class PhaseLoop:
    """One simulated run, the newest sequence the victim. Given.

    Cost: O(1) a step and O(1) for each admission, departure and preemption.
    """

    def __init__(self, jobs: Jobs, counts: Counts) -> None:
        """Everything waits; nothing runs."""
        self.jobs, self.counts = jobs, counts
        self.free = jobs.limits.num_blocks
        self.never_ran = iter(jobs.accepted)
        self.head = next(self.never_ran, None)
        self.preempted: list[int] = []  # they go before those that never ran; the head comes last
        self.num_waiting = len(jobs.accepted)
        self.stored = jobs.prompts.copy()  # the tokens with which each came in, or was sent back
        self.needs = jobs.blocks_of(jobs.prompts)  # the blocks that they take
        self.held_at_end = jobs.blocks_of(jobs.lengths)
        self.leads: dict[int, int] = {}  # the running sequences in order of admission
        self.phases = [0] * jobs.limits.block_size  # how many have lead k modulo block_size
        self.ends: dict[int, list[int]] = {}  # step: those that may leave at its end

    def run(self) -> None:
        """Run to the end; fills the counts."""
        phases, ends, block_size = self.phases, self.ends, self.jobs.limits.block_size
        counts, leads = self.counts, self.leads
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
                    counts.measure(len(leads), self.num_waiting, step - first)
                    if counts.history:
                        self.record(first, step)
                self.free, first = free, step
                self.preempt(step)
                if not leads:  # the last one has ended for want of a block
                    self.admit(step)
                    continue
                free, demand = self.free, phases[-step % block_size]
            counts.measure(len(leads), self.num_waiting, step + 1 - first)
            if counts.history:
                self.record(first, step + 1)
            self.free = free - demand
            if step in ends:
                self.leave(step)
            step += 1
            if step > max_steps:
                raise RuntimeError(f"a run that should end did not, in {max_steps:,} steps")
            self.admit(step)

    def admit(self, step: int) -> None:
        """Let in the head of the queue while its blocks, and the watermark's, are free."""
        jobs, preempted, leads, needs = self.jobs, self.preempted, self.leads, self.needs
        block_size, headroom = jobs.limits.block_size, jobs.limits.headroom
        while self.num_waiting:
            i = preempted[-1] if preempted else self.head
            if self.free - needs[i] < headroom and leads:  # `has_room`, written out
                break
            if preempted:
                preempted.pop()
            else:
                self.head = next(self.never_ran, None)
            self.num_waiting -= 1
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
            self.preempted.append(i)
            self.num_waiting += 1
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

    def record(self, first: int, end: int) -> None:
        """Write steps of the history. O(running) for each, the only place that is."""
        running, free, leads = len(self.leads), self.free, sum(self.leads.values())
        for step in range(first, end):
            free -= self.phases[-step % self.jobs.limits.block_size]
            stored = leads + (step + 1) * running
            self.counts.record(self.jobs, running, self.num_waiting, free, stored)
