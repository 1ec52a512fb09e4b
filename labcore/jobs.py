"""What a simulated run is given, what it counts, and what it can write down of each step."""

from dataclasses import dataclass, field

import numpy as np

from labcore.admission import Limits, Policy, group_blocks, group_tokens
from labcore.blocks import blocks_needed


@dataclass
class History:
    """What happened in each step, for plots and for comparing two runs. Given.

    The lists hold one entry a step, taken after tokens are stored and before sequences leave:
    requests that run, that wait or have yet to come, that have finished or were refused so far;
    free blocks; tokens stored. `admitted` and `victims` hold (step, request) pairs.
    """

    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    victims: list[tuple[int, int]] = field(default_factory=list)

    def record(self, **counts: int) -> None:
        """Write one step: a number for each of the six lists."""
        for name, count in counts.items():
            getattr(self, name).append(count)


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
    # by the step loop only
    seconds: float = 0.0
    recomputed_tokens: int = 0  # computed and lost by victims that were not swapped
    swaps: int = 0
    stored: int | None = None  # tokens, summed over all steps
    held_blocks: int = 0  # summed over all steps
    waiting_free: int = 0  # free blocks, summed over the steps in which a request waits
    first_token: dict[int, float] = field(default_factory=dict)  # seconds after its arrival

    def record(self, jobs: "Jobs", running: int, waiting: int, free: int, stored: int) -> None:
        """Write one step of the history, if one is kept."""
        if self.history:
            self.history.record(
                running=running,
                waiting=waiting,
                finished=self.finished,
                refused=len(jobs.prompts) - len(jobs.accepted) + len(self.ended_early),
                free=free,
                stored=stored,
            )

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
    for each request; it is None where blocks are taken as tokens are stored. `declared` holds each
    request's output limit, `arrivals` its seconds; where that is None all wait from the start.
    Each request is a group of `samples` sequences that share their prompt's blocks.
    """

    policy: Policy
    limits: Limits
    prompts: list[int]
    lengths: list[int]
    accepted: list[int]
    room: list[int] | None
    declared: list[int] | None = None
    arrivals: list[float] | None = None
    samples: int = 1

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
        """The blocks that request `i` holds while its sequences have `tokens` stored each. O(1)."""
        if self.room is not None:
            return self.room[i]
        return group_blocks(self.prompts[i], tokens, self.samples, self.limits.block_size)

    def stored(self, i: int, tokens: int) -> int:
        """The slots that hold a token then: shared ones count once. O(1)."""
        return group_tokens(self.prompts[i], tokens, self.samples, self.limits.block_size)
