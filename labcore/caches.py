"""Where keys and values stay between steps: concatenated, in one long buffer, or in blocks."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain

import torch

from labcore.attention import causal_attention
from labcore.blocks import BlockAllocator, BlockTables, undo_reserve
from labcore.gpt2 import GPT2, GPT2Config


class ContextOverflow(ValueError):
    """A token past the last position that a model, or a buffer, has. Built in: ch04"""


class ConcatKV:
    """Grows by concatenation, [batch, num_tokens, heads, head_dim] a layer. Built in: ch04"""

    def __init__(self, config: GPT2Config) -> None:
        self.num_tokens, self.max_tokens = 0, config.n_positions
        self.keys, self.values = [None] * config.n_layer, [None] * config.n_layer

    def attend(self, layer, q, k, v):
        """Keep k and v, then let q attend to all that is kept: [batch, n, heads, head_dim]."""
        if self.num_tokens > 0:
            k = torch.cat((self.keys[layer][:, : self.num_tokens], k), dim=1)
            v = torch.cat((self.values[layer][:, : self.num_tokens], v), dim=1)
        else:  # a view of queries, keys and values would keep all three
            k, v = k.contiguous(), v.contiguous()
        self.keys[layer], self.values[layer] = k, v
        return causal_attention(q, k, v)


class StaticKV:
    """One buffer of [layers, batch, heads, max_tokens, head_dim], taken at the start, never moved.

    Raises ContextOverflow for more tokens than the model has positions. Built in: ch04
    """

    def __init__(
        self, config: GPT2Config, batch: int, max_tokens: int, dtype=torch.float32, device="cpu"
    ) -> None:
        if max_tokens > config.n_positions:
            raise ContextOverflow(f"{max_tokens} tokens, the model has {config.n_positions}")
        self.num_tokens, self.max_tokens = 0, max_tokens
        shape = (config.n_layer, batch, config.n_head, max_tokens, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def attend(self, layer, q, k, v):
        """Write k and v behind what is there, then attend: [batch, n, heads, head_dim]."""
        if len(k) != self.keys.shape[1]:
            raise ValueError(f"{len(k)} sequences in a buffer for {self.keys.shape[1]}")
        end = self.num_tokens + k.shape[1]
        for buffer, new in ((self.keys, k), (self.values, v)):
            buffer[layer, :, :, self.num_tokens : end] = new.transpose(1, 2)
        k, v = (x[layer, :, :, :end].transpose(1, 2) for x in (self.keys, self.values))
        return causal_attention(q, k, v)


def forward_cached(model: GPT2, cache: ConcatKV | StaticKV, tokens: torch.Tensor) -> torch.Tensor:
    """Run only the new tokens, [batch, n], and store them; logits of the last, [batch, vocab_size].

    Raises ContextOverflow, and ValueError for no tokens or another batch than StaticKV's, before
    anything is written. Built in: ch04
    """
    end = cache.num_tokens + tokens.shape[1]
    if end == cache.num_tokens:
        raise ValueError("no tokens")
    if end > cache.max_tokens:
        raise ContextOverflow(f"token {end} of at most {cache.max_tokens}")
    positions = torch.arange(cache.num_tokens, end, device=tokens.device).expand_as(tokens)
    logits = model.logits(model.hidden(tokens, positions, cache.attend)[:, -1])
    cache.num_tokens = end  # last: a step that fails has stored nothing
    return logits


class PagedKV:
    """Keys and values of any number of sequences, in the blocks of one pool that never grows.

    keys and values are [layers, num_blocks, block_size, heads, head_dim]; add, fork and drop
    sequences in `tables`. A token is written before they count it, so that a step which fails
    half-way has stored nothing. Source: Kwon et al. 2023, section 4.3. Built in: ch05
    """

    def __init__(
        self,
        config: GPT2Config,
        num_blocks: int,
        block_size: int,
        dtype=torch.float32,
        device="cpu",
        allocator: Callable[[int], BlockAllocator] = BlockAllocator,
    ) -> None:
        self.config = config
        self.tables = BlockTables(allocator(num_blocks), block_size)
        shape = (config.n_layer, num_blocks, block_size, config.n_head, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def reserve(self, growth: Mapping[Hashable, int]) -> None:
        """Take blocks for {seq_id: new tokens}, all or none; copy shared ones. OutOfBlocks."""
        before = {seq_id: self.tables.block_table(seq_id) for seq_id in growth}
        copies = self.tables.reserve_all(growth)
        try:
            self.copy_blocks(copies)
        except BaseException:  # no memory for the copies, or Ctrl-C
            undo_reserve(self.tables, before)
            raise

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers. Raises UnknownBlock for a wrong id."""
        for block_id in chain.from_iterable(copies):
            self.tables.allocator.ref_count(block_id)  # raises UnknownBlock
        if copies:
            source, destination = torch.tensor(copies, device=self.keys.device).T
            for pool in (self.keys, self.values):
                pool[:, destination] = pool[:, source]

    def slots(self, seq_id: Hashable, start: int, stop: int) -> list[int]:
        """The slots of positions `start` to `stop`, reserved ones too. Raises IndexError."""
        table, size = self.tables.block_table(seq_id), self.tables.block_size
        if not 0 <= start <= stop <= len(table) * size:
            raise IndexError(f"positions {start} to {stop} in {len(table)} blocks of {size}")
        return [table[p // size] * size + p % size for p in range(start, stop)]

    def block_tables(self, seq_ids: Sequence[Hashable]) -> torch.Tensor:
        """The tables as rows of one tensor, shorter ones filled up with 0: [batch, max_blocks]."""
        tables = [self.tables.block_table(seq_id) for seq_id in seq_ids]
        longest = max(map(len, tables))
        rows = [table + [0] * (longest - len(table)) for table in tables]
        return torch.tensor(rows, device=self.keys.device)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values of new tokens, [n, heads, head_dim], in n slots of a layer."""
        self.keys[layer].flatten(0, 1)[slots] = k
        self.values[layer].flatten(0, 1)[slots] = v

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values in n slots of a layer: both [n, heads, head_dim]."""
        return self.keys[layer].flatten(0, 1)[slots], self.values[layer].flatten(0, 1)[slots]

    def check_invariants(self) -> None:
        """Assert that tables and pools describe the same blocks."""
        self.tables.check_invariants()
        blocks = self.tables.allocator.num_blocks, self.tables.block_size
        assert self.keys.shape[1:3] == self.values.shape[1:3] == blocks, (self.keys.shape, blocks)
