"""GPT-2 through a block table: prefill, a decode step for sequences of any lengths, generation.

Check, take blocks, compute, count: a call that is refused has changed nothing, one that is
interrupted has stored nothing and leaves the blocks that it took for the next try::

    model, tokenizer = load_gpt2()
    kv = PagedKV(model.config, num_blocks=64, block_size=16)
    kv.tables.add("Ana")
    logits = prefill_paged(model, kv, "Ana", tokenizer.encode("It is a truth").ids)
    logits = forward_paged_decode(model, kv, ["Ana"], [logits.argmax()])  # and so on
    kv.tables.drop("Ana")
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import chain
from operator import index

import numpy as np
import torch
from torch import Tensor
from tqdm import trange

from kernels.paged_attention import find_kernels
from labcore.attention import IN_PLACE_DTYPES, causal_attention, gather, in_place, triton_kernel
from labcore.blocks import BlockTables
from labcore.caches import ContextOverflow, PagedKV
from labcore.gpt2 import GPT2

ATTENTION = {"gather": gather, "in_place": in_place, "triton": triton_kernel}


def forward_paged_decode(
    model: GPT2,
    kv: PagedKV,
    seq_ids: Sequence[Hashable],
    tokens: Sequence[int],
    attention: str | Callable = "in_place",
) -> Tensor:
    """One more token for each sequence, each at its own position: logits [batch, vocab_size].

    `attention` is "gather", "in_place", "triton" or a function of their form. Raises, before any
    block is taken, as `prefill_packed` and `find_attention`, and ValueError for a sequence named
    twice or another number of tokens. Cost: the weights once, and every sequence's keys and values.
    Source: Kwon et al. 2023, section 4.3. Built in: ch05
    """
    seq_ids, tokens = list(seq_ids), list(tokens)
    if len(seq_ids) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for {len(seq_ids)} sequences")
    if len(set(seq_ids)) < len(seq_ids):
        raise ValueError(f"a sequence is named twice: {seq_ids}")
    attention = find_attention(attention, kv)
    new_tokens = {seq_id: [token] for seq_id, token in zip(seq_ids, tokens, strict=True)}
    new_tokens = _checked(model, kv, new_tokens)
    ids, positions, slots = _start(kv, new_tokens)  # each [batch]
    through_table = attention(kv.block_tables(seq_ids), positions + 1, kv.keys[0])

    def attend(layer, q, k, v):  # [batch, 1, heads, head_dim]
        kv.write(layer, slots, k[:, 0], v[:, 0])
        return through_table(q[:, 0], kv.keys[layer], kv.values[layer])[:, None]

    hidden = model.hidden(ids[:, None], positions[:, None], attend)[:, 0]  # [batch, n_embd]
    logits = model.logits(hidden)
    _settle(kv, new_tokens)
    return logits


def prefill_paged(
    model: GPT2, kv: PagedKV, seq_id: Hashable, tokens: Sequence[int], chunk: int | None = None
) -> Tensor:
    """Store a prompt, `chunk` tokens at a time: logits [vocab_size] after its last token.

    Blocks for all chunks are taken at once; chunks stored before an interruption stay. Raises as
    `prefill_packed`, and ValueError for a chunk below 1.  Built in: ch05
    """
    tokens = list(tokens)
    chunk = len(tokens) if chunk is None else index(chunk)
    if chunk < 1 <= len(tokens):
        raise ValueError(f"a chunk holds at least one token, got {chunk}")
    _checked(model, kv, {seq_id: tokens})
    kv.reserve({seq_id: len(tokens)})
    for start in range(0, len(tokens), chunk):
        logits = prefill_packed(model, kv, {seq_id: tokens[start : start + chunk]})
    return logits[0]


def prefill_packed(model: GPT2, kv: PagedKV, prompts: Mapping[Hashable, Sequence[int]]) -> Tensor:
    """Store prompts of several sequences in one pass without padding: logits [batch, vocab_size].

    Each sequence reads a copy of its own tokens through its table. Raises, before any block is
    taken, KeyError; ValueError for no sequences, no tokens, tokens outside the vocabulary or a
    cache of another shape; TypeError for tokens that are no whole numbers or a cache of other
    numbers or on another device; ContextOverflow and OutOfBlocks.  Built in: ch05
    """
    prompts = _checked(model, kv, prompts)
    ids, positions, slots = _start(kv, prompts)  # each [total]
    counts = list(map(len, prompts.values()))
    slots_so_far = [
        torch.tensor(kv.slots(seq_id, 0, kv.tables.num_tokens(seq_id) + n), device=ids.device)
        for seq_id, n in zip(prompts, counts, strict=True)
    ]

    def attend(layer, q, k, v):  # [1, total, heads, head_dim]
        kv.write(layer, slots, k[0], v[0])
        parts, queries = [], q.split(counts, dim=1)  # each [1, n, heads, head_dim]
        for own, places in zip(queries, slots_so_far, strict=True):
            keys, values = kv.read(layer, places)  # [tokens, heads, head_dim]
            parts.append(causal_attention(own, keys[None], values[None]))
        return torch.cat(parts, dim=1)

    last = torch.tensor(counts).cumsum(0) - 1
    hidden = model.hidden(ids[None], positions[None], attend)[0, last]  # [batch, n_embd]
    logits = model.logits(hidden)
    _settle(kv, prompts)
    return logits


def greedy(logits: Tensor, rows: Sequence[int], step: int) -> list[int]:
    """The token with the largest logit, for each row of [batch, vocab_size].  Given."""
    return logits.argmax(-1).tolist()


def sampler(temperature: float, seed: int = 0) -> Callable:
    """A `choose` for `generate` that draws from softmax(logits / temperature).

    What is drawn depends on seed, row and step alone. Raises ValueError.  Given.
    """
    if not temperature > 0 or index(seed) < 0:
        raise ValueError(f"temperature is above 0, a seed not below: {temperature} and {seed}")

    def choose(logits, rows, step):
        logits = logits.double() - logits.double().amax(-1, keepdim=True)
        weights = (logits / temperature).softmax(-1).cpu().numpy()
        return [
            int(np.random.default_rng((seed, row, step)).choice(len(p), p=p))
            for p, row in zip(weights, rows, strict=True)
        ]

    return choose


def generate(
    model: GPT2,
    kv: PagedKV,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choose: Callable = greedy,
    attention: str | Callable = "in_place",
    samples: int = 1,
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens`, or up to the model's end-of-text token.

    `choose(logits [batch, vocab_size], rows, step)` returns a token a row. A prompt is computed
    once for its `samples` rows, one after another, each with an answer. In the end all blocks are
    free, after an error too. Raises as `forward_paged_decode`; OutOfBlocks also on the way.  Given.
    """
    prompts, samples = [list(tokens) for tokens in prompts], index(samples)
    longest = max(map(len, prompts), default=0) + index(max_new_tokens) - 1
    if max_new_tokens < 0 or samples < 1:
        raise ValueError(f"{max_new_tokens} new tokens, {samples} samples")
    if longest > model.config.n_positions:
        raise ContextOverflow(f"{longest} tokens to store, {model.config.n_positions} positions")
    if not all(prompts):
        raise ValueError(f"prompt {prompts.index([])} has no tokens")
    attention = find_attention(attention, kv)
    answers = [[] for _ in prompts for _ in range(samples)]
    rows = {object(): row for row in range(len(answers))}  # seq_id: row, of those that go on
    try:
        logits = _prefill_samples(model, kv, prompts, list(rows), samples)
        for step in trange(max_new_tokens, unit="step", delay=5, leave=False):
            tokens = list(map(index, choose(logits, list(rows.values()), step)))
            check_vocabulary(tokens, model.config.vocab_size)
            for (seq_id, row), token in zip(list(rows.items()), tokens, strict=True):
                if token == model.config.eos_token_id:
                    kv.tables.drop(seq_id)
                    del rows[seq_id]
                else:
                    answers[row].append(token)
            if not rows or step == max_new_tokens - 1:
                break
            newest = [answers[row][-1] for row in rows.values()]
            logits = forward_paged_decode(model, kv, rows, newest, attention)
    finally:
        drop_left(kv.tables, rows)
    return answers


def _prefill_samples(model, kv, prompts, seq_ids, samples):
    """Compute each prompt once, and fork it for its other samples: logits [rows, vocab_size]."""
    firsts = seq_ids[::samples]
    for seq_id in firsts:
        kv.tables.add(seq_id)
    logits = prefill_packed(model, kv, dict(zip(firsts, prompts, strict=True)))
    for row, seq_id in enumerate(seq_ids):
        if row % samples:
            kv.tables.fork(firsts[row // samples], seq_id)
    return logits.repeat_interleave(samples, 0)


def drop_left(tables: BlockTables, seq_ids: Collection[Hashable]) -> None:
    """Drop those of `seq_ids` that are still there, oldest first: what an error left.  Given."""
    for seq_id in tables.seq_ids():
        if seq_id in seq_ids:
            tables.drop(seq_id)


def find_attention(attention: str | Callable, kv: PagedKV) -> Callable:
    """The function that `attention` names, or the error that is known before blocks are taken.

    ValueError for another name; TypeError or RuntimeError where it cannot read the pool.  Given.
    """
    if attention not in ATTENTION and not callable(attention):
        raise ValueError(f"attention is one of {', '.join(ATTENTION)}, got {attention!r}")
    attention = ATTENTION.get(attention, attention)
    if attention is in_place and kv.keys.dtype not in IN_PLACE_DTYPES:
        raise TypeError(f'"in_place" reads float32 and float64, not {kv.keys.dtype}: use "gather"')
    if attention is triton_kernel:
        find_kernels(kv.keys)
    return attention


def _settle(kv, new_tokens):
    """Let the tables count what was stored. Copies are due only where somebody forked meanwhile."""
    growth = {seq_id: len(tokens) for seq_id, tokens in new_tokens.items()}
    kv.copy_blocks(kv.tables.append_all(growth))


def _start(kv, new_tokens):
    """Take the blocks of checked tokens: their ids, positions and slots, each [total]."""
    kv.reserve({seq_id: len(tokens) for seq_id, tokens in new_tokens.items()})
    positions, slots = [], []
    for seq_id, tokens in new_tokens.items():
        start = kv.tables.num_tokens(seq_id)
        positions += range(start, start + len(tokens))
        slots += kv.slots(seq_id, start, start + len(tokens))
    ids = list(chain.from_iterable(new_tokens.values()))
    return torch.tensor([ids, positions, slots], device=kv.keys.device)


def check_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for tokens that are not in a vocabulary.  Built in: ch05"""
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"tokens {outside} are outside a vocabulary of {vocab_size}")


def _checked(model, kv, new_tokens):
    """{seq_id: tokens} as lists of int, or the error that can be known before blocks are taken."""
    config, weight = model.config, model.wte.weight
    if kv.config != config:
        raise ValueError(f"a cache for {kv.config}, a model of {config}")
    if (kv.keys.dtype, kv.keys.device) != (weight.dtype, weight.device):
        raise TypeError(
            f"a cache of {kv.keys.dtype} on {kv.keys.device}, "
            f"a model of {weight.dtype} on {weight.device}"
        )
    new_tokens = {seq_id: list(map(index, tokens)) for seq_id, tokens in new_tokens.items()}
    if not new_tokens:
        raise ValueError("no sequences")
    for seq_id, tokens in new_tokens.items():
        stored = kv.tables.num_tokens(seq_id)  # raises KeyError if there is none
        if not tokens:
            raise ValueError(f"sequence {seq_id!r}: no tokens")
        check_vocabulary(tokens, config.vocab_size)
        if stored + len(tokens) > config.n_positions:
            raise ContextOverflow(
                f"sequence {seq_id!r} stores {stored} tokens, {len(tokens)} more would pass the "
                f"model's {config.n_positions} positions"
            )
    return new_tokens
