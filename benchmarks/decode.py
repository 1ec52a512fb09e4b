"""A decode step through a block table against one on a static cache, on the processor.

GPT-2's real shape, float32, two threads, random weights, blocks in random order. All ratios are
time / static cache's time, in one process, taken in turns: median, smallest, largest.
Run: python benchmarks/decode.py [--record]
Takes five minutes and 8 GB of memory; --record writes book/results/decode.json for the book.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from bookkit.timing import bench, machine, ratio, write_record
from labcore.attention import gather, in_place
from labcore.blocks import blocks_needed
from labcore.caches import PagedKV, StaticKV, forward_cached
from labcore.decode import forward_paged_decode, generate
from labcore.gpt2 import GPT2Config as Shape
from labcore.gpt2 import load_gpt2, random_gpt2

RESULT = Path(__file__).resolve().parent.parent / "book/results/decode.json"
SHAPES = [(1, 128), (8, 128), (32, 128), (64, 128), (32, 512), (64, 512)]  # batch, context
GOALS = {(64, 512): 1.4}  # whole step, in place; 1.15 elsewhere
BLOCK_SIZE, REPEATS, THREADS = 16, 15, 2
STEPS = REPEATS + 2  # what `bench` calls a contender that is slower than its time slice
PATHS = {"gather": gather, "in_place": in_place}


def scatter(tables):
    """Leave the free list of an unused pool in random order."""
    num_blocks = tables.allocator.num_free
    tables.allocator.allocate_many(num_blocks)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables.allocator.free_many(order.tolist())


def filled(tensor):
    """Random numbers in every layer of a cache: the same, for time depends on no value."""
    tensor[:] = torch.randn(tensor.shape[1:])


def paged_cache(config, batch, context):
    """A pool that holds `batch` sequences of `context` tokens, scattered, and room for the run."""
    kv = PagedKV(config, batch * blocks_needed(context + STEPS, BLOCK_SIZE), BLOCK_SIZE)
    scatter(kv.tables)
    for row in range(batch):
        kv.tables.add(row, context)
    filled(kv.keys)
    filled(kv.values)
    return kv


def static_cache(config, batch, context):
    """The same in one buffer a sequence."""
    cache = StaticKV(config, batch, context + STEPS)
    filled(cache.keys)
    filled(cache.values)
    cache.num_tokens = context
    return cache


def three(times, who, static="static"):
    """Median, smallest and largest ratio to the static cache."""
    return [round(x, 3) for x in ratio(times, who, static)]


def time_step(model, batch, context):
    """The whole step, and its attention alone, for one shape.

    Every call stores a token: in all contenders contexts grow from `context` - 8 to + 8.
    """
    start = context - STEPS // 2
    static = static_cache(model.config, batch, start)
    paged = {name: paged_cache(model.config, batch, start) for name in PATHS}
    tokens = list(range(batch))
    column = torch.tensor(tokens)[:, None]

    def step(name):
        return lambda: forward_paged_decode(model, paged[name], range(batch), tokens, name)

    contenders = {"static": lambda: forward_cached(model, static, column)}
    times = bench(contenders | {name: step(name) for name in PATHS}, REPEATS, seconds=1e-6)
    assert static.num_tokens == paged["gather"].tables.num_tokens(0) == start + STEPS
    row = {"batch": batch, "context": context, "static_ms": round(1e3 * median(times["static"]), 3)}
    return row | {name: three(times, name) for name in PATHS}, static, paged


def contiguous(static, queries, context):
    """All layers of a static cache: stock attention over keys that lie side by side."""

    def call():
        for layer in range(len(static.keys)):
            k, v = (x[layer, :, :, :context] for x in (static.keys, static.values))
            F.scaled_dot_product_attention(queries[:, :, None], k, v)

    return call


def time_attention(batch, context, static, paged):
    """Attention of one layer: a step's indices and all its layers, divided by the layers."""
    layers, _, heads, _, head_dim = static.keys.shape
    queries = torch.randn(batch, heads, head_dim)

    def through_table(name):
        kv = paged[name]

        def call():
            tables = kv.block_tables(range(batch))
            attend = PATHS[name](tables, torch.full((batch,), context), kv.keys[0])
            for k, v in zip(kv.keys, kv.values, strict=True):
                attend(queries, k, v)

        return call

    contenders = {"static": contiguous(static, queries, context)}
    times = bench(contenders | {name: through_table(name) for name in PATHS}, REPEATS)
    row = {
        "batch": batch,
        "context": context,
        "static_us": round(1e6 * median(times["static"]) / layers, 1),
    }
    return row | {name: three(times, name) for name in PATHS}


def time_gather_alone():
    """Copies of one layer's keys and values, 8 x 512 tokens, through tables of each kind."""
    pool = torch.randn(2, 8 * 512, 768)
    kept = torch.empty_like(pool)
    contenders = {}
    for block_size in (1, 16, 256):
        blocks, target = (x.view(2, -1, block_size * 768) for x in (pool, kept))
        in_order = torch.arange(blocks.shape[1])
        for order, table in (("in order", in_order), ("scattered", torch.randperm(len(in_order)))):
            contenders[block_size, order] = copier(blocks, table, target)
    times = bench(contenders, REPEATS)
    return [
        {"block_size": size, "order": order, "us": round(1e6 * median(taken), 1)}
        for (size, order), taken in times.items()
    ]


def copier(pool, table, kept):
    """Copy keys and values block by block into a place that is there already."""

    def call():
        for source, target in zip(pool, kept, strict=True):
            torch.index_select(source, 0, table, out=target)

    return call


def time_rows():
    """Rows of 16 positions read through an index, against one copy of the same bytes."""
    pool = torch.randn(1, 8 * 512 // BLOCK_SIZE, BLOCK_SIZE * 768)
    kept = torch.empty_like(pool)
    rows = copier(pool, torch.randperm(pool.shape[1]), kept)
    times = bench({"rows": rows, "static": lambda: kept.copy_(pool)}, REPEATS)
    return {"bytes": pool.nbytes, "ratio": three(times, "rows")}


def time_batch_1(config, context=512):
    """One sequence whose blocks happen to lie in order: then they are a tensor already."""
    static = static_cache(config, 1, context)
    paged = {name: paged_cache(config, 1, context) for name in PATHS}
    row = time_attention(1, context, static, paged)
    pool, queries = paged["in_place"], torch.randn(1, config.n_head, config.head_dim)

    def views():
        for k, v in zip(pool.keys, pool.values, strict=True):
            k, v = (x.flatten(0, 1)[None, :context].transpose(1, 2) for x in (k, v))
            F.scaled_dot_product_attention(queries[:, :, None], k, v)

    times = bench({"static": contiguous(static, queries, context), "views": views}, REPEATS)
    return {key: row[key] for key in ("context", *PATHS)} | {"views": three(times, "views")}


def time_generate(name, model, batch=8, prompt=32, new=32):
    """Tokens a second, greedy, against transformers.generate on the same prompts and weights."""
    model.config = replace(model.config, eos_token_id=None)  # both go on to the end
    theirs = their_gpt2(model)
    prompts = torch.randint(1, model.config.vocab_size, (batch, prompt))
    kv = PagedKV(model.config, batch * blocks_needed(prompt + new, BLOCK_SIZE), BLOCK_SIZE)
    contenders = {
        "ours": lambda: generate(model, kv, prompts.tolist(), new),
        "theirs": lambda: theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False
        ),
    }
    if name == "tiny":  # random weights have ties
        assert contenders["ours"]() == contenders["theirs"]()[:, prompt:].tolist()
    times = bench(contenders, REPEATS, seconds=1e-6)
    speed = {who: batch * new / median(taken) for who, taken in times.items()}
    return {
        "model": name,
        "batch": batch,
        "tokens_per_second": round(speed["ours"]),
        "transformers_tokens_per_second": round(speed["theirs"]),
        "ratio": three(times, "theirs", "ours"),
    }


def their_gpt2(model):
    """transformers' GPT-2 with our weights."""
    c = model.config
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.n_positions, n_embd=c.n_embd, n_layer=c.n_layer,
            n_head=c.n_head, bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    theirs.transformer.load_state_dict(model.state_dict())
    return theirs


def measure():
    """Everything, printed as it comes."""
    model = random_gpt2(Shape())
    step, attention = [], []
    for batch, context in SHAPES:
        row, static, paged = time_step(model, batch, context)
        step.append(row)
        attention.append(time_attention(batch, context, static, paged))
        print(f"step      {row}  goal {GOALS.get((batch, context), 1.15)}")
        print(f"attention {attention[-1]}  goal 1.7", flush=True)
        del static, paged
    result = {"step": step, "attention": attention}
    result["gather_alone"] = time_gather_alone()
    result["row_gather"] = time_rows()
    result["batch_1"] = time_batch_1(Shape())
    result["generate"] = [
        time_generate("tiny", load_gpt2("tiny")[0]),
        time_generate("gpt2", model),
    ]
    for key in ("gather_alone", "row_gather", "batch_1", "generate"):
        print(key, result[key])
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name} for the book")
    record = parser.parse_args().record
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    print(machine())
    result = measure()
    if record:
        head = {"threads": THREADS, "torch": torch.__version__, "block_size": BLOCK_SIZE}
        write_record(RESULT, "python benchmarks/decode.py --record", head | result)


if __name__ == "__main__":
    main()
