"""How long things take: a step, a prompt, and bringing a victim back."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from numbers import Integral


@dataclass(frozen=True)
class ConstantStep:
    """Every step takes `seconds`, whatever runs in it. Built in: ch08b"""

    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < inf:
            raise ValueError(f"a step takes a finite time, at least 0, got {self.seconds} seconds")

    def __call__(self, stored: int, computed: int) -> float:
        """The same for any number of tokens."""
        return self.seconds


@dataclass(frozen=True)
class Roofline:
    """A step takes as long as the slower of its two halves: reading memory, or multiplying.

    Left out: attention's own arithmetic, and that neither half reaches its peak.
    Source: Williams et al. 2009, "Roofline". Built in: ch08b
    """

    weight_bytes: float  # read once a step
    token_bytes: float  # read for each stored token
    bandwidth: float  # bytes a second
    flops: float  # for each computed token
    flops_per_second: float
    overhead: float = 0.0  # seconds

    def __post_init__(self) -> None:
        amounts = self.weight_bytes, self.token_bytes, self.flops, self.overhead
        rates = self.bandwidth, self.flops_per_second
        if not (all(0 <= amount < inf for amount in amounts) and all(rate > 0 for rate in rates)):
            raise ValueError(f"rates are above 0, the rest is finite and not below: {self}")

    def __call__(self, stored: int, computed: int) -> float:
        """Seconds of a step that reads `stored` tokens and computes `computed`."""
        memory = (self.weight_bytes + self.token_bytes * stored) / self.bandwidth
        return max(memory, self.flops * computed / self.flops_per_second) + self.overhead


@dataclass(frozen=True)
class Recovery:
    """What it takes to bring a victim back: compute its tokens again, or copy its blocks.

    Who does not fit on the host is computed again. Left out: copies during steps. Built in: ch08b
    """

    prefill_rate: float = inf  # tokens a second
    host_blocks: int = 0  # room for victims in the host's memory
    block_seconds: float = 0.0  # to copy a block there, and again to copy it back

    def __post_init__(self) -> None:
        if not (self.prefill_rate > 0 and self.host_blocks >= 0 and 0 <= self.block_seconds < inf):
            raise ValueError(
                f"a rate is above 0, a number of blocks and a time are not below: {self}"
            )


@dataclass(frozen=True)
class Costs:
    """What a run is charged in seconds; `step(stored, computed)` gives those of a step. Given.

    With a `token_budget`, a step computes so many tokens: one for each sequence that has its prompt
    and, with what is left, pieces of prompts and of victims (chunked prefill). Without, prompts are
    free, and a victim costs its `recovery`. Left out: scheduler, sampling and network.
    """

    step: Callable[[int, int], float] = ConstantStep()
    recovery: Recovery = Recovery()
    token_budget: int | None = None

    def __post_init__(self) -> None:
        budget = self.token_budget
        if budget is not None and not (isinstance(budget, Integral) and budget >= 1):
            raise ValueError(f"a token budget is a whole number, at least 1, got {budget!r}")
