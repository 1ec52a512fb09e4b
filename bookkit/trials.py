"""Three trials of the simulator: a paper's figures, an engine's sweep, an engine's log.

Constants are published ones, their source beside them. What is not published, the shape of the
lengths in the paper, is run over a range.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from bookkit.contiguous import Buddy
from labcore.admission import (
    Limits,
    Policy,
    has_room,
    paged,
    reserve_limit,
    reserve_max,
    reserve_power_of_2,
    room_for_stored,
)
from labcore.blocks import blocks_needed
from labcore.capacity import KVShape
from labcore.costs import Costs, Roofline
from labcore.simulator import SimulationResult, simulate
from labcore.workloads import Workload

#: Kwon et al. 2023: tokens that fit beside OPT-13B on 40 GB (table 1).  Given.
SLOTS = 15_728
#: OPT's context, which Orca Max reserves.  Given.
CONTEXT = 2_048
#: Fig. 11: mean input and output, in tokens.  Given.
MEANS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
#: The systems of its section 6.1. Pow2 and Oracle know how long an answer will be.  Given.
SYSTEMS = {
    "Orca Max": reserve_max,
    "Orca Pow2": reserve_power_of_2,
    "Orca Oracle": reserve_limit,
    "vLLM": paged,
}
#: What memory is used for.  Given.
PARTS = ("token states", "reservation", "internal", "external")
#: Fig. 2: the four parts in per cent of the memory; of vLLM only the first is told.  Given.
FIG_2 = {
    "Orca Max": (20.4, 13.3, 57.3, 8.9),
    "Orca Pow2": (26.8, 17.9, 13.6, 41.6),
    "Orca Oracle": (38.2, 25.2, 0.0, 36.6),
    "vLLM": (96.3,),
}
#: Fig. 13: batched requests of OPT-13B, at 2 and at 30 requests a second, by system.  Given.
FIG_13 = {"ShareGPT": (7.00, 9.81, 13.62, 30.42), "Alpaca": (7.00, 43.24, 72.75, 132.44)}

#: vLLM PR #44594: watermark -> preemptions, output tokens a second.  Given.
SWEEP = {
    0.0: (1065, 11_582),
    0.02: (400, 12_134),
    0.05: (187, 12_167),
    0.10: (168, 11_835),
    0.15: (168, 11_635),
}
# Weights, keys and values in bf16; two operations a weight.
QWEN, LLAMA = KVShape(28, 4, 128, 2).token_bytes, KVShape(32, 8, 128, 2).token_bytes
# The cards' figures are NVIDIA's peaks, read second hand on the pages named, not in its own papers.
#: Qwen2.5-7B; one GPU of a GB200, 8 TB/s, 2.5 PFLOP/s bf16 (glennklockwood.com, "B200").  Given.
QWEN_ON_GB200 = Roofline(2 * 7.616e9, QWEN, 8e12, 2 * 7.616e9, 2.5e15)
#: Llama-3.1-8B; an RTX 4090, 1,008 GB/s, 165.2 TFLOP/s bf16 (waredb.com).  Given.
LLAMA_ON_4090 = Roofline(2 * 8.03e9, LLAMA, 1.008e12, 2 * 8.03e9, 165.2e12)


def lengths(
    mean: float, sigma: float, most: int | np.ndarray, rng: np.random.Generator, n: int
) -> np.ndarray:
    """`n` log-normal lengths of that mean and shape, at least 1 and at most `most`.

    They are the quantiles of the distribution: chance decides their order and nothing else. What
    the cut at `most` takes from the mean, the scale gives back.  Built in: ch10a
    """
    quantiles = [NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)]
    shape, scale = np.exp(sigma * rng.permutation(quantiles)), mean
    for _ in range(50):
        tokens = np.clip(np.rint(scale * shape), 1, most)
        scale *= mean / tokens.mean()
    return tokens.astype(int)


def requests_like(trace: str, sigma: float, seed: int = 0, n: int = 3_000) -> Workload:
    """`n` requests with the published mean lengths of a trace, cut at CONTEXT.  Built in: ch10a"""
    rng, (prompt, output) = np.random.default_rng(seed), MEANS[trace]
    prompts = lengths(prompt, sigma, CONTEXT - 1, rng, n)
    return Workload(trace, prompts, lengths(output, sigma, CONTEXT - prompts, rng, n))


def steps_of_entry(rooms: Sequence[int], outputs: Sequence[int], slots: int = SLOTS) -> list[int]:
    """The step in which each request comes in, if its room is one piece of a `Buddy`.

    All wait from the start. Nothing changes between two departures, so only those are visited: the
    run of `simulate(..., memory=Buddy)` in O(requests).  Built in: ch10a
    """
    memory, leaving, step, entries = Buddy(slots), [], 0, []
    for room, output in zip(rooms, outputs, strict=True):
        while (region := memory.allocate(room)) is None:
            step = leaving[0][0]
            while leaving and leaving[0][0] == step:
                memory.free(heappop(leaving)[1])
        entries.append(step)
        heappush(leaving, (step + output, region))
    return entries


class Usage(NamedTuple):
    """While somebody waits: PARTS in per cent, and how many run.  Given."""

    parts: tuple[float, ...]
    batch: float


def usage_reserved(policy: Policy, workload: Workload, slots: int = SLOTS) -> Usage:
    """What a system that reserves does with its memory: slots times steps, over all requests.

    What rounding up takes is external, as in the paper.  Built in: ch10a
    """
    prompts, outputs = workload.prompts, workload.outputs
    rooms = [policy.set_aside(p, p, Limits(slots, 1, o, CONTEXT)) for p, o, _ in workload]
    entries = np.array(steps_of_entry(rooms, outputs.tolist(), slots))
    steps = entries[-1]  # then the last one is in, and nobody waits
    inside = np.minimum(outputs, steps - entries)
    written = inside * (inside + 1) // 2  # 1 + 2 + ... + inside
    stored = inside * prompts + written
    reservation = inside * outputs - written
    internal = inside * (rooms - prompts - outputs)
    parts = [100 * part.sum() / (steps * slots) for part in (stored, reservation, internal)]
    return Usage((*parts, 100 - sum(parts)), inside.sum() / steps)


def usage_paged(workload: Workload) -> Usage:
    """The same for blocks of 16 and vLLM's watermark of 2023, 0.01 (PR #11).  Given."""
    run = simulate(paged, workload, SLOTS, 16, 0.01, max_context=CONTEXT, history=True)
    h, busy = run.history, np.array(run.history.waiting) > 0
    stored, free, batch = (np.array(kept)[busy].mean() for kept in (h.stored, h.free, h.running))
    stored, free = 100 * stored / SLOTS, 100 * 16 * free / SLOTS
    return Usage((stored, 0.0, 100 - stored - free, free), batch)


def usage(system: str, workload: Workload) -> Usage:
    """The usage of memory under one of SYSTEMS.  Given."""
    policy = SYSTEMS[system]
    return usage_paged(workload) if policy.grows else usage_reserved(policy, workload)


def verdict(ours: Mapping[float, float], published: float, most: float) -> str:
    """For which shapes our value, {shape: value}, is within `most` of what is published.  Given."""
    close = [shape for shape, value in ours.items() if abs(value - published) <= most]
    if len(close) in (0, len(ours)):
        return "matches" if close else "does not"
    return f"depends: {' to '.join(map(str, sorted({min(close), max(close)})))}"


def clients(n: int) -> Policy:
    """`paged` for `n` clients, each of which sends its next request when one ends.

    A victim is older than those who have yet to come: it passes the first test.  Built in: ch10a
    """

    def admits(request, server, limits):
        if request.index >= len(server.answer_lengths) + n:
            return False
        needed = blocks_needed(request.stored, limits.block_size)
        return has_room(needed, server.num_free, len(server.running), limits)

    return Policy(f"paged, {n} clients", room_for_stored, True, admits)


def sweep_run(watermark: float, seed: int, costs: Costs | None = None) -> SimulationResult:
    """One run of PR #44594: 450 requests of 800 to 1,200 tokens and answers of 4,000 to 6,000.

    By default with vLLM's budget of 8,192 tokens a step, for a server on a large card
    (vllm/engine/arg_utils.py).  Given.
    """
    rng = np.random.default_rng(seed)
    workload = Workload("random", rng.integers(800, 1_201, 450), rng.integers(4_000, 6_001, 450))
    return simulate(
        clients(128), workload, 299_584, 16, watermark, declared=6_000, max_context=8_192,
        recompute_steps=0, history=True, costs=costs or Costs(QWEN_ON_GB200, token_budget=8_192),
    )  # fmt: skip


class Replay(NamedTuple):
    """A run on a clock: when each step ends, how many run in it, how full the cache is.  Given."""

    ends: np.ndarray
    running: np.ndarray
    kv_use: np.ndarray
    preemptions: int

    def at(self, seconds: np.ndarray, stretch: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Running and KV use at those seconds, if all took `stretch` times as long; then 0."""
        step = np.searchsorted(self.ends * stretch, seconds)  # the one under way
        return np.append(self.running, 0)[step], np.append(self.kv_use, 0)[step]


def replay_log(
    workload: Workload,
    num_blocks: int = 2_588,
    step: Callable[[int, int], float] = LLAMA_ON_4090,
    token_budget: int = 2_048,
) -> Replay:
    """Serve requests as they came: blocks of 16, no watermark, chunked prefill.  Built in: ch10a"""
    taken = []

    def timed(stored, computed):
        taken.append(step(stored, computed))
        return taken[-1]

    run = simulate(
        paged, workload, num_blocks * 16, 16, declared=0, max_context=32_768, arrivals=True,
        recompute_steps=0, history=True, costs=Costs(timed, token_budget=token_budget),
    )  # fmt: skip
    came = {k: workload.arrivals[i] for k, i in run.history.admitted}
    now, ends = 0.0, []
    for k, seconds in enumerate(taken):
        now = max(now, came.get(k, now)) + seconds  # nobody there: wait
        ends.append(now)
    kv_use = 1 - np.array(run.history.free) / num_blocks
    return Replay(np.array(ends), np.array(run.history.running), kv_use, run.preemptions)
