"""How many sequences fit: a saturated server that gives every running sequence one token a step.

It is a model of an allocator, not of a server: prompts cost no time, every request is there from
the start, and a preemption is charged as a flat number of steps. What a step does is told in
`labcore.steps`. `simulate` takes the fast way of `labcore.phases` where that is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from labcore.admission import Limits, Policy, newest, submit
from labcore.blocks import blocks_needed
from labcore.phases import PhaseLoop
from labcore.steps import Counts, History, Jobs, StepLoop, Victim
from labcore.workloads import Workload, draw, from_pairs


@dataclass(frozen=True)
class SimulationResult:
    """What a run came to. Ratios are of sums over all steps, taken before finished sequences leave.

    `steps` are raw; `charged_steps` add `recompute_steps` for each preemption. `empty_preemptions`
    are those of victims that had stored nothing since they came in. `utilization` is stored / set
    aside, `waste` unused / set aside, `waste_of_used` unused / stored, in tokens. `mean_resident`
    is over the steps in which a request waits (all, if none ever does). `refusals` gives a reason
    for each refused request; `overruns` counts sequences that outgrew their reservation. Given.
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

    @property
    def refused(self) -> int:
        """How many requests were refused, at submission or alone in a pool too small."""
        return len(self.refusals)


def simulate(
    policy: Policy,
    workload: str | Workload | Iterable[Sequence[int]],
    budget: int = 32_768,
    block_size: int | None = None,
    watermark: float = 0.0,
    *,
    declared: int = 512,
    max_context: int = 1_024,
    victim: Victim = newest,
    recompute_steps: int = 4,
    seed: int = 0,
    history: bool = False,
) -> SimulationResult:
    """Run a workload under a policy on `budget` tokens of KV cache, in blocks of `block_size`.

    `workload` is a name (3,000 requests drawn with `seed`), a `Workload`, or (prompt, output)
    pairs; all requests wait from the start, in order. `block_size` is by default 16 where blocks
    are taken on demand and 1 where room is reserved. A sequence ends at `max_context` tokens if
    not before. The same arguments give the same result. Cost: see `labcore.phases`; with another
    victim than the newest, or a history, O(running) a step. Raises ValueError for settings and
    requests that cannot be. Built in: ch07
    """
    if block_size is None:
        block_size = 16 if policy.grows else 1
    limits = _limits(
        watermark, budget=budget, block_size=block_size, declared=declared, max_context=max_context
    )
    if not recompute_steps >= 0:
        raise ValueError(f"a preemption costs at least 0 steps, got {recompute_steps}")
    if isinstance(workload, str):
        workload = draw(workload, seed=seed, max_context=limits.max_context)
    elif not isinstance(workload, Workload):
        workload = from_pairs(workload)
    if policy.grows and policy.set_aside(1, 2, limits) != 2:
        raise ValueError(f"{policy.name} grows, so it sets aside what is stored and no more")
    if not policy.grows:  # what is set aside never grows, so there is nothing to keep headroom for
        limits = replace(limits, watermark=0.0)
    jobs, refusals = _submit_all(policy, workload, limits)
    counts = Counts(history=History() if history else None)
    loop = PhaseLoop(jobs, counts) if victim is newest else StepLoop(jobs, counts, victim)
    loop.run()
    refusals |= {i: _too_small(tokens, limits) for i, tokens in counts.ended_early.items()}
    return _result(jobs, counts, refusals, recompute_steps)


def _limits(watermark, **sizes):
    """The limits of a run, in Python's own integers: NumPy's may overflow without a word."""
    for name, value in sizes.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} is a whole number of tokens, got {value!r}")
    budget, block_size, declared, max_context = map(int, sizes.values())
    if not 1 <= block_size <= budget:
        raise ValueError(f"a budget of {budget} tokens holds no block of {block_size}")
    return Limits(budget // block_size, block_size, declared, max_context, watermark)


def _submit_all(policy, workload, limits):
    """The jobs of a run, and the reason for each request that is refused at submission."""
    prompts = workload.prompts.tolist()
    longest = np.maximum(limits.max_context - workload.prompts, 0)  # a sum could overflow
    lengths = (workload.prompts + np.minimum(workload.outputs, longest)).tolist()
    refusals = {}
    # room for what is stored: if the longest prompt fits, all do
    if prompts and (not policy.grows or submit(policy, max(prompts), limits)):
        reasons = {prompt: submit(policy, prompt, limits) for prompt in set(prompts)}
        refusals = {i: reasons[prompt] for i, prompt in enumerate(prompts) if reasons[prompt]}
    accepted = [i for i in range(len(prompts)) if i not in refusals]
    room = None
    if not policy.grows:
        tokens = (policy.set_aside(prompt, prompt, limits) for prompt in prompts)
        room = [blocks_needed(n, limits.block_size) for n in tokens]
    return Jobs(policy, limits, prompts, lengths, accepted, room), refusals


def _too_small(tokens, limits):
    """Why a sequence that ran alone with `tokens` stored could not go on."""
    needed = blocks_needed(tokens + 1, limits.block_size)
    return f"cache too small: needs {needed} blocks, the pool has {limits.num_blocks}"


def _result(jobs, counts, refusals, recompute_steps):
    """Ratios from closed forms: in any schedule, token k of a sequence is stored in one step."""
    block_size = jobs.limits.block_size
    served = np.array(jobs.accepted, dtype=np.int64)
    early = np.array(list(counts.ended_early), dtype=np.int64)
    first, last = np.array(jobs.prompts), np.array(jobs.lengths)
    last[early] = list(counts.ended_early.values())
    first, last, ended = first[served], last[served], np.isin(served, early)
    stored = int((_sum_of_tokens(last) - _sum_of_tokens(first)).sum())
    overruns = 0
    if jobs.room is None:
        blocks = int((_sum_of_blocks(last, block_size) - _sum_of_blocks(first, block_size)).sum())
    else:
        room = np.array(jobs.room)[served]
        blocks = int((room * (last - first)).sum())
        overruns = int((last > room * block_size).sum())
    set_aside = blocks * block_size
    unused = set_aside - stored
    waiting_steps = counts.waiting_steps or counts.steps
    residents = counts.waiting_residents if counts.waiting_steps else int((last - first).sum())
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
        output_tokens=int((last - first)[~ended].sum()),
        overruns=overruns,
        refusals=refusals,
        history=counts.history,
    )


def _sum_of_tokens(n):
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2


def _sum_of_blocks(n, block_size):
    """The blocks that 1, 2, ... n tokens need, added up."""
    full, rest = np.divmod(n, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
