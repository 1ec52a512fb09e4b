"""Answers that the checks of chapter 4 must refuse."""

import torch

from bookkit.exercises.ch04 import check_doubling, check_even_batch, check_off_by_one
from labcore.attention import causal_attention
from labcore.caches import ConcatKV, StaticKV, forward_cached


class Doubling(ConcatKV):
    """The right one, in pieces that the wrong ones change."""

    copied = 0

    def attend(self, layer, q, k, v):
        start, end = self.num_tokens, self.num_tokens + k.shape[1]
        for buffers, new in ((self.keys, k), (self.values, v)):
            old = buffers[layer]
            if old is None or self.is_full(old.shape[1], end):
                buffers[layer] = new.new_zeros(len(new), self.room(end), *new.shape[2:])
                if old is not None:
                    self.keep(buffers[layer], old, start)
            buffers[layer][:, start:end] = new
        return causal_attention(
            q, *(x[layer][:, : self.seen(end)] for x in (self.keys, self.values))
        )

    def is_full(self, room, end):
        return room < end

    def room(self, end):
        return 1 << (end - 1).bit_length()

    def keep(self, new, old, start):
        new[:, :start] = old[:, :start]
        self.copied += start

    def seen(self, end):
        return end


class TooEarly(Doubling):
    """Doubles when it is full, not when one more comes."""

    def is_full(self, room, end):
        return room <= end

    def room(self, end):
        return 1 << end.bit_length()


class Forgetful(Doubling):
    """Doubles, and starts again from nothing."""

    def keep(self, new, old, start):
        self.copied += start


class CopiesAll(Doubling):
    """Counts the room as copied, not the tokens."""

    def keep(self, new, old, start):
        new[:, : old.shape[1]] = old
        self.copied += new.shape[1]


class MovesAll(Doubling):
    """Moves what the old room holds and nothing counts, too."""

    def keep(self, new, old, start):
        new[:, : old.shape[1]] = old
        self.copied += old.shape[1]


class DoublesOnce(Doubling):
    """Twice the room, whether that suffices or not."""

    def attend(self, layer, q, k, v):
        old = self.keys[layer]
        self.once = None if old is None else 2 * old.shape[1]
        return super().attend(layer, q, k, v)

    def room(self, end):
        return self.once or super().room(end)


class ReadsAll(Doubling):
    """Attends to the room that is not filled yet."""

    def seen(self, end):
        return self.room(end)


class Static(StaticKV):
    """Room for all positions from the start."""

    copied = 0

    def __init__(self, config):
        super().__init__(config, 2, config.n_positions, torch.float64)


class Concat(ConcatKV):
    """Concatenation, which copies at every step."""

    copied = 0


class OnlyCounts(Doubling):
    """Keeps the step that was interrupted as if it had been counted."""

    def attend(self, layer, q, k, v):
        self.num_tokens += layer == 0
        return super().attend(layer, q, k, v)


def shifted_twice(model, cache, token, shift=2):
    position = torch.tensor([[cache.num_tokens + shift]])
    hidden = model.hidden(token, position, cache.attend)
    cache.num_tokens += 1
    return model.logits(hidden[:, -1])


def never_counts(model, cache, token):
    position = torch.tensor([[cache.num_tokens + 1]])
    return model.logits(model.hidden(token, position, cache.attend)[:, -1])


def clamped(model, cache, token):
    last = cache.max_tokens - 1
    return shifted_twice(model, cache, token, min(1, last - cache.num_tokens))


def constant(model, cache, token):
    cache.num_tokens += 1
    return torch.zeros(1, 29, dtype=torch.float64)


WRONG = {
    check_even_batch: [6.6, 1.6, 12, 48, "24"],
    check_doubling: [
        *(TooEarly, Forgetful, CopiesAll, MovesAll, DoublesOnce),
        *(ReadsAll, Static, Concat, OnlyCounts),
    ],
    check_off_by_one: [forward_cached, shifted_twice, never_counts, clamped, constant],
}
