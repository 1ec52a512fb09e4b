"""What a simulated run is given, what it counts, and what it can write down of each step."""

from dataclasses import dataclass, field

from labcore.admission import Limits, Policy, group_blocks


@dataclass
class History:
    """What there is in each step, after tokens are stored and before sequences leave. Given."""

    running: list[int] = field(default_factory=list)  # requests
    waiting: list[int] = field(default_factory=list)  # or have yet to come
    finished: list[int] = field(default_factory=list)  # so far
    refused: list[int] = field(default_factory=list)  # so far
    free: list[int] = field(default_factory=list)  # blocks
    stored: list[int] = field(default_factory=list)  # tokens
    admitted: list[tuple[int, int]] = field(default_factory=list)  # (step, request)
    victims: list[tuple[int, int]] = field(default_factory=list)  # (step, request)

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
    seconds: float | None = None
    recomputed_tokens: int | None = None
    swaps: int | None = None
    first_token: dict[int, float] | None = None
    stored: int | None = None  # tokens, summed over all steps
    held_blocks: int = 0  # summed over all steps
    waiting_free: int = 0  # free blocks, summed over the steps in which a request waits

    def measure(self, running: int, waiting: int, steps: int = 1) -> None:
        """Count steps, one or more, in which the same sequences run."""
        self.steps += steps
        if waiting:
            self.waiting_steps += steps
            self.waiting_residents += steps * running
        if running > self.peak_resident:
            self.peak_resident = running

    def record(self, jobs: "Jobs", running: int, waiting: int, free: int, stored: int) -> None:
        """Write one step of the history, if one is kept."""
        if self.history:
            refused = len(jobs.prompts) - len(jobs.accepted) + len(self.ended_early)
            places = {"running": running, "waiting": waiting, "finished": self.finished}
            self.history.record(**places, refused=refused, free=free, stored=stored)


@dataclass(frozen=True)
class Jobs:
    """The requests of a run as plain lists, and which of them may come in at all. Given."""

    policy: Policy
    limits: Limits
    prompts: list[int]  # tokens
    lengths: list[int]  # tokens with which they end
    accepted: list[int]  # the requests that were not refused
    room: list[int] | None  # blocks set aside for each; None where they are taken on demand
    declared: list[int] | None = None  # output limits; None: that of the limits
    arrivals: list[float] | None = None  # seconds; None: all wait from the start
    samples: int = 1  # sequences of a request, which share their prompt's blocks

    @property
    def max_steps(self) -> int:
        """More steps than any run can take: each stores a token, or ends with a refusal."""
        tokens = sum(self.lengths[i] - self.prompts[i] for i in self.accepted)
        return max(tokens, 0) + len(self.accepted) + 1

    def blocks(self, i: int, tokens: int) -> int:
        """The blocks of request `i` while its sequences have `tokens` stored each. O(1)."""
        if self.room is not None:
            return self.room[i]
        return group_blocks(self.prompts[i], tokens, self.samples, self.limits.block_size)
