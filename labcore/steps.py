"""The plain way through a simulation: step by step, sequence by sequence, any victim.

One step is, in this order:

1. Admit from the head of the queue while it fits; the head blocks the rest.
2. Each running sequence, in order of admission, makes room for one more token. While none is free
   a victim is preempted: it gives its blocks back, keeps its tokens, and waits at the head of the
   queue.
3. Every sequence that still runs stores one token.
4. Measure. Then those that have reached their length leave.

A sequence that is alone and finds no block ends as refused, and the next is let in within the same
step: in every step somebody runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from labcore.admission import Limits, Policy, Resident, has_room
from labcore.blocks import blocks_needed

Victim = Callable[[Sequence[Resident]], Resident]


@dataclass
class History:
    """What happened in each step, for plots and for comparing two runs. Given.

    The lists hold one entry a step, taken after tokens are stored and before sequences leave:
    requests that run, that wait, that have finished or were refused so far; free blocks; tokens
    stored. `admitted` and `victims` hold (step, request) pairs.
    """

    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    victims: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Counts:
    """What a loop counts while it runs. Given."""

    steps: int = 0
    finished: int = 0
    preemptions: int = 0
    empty_preemptions: int = 0
    waiting_steps: int = 0  # the steps in which a request waits
    waiting_residents: int = 0  # the running sequences, summed over those steps
    peak_resident: int = 0
    ended_early: dict[int, int] = field(default_factory=dict)  # alone and refused: tokens stored
    history: History | None = None

    def record(self, jobs: "Jobs", running: int, waiting: int, free: int, stored: int) -> None:
        """Write one step of the history, if one is kept."""
        if history := self.history:
            refused = len(jobs.prompts) - len(jobs.accepted) + len(self.ended_early)
            history.running.append(running)
            history.waiting.append(waiting)
            history.finished.append(self.finished)
            history.refused.append(refused)
            history.free.append(free)
            history.stored.append(stored)

    def measure(self, running: int, waiting: int, steps: int = 1) -> None:
        """Count steps, one or more, in which the same sequences run."""
        self.steps += steps
        if waiting:
            self.waiting_steps += steps
            self.waiting_residents += steps * running
        if running > self.peak_resident:
            self.peak_resident = running


@dataclass(frozen=True)
class Jobs:
    """The requests of a run as plain lists, and which of them may come in at all. Given.

    `prompts` and `lengths` hold tokens by request; a sequence ends at its length. `accepted` are
    the requests that were not refused. `room` holds the blocks that a reserving policy sets aside
    for each request; it is None where blocks are taken as tokens are stored.
    """

    policy: Policy
    limits: Limits
    prompts: list[int]
    lengths: list[int]
    accepted: list[int]
    room: list[int] | None

    @property
    def max_steps(self) -> int:
        """More steps than any run can take: each stores a token, or ends with a refusal."""
        tokens = sum(self.lengths[i] - self.prompts[i] for i in self.accepted)
        return max(tokens, 0) + len(self.accepted) + 1

    def blocks_of(self, tokens: list[int]) -> list[int]:
        """`blocks` for all requests at once, request i with tokens[i] stored. O(requests)."""
        if self.room is not None:
            return self.room.copy()
        return blocks_needed(np.array(tokens, dtype=np.int64), self.limits.block_size).tolist()

    def blocks(self, i: int, tokens: int) -> int:
        """The blocks that request `i` holds while it runs with `tokens` stored. O(1)."""
        return blocks_needed(tokens, self.limits.block_size) if self.room is None else self.room[i]


class StepLoop:
    """One simulated run. Cost: O(running) a step, and what the victim's rule costs. Given."""

    def __init__(self, jobs: Jobs, counts: Counts, victim: Victim) -> None:
        """Everything waits; nothing runs."""
        self.jobs, self.counts, self.victim = jobs, counts, victim
        self.free = jobs.limits.num_blocks
        prompts = jobs.prompts
        self.waiting = deque(Resident(i, prompts[i], prompts[i]) for i in jobs.accepted)
        self.running: list[Resident] = []
        self.blocks: dict[int, int] = {}  # what each running request holds
        self.admitted_with: dict[int, int] = {}  # the tokens it had when it came in

    def run(self) -> None:
        """Run to the end; fills the counts."""
        max_steps = self.jobs.max_steps
        while self.waiting or self.running:
            if self.counts.steps >= max_steps:
                raise RuntimeError(f"a run that should end did not, in {max_steps:,} steps")
            self.admit()
            for sequence in self.running.copy():
                if sequence.index in self.blocks:  # else it was preempted a moment ago
                    self.make_room(sequence)
            if not self.running:  # the last one has ended for want of a block: let the next one in
                continue
            for sequence in self.running:
                sequence.stored += 1
            running, waiting = len(self.running), len(self.waiting)
            stored = sum(sequence.stored for sequence in self.running)
            self.counts.record(self.jobs, running, waiting, self.free, stored)
            self.counts.measure(running, waiting)
            for sequence in self.running.copy():
                if sequence.stored == self.jobs.lengths[sequence.index]:
                    self.leave(sequence)
                    self.counts.finished += 1

    def admit(self) -> None:
        """Let in the head of the queue while there is room for it."""
        while self.waiting:
            head, limits = self.waiting[0], self.jobs.limits
            needed = self.jobs.blocks(head.index, head.stored)
            if not has_room(needed, self.free, len(self.running), limits):
                break
            self.running.append(self.waiting.popleft())
            self.free -= needed
            self.blocks[head.index] = needed
            self.admitted_with[head.index] = head.stored
            if self.counts.history:
                self.counts.history.admitted.append((self.counts.steps, head.index))

    def make_room(self, sequence: Resident) -> None:
        """Take the block that one more token needs, if it needs one; preempt while none is free."""
        i = sequence.index
        needed = self.jobs.blocks(i, sequence.stored + 1) - self.blocks[i]
        while needed > self.free:
            if len(self.running) == 1:  # alone, and still no block: there is nobody to wait for
                self.counts.ended_early[i] = sequence.stored
                self.leave(sequence)
                return
            victim = self.victim(tuple(self.running))
            if not any(victim is other for other in self.running):
                raise ValueError(
                    f"a victim is one of the {len(self.running)} that run, got {victim!r}"
                )
            self.preempt(victim)
            if victim is sequence:
                return
        self.free -= needed
        self.blocks[i] += needed

    def preempt(self, victim: Resident) -> None:
        """Send a running sequence back to the head of the queue; it keeps its tokens."""
        counts, i = self.counts, victim.index
        counts.preemptions += 1
        counts.empty_preemptions += victim.stored == self.admitted_with[i]
        if counts.history:
            counts.history.victims.append((counts.steps, i))
        self.leave(victim)
        self.waiting.appendleft(victim)

    def leave(self, sequence: Resident) -> None:
        """Give back all blocks of a running sequence."""
        self.running.remove(sequence)
        self.free += self.blocks.pop(sequence.index)
