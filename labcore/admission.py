"""Who may come in, and who must go: the decisions of a server with a fixed pool of blocks.

A policy sees what a server sees: the tokens of the prompt, the tokens stored so far, the limit
that the request declared and the maximum context. It never sees how long the answer will be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from math import ceil

from labcore.blocks import blocks_needed


class Admission(Enum):
    """The answer to a request: it comes in, it waits, or it can never be served. Built in: ch08"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True)
class Limits:
    """What a server knows of its memory and of its clients. Built in: ch08

    `num_blocks` blocks of `block_size` tokens; `declared`, the output limit that each request
    states, and `max_context`, the most tokens a sequence can have; `watermark`, the fraction of
    the pool that an admission must leave free.
    """

    num_blocks: int
    block_size: int
    declared: int = 512
    max_context: int = 1_024
    watermark: float = 0.0

    def __post_init__(self) -> None:
        """Refuse settings under which nothing could be served."""
        least = {"num_blocks": 1, "block_size": 1, "declared": 0, "max_context": 2}
        for name, smallest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ValueError(f"{name} is an int of at least {smallest}, got {value!r}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"a watermark is at least 0 and below 1, got {self.watermark}")

    @cached_property
    def headroom(self) -> int:
        """The watermark in whole blocks, rounded up and exact: 0.07 of 100 blocks is 7."""
        return ceil(Fraction(str(self.watermark)) * self.num_blocks)


@dataclass(frozen=True)
class Policy:
    """A rule for memory: how much to set aside when a request comes in, and whether it grows.

    `set_aside(prompt, stored, limits)` is the number of tokens for which room is taken when a
    request comes in, or comes back with `stored` tokens. Where `grows` is true, more blocks are
    taken one by one as tokens are stored; else the room stays as it is, and a sequence that
    outgrows it stores on, which is an overrun. A longer prompt never needs less room.
    Built in: ch07
    """

    name: str
    set_aside: Callable
    grows: bool


def room_for_maximum(prompt: int, stored: int, limits: Limits) -> int:
    """Room for the longest sequence there can be. Built in: ch07"""
    return limits.max_context


def room_for_declared(prompt: int, stored: int, limits: Limits) -> int:
    """Room for the prompt and the output limit that the request declares. Built in: ch07"""
    return min(prompt + limits.declared, limits.max_context)


def room_for_stored(prompt: int, stored: int, limits: Limits) -> int:
    """Room for what is stored when the request comes in, or comes back. Built in: ch07"""
    return stored


#: Servers before Orca, and Orca's Max in the PagedAttention paper. Left out: its buddy allocator.
#: Built in: ch07
reserve_max = Policy("reserve_max", room_for_maximum, grows=False)
#: TensorRT-LLM's default (no request is ever evicted). Left out: its rounding and chunked prefill.
#: Built in: ch07
reserve_limit = Policy("reserve_limit", room_for_declared, grows=False)
#: vLLM: v0 with a watermark of 0.01, v1 with none, and one again since June 2026 (PR #44594).
#: Left out: prefix sharing, chunked prefill, the limit on tokens a step. Built in: ch07
paged = Policy("paged", room_for_stored, grows=True)


def submit(policy: Policy, prompt: int, limits: Limits) -> str | None:
    """Why a request can never be served under a policy, with the numbers, or None. O(1).

    A request may need min(prompt + declared, max_context) tokens; if those, or what the policy sets
    aside, take more blocks than the pool has, it would wait for ever. Built in: ch08
    """
    if prompt >= limits.max_context:
        return f"a prompt of {prompt} tokens leaves no room in a context of {limits.max_context}"
    tokens = max(
        room_for_declared(prompt, prompt, limits), policy.set_aside(prompt, prompt, limits)
    )
    needed = blocks_needed(tokens, limits.block_size)
    if needed > limits.num_blocks:
        return f"needs {needed} blocks, the pool has {limits.num_blocks}"
    return None


def has_room(needed: int, num_free: int, num_running: int, limits: Limits) -> bool:
    """Whether a request that takes `needed` blocks may come in now.

    Afterwards at least the watermark's blocks must be free. That headroom is for the growth of what
    runs already, so it is waived when nothing runs. Built in: ch08
    """
    headroom = limits.headroom if num_running else 0
    return num_free - needed >= headroom


def admit(
    policy: Policy, prompt: int, stored: int, num_free: int, num_running: int, limits: Limits
) -> Admission:
    """The answer to a request that has `stored` tokens (its prompt, or more if it was preempted).

    Never on part of what it needs: a preempted sequence comes back only when all of it fits.
    Built in: ch08
    """
    if submit(policy, prompt, limits) is not None:
        return Admission.NEVER
    needed = blocks_needed(policy.set_aside(prompt, stored, limits), limits.block_size)
    return Admission.OK if has_room(needed, num_free, num_running, limits) else Admission.LATER


@dataclass(slots=True)
class Resident:
    """A running sequence as a policy sees it: its place in the order of arrival, its tokens.

    Given.
    """

    index: int
    prompt: int
    stored: int

    @property
    def generated(self) -> int:
        """Tokens of the answer that are stored."""
        return self.stored - self.prompt


def newest(running: Sequence[Resident]) -> Resident:
    """The victim is the sequence that was admitted last. O(1). vLLM v1's rule. Built in: ch07

    `running` is in order of admission. The oldest is never chosen while another one runs, so it
    always ends: no run can go on for ever.
    """
    return running[-1]


def fewest_generated(running: Sequence[Resident]) -> Resident:
    """The victim has the fewest generated tokens; among equals the later arrival goes. O(n).

    Built in: ch08
    """
    return min(running, key=lambda sequence: (sequence.generated, -sequence.index))
