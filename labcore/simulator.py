"""How many sequences fit: a server that gives every running sequence one token a step.

It is a model of an allocator first: unless `labcore.costs` says otherwise prompts cost no time,
every request is there from the start, and a preemption is charged as a flat number of steps. What a
step does is told in `labcore.steps`. `simulate` takes the fast way of `labcore.phases` where that
is exact.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral

import numpy as np

from labcore.admission import Limits, Policy, Victim, newest, submit
from labcore.blocks import blocks_needed
from labcore.costs import Costs
from labcore.jobs import Counts, History, Jobs
from labcore.phases import PhaseLoop
from labcore.steps import StepLoop
from labcore.workloads import Workload, draw, from_pairs


@dataclass(frozen=True)
class SimulationResult:
    """What a run came to. Ratios are of sums over all steps, taken before finished sequences leave.

    `steps` are raw; `charged_steps` add `recompute_steps` for each preemption. `empty_preemptions`
    are those of victims that had stored nothing since they came in. `utilization` is stored / set
    aside, `waste` unused / set aside, `waste_of_used` unused / stored, in tokens. `mean_resident`
    is over the steps in which a request waits (all, if none ever does). `refusals` gives a reason
    for each refused request; `overruns` counts sequences that outgrew their reservation.

    Where the step loop ran: `seconds`, by `Costs`; `recomputed_tokens`, computed and then lost by a
    victim; `swaps` of victims whose blocks were copied out; `unreserved`, the part of the pool that
    nobody held while a request waited; `first_token`, the seconds from arrival to each request's
    first token. Elsewhere these are None. Given.
    """

    steps: int
    charged_steps: int
    preemptions: int
    empty_preemptions: int
    utilization: float
    waste: float
    waste_of_used: float
    mean_resident: float
    peak_resident: int
    finished: int
    output_tokens: int
    overruns: int
    refusals: dict[int, str]
    history: History | None = None
    seconds: float | None = None
    recomputed_tokens: int | None = None
    swaps: int | None = None
    unreserved: float | None = None
    first_token: dict[int, float] | None = field(default=None, repr=False)

    @property
    def refused(self) -> int:
        """How many requests were refused, at submission or alone in a pool too small."""
        return len(self.refusals)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of what has finished, a second. ValueError for a run without seconds."""
        if self.seconds is None:
            raise ValueError("the fast way counts no seconds: simulate with costs")
        if not self.output_tokens:
            return 0.0
        return self.output_tokens / self.seconds if self.seconds else inf


def simulate(
    policy: Policy,
    workload: str | Workload | Iterable[Sequence[int]],
    budget: int = 32_768,
    block_size: int | None = None,
    watermark: float = 0.0,
    *,
    declared: int | Sequence[int] = 512,
    max_context: int = 1_024,
    victim: Victim = newest,
    recompute_steps: int = 4,
    seed: int = 0,
    history: bool = False,
    costs: Costs | None = None,
    arrivals: bool = False,
    samples: int = 1,
    memory: Callable | None = None,
) -> SimulationResult:
    """Run a workload under a policy on `budget` tokens of KV cache, in blocks of `block_size`.

    `workload` is a name (3,000 requests drawn with `seed`), a `Workload`, or (prompt, output)
    pairs; all requests wait from the start, in order. `block_size` is by default 16 where blocks
    are taken on demand and 1 where room is reserved. `declared` is the output limit of all
    requests, or one for each. A sequence ends at `max_context` tokens if not before.

    With `costs` a run has seconds; with `arrivals` requests come when the workload says. Each
    request is answered by `samples` sequences that share its prompt, admitted and preempted as one.
    `memory`, `FirstFit` or `Buddy` of labcore.contiguous, gives a reservation in one piece. The
    same arguments give the same result. Cost: see `labcore.phases`; with any of these four, another
    victim than the newest, a policy with a rule of its own, or a history, O(running) a step. Raises
    ValueError for settings and requests that cannot be. Built in: ch07
    """
    if block_size is None:
        block_size = 16 if policy.grows else 1
    limits = _limits(budget, block_size, max_context, watermark)
    if isinstance(workload, str):
        workload = draw(workload, seed=seed, max_context=limits.max_context)
    elif not isinstance(workload, Workload):
        workload = from_pairs(workload)
    _check(policy, limits, recompute_steps, samples, memory)
    if not policy.grows:  # what is set aside never grows, so there is nothing to keep headroom for
        limits = replace(limits, watermark=0.0)
    jobs, refusals = _submit_all(policy, workload, limits, declared, samples, memory)
    if arrivals:
        jobs = replace(jobs, arrivals=_arrivals(workload))
    counts = Counts(history=History() if history else None)
    rules = victim is not newest or policy.admits is not None
    if rules or arrivals or samples > 1 or memory is not None or costs is not None:
        region = memory and memory(limits.num_blocks * limits.block_size)
        loop = StepLoop(jobs, counts, victim, costs, region, recompute_steps)
    else:
        loop = PhaseLoop(jobs, counts)
    loop.run()
    for i, tokens in counts.ended_early.items():  # alone, and still no block for one more token
        needed = jobs.blocks(i, tokens + 1)
        refusals[i] = f"cache too small: needs {needed} blocks, the pool has {limits.num_blocks}"
    return _result(jobs, counts, refusals, recompute_steps)


def _whole(name, value):
    """Python's own integer: NumPy's may overflow without a word."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is a whole number of tokens, got {value!r}")
    return int(value)


def _limits(budget, block_size, max_context, watermark):
    budget, block_size = _whole("budget", budget), _whole("block_size", block_size)
    if not 1 <= block_size <= budget:
        raise ValueError(f"a budget of {budget} tokens holds no block of {block_size}")
    max_context = _whole("max_context", max_context)
    return Limits(budget // block_size, block_size, 0, max_context, watermark)


def _check(policy, limits, recompute_steps, samples, memory):
    if not 0 <= recompute_steps < inf:
        raise ValueError(f"a preemption costs at least 0 steps, got {recompute_steps}")
    if policy.grows and policy.set_aside(1, 2, limits) != 2:
        raise ValueError(f"{policy.name} grows, so it sets aside what is stored and no more")
    if policy.grows and memory is not None:
        raise ValueError(f"{policy.name} grows, and a region of contiguous memory does not")
    if not isinstance(samples, Integral) or samples < 1:
        raise ValueError(f"samples is a whole number, at least 1, got {samples!r}")
    if samples > 1 and not policy.grows:
        raise ValueError(f"under {policy.name}, {samples} samples cannot share blocks")


def _arrivals(workload):
    """The seconds at which requests come."""
    if workload.arrivals is None:
        raise ValueError(f"nothing is known of the arrivals of {workload.name}")
    arrivals = np.asarray(workload.arrivals, dtype=float)
    if arrivals.shape != (len(workload),):
        raise ValueError(f"{arrivals.size} arrivals for {len(workload)} requests")
    wrong = ~(np.isfinite(arrivals) & (np.diff(arrivals, prepend=0.0) >= 0))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(f"arrivals are in order and from 0 on, request {i} comes at {arrivals[i]}")
    return arrivals.tolist()


def _submit_all(policy, workload, limits, declared, samples, memory):
    """The jobs of a run, and the reason for each request that is refused at submission."""
    prompts = workload.prompts.tolist()
    longest = np.maximum(limits.max_context - workload.prompts, 0)  # a sum could overflow
    lengths = (workload.prompts + np.minimum(workload.outputs, longest)).tolist()
    declared = _declared(declared, len(prompts))
    refusals, room = {}, None
    limits_of = {tokens: replace(limits, declared=tokens) for tokens in set(declared)}
    # where room is taken for what is stored: if the longest prompt fits, all do. Not so for groups,
    # which share more of a longer prompt
    one_by_one = not policy.grows or samples > 1
    if prompts and (one_by_one or submit(policy, max(prompts), limits_of[max(declared)])):
        kinds = list(zip(prompts, declared, strict=True))
        blocks, reasons = {}, {}
        for prompt, tokens in set(kinds):
            own, kind = limits_of[tokens], (prompt, tokens)
            blocks[kind] = blocks_needed(policy.set_aside(prompt, prompt, own), own.block_size)
            reasons[kind] = submit(policy, prompt, own, samples)
            reasons[kind] = reasons[kind] or _refuse_region(blocks[kind], own, memory)
        refusals = {i: reasons[kind] for i, kind in enumerate(kinds) if reasons[kind]}
        room = None if policy.grows else [blocks[kind] for kind in kinds]
    accepted = [i for i in range(len(prompts)) if i not in refusals]
    jobs = Jobs(policy, limits, prompts, lengths, accepted, room, declared, samples=samples)
    return jobs, refusals


def _declared(declared, num_requests):
    """The output limit of each request."""
    if not isinstance(declared, Sequence | np.ndarray):
        return [_whole("declared", declared)] * num_requests
    declared = [_whole("declared", tokens) for tokens in declared]
    if len(declared) != num_requests:
        raise ValueError(f"{len(declared)} declared limits for {num_requests} requests")
    return declared


def _refuse_region(blocks, limits, memory):
    """Why not even empty memory has such a region, or None."""
    size, tokens = limits.num_blocks * limits.block_size, blocks * limits.block_size
    if memory is not None and memory(size).allocate(tokens) is None:
        return f"needs {tokens} tokens in one piece, no piece of {size} tokens is as large"
    return None


def _result(jobs, counts, refusals, recompute_steps):
    """Ratios from closed forms where `labcore.phases` has summed nothing.

    There, in any schedule, token k of a sequence is stored in one step.
    """
    block_size = jobs.limits.block_size
    served = np.array(jobs.accepted, dtype=np.int64)
    early = np.array(list(counts.ended_early), dtype=np.int64)
    first, last = np.array(jobs.prompts), np.array(jobs.lengths)
    last[early] = list(counts.ended_early.values())
    first, last, ended = first[served], last[served], np.isin(served, early)
    room = None if jobs.room is None else np.array(jobs.room)[served]
    stored, blocks = counts.stored, counts.held_blocks
    if stored is None:
        stored = int((_sum_of_blocks(last, 1) - _sum_of_blocks(first, 1)).sum())
        by_tokens = _sum_of_blocks(last, block_size) - _sum_of_blocks(first, block_size)
        blocks = int((by_tokens if room is None else room * (last - first)).sum())
    overruns = 0 if room is None else int((last > room * block_size).sum())
    set_aside = blocks * block_size
    unused = set_aside - stored
    waiting_steps = counts.waiting_steps or counts.steps
    residents = counts.waiting_residents if counts.waiting_steps else int((last - first).sum())
    by_steps = {}
    if counts.stored is not None:
        held = counts.waiting_steps * jobs.limits.num_blocks
        by_steps = {
            "seconds": counts.seconds,
            "recomputed_tokens": counts.recomputed_tokens,
            "swaps": counts.swaps,
            "unreserved": counts.waiting_free / max(held, 1),
            "first_token": counts.first_token,
        }
    return SimulationResult(
        steps=counts.steps,
        charged_steps=counts.steps + recompute_steps * counts.preemptions,
        preemptions=counts.preemptions,
        empty_preemptions=counts.empty_preemptions,
        utilization=stored / max(set_aside, 1),
        waste=unused / max(set_aside, 1),
        waste_of_used=unused / max(stored, 1),
        mean_resident=residents / max(waiting_steps, 1),
        peak_resident=counts.peak_resident,
        finished=counts.finished,
        output_tokens=jobs.samples * int((last - first)[~ended].sum()),
        overruns=overruns,
        refusals=refusals,
        history=counts.history,
        **by_steps,
    )


def _sum_of_blocks(n, block_size):
    """The blocks that 1, 2, ... n tokens need, added up; in blocks of one, the tokens."""
    full, rest = np.divmod(n, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
