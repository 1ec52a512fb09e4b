"""The fast way through a simulation: it touches a sequence only when something happens to it.

Every running sequence stores one token a step. One that came in at step a with s tokens has t + (s
- a) of them at the start of step t; call s - a its lead. It needs a block in the steps in which t
+ lead is a multiple of the block size. So all that has to be known of the running sequences is how
many there are of each lead modulo the block size: one of these numbers is the demand of a step.
What is left are events: admissions, departures, and steps whose demand passes the free blocks.

The victim is the newest; for other victims see `labcore.steps`, whose results are the same.
"""

from labcore.steps import Counts, Jobs


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
        self.leads: dict[int, int] = {}  # the running sequences in order of admission
        self.phases = [0] * jobs.limits.block_size  # how many have lead k modulo block_size
        self.ends: dict[int, list[int]] = {}  # step: those that may leave at its end

    def run(self) -> None:
        """Run to the end; fills the counts."""
        counts, leads, phases, ends = self.counts, self.leads, self.phases, self.ends
        block_size, changed, max_steps = self.jobs.limits.block_size, True, self.jobs.max_steps
        for step in range(max_steps):
            if changed:  # until something leaves, the free blocks only become fewer
                self.admit(step)
                if not leads:
                    counts.steps = step
                    return
            demand = phases[-step % block_size]
            changed = demand > self.free
            if changed:
                demand = self.preempt(step, demand)
            self.free -= demand
            if self.num_waiting:
                counts.waiting_steps += 1
                counts.waiting_residents += len(leads)
            if len(leads) > counts.peak_resident:
                counts.peak_resident = len(leads)
            if counts.history:
                self.record(step)
            if step in ends:
                self.leave(step)
                changed = True
        raise RuntimeError(f"a run that should end did not, in {max_steps:,} steps")

    def admit(self, step: int) -> None:
        """Let in the head of the queue while its blocks, and the watermark's, are free."""
        jobs, stored, preempted, history = (
            self.jobs,
            self.stored,
            self.preempted,
            self.counts.history,
        )
        block_size, headroom = jobs.limits.block_size, jobs.limits.headroom
        while self.num_waiting:
            i = preempted[-1] if preempted else self.head
            needed = jobs.blocks(i, stored[i])
            if self.free - needed < headroom and self.leads:  # `has_room`, written out for speed
                break
            if preempted:
                preempted.pop()
            else:
                self.head = next(self.never_ran, None)
            self.num_waiting -= 1
            self.free -= needed
            self.leads[i] = lead = stored[i] - step
            if jobs.room is None:
                self.phases[lead % block_size] += 1
            self.ends.setdefault(jobs.lengths[i] - 1 - lead, []).append(i)
            if history:
                history.admitted.append((step, i))

    def preempt(self, step: int, demand: int) -> int:
        """Send the newest away until the rest finds its blocks; return how many the rest needs."""
        jobs, counts, block_size = self.jobs, self.counts, self.jobs.limits.block_size
        while demand > self.free:
            i, lead = self.leads.popitem()
            tokens = step + lead
            self.phases[lead % block_size] -= 1
            demand -= tokens % block_size == 0
            self.free += jobs.blocks(i, tokens)
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
        return demand

    def leave(self, step: int) -> None:
        """Free the blocks of those that have reached their length."""
        jobs, leads = self.jobs, self.leads
        for i in self.ends.pop(step):
            lead = jobs.lengths[i] - 1 - step
            if leads.get(i) == lead:  # else it was preempted meanwhile, and ends later
                del leads[i]
                self.free += jobs.blocks(i, jobs.lengths[i])
                if jobs.room is None:
                    self.phases[lead % jobs.limits.block_size] -= 1

    def record(self, step: int) -> None:
        """Write one step of the history. O(running), the only place that is."""
        history, running = self.counts.history, len(self.leads)
        history.running.append(running)
        history.waiting.append(self.num_waiting)
        history.free.append(self.free)
        history.stored.append(sum(self.leads.values()) + (step + 1) * running)
