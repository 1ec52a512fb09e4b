"""Continuous batching: requests come in, share every step of the model, and leave as they end.

A step here is a step of `labcore.steps` with a model in it: admit from the head of the queue and
store the prompts of those who come in; let each running request make room for one more token, and
preempt where there is none; run the model once for all; let go who is done. Which request does
what, and when, the simulator says from the lengths alone::

    model, tokenizer = load_gpt2()
    kv = PagedKV(model.config, num_blocks=32, block_size=16)
    engine = Engine(model, kv, Limits(32, 16, watermark=0.05))
    engine.submit(tokenizer.encode("It is a truth").ids, max_new_tokens=20)
    engine.run()  # {0: [[...]]}: one answer to request 0
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import index

from labcore.admission import (
    Limits,
    Policy,
    Resident,
    Server,
    group_blocks,
    group_tokens,
    may_enter,
    newest,
    paged,
    submit,
)
from labcore.blocks import blocks_needed
from labcore.caches import PagedKV
from labcore.decode import forward_paged_decode, greedy, prefill_packed, prefill_paged
from labcore.gpt2 import GPT2
from labcore.steps import History, Victim
from labcore.swap import HostPool


@dataclass(slots=True, eq=False)
class Generation(Resident):
    """A request on its way: the ids of its prompt, and an answer for each of its samples.

    The last token of an answer is chosen and not stored yet: the next step stores it and chooses
    another one. `going` are the samples that have not ended. Given.
    """

    prompt_ids: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    going: list[int] = field(default_factory=list)

    def stored_ids(self, sample: int) -> list[int]:
        """The tokens of one answer that are stored, or were when it was preempted."""
        return self.answers[sample][: self.generated]


class Engine:
    """A server of one model on one pool of blocks, first come, first served.

    `limits` are those of the pool. `choose` is `greedy` or a `sampler`, called for one token at a
    time with the request's number as its row. With a `host` pool victims of one sample are copied
    there while it has room; all others are computed again. `answers` holds what has ended, by
    request, one list of tokens a sample; `refusals` a reason for each request that cannot be
    served. Between two steps every block is free or belongs to a request that runs.
    Source: Yu et al. 2022 (Orca), iteration-level scheduling. Built in: ch08a
    """

    def __init__(
        self,
        model: GPT2,
        kv: PagedKV,
        limits: Limits,
        policy: Policy = paged,
        *,
        victim: Victim = newest,
        choose: Callable = greedy,
        attention: str | Callable = "in_place",
        host: HostPool | None = None,
    ) -> None:
        pool = kv.tables.allocator.num_blocks, kv.tables.block_size
        if (limits.num_blocks, limits.block_size) != pool:
            raise ValueError(f"{limits} for a pool of {pool[0]} blocks of {pool[1]} tokens")
        if limits.max_context > model.config.n_positions:
            raise ValueError(
                f"a context of {limits.max_context} in {model.config.n_positions} positions"
            )
        self.model, self.kv, self.limits, self.policy = model, kv, limits, policy
        self.victim, self.choose, self.attention, self.host = victim, choose, attention, host
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.answers: dict[int, list[list[int]]] = {}
        self.refusals: dict[int, str] = {}
        self.history = History()
        self.steps = self.calm_since = self.num_requests = 0
        self.answer_lengths: list[int] = []

    def submit(self, prompt: Sequence[int], max_new_tokens: int, samples: int = 1) -> int:
        """Queue a request and return its number, from 0; one that can never fit is in `refusals`.

        Its samples are admitted and preempted as one. Raises ValueError for no prompt, no new
        tokens or no samples, and for more than one sample under a policy that reserves.
        """
        ids = list(map(index, prompt))
        if min(len(ids), max_new_tokens, samples) < 1 or (samples > 1 and not self.policy.grows):
            raise ValueError(
                f"{samples} samples of {max_new_tokens} tokens after a prompt of {len(ids)}, under "
                f"{self.policy.name}"
            )
        request = Generation(self.num_requests, len(ids), len(ids), max_new_tokens, ids)
        request.answers = [[] for _ in range(samples)]
        request.going = list(range(samples))
        self.num_requests += 1
        limits = replace(self.limits, declared=max_new_tokens)
        reason = submit(self.policy, len(ids), limits, samples)
        if reason is not None:
            self.refusals[request.index] = reason
        else:
            self.waiting.append(request)
        return request.index

    def cancel(self, number: int) -> None:
        """Forget a request that waits or runs; its blocks are free at once. Raises KeyError."""
        for request in [*self.waiting, *self.running]:
            if request.index == number:
                if request in self.running:
                    self._leave(request)
                else:
                    self.waiting.remove(request)
                if self._is_on_host(request):
                    self.host.forget((number, 0))
                return
        raise KeyError(f"request {number} neither waits nor runs")

    def run(self) -> dict[int, list[list[int]]]:
        """Step until nobody waits or runs; all answers."""
        while self.waiting or self.running:
            self.step()
        return self.answers

    def step(self) -> None:
        """Admit, make room, run the model once for all, let go who is done."""
        self._admit()
        for request in self.running.copy():
            if request in self.running:  # else it was preempted a moment ago
                self._make_room(request)
        if not self.running:  # the last one has ended for want of a block
            return
        going = [(request, sample) for request in self.running for sample in request.going]
        seq_ids = [(request.index, sample) for request, sample in going]
        tokens = [request.answers[sample][-1] for request, sample in going]
        logits = forward_paged_decode(self.model, self.kv, seq_ids, tokens, self.attention)
        for request in self.running:
            request.stored += 1
        self._record()
        self.steps += 1
        for (request, sample), row in zip(going, logits, strict=True):
            self._choose(request, sample, row)

    def _admit(self):
        """Let in the head of the queue while it may enter; the head blocks the rest."""
        while self.waiting:
            head, block_size = self.waiting[0], self.limits.block_size
            limits = replace(self.limits, declared=head.declared)
            room = self.policy.set_aside(head.prompt, head.stored, limits)
            needed = blocks_needed(room, block_size)
            if self.policy.grows:
                needed = group_blocks(head.prompt, head.stored, len(head.going), block_size)
            calm_steps, free = self.steps - self.calm_since, self.kv.tables.allocator.num_free
            server = Server(self.running, free, calm_steps, self.answer_lengths)
            if not may_enter(self.policy, head, needed, server, limits):
                break
            self.running.append(self.waiting.popleft())
            self.history.admitted.append((self.steps, head.index))
            self._enter(head, room)

    def _enter(self, request, room):
        """Fill a request's blocks: from the host's memory, or by computing what it had stored."""
        if self._is_on_host(request):
            self.host.swap_in((request.index, 0))
            return
        first, *others = ((request.index, sample) for sample in request.going)
        self.kv.tables.add(first)
        self.kv.reserve({first: room})
        known = request.prompt_ids
        if not others:
            known = known + request.stored_ids(first[1])
        logits = prefill_paged(self.model, self.kv, first, known)
        for other in others:
            self.kv.tables.fork(first, other)
        if others and request.generated:
            tails = {seq_id: request.stored_ids(seq_id[1]) for seq_id in (first, *others)}
            prefill_packed(self.model, self.kv, tails)
        for sample in request.going.copy():
            if not request.answers[
                sample
            ]:  # else its next token was chosen before it was sent away
                self._choose(request, sample, logits)

    def _make_room(self, request):
        """Take the blocks that one more token a sample needs; preempt while there are too few."""
        growth = {(request.index, sample): 1 for sample in request.going}
        tables = self.kv.tables
        while tables.blocks_to_append(growth) > tables.allocator.num_free:
            if len(self.running) == 1:  # alone, and still no block: there is nobody to wait for
                needed = blocks_needed(request.stored + 1, tables.block_size)
                self.refusals[request.index] = (
                    f"cache too small: needs {needed} blocks, the pool has "
                    f"{tables.allocator.num_blocks}"
                )
                self._leave(request)
                return
            victim = self.victim(tuple(self.running))
            self._preempt(victim)
            if victim is request:
                return
        self.kv.reserve(growth)

    def _preempt(self, victim):
        """Send a running request back to the head of the queue; it keeps its tokens."""
        self.history.victims.append((self.steps, victim.index))
        self.calm_since = self.steps
        seq_id = (victim.index, 0)
        if self.host and len(victim.answers) == 1 and self.host.has_room(seq_id):
            self.host.swap_out(seq_id)
            self.running.remove(victim)
        else:
            self._leave(victim)
        self.waiting.appendleft(victim)

    def _leave(self, request):
        """Give back all blocks of a running request."""
        for sample in request.going:
            self.kv.tables.drop((request.index, sample))
        self.running.remove(request)

    def _choose(self, request, sample, logits):
        """Choose a sample's next token; the sample ends with it, or goes on."""
        answer = request.answers[sample]
        row = request.index if len(request.answers) == 1 else (request.index, sample)
        (token,) = self.choose(logits[None], [row], len(answer))
        ended = token == self.model.config.eos_token_id
        if not ended:
            answer.append(token)
        room = self.limits.max_context - request.prompt  # the last token is never stored
        if ended or len(answer) == min(request.declared, room + 1):
            self.kv.tables.drop((request.index, sample))
            request.going.remove(sample)
        if not request.going:
            self.running.remove(request)
            self.answers[request.index] = request.answers
            insort(self.answer_lengths, request.generated)

    def _is_on_host(self, request):
        return self.host is not None and (request.index, 0) in self.host.tables

    def _record(self):
        """Write one step of the history, as the simulator does: stored, and nobody has left yet."""
        history, block_size = self.history, self.limits.block_size
        history.running.append(len(self.running))
        history.waiting.append(len(self.waiting))
        history.finished.append(len(self.answers))
        history.refused.append(len(self.refusals))
        history.free.append(self.kv.tables.allocator.num_free)
        tokens = (group_tokens(r.prompt, r.stored, len(r.going), block_size) for r in self.running)
        history.stored.append(sum(tokens))
