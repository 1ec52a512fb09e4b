"""Who may come in, and who must go: the decisions of a server with a fixed pool of blocks.

A rule sees what a server sees; how long an answer will be, only `oracle` knows.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from math import ceil

import numpy as np

from labcore.blocks import blocks_needed


class Admission(Enum):
    """The answer to a request: it comes in, it waits, or it can never be served. Built in: ch08a"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True)
class Limits:
    """What a server knows of its memory and of its clients. Built in: ch08a"""

    num_blocks: int
    block_size: int  # tokens
    declared: int = 512  # the output limit that each request states
    max_context: int = 1_024  # the most tokens that a sequence can have
    watermark: float = 0.0  # the fraction of the pool that an admission must leave free

    def __post_init__(self) -> None:
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
    """How much room to take when a request comes in, and whether it grows. Built in: ch07

    If it does not, a sequence that outgrows its room stores on: an overrun.
    """

    name: str
    set_aside: Callable  # (prompt, stored, limits) -> tokens, when it comes in, or comes back
    grows: bool  # blocks are taken as tokens are stored
    admits: Callable | None = None  # (request, server, limits) -> bool, instead of the watermark


def room_for_maximum(prompt: int, stored: int, limits: Limits) -> int:
    """Room for the longest sequence there can be. Built in: ch07"""
    return limits.max_context


def room_for_declared(prompt: int, stored: int, limits: Limits) -> int:
    """Room for the prompt and the output limit that the request declares. Built in: ch07"""
    return min(prompt + limits.declared, limits.max_context)


def room_for_power_of_2(prompt: int, stored: int, limits: Limits) -> int:
    """Room for the prompt and the next power of two from the declared limit. Built in: ch08b"""
    power = 1 << max(limits.declared - 1, 0).bit_length()
    return min(prompt + power, limits.max_context)


def room_for_stored(prompt: int, stored: int, limits: Limits) -> int:
    """Room for what is stored when the request comes in, or comes back. Built in: ch07"""
    return stored


#: Servers before Orca; Orca's Max in the PagedAttention paper. Left out: buddies. Built in: ch07
reserve_max = Policy("reserve_max", room_for_maximum, grows=False)
#: TensorRT-LLM's default: no eviction. Left out: its rounding, chunked prefill. Built in: ch07
reserve_limit = Policy("reserve_limit", room_for_declared, grows=False)
#: Orca's Pow2 there, which rounds up the output. Left out: buddies, too. Built in: ch08b
reserve_power_of_2 = Policy("reserve_power_of_2", room_for_power_of_2, grows=False)
#: vLLM: v0 with a watermark of 0.01, v1 with none, and one again since June 2026 (PR #44594).
#: Left out: prefix sharing, chunked prefill, the limit on tokens a step. Built in: ch07
paged = Policy("paged", room_for_stored, grows=True)


def group_blocks(prompt: int, tokens: int, samples: int, block_size: int) -> int:
    """Blocks of `samples` sequences of `tokens` that share a prompt's full ones. Built in: ch08a"""
    needed = blocks_needed(tokens, block_size)
    if samples == 1 or tokens <= prompt:
        return needed
    shared = prompt // block_size
    return shared + samples * (needed - shared)


def submit(policy: Policy, prompt: int, limits: Limits, samples: int = 1) -> str | None:
    """Why a request can never be served, with the numbers, or None. O(1). Built in: ch08a"""
    if prompt >= limits.max_context:
        return f"a prompt of {prompt} tokens leaves no room in a context of {limits.max_context}"
    tokens = max(
        room_for_declared(prompt, prompt, limits), policy.set_aside(prompt, prompt, limits)
    )
    needed = group_blocks(prompt, tokens, samples, limits.block_size)
    if needed > limits.num_blocks:
        return f"needs {needed} blocks, the pool has {limits.num_blocks}"
    return None


def has_room(needed: int, num_free: int, num_running: int, limits: Limits) -> bool:
    """Whether `needed` blocks leave the watermark's free, if anything runs. Built in: ch08a"""
    return num_free - needed >= (limits.headroom if num_running else 0)


def admit(
    policy: Policy, prompt: int, stored: int, num_free: int, num_running: int, limits: Limits
) -> Admission:
    """The answer to a request with `stored` tokens, its prompt or more. Built in: ch08a"""
    if submit(policy, prompt, limits) is not None:
        return Admission.NEVER
    needed = blocks_needed(policy.set_aside(prompt, stored, limits), limits.block_size)
    return Admission.OK if has_room(needed, num_free, num_running, limits) else Admission.LATER


@dataclass(slots=True, eq=False)  # `in` and `remove` mean this one, not one like it
class Resident:
    """A sequence as a policy sees it: its place in the order of arrival, and its tokens. Given."""

    index: int
    prompt: int
    stored: int
    declared: int = 512

    @property
    def generated(self) -> int:
        """Tokens of the answer that are stored."""
        return self.stored - self.prompt


@dataclass(frozen=True, slots=True)
class Server:
    """A server as an admission rule sees it. Given."""

    running: Sequence[Resident]  # in order of admission
    num_free: int  # blocks
    calm_steps: int = 0  # since the last preemption, or the start
    answer_lengths: Sequence[int] = ()  # of those that have ended, in order of length


def may_enter(
    policy: Policy, request: Resident, needed: int, server: Server, limits: Limits
) -> bool:
    """Whether a request may take `needed` blocks; alone, it may take all. Built in: ch08a"""
    if policy.admits is None:
        return has_room(needed, server.num_free, len(server.running), limits)
    if needed > server.num_free:
        return False
    return not server.running or policy.admits(request, server, limits)


def decaying_ratio(start: float = 0.7, factor: float = 0.14, steps: int = 600) -> Policy:
    """SGLang's rule: a fraction of what the running have declared counts as taken.

    It falls from `start` to `factor` times that over `steps` steps without a preemption.
    Source: SGLang PRs #708, #1811; v0.4 and later. Left out: its estimate of the fraction after a
    preemption, here `start` again; a group counts as one sequence. Built in: ch08b
    """
    if not (0 <= start <= 1 and 0 <= factor <= 1 and steps >= 1):
        raise ValueError(f"two fractions and a number of steps, got {start}, {factor}, {steps}")

    def admits(request, server, limits):
        decay = (1 - factor) * min(1, server.calm_steps / steps)
        ratio = start * (1 - decay)
        taken = sum(ratio * max(0, r.declared - r.generated) for r in server.running)
        wanted = request.stored + max(0, request.declared - request.generated)
        return wanted + taken <= server.num_free * limits.block_size

    return Policy("decaying_ratio", room_for_stored, True, admits)


def expect_declared(request: Resident, server: Server, limits: Limits) -> int:
    """The tokens still to come if an answer is as long as its request declares. Built in: ch08b"""
    return max(1, min(request.declared, limits.max_context - request.prompt) - request.generated)


def expect_like_others(quantile: float = 0.9) -> Callable:
    """A quantile, 0 to 1, of the longer answers that have ended; if none, what is declared.

    Raises ValueError for another quantile. Built in: ch08b
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"a quantile is between 0 and 1, got {quantile}")

    def expect(request, server, limits):
        lengths, generated = server.answer_lengths, request.generated
        shorter = bisect_right(lengths, generated)
        if shorter == len(lengths):
            return expect_declared(request, server, limits)
        return lengths[shorter + int(quantile * (len(lengths) - 1 - shorter))] - generated

    return expect


def future_peak(expect: Callable = expect_declared, name: str = "future_peak") -> Policy:
    """LightLLM's rule: let in whom the pool can hold at its fullest moment: when somebody ends.

    `expect(request, server, limits)` says how many tokens a sequence will still store. O(running
    squared), in numpy. Source: Gong et al. 2025, "Past-Future Scheduler". Left out: it samples
    lengths; a group counts as one sequence. Built in: ch08b
    """

    def admits(request, server, limits):
        everybody = [*server.running, request]
        left = np.array([expect(r, server, limits) for r in everybody])
        stored = np.array([r.stored for r in everybody])
        blocks = blocks_needed(stored + left[:, None], limits.block_size)  # when row's r ends
        there = left >= left[:, None]
        return int((blocks * there).sum(axis=1).max()) <= limits.num_blocks

    return Policy(name, room_for_stored, True, admits)


def oracle(outputs: Sequence[int]) -> Policy:
    """`future_peak` for somebody who knows the tokens of each answer, in order of arrival.

    Raises ValueError for a request of which `outputs` says nothing. Built in: ch08b
    """

    def expect(request, server, limits):
        length = int(_of_request(outputs, request.index, "outputs"))
        return min(length, limits.max_context - request.prompt) - request.generated

    return future_peak(expect, "oracle")


Victim = Callable[[Sequence[Resident]], Resident]  # of those that run, in order of admission


def newest(running: Sequence[Resident]) -> Resident:
    """Who was admitted last goes. O(1). vLLM v1's rule. Built in: ch07"""
    return running[-1]


def fewest_generated(running: Sequence[Resident]) -> Resident:
    """The fewest generated tokens go, of equals the latest. O(n). Built in: ch08a"""
    return min(running, key=lambda sequence: (sequence.generated, -sequence.index))


def oldest(running: Sequence[Resident]) -> Resident:
    """Who was admitted first goes. O(1). Built in: ch08b"""
    return running[0]


def least_computed(running: Sequence[Resident]) -> Resident:
    """The fewest stored tokens go, of equals the latest. O(n). vLLM #54644. Built in: ch08b"""
    return min(running, key=lambda sequence: (sequence.stored, -sequence.index))


def lowest_priority(classes: Sequence[int]) -> Callable:
    """vLLM's priority scheduling: the largest of `classes` goes, of equals the latest.

    `classes` are in order of arrival; raises ValueError where there is none. Left out: vLLM also
    sorts the queue. Built in: ch08b
    """

    def rank(sequence):
        return _of_request(classes, sequence.index, "classes"), sequence.index

    return lambda running: max(running, key=rank)


def _of_request(values, index, name):
    """What a list says of one request."""
    if index >= len(values):
        raise ValueError(f"{len(values)} {name} say nothing of request {index}")
    return values[index]
