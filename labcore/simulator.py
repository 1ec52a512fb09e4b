"""How many sequences fit: a server that gives every running sequence one token a step.

Unless it has costs, prompts are free, and a preemption is charged as a flat number of steps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
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
    """What a run came to; ratios are of sums over all steps, before finished ones leave. Given."""

    steps: int
    charged_steps: int  # with `recompute_steps` more for each preemption
    preemptions: int
    empty_preemptions: int  # of victims that had stored nothing since they came in
    utilization: float  # stored / set aside, in tokens
    waste: float  # unused / set aside
    waste_of_used: float  # unused / stored
    mean_resident: float  # over the steps in which a request waits; all, if none ever does
    peak_resident: int
    finished: int
    output_tokens: int  # of those finished
    overruns: int  # sequences that outgrew their reservation
    refusals: dict[int, str]  # the reason for each refused request
    history: History | None
    # by the step loop only, else None
    seconds: float | None
    recomputed_tokens: int | None  # computed and then lost by a victim
    swaps: int | None  # of victims whose blocks were copied out
    unreserved: float | None  # the part of the pool that nobody held while a request waited
    first_token: dict[int, float] | None = field(repr=False)  # seconds after each arrival

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
    pairs. By default blocks are of 16 tokens where they are taken on demand, of 1 where room is
    reserved. `declared` is the output limit of all requests, or one for each. With `costs` there
    are seconds; with `arrivals` not all wait from the start; `samples` answers to a request share
    its prompt and come and go as one; `memory`, FirstFit or Buddy, gives room in one piece. Any of
    these four, another victim and a rule of the policy's own take O(running) a step, all else what
    `labcore.phases` takes. Raises ValueError for what cannot be. Built in: ch07
    """
    limits = _limits(policy, budget, block_size, max_context, watermark)
    if isinstance(workload, str):
        workload = draw(workload, seed=seed, max_context=limits.max_context)
    elif not isinstance(workload, Workload):
        workload = from_pairs(workload)
    _check(policy, limits, recompute_steps, samples, memory)
    jobs, refusals = _submit_all(policy, workload, limits, declared, samples, memory)
    if arrivals:
        if workload.arrivals is None:
            raise ValueError(f"nothing is known of the arrivals of {workload.name}")
        jobs = replace(jobs, arrivals=workload.arrivals.tolist())
    counts = Counts(history=History() if history else None)
    if victim is not newest or policy.admits or arrivals or samples > 1 or memory or costs:
        region = memory and memory(limits.num_blocks * limits.block_size)
        StepLoop(jobs, counts, victim, costs, region, recompute_steps).run()
    else:
        PhaseLoop(jobs, counts).run()
    for i, tokens in counts.ended_early.items():  # alone, and still no block for one more token
        needed = jobs.blocks(i, tokens + 1)
        refusals[i] = f"cache too small: needs {needed} blocks, the pool has {limits.num_blocks}"
    return _result(jobs, counts, refusals, recompute_steps)


def _whole(name, value):
    """Python's own integer: NumPy's may overflow without a word."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is a whole number of tokens, got {value!r}")
    return int(value)


def _limits(policy, budget, block_size, max_context, watermark):
    if block_size is None:
        block_size = 16 if policy.grows else 1
    budget, block_size = _whole("budget", budget), _whole("block_size", block_size)
    if not 1 <= block_size <= budget:
        raise ValueError(f"a budget of {budget} tokens holds no block of {block_size}")
    max_context = _whole("max_context", max_context)
    limits = Limits(budget // block_size, block_size, 0, max_context, watermark)
    return limits if policy.grows else replace(limits, watermark=0.0)  # headroom is for growth


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


def _declared(declared, num_requests):
    """The output limit of each request."""
    if not isinstance(declared, Sequence | np.ndarray):
        return [_whole("declared", declared)] * num_requests
    if len(declared) != num_requests:
        raise ValueError(f"{len(declared)} declared limits for {num_requests} requests")
    return [_whole("declared", tokens) for tokens in declared]


def _submit_all(policy, workload, limits, declared, samples, memory):
    """The jobs of a run, and the reason for each request that is refused at submission."""
    prompts, declared = workload.prompts.tolist(), _declared(declared, len(workload))
    longest = np.maximum(limits.max_context - workload.prompts, 0)  # a sum could overflow
    lengths = (workload.prompts + np.minimum(workload.outputs, longest)).tolist()
    limits_of = {tokens: replace(limits, declared=tokens) for tokens in set(declared)}
    kinds = list(zip(prompts, declared, strict=True))
    if prompts and policy.grows and samples == 1:  # if the longest prompt fits, all do
        kinds = kinds if submit(policy, max(prompts), limits_of[max(declared)]) else []
    blocks, reasons, size = {}, {}, limits.num_blocks * limits.block_size
    for kind in set(kinds):
        prompt, own = kind[0], limits_of[kind[1]]
        blocks[kind] = blocks_needed(policy.set_aside(prompt, prompt, own), own.block_size)
        tokens = blocks[kind] * own.block_size
        reason = submit(policy, prompt, own, samples)
        if not reason and memory and memory(size).allocate(tokens) is None:
            reason = f"needs {tokens} tokens in one piece, no piece of {size} tokens is as large"
        reasons[kind] = reason
    refusals = {i: reasons[kind] for i, kind in enumerate(kinds) if reasons[kind]}
    accepted = [i for i in range(len(prompts)) if i not in refusals]
    room = None if policy.grows else [blocks[kind] for kind in kinds]
    jobs = Jobs(policy, limits, prompts, lengths, accepted, room, declared, samples=samples)
    return jobs, refusals


def _result(jobs, counts, refusals, recompute_steps):
    """Closed forms where nothing is summed: in any schedule, token k is stored in one step."""
    block_size, early = jobs.limits.block_size, counts.ended_early
    served, last = np.array(jobs.accepted, dtype=np.int64), np.array(jobs.lengths)
    last[list(early)] = list(early.values())
    first, last = np.array(jobs.prompts)[served], last[served]
    room = None if jobs.room is None else np.array(jobs.room)[served]
    generated = int((last - first).sum())
    stored, blocks, unreserved = counts.stored, counts.held_blocks, None
    if stored is not None:
        unreserved = counts.waiting_free / max(counts.waiting_steps * jobs.limits.num_blocks, 1)
    else:
        stored = _sum_of_blocks(last, 1) - _sum_of_blocks(first, 1)
        blocks = _sum_of_blocks(last, block_size) - _sum_of_blocks(first, block_size)
        if room is not None:
            blocks = int((room * (last - first)).sum())
    unused = blocks * block_size - stored
    residents = counts.waiting_residents if counts.waiting_steps else generated
    lost = sum(tokens - jobs.prompts[i] for i, tokens in early.items())
    counted = {f.name for f in fields(SimulationResult)} & vars(counts).keys()
    return SimulationResult(
        charged_steps=counts.steps + recompute_steps * counts.preemptions,
        utilization=stored / max(stored + unused, 1),
        waste=unused / max(stored + unused, 1),
        waste_of_used=unused / max(stored, 1),
        mean_resident=residents / max(counts.waiting_steps or counts.steps, 1),
        output_tokens=jobs.samples * (generated - lost),
        overruns=0 if room is None else int((last > room * block_size).sum()),
        refusals=refusals,
        unreserved=unreserved,
        **{name: getattr(counts, name) for name in counted},
    )


def _sum_of_blocks(n, block_size):
    """The blocks that 1, 2, ... n tokens need, added up; in blocks of one, the tokens."""
    full, rest = np.divmod(n, block_size)
    return int((block_size * full * (full + 1) // 2 + rest * (full + 1)).sum())
