"""What the tests of the model share: small models, the reference's, caches to spoil, snapshots."""

import random
from functools import cache, lru_cache
from pathlib import Path

import torch

import labcore
from kernels.reference import paged_attention
from labcore.caches import PagedKV
from labcore.gpt2 import GPT2, GPT2Config, load_gpt2, random_gpt2

TINY = Path(labcore.__file__).parent / "tiny"
NAN, RUBBISH = float("nan"), 1e4  # in a slot that was never written, and in one written before
FLOATS = [torch.float32, torch.float64]


@cache
def tiny(dtype: torch.dtype = torch.float64) -> GPT2:
    return load_gpt2("tiny", dtype)[0]


@cache
def odd(dtype: torch.dtype = torch.float64, **changes) -> GPT2:
    """A model of few numbers, none of them round, whose weights are all random and large.

    Those of its norms are the largest: at 0.5, too, it would say token 2 whatever it was asked.
    """
    shape = {"n_layer": 2, "n_head": 3, "n_embd": 15, "vocab_size": 53, "n_positions": 41}
    model = random_gpt2(GPT2Config(**shape | changes)).to(dtype)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=2.0 if "ln_" in name and name.endswith("weight") else 0.5)
    return model


@cache
def reference(folder: Path = TINY, dtype: torch.dtype = torch.float64):
    """transformers' model of a checkpoint."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


def reference_greedy(model, prompt: list[int], steps: int) -> torch.Tensor:
    """The logits that chose each greedy token, by transformers' model with its own cache."""
    from transformers import DynamicCache

    cache, tokens, logits = DynamicCache(config=model.config), prompt, []
    for _ in range(steps):
        logits.append(model(torch.tensor([tokens]), cache, use_cache=True).logits[0, -1])
        tokens = [logits[-1].argmax().item()]
    return torch.stack(logits)


def tolerance(expected: torch.Tensor) -> float:
    """How far logits may be from these."""
    return 1e-9 if expected.dtype == torch.float64 else 1e-4 * max(1, expected.abs().max().item())


def assert_equal_logits(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.dtype == expected.dtype
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance(expected))


def random_tokens(n: int, seed: int = 0, vocab_size: int = 2_048) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(vocab_size) for i in range(n)]


@lru_cache(maxsize=128)
def _dense(model: GPT2, tokens: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([tokens]))[0]


def dense(model: GPT2, tokens: list[int]) -> torch.Tensor:
    """The logits after each of the tokens, everything anew: [len(tokens), vocab_size]."""
    return _dense(model, tuple(tokens))


@cache
def _dense_greedy(model: GPT2, prompt: tuple[int, ...], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens


def dense_greedy(model: GPT2, prompt: list[int], steps: int) -> list[int]:
    """A prompt and its greedy continuation, the whole text being run again for each token."""
    return list(_dense_greedy(model, tuple(prompt), steps))


def paged_cache(model: GPT2, num_blocks: int, block_size: int, order: list[int] | None = None):
    """A cache full of NaN that hands out its blocks in `order`, by default at random."""
    weight = model.wte.weight
    kv = PagedKV(model.config, num_blocks, block_size, weight.dtype, weight.device)
    allocator = kv.tables.allocator
    order = order or random.Random(num_blocks).sample(range(num_blocks), num_blocks)
    allocator.allocate_many(num_blocks)
    allocator.free_many(order[::-1])  # the block freed last is handed out first
    poison(kv, NAN)
    return kv


def poison(kv: PagedKV, value: float) -> None:
    """Put `value` into every slot that holds no token of a sequence."""
    nobody = torch.ones(kv.keys.shape[1] * kv.keys.shape[2], dtype=torch.bool)
    for seq_id in kv.tables.seq_ids():
        nobody[kv.tables.slot_mapping(seq_id)] = False
    kv.keys.flatten(1, 2)[:, nobody] = value
    kv.values.flatten(1, 2)[:, nobody] = value


def bits(tensor: torch.Tensor) -> bytes:
    """What a tensor holds, so that NaN equals NaN."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def snapshot(kv: PagedKV) -> tuple:
    """Everything a failed call could have changed: free list, counts, tables, lengths, data."""
    tables, allocator = kv.tables, kv.tables.allocator
    return (
        list(allocator._free_ids),
        [allocator.ref_count(b) for b in range(allocator.num_blocks)],
        [(s, tables.block_table(s), tables.num_tokens(s)) for s in tables.seq_ids()],
        bits(kv.keys),
        bits(kv.values),
    )


def used(kv: PagedKV) -> int:
    return kv.tables.allocator.num_blocks - kv.tables.allocator.num_free


def oracle(block_tables, seq_lens, pool):
    """kernels.reference as a way through the table, in the form of labcore.attention's."""

    def attend(queries, key_pool, value_pool):
        return paged_attention(queries, key_pool, value_pool, block_tables, seq_lens).to(pool.dtype)

    return attend


PATHS = {"gather": "gather", "in_place": "in_place", "oracle": oracle}
