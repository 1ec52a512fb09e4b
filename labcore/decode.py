"""GPT-2 through a block table: prefill, a decode step for sequences of any lengths, generation.

Every check comes first, then the blocks, then the model, and only then do the tables count the new
tokens. A call that is refused has changed nothing; one that is interrupted has stored nothing.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from operator import index

import numpy as np
import torch
from tqdm import trange

from labcore.attention import IN_PLACE_DTYPES, causal_attention, gather, in_place
from labcore.caches import ContextOverflow, PagedKV
from labcore.gpt2 import GPT2

ATTENTION = {"gather": gather, "in_place": in_place}


def forward_paged_decode(
    model: GPT2,
    kv: PagedKV,
    seq_ids: Sequence[Hashable],
    tokens: Sequence[int],
    attention: str | Callable = "in_place",
) -> torch.Tensor:
    """One more token for each sequence, each at its own position: logits [batch, vocab_size].

    `attention` is "gather", "in_place" or a function of their form (labcore.attention). Raises,
    before any block is taken, KeyError for a sequence that is not there, ValueError for one that
    is there twice and for a token outside the vocabulary, ContextOverflow, OutOfBlocks, and
    TypeError for dtypes that do not go together. Source: Kwon et al. 2023, section 4.3. Built in:
    ch05
    """
    seq_ids, tokens = list(seq_ids), list(tokens)
    if len(set(seq_ids)) < len(seq_ids) or len(seq_ids) != len(tokens):
        raise ValueError(f"one token for each of several sequences, got {tokens} for {seq_ids}")
    if isinstance(attention, str) and attention not in ATTENTION:
        raise ValueError(f"attention is one of {', '.join(ATTENTION)}, got {attention!r}")
    attention = ATTENTION.get(attention, attention)
    if attention is in_place and kv.keys.dtype not in IN_PLACE_DTYPES:
        raise TypeError(f'"in_place" reads float32 and float64, not {kv.keys.dtype}: use "gather"')
    growth = {seq_id: [token] for seq_id, token in zip(seq_ids, tokens, strict=True)}
    ids, positions, slots = _start(model, kv, growth)  # each [batch]
    through_table = attention(kv.block_tables(seq_ids), positions + 1, kv.keys[0])

    def attend(layer, q, k, v):  # [batch, 1, heads, head_dim]
        kv.write(layer, slots, k[:, 0], v[:, 0])
        return through_table(q[:, 0], kv.keys[layer], kv.values[layer])[:, None]

    hidden = model.hidden(ids[:, None], positions[:, None], attend)
    kv.tables.append_all(dict.fromkeys(seq_ids, 1))
    return model.logits(hidden[:, 0])


def prefill_paged(
    model: GPT2, kv: PagedKV, seq_id: Hashable, tokens: Sequence[int], chunk: int | None = None
) -> torch.Tensor:
    """Store a prompt behind what a sequence holds, `chunk` tokens at a time: logits [vocab_size].

    The logits are those after the last token. The sequence must have been added to `kv.tables`.
    Blocks for all chunks are taken at once. Raises as `prefill_packed`. Built in: ch05
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


def prefill_packed(
    model: GPT2, kv: PagedKV, prompts: Mapping[Hashable, Sequence[int]]
) -> torch.Tensor:
    """Store prompts of several sequences in one pass without padding: logits [batch, vocab_size].

    All tokens lie behind one another in one row; each sequence attends to its own. Before any block
    is taken it raises KeyError for a sequence that is not there, ValueError for a prompt that is
    empty or holds a token outside the vocabulary, ContextOverflow and OutOfBlocks. Built in: ch05
    """
    ids, positions, slots = _start(model, kv, prompts)  # each [total]
    counts = [len(tokens) for tokens in prompts.values()]
    stored = [
        torch.tensor(kv.slots(seq_id, 0, kv.tables.num_tokens(seq_id) + n), device=ids.device)
        for seq_id, n in zip(prompts, counts, strict=True)
    ]

    def attend(layer, q, k, v):  # [1, total, heads, head_dim]
        kv.write(layer, slots, k[0], v[0])
        parts = []
        for own, places in zip(q.split(counts, dim=1), stored, strict=True):
            keys, values = kv.read(layer, places)  # [tokens, heads, head_dim]
            parts.append(causal_attention(own, keys[None], values[None]))
        return torch.cat(parts, dim=1)

    hidden = model.hidden(ids[None], positions[None], attend)
    kv.tables.append_all(dict(zip(prompts, counts, strict=True)))
    last = torch.tensor(counts).cumsum(0) - 1
    return model.logits(hidden[0, last])


def greedy(logits: torch.Tensor, rows: Sequence[int], step: int) -> list[int]:
    """The token with the largest logit, for each row of [batch, vocab_size].  Given."""
    return logits.argmax(-1).tolist()


def sampler(temperature: float, seed: int = 0) -> Callable:
    """A `choose` for `generate` that draws from softmax(logits / temperature).

    What is drawn depends on seed, row and step alone: not on the other rows, nor on their order,
    nor on whether the sequence was preempted in between. ValueError unless temperature > 0. Given.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is above 0, got {temperature}; `greedy` is its limit")

    def choose(logits, rows, step):
        weights = (logits.double() / temperature).softmax(-1).cpu().numpy()
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
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens`, or up to the model's end-of-text token.

    `choose` is `greedy` or a `sampler`. A sequence gives its blocks back when it ends, and
    all do when an error ends the call; the last token chosen is never stored. Raises as
    `prefill_packed`, and OutOfBlocks when the pool is too small for what is generated. Given.
    """
    if max_new_tokens < 0:
        raise ValueError(f"{max_new_tokens} new tokens")
    longest = max(map(len, prompts), default=0) + max_new_tokens - 1
    if longest > model.config.n_positions:
        raise ContextOverflow(f"{longest} tokens to store, {model.config.n_positions} positions")
    going = {("prompt", row): list(tokens) for row, tokens in enumerate(prompts)}
    answers = {seq_id: [] for seq_id in going}
    added = []
    try:
        for seq_id in going:
            kv.tables.add(seq_id)
            added.append(seq_id)
        logits = prefill_packed(model, kv, going)
        for step in trange(max_new_tokens, unit="step", delay=5, leave=False):
            chosen = choose(logits, [row for _, row in going], step)
            going = dict(zip(going, chosen, strict=True))
            for seq_id, token in list(going.items()):
                if token != model.config.eos_token_id:
                    answers[seq_id].append(token)
                else:
                    del going[seq_id]
                    kv.tables.drop(seq_id)
                    added.remove(seq_id)
            if not going or step == max_new_tokens - 1:
                break
            logits = forward_paged_decode(model, kv, list(going), going.values(), attention)
    finally:
        for seq_id in added:
            kv.tables.drop(seq_id)
    return list(answers.values())


def _start(model, kv, new_tokens):
    """Check, then take the blocks: ids, positions and slots of all new tokens, each [total]."""
    new_tokens = _checked(model, kv, new_tokens)
    kv.reserve({seq_id: len(tokens) for seq_id, tokens in new_tokens.items()})
    positions, slots = [], []
    for seq_id, tokens in new_tokens.items():
        start = kv.tables.num_tokens(seq_id)
        positions += range(start, start + len(tokens))
        slots += kv.slots(seq_id, start, start + len(tokens))
    ids = list(chain.from_iterable(new_tokens.values()))
    return torch.tensor([ids, positions, slots], device=kv.keys.device)


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
        outside = [token for token in tokens if not 0 <= token < config.vocab_size]
        if outside:
            raise ValueError(f"tokens {outside} are outside a vocabulary of {config.vocab_size}")
        if stored + len(tokens) > config.n_positions:
            raise ContextOverflow(
                f"sequence {seq_id!r} stores {stored} tokens, {len(tokens)} more would pass the "
                f"model's {config.n_positions} positions"
            )
    return new_tokens
