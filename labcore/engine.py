"""Continuous batching: requests come in, share every step of the model, and leave as they end.

A step is one of `labcore.steps` with a model in it. Which request does what, and when, the
simulator says from the lengths alone::

    kv = PagedKV(model.config, num_blocks=32, block_size=16)
    engine = Engine(model, kv, Limits(32, 16, watermark=0.05))
    engine.submit(tokenizer.encode("It is a truth").ids, max_new_tokens=20)
    engine.run()  # {0: [[...]]}: one answer to request 0
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index

from labcore.admission import (
    Limits,
    Policy,
    Resident,
    Server,
    Victim,
    group_blocks,
    may_enter,
    newest,
    paged,
    room_for_declared,
    submit,
)
from labcore.caches import PagedKV
from labcore.decode import (
    check_vocabulary,
    drop_left,
    find_attention,
    forward_paged_decode,
    greedy,
    prefill_packed,
)
from labcore.gpt2 import GPT2
from labcore.jobs import History
from labcore.prefix import known_in_use, publish, start
from labcore.swap import HostPool


class Generation(Resident):
    """A request on its way: the ids of its prompt, and an answer for each of its samples. Given.

    The last token of an answer is not stored yet. `going` are the samples that have not ended;
    `limits` are the server's, with the limit that this request declared.
    """

    def __init__(self, number: int, prompt_ids: list[int], limits: Limits, samples: int) -> None:
        super().__init__(number, len(prompt_ids), len(prompt_ids), limits.declared)
        self.prompt_ids, self.limits = prompt_ids, limits
        self.answers: list[list[int]] = [[] for _ in range(samples)]
        self.going = list(range(samples))

    @property
    def seq_ids(self) -> list[tuple[int, int]]:
        """What the samples that go on are called in the tables."""
        return [(self.index, sample) for sample in self.going]

    def stored_ids(self, sample: int) -> list[int]:
        """The tokens of one answer that are stored, or were when it was preempted."""
        return self.answers[sample][: self.generated]

    @property
    def first_ids(self) -> list[int]:
        """What is computed first when it comes in: of several samples what they share."""
        return self.prompt_ids + (self.stored_ids(self.going[0]) if len(self.going) == 1 else [])


class Engine:
    """A server of one model on one pool of blocks, first come, first served.

    `limits` are the pool's; a policy that reserves has no use for their watermark. `choose` is
    called for one token at a time with the request's number as its row. It, `victim` and a rule may
    submit and cancel, and not step. With a `host` pool victims of one sample are copied there while
    it has room; all others are computed again. `answers` holds what has ended, by request, one list
    of tokens a sample; `refusals` why a request cannot be served. In a `PrefixCache` prompts are
    found once they are computed, answers once they end or are preempted; who returns from the host
    looks nothing up, a group of samples only its prompt.
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
        _check_parts(model, kv, limits, host)
        self.model, self.kv, self.policy, self.victim = model, kv, policy, victim
        self.choose, self.attention, self.host = choose, find_attention(attention, kv), host
        self.limits = limits if policy.grows else replace(limits, watermark=0.0)
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.undecided: deque[tuple] = deque()  # (request, sample, logits) of a token to choose
        self.answers: dict[int, list[list[int]]] = {}
        self.refusals: dict[int, str] = {}
        self.history = History()
        self.steps = self.calm_since = self.num_requests = 0
        self.answer_lengths: list[int] = []

    def submit(self, prompt: Sequence[int], max_new_tokens: int, samples: int = 1) -> int:
        """Queue a request and return its number, from 0; one that can never fit is in `refusals`.

        Raises TypeError for what is no whole number; ValueError for no prompt, no new tokens, no
        samples, tokens outside the vocabulary, several samples under a policy that reserves, and a
        policy that sets too little aside: a real cache has no overruns.
        """
        ids, declared, samples = list(map(index, prompt)), index(max_new_tokens), index(samples)
        if min(len(ids), declared, samples) < 1 or (samples > 1 and not self.policy.grows):
            asked = f"{samples} samples of {declared} tokens after a prompt of {len(ids)}"
            raise ValueError(f"{asked}, under {self.policy.name}")
        check_vocabulary(ids, self.model.config.vocab_size)
        number, limits = self.num_requests, replace(self.limits, declared=declared)
        reason = submit(self.policy, len(ids), limits, samples)
        most = room_for_declared(len(ids), len(ids), limits)
        if (room := self.policy.set_aside(len(ids), most, limits)) < most:
            raise ValueError(f"{self.policy.name} sets {room} tokens aside where {most} may come")
        self.num_requests += 1
        if reason is not None:
            self.refusals[number] = reason
        else:
            self.waiting.append(Generation(number, ids, limits, samples))
        return number

    def cancel(self, number: int) -> None:
        """Forget a request that waits or runs; its blocks are free at once. Raises KeyError."""
        everybody = {request.index: request for request in (*self.waiting, *self.running)}
        if number not in everybody:
            raise KeyError(f"request {number} neither waits nor runs")
        request = everybody[number]
        if request in self.running:
            self._leave(request)
            self.undecided = deque(row for row in self.undecided if row[0] is not request)
        else:
            self.waiting.remove(request)
            self._forget_on_host(request)

    def run(self) -> dict[int, list[list[int]]]:
        """Step until nobody waits or runs; all answers."""
        while self.waiting or self.running:
            self.step()
        return self.answers

    def step(self) -> None:
        """Admit, make room, run the model once, let go. After an error the next call goes on."""
        self._choose_tokens()  # those that a failed step has left
        self._admit()
        for request in self.running.copy():
            if request in self.running:  # else it was preempted a moment ago
                self._make_room(request)
        if not self.running:  # whoever came in has ended with the first token, or was refused
            return
        going = {(r.index, sample): (r, sample) for r in self.running for sample in r.going}
        tokens = [request.answers[sample][-1] for request, sample in going.values()]
        logits = forward_paged_decode(self.model, self.kv, going, tokens, self.attention)
        self.undecided.extend((*who, row) for who, row in zip(going.values(), logits, strict=True))
        for request in self.running:
            request.stored += 1
        self._record()
        self.steps += 1
        self._choose_tokens()

    def check_invariants(self) -> None:
        """Assert that a request is in one place, and that the pool holds the tokens of who runs."""
        self.kv.check_invariants()
        numbers = [request.index for request in (*self.waiting, *self.running)]
        numbers += [*self.answers, *self.refusals]
        assert len(numbers) == len(set(numbers)) <= self.num_requests, numbers
        for request in self.running:
            stored = {self.kv.tables.num_tokens(seq_id) for seq_id in request.seq_ids}
            assert stored == {request.stored}, (request, stored)

    def _admit(self):
        """Let in the head of the queue while it may enter; the head blocks the rest."""
        while self.waiting:
            head, logits, free = self.waiting[0], None, self.kv.tables.allocator.num_free
            room = self.policy.set_aside(head.prompt, head.stored, head.limits)
            needed = group_blocks(head.prompt, room, len(head.going), head.limits.block_size)
            on_host = self._is_on_host(head)
            needed -= 0 if on_host else known_in_use(self.kv.tables, head.first_ids)
            server = Server(self.running, free, self.steps - self.calm_since, self.answer_lengths)
            enters = may_enter(self.policy, head, needed, server, head.limits)
            if not self.waiting or self.waiting[0] is not head:  # the rule has cancelled it
                continue
            if enters:
                if on_host:
                    self.host.swap_in((head.index, 0))
                else:
                    logits = _compute(self.model, self.kv, head, room)
                self.running.append(self.waiting.popleft())
                self.history.admitted.append((self.steps, head.index))
                new = [sample for sample in head.going if not head.answers[sample]]
                self.undecided.extend((head, sample, logits) for sample in new)
                self._choose_tokens()
            elif self.running:
                break
            else:
                self._refuse(self.waiting.popleft(), needed)

    def _make_room(self, request):
        """Take the blocks that one more token a sample needs; preempt while there are too few."""
        growth, tables = dict.fromkeys(request.seq_ids, 1), self.kv.tables
        while (needed := tables.blocks_to_append(growth)) > tables.allocator.num_free:
            if len(self.running) == 1:
                self._refuse(request, needed)
                self._leave(request)
                return
            victim = self.victim(tuple(self.running))
            if victim not in self.running:
                raise ValueError(f"a victim is one of those that run, got {victim!r}")
            self._preempt(victim)
            if victim is request:
                return
        self.kv.reserve(growth)

    def _preempt(self, victim):
        """Send a running request back to the head of the queue; it keeps its tokens."""
        seq_id = (victim.index, 0)
        if self.host is not None and len(victim.answers) == 1 and self.host.has_room(seq_id):
            self.host.swap_out(seq_id)
            self.running.remove(victim)
        else:
            self._leave(victim)
        self.waiting.appendleft(victim)
        self.history.victims.append((self.steps, victim.index))
        self.calm_since = self.steps

    def _leave(self, request):
        for sample in request.going:
            self._drop(request, sample)
        self.running.remove(request)

    def _drop(self, request, sample):
        """Give up a sample's blocks; a prefix cache still knows what the full ones hold."""
        tables, seq_id = self.kv.tables, (request.index, sample)
        publish(tables, seq_id, request.prompt_ids + request.stored_ids(sample))
        tables.drop(seq_id)

    def _refuse(self, request, needed):
        """It does not fit though nobody runs: somebody else has blocks and will not leave."""
        free = self.kv.tables.allocator.num_free
        reason = f"cache too small: needs {needed} free blocks, there are {free}"
        self.refusals[request.index] = reason
        self._forget_on_host(request)

    def _choose_tokens(self):
        """Choose the next token of each sample that has logits; the sample ends with it, or not."""
        while self.undecided:
            request, sample, logits = undecided = self.undecided.popleft()
            answer = request.answers[sample]
            row = request.index if len(request.answers) == 1 else (request.index, sample)
            try:
                (token,) = map(index, self.choose(logits[None], [row], len(answer)))
                check_vocabulary([token], self.model.config.vocab_size)
            except BaseException:
                if request in self.running:  # the next step asks again
                    self.undecided.appendleft(undecided)
                raise
            if request not in self.running:  # `choose` has cancelled it
                continue
            ended = token == self.model.config.eos_token_id
            if not ended:
                answer.append(token)
            room = self.limits.max_context - request.prompt  # the last token is never stored
            if ended or len(answer) == min(request.declared, room + 1):
                self._drop(request, sample)
                request.going.remove(sample)
            if not request.going:
                self.running.remove(request)
                self.answers[request.index] = request.answers
                insort(self.answer_lengths, request.generated)

    def _is_on_host(self, request):
        return self.host is not None and (request.index, 0) in self.host.tables.seq_ids()

    def _forget_on_host(self, request):
        if self._is_on_host(request):
            self.host.tables.drop((request.index, 0))

    def _record(self):
        """Write one step of the history, as the simulator does: stored, and nobody has left yet."""
        tables, block_size, running = self.kv.tables, self.limits.block_size, self.running
        full = {  # blocks that may be shared: their slots count once
            block_id
            for request in running
            for seq_id in request.seq_ids
            for block_id in tables.block_table(seq_id)[: request.stored // block_size]
        }
        self.history.record(
            running=len(self.running),
            waiting=len(self.waiting),
            finished=len(self.answers),
            refused=len(self.refusals),
            free=tables.allocator.num_free,
            stored=len(full) * block_size
            + sum(request.stored % block_size * len(request.going) for request in running),
        )


def _check_parts(model, kv, limits, host):
    """Refuse parts of an engine that do not fit together."""
    pool = kv.tables.allocator.num_blocks, kv.tables.block_size
    config, weight = model.config, model.wte.weight
    if (limits.num_blocks, limits.block_size) != pool:
        raise ValueError(f"{limits} for a pool of {pool[0]} blocks of {pool[1]} tokens")
    if (kv.config, kv.keys.dtype, kv.keys.device) != (config, weight.dtype, weight.device):
        raise ValueError(
            f"a cache for {kv.config}, {kv.keys.dtype} on {kv.keys.device}; "
            f"a model of {config}, {weight.dtype} on {weight.device}"
        )
    if limits.max_context > config.n_positions:
        raise ValueError(f"a context of {limits.max_context} in {config.n_positions} positions")
    if host is not None and (host.kv is not kv or host.tables.seq_ids()):
        raise ValueError(f"the host pool is another cache's, or holds {host.tables.seq_ids()}")
    if strangers := [name for name in kv.tables.seq_ids() if isinstance(name, tuple)]:
        raise ValueError(f"the engine's names are tuples, and the cache has sequences {strangers}")


def _compute(model, kv, request, room):
    """Take a request's blocks, or none, and compute all that it had stored; the last logits."""
    first, *others = request.seq_ids
    tables, tokens = kv.tables, request.first_ids
    hit = start(tables, first, tokens)
    try:
        kv.reserve({first: room - hit})
        (logits,) = prefill_packed(model, kv, {first: tokens[hit:]})
        publish(tables, first, tokens)
        for other in others:
            tables.fork(first, other)
        if others and request.generated:
            tails = {seq_id: request.stored_ids(seq_id[1]) for seq_id in request.seq_ids}
            prefill_packed(model, kv, tails)
    except BaseException:  # no memory, or Ctrl-C
        drop_left(tables, request.seq_ids)
        raise
    return logits
