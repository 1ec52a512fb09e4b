"""The plain way through a simulation: step by step, sequence by sequence, any rule, any price.

One step is, in this order:

1. Admit from the head of the queue while it may enter; the head blocks the rest.
2. Each running sequence, in order of admission, makes room for one more token. While none is free
   a victim is preempted: it gives its blocks back, keeps its tokens, and waits at the head of the
   queue. Those whose prompt is being computed go first; else two could send each other away for
   ever, and no token be stored.
3. Every sequence that still runs stores one token. Under a token budget only those do whose prompt
   has been computed; what is left of the budget goes to the prompts of the others, in order.
4. Measure. Then those that have reached their length leave.

A sequence that is alone and finds no block ends as refused, and the next is let in within the same
step: in every step somebody runs.
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
    """A request on its way through the step loop. Given.

    `computed` tokens are in the cache; fewer than `stored` while its prompt is computed in pieces.
    It `started` with so many stored, 0 if it never ran; `swapped` blocks lie on the host.
    """

    arrival: float = 0.0
    computed: int = 0
    started: int = 0
    swapped: int = 0


class StepLoop:
    """One simulated run. Cost: O(running) a step, and what the rules cost. Given."""

    def __init__(
        self,
        jobs: Jobs,
        counts: Counts,
        victim: Victim,
        costs: Costs | None = None,
        memory=None,
        charge: float = 0,
    ) -> None:
        """Everything waits; nothing runs. `memory` gives regions: FirstFit or Buddy, or None.

        Each preemption takes `charge` times as long as the step it happens in.
        """
        self.jobs, self.counts, self.victim = jobs, counts, victim
        self.costs, self.memory, self.charge = costs or Costs(), memory, charge
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
        self.calm_since = 0
        self.answer_lengths: list[int] = []

    def run(self) -> None:
        """Run to the end; fills the counts."""
        self.counts.stored, max_steps = 0, self.jobs.max_steps
        if budget := self.costs.token_budget:  # a victim's prompt takes steps once more
            max_steps *= 2 + max(self.jobs.lengths, default=0) // budget
        rounds = charged = 0  # of the loop; preemptions that a step has been charged for
        while self.coming or self.waiting or self.running:
            if rounds >= max_steps:
                raise RuntimeError(f"a run that should end did not, in {max_steps:,} steps")
            rounds += 1
            self.arrive()
            self.admit()
            for sequence in self.running.copy():
                # else it was preempted a moment ago, or has its prompt to compute first
                if sequence.index in self.blocks and sequence.computed == sequence.stored:
                    self.make_room(sequence)
            if self.running:  # else the last one has ended for want of a block: let the next one in
                preemptions = self.counts.preemptions
                self.step(preemptions - charged)
                charged = preemptions

    def arrive(self) -> None:
        """Queue who has come by now; where nobody is there, wait for the next."""
        if self.coming and not self.waiting and not self.running:
            self.counts.seconds = max(self.counts.seconds, self.coming[0].arrival)
        while self.coming and self.coming[0].arrival <= self.counts.seconds:
            self.waiting.append(self.coming.popleft())

    def admit(self) -> None:
        """Let in the head of the queue while there is room for it."""
        while self.waiting:
            head, jobs = self.waiting[0], self.jobs
            needed = jobs.blocks(head.index, head.stored)
            calm_steps = self.counts.steps - self.calm_since
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
            if self.counts.history:
                self.counts.history.admitted.append((self.counts.steps, head.index))

    def fill(self, sequence: Job) -> None:
        """Fill the blocks of a sequence that has come in: from the host, or by computing."""
        recovery = self.costs.recovery
        in_pieces = self.costs.token_budget is not None and not sequence.swapped
        sequence.computed = 0 if in_pieces else sequence.stored
        if sequence.swapped:
            self.counts.seconds += sequence.swapped * recovery.block_seconds
            self.host_free += sequence.swapped
            sequence.swapped = 0
        elif sequence.started:
            self.counts.seconds += self.computed_tokens(sequence) / recovery.prefill_rate

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
        # a block taken ahead and still empty stays behind
        used = self.jobs.blocks(i, victim.stored)
        if whole and used <= self.host_free:
            victim.swapped = used
            self.host_free -= used
            counts.swaps += 1
            counts.seconds += used * self.costs.recovery.block_seconds
        else:
            counts.recomputed_tokens += self.computed_tokens(victim)
        self.calm_since = counts.steps
        self.leave(victim)
        self.waiting.appendleft(victim)

    def computed_tokens(self, sequence: Job) -> int:
        """What it takes to compute a request's tokens: its prompt once, each sample's answer."""
        answer = max(0, sequence.computed - sequence.prompt)
        return sequence.computed + (self.jobs.samples - 1) * answer

    def leave(self, sequence: Job) -> None:
        """Give back all blocks of a running sequence."""
        self.running.remove(sequence)
        self.free += self.blocks.pop(sequence.index)
        if self.memory is not None:
            self.memory.free(self.regions.pop(sequence.index))

    def step(self, preempted: int) -> None:
        """Compute, store, measure; `preempted` sequences have just been sent away."""
        jobs, counts, samples = self.jobs, self.counts, self.jobs.samples
        ready = [s for s in self.running if s.computed == s.stored]
        computed = samples * len(ready) + self.prefill(samples * len(ready))
        for sequence in ready:
            sequence.stored += 1
            sequence.computed += 1
        running, waiting = len(self.running), len(self.waiting)
        stored = sum(jobs.stored(s.index, s.computed) for s in self.running)
        counts.record(jobs, running, waiting + len(self.coming), self.free, stored)
        counts.measure(running, waiting)
        counts.stored += stored
        counts.held_blocks += jobs.limits.num_blocks - self.free
        counts.waiting_free += self.free * (waiting > 0)
        seconds = self.costs.step(stored, computed)
        if not 0 <= seconds < inf:
            raise ValueError(f"a step takes a finite time, at least 0, got {seconds} seconds")
        counts.seconds += seconds * (1 + self.charge * preempted)
        for sequence in self.running.copy():
            if sequence.computed == sequence.stored:
                waited = counts.seconds - sequence.arrival
                counts.first_token.setdefault(sequence.index, waited)
            if sequence.stored == jobs.lengths[sequence.index]:
                insort(self.answer_lengths, sequence.generated)
                self.leave(sequence)
                counts.finished += 1

    def prefill(self, used: int) -> int:
        """Spend what is left of the token budget on prompts; tokens computed."""
        left = start = max(0, (self.costs.token_budget or used) - used)
        for sequence in self.running:
            piece = min(left, sequence.stored - sequence.computed)
            sequence.computed += piece
            left -= piece
        return start - left
