"""Beam search on forked block tables: the prompt is stored once, and so is all that beams share.

Beams come and go in every step. Samples, which only go, need no module of their own: they are
`labcore.decode.generate(..., samples=n)`, or a request of `labcore.engine` with n samples.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index

import torch

from labcore.blocks import BlockTables
from labcore.caches import ContextOverflow, PagedKV
from labcore.decode import drop_left, find_attention, forward_paged_decode, prefill_packed
from labcore.gpt2 import GPT2


@dataclass(eq=False)
class Beam:
    """An answer on its way: its tokens, and the sum of their log probabilities.

    It is its own name in the tables, where all but its last token are stored. Built in: ch09a
    """

    total: float = 0.0
    tokens: list[int] = field(default_factory=list)


def best_first(
    logits: torch.Tensor, totals: Sequence[float], number: int
) -> Iterator[tuple[float, int, int]]:
    """The best continuations of all beams, best first, as (total, row of its beam, token).

    `logits` are [beams, vocab_size], `totals` one a row. Of equals any may be first. One log
    probability a row and token is computed, in float64. Built in: ch09a
    """
    totals = torch.tensor(totals, dtype=torch.double, device=logits.device)
    sums = totals[:, None] + logits.double().log_softmax(-1)  # [beams, vocab_size]
    best = sums.flatten().topk(min(number, sums.numel()))
    for total, place in zip(*map(torch.Tensor.tolist, best), strict=True):
        yield total, *divmod(place, logits.shape[1])


def replace_beams(
    tables: BlockTables, parents: Sequence[Hashable], children: Sequence[tuple[Hashable, Hashable]]
) -> None:
    """Fork a table for every (parent, child), then drop all parents. Takes no block.

    So the blocks of the dead are free before a survivor takes one, and an only child is alone in
    its parent's blocks: it writes in place. O(blocks of all tables).
    Source: Kwon et al. 2023, section 4.4. Built in: ch09a
    """
    for parent, child in children:
        tables.fork(parent, child)
    for parent in parents:
        tables.drop(parent)


def beam_search(
    model: GPT2,
    kv: PagedKV,
    prompt: Sequence[int],
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    attention: str | Callable = "in_place",
) -> list[tuple[list[int], float]]:
    """The best answers to a prompt that a search with `num_beams` beams finds: (tokens, score).

    A score is the sum of an answer's log probabilities / its length ** length_penalty; the length
    counts the end-of-text token, which `tokens` leaves out. Of each step's 2 num_beams best
    continuations, those among the first num_beams that end are answers, and the first num_beams
    that do not end live on. It stops when none of these could still beat the worst of num_beams
    answers: transformers' `early_stopping="never"`. One beam is `greedy` if length_penalty is 0.

    With n tokens stored at most group_blocks(len(prompt), n, num_beams, block_size) blocks are in
    use; at the end, or after an error, none. Raises as `generate`, and ValueError for no prompt, no
    beams, no new tokens or a length_penalty beyond 50, where powers leave float64. Built in: ch09a
    """
    prompt, num_beams, max_new_tokens = _checked(model, prompt, num_beams, max_new_tokens)
    length_penalty = float(length_penalty)
    if not abs(length_penalty) <= 50:  # nan is refused, too
        raise ValueError(f"a length_penalty is from -50 to 50, got {length_penalty}")
    attention, eos = find_attention(attention, kv), model.config.eos_token_id
    beams, children, answers = [Beam()], [], []
    try:
        kv.tables.add(beams[0])
        logits = prefill_packed(model, kv, {beams[0]: prompt})
        for length in range(1, max_new_tokens + 1):
            children, ended = _grow(beams, logits, num_beams, eos, length == max_new_tokens)
            answers += [(tokens, total / length**length_penalty) for tokens, total in ended]
            answers = sorted(answers, key=lambda answer: -answer[1])[:num_beams]
            if not children:
                break
            best_length = max_new_tokens if length_penalty > 0 else length
            best_score = children[0][1].total / best_length**length_penalty
            if len(answers) == num_beams and best_score <= answers[-1][1]:
                break
            replace_beams(kv.tables, beams, children)
            beams = [child for _, child in children]
            newest = [beam.tokens[-1] for beam in beams]
            logits = forward_paged_decode(model, kv, beams, newest, attention)
    finally:
        drop_left(kv.tables, {*beams, *(child for _, child in children)})
    return answers


def _checked(model, prompt, num_beams, max_new_tokens):
    """A list and two of int, or the error that can be known before a block is taken."""
    prompt, num_beams, max_new_tokens = list(prompt), index(num_beams), index(max_new_tokens)
    if min(len(prompt), num_beams, max_new_tokens) < 1:
        raise ValueError(f"{num_beams} beams of {max_new_tokens} tokens, a prompt of {len(prompt)}")
    longest = len(prompt) + max_new_tokens - 1
    if longest > model.config.n_positions:
        raise ContextOverflow(f"{longest} tokens to store, {model.config.n_positions} positions")
    return prompt, num_beams, max_new_tokens


def _grow(beams, logits, num_beams, eos, is_last):
    """The next beams, as (parent, child), and what ends in this step, as (tokens, total)."""
    children, ended = [], []
    best = best_first(logits, [beam.total for beam in beams], 2 * num_beams)
    for rank, (total, row, token) in enumerate(best):
        tokens = [*beams[row].tokens, token]
        if is_last or token == eos:
            if rank < num_beams:
                ended.append((tokens[:-1] if token == eos else tokens, total))
        elif len(children) < num_beams:
            children.append((beams[row], Beam(total, tokens)))
    return children, ended
