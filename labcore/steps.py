"""The plain way through a simulation: step by step, sequence by sequence, any rule, any price.

One step is, in this order:

1. Admit from the head of the queue while it may enter; the head blocks the rest.
2. Each running sequence, in order of admission, makes room for one more token. While none is free
   a victim goes back to the head of the queue with its tokens, first those whose prompt is being
   computed: else two could send each other away for ever. Who is alone and finds no block ends as
   refused, and the next comes in within the same step: in every step somebody runs.
3. Those whose prompt has been computed store one token; what is left of a token budget goes to the
   prompts of the others, in order.
4. Measure. Then those that have reached their length leave.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from math import inf

from labcore.admission import Resident, Server, Victim, may_enter
from labcore.costs import Costs
from labcore.jobs import Counts, Jobs


@dataclass(slots=True, eq=False)
class Job(Resident):
    """A request on its way through the step loop. Given."""

    arrival: float = 0.0
    computed: int = 0  # tokens in the cache: less than stored while a prompt is computed in pieces
    started: int = 0  # tokens stored when it came in, 0 if it never ran
    swapped: int = 0  # blocks on the host


class StepLoop:
    """One simulated run. Cost: O(running) a step, and what the rules cost. Given.

    `memory`, a FirstFit or Buddy, gives regions. A preemption takes `charge` times its step.
    """

    def __init__(
        self, jobs: Jobs, counts: Counts, victim: Victim, costs=None, memory=None, charge: float = 0
    ) -> None:
        self.jobs, self.counts, self.victim = jobs, counts, victim
        self.costs, self.memory, self.charge = costs or Costs(), memory, charge
        counts.seconds, counts.first_token = 0.0, {}
        counts.recomputed_tokens = counts.swaps = counts.stored = 0
        self.free = jobs.limits.num_blocks
        self.host_free = self.costs.recovery.host_blocks
        declared = jobs.declared or [jobs.limits.declared] * len(jobs.prompts)
        arrivals = jobs.arrivals or [0.0] * len(jobs.prompts)
        self.coming = deque(
            Job(i, jobs.prompts[i], jobs.prompts[i], declared[i], arrivals[i])
            for i in jobs.accepted
        )
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.blocks: dict[int, int] = {}  # what each running request holds
        self.regions: dict[int, int] = {}  # where it lies, in contiguous memory
        self.calm_since = self.uncharged = 0  # the last preemption; those since the last step
        self.answer_lengths: list[int] = []

    def run(self) -> None:
        """Run to the end; fills the counts."""
        max_steps = self.jobs.max_steps
        if budget := self.costs.token_budget:  # a victim's prompt takes steps once more
            max_steps *= 2 + max(self.jobs.lengths, default=0) // budget
        for _ in range(max_steps):
            if self.coming and not self.waiting and not self.running:  # wait for the next one
                self.counts.seconds = max(self.counts.seconds, self.coming[0].arrival)
            while self.coming and self.coming[0].arrival <= self.counts.seconds:
                self.waiting.append(self.coming.popleft())
            self.admit()
            for sequence in self.running.copy():
                # else it was preempted a moment ago, or has its prompt to compute first
                if sequence.index in self.blocks and sequence.computed == sequence.stored:
                    self.make_room(sequence)
            if self.running:  # else the last one has ended for want of a block
                self.step()
            if not (self.coming or self.waiting or self.running):
                return
        raise RuntimeError(f"a run that should end did not, in {max_steps:,} steps")

    def admit(self) -> None:
        """Let in the head of the queue while there is room for it."""
        while self.waiting:
            head, jobs, counts = self.waiting[0], self.jobs, self.counts
            needed = jobs.blocks(head.index, head.stored)
            calm_steps = counts.steps - self.calm_since
            server = Server(self.running, self.free, calm_steps, self.answer_lengths)
            if not may_enter(jobs.policy, head, needed, server, jobs.limits):
                break
            if self.memory is not None:
                region = self.memory.allocate(needed * jobs.limits.block_size)
                if region is None:
                    break
                self.regions[head.index] = region
            self.running.append(self.waiting.popleft())
            self.free -= needed
            self.blocks[head.index] = needed
            self.fill(head)
            head.started = head.stored
            if counts.history:
                counts.history.admitted.append((counts.steps, head.index))

    def fill(self, sequence: Job) -> None:
        """Fill the blocks of a sequence that has come in: from the host, or by computing."""
        recovery = self.costs.recovery
        sequence.computed = sequence.stored
        if sequence.swapped:
            self.counts.seconds += sequence.swapped * recovery.block_seconds
            self.host_free += sequence.swapped
            sequence.swapped = 0
        elif self.costs.token_budget is not None:  # in pieces
            sequence.computed = 0
        elif sequence.started:
            tokens = self.total(sequence, sequence.prompt)
            self.counts.seconds += tokens / recovery.prefill_rate

    def make_room(self, sequence: Job) -> None:
        """Take the block that one more token needs, if it needs one; preempt while none is free."""
        i, running = sequence.index, self.running
        needed = self.jobs.blocks(i, sequence.stored + 1) - self.blocks[i]
        while needed > self.free:
            if len(running) == 1:  # alone, and still no block: there is nobody to wait for
                self.counts.ended_early[i] = sequence.stored
                self.leave(sequence)
                return
            unready = [s for s in running if s.computed < s.stored]
            victim = self.victim(tuple(unready or running))
            if victim not in running:
                raise ValueError(f"a victim is one of the {len(running)} that run, got {victim!r}")
            self.preempt(victim)
            if victim is sequence:
                return
        self.free -= needed
        self.blocks[i] += needed

    def preempt(self, victim: Job) -> None:
        """Send a running sequence back to the head of the queue; it keeps its tokens."""
        counts, i = self.counts, victim.index
        counts.preemptions += 1
        counts.empty_preemptions += victim.stored == victim.started
        if counts.history:
            counts.history.victims.append((counts.steps, i))
        whole = victim.computed == victim.stored and self.jobs.samples == 1
        used = self.jobs.blocks(i, victim.stored)  # one taken ahead and still empty stays behind
        if whole and used <= self.host_free:
            victim.swapped = used
            self.host_free -= used
            counts.swaps += 1
            counts.seconds += used * self.costs.recovery.block_seconds
        else:
            counts.recomputed_tokens += self.total(victim, victim.prompt)
        self.calm_since = counts.steps
        self.uncharged += 1
        self.leave(victim)
        self.waiting.appendleft(victim)

    def total(self, sequence: Job, shared: int) -> int:
        """The computed tokens of all samples; `shared` ones, of the prompt, count once."""
        own = sequence.computed - shared if sequence.computed > sequence.prompt else 0
        return sequence.computed + (self.jobs.samples - 1) * own

    def leave(self, sequence: Job) -> None:
        """Give back all blocks of a running sequence."""
        self.running.remove(sequence)
        self.free += self.blocks.pop(sequence.index)
        if self.memory is not None:
            self.memory.free(self.regions.pop(sequence.index))

    def step(self) -> None:
        """Compute, store, measure; let go who is done."""
        counts, limits, samples = self.counts, self.jobs.limits, self.jobs.samples
        ready = [s for s in self.running if s.computed == s.stored]
        computed = samples * len(ready)
        left = max(0, (self.costs.token_budget or computed) - computed)
        for sequence in self.running:
            piece = min(left, sequence.stored - sequence.computed)
            sequence.computed += piece
            computed += piece
            left -= piece
        for sequence in ready:
            sequence.stored += 1
            sequence.computed += 1
        block_size = limits.block_size
        stored = sum(self.total(s, s.prompt // block_size * block_size) for s in self.running)
        running, waiting = len(self.running), len(self.waiting)
        counts.record(self.jobs, running, waiting + len(self.coming), self.free, stored)
        counts.measure(running, waiting)
        counts.stored += stored
        counts.held_blocks += limits.num_blocks - self.free
        counts.waiting_free += self.free * (waiting > 0)
        seconds = self.costs.step(stored, computed)
        if not 0 <= seconds < inf:
            raise ValueError(f"a step takes a finite time, at least 0, got {seconds} seconds")
        counts.seconds += seconds * (1 + self.charge * self.uncharged)
        self.uncharged = 0
        for sequence in self.running.copy():
            if sequence.computed == sequence.stored:
                waited = counts.seconds - sequence.arrival
                counts.first_token.setdefault(sequence.index, waited)
            if sequence.stored == self.jobs.lengths[sequence.index]:
                insort(self.answer_lengths, sequence.generated)
                self.leave(sequence)
                counts.finished += 1
