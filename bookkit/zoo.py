"""A zoo of bugs: ten wrong versions of labcore, each a small edit of its source, kept in memory.

An exercise asks for an invariant. `hunt(invariant, "ch02")` calls it after every step of random
work on the healthy class and on each mutant of `cages("ch02")`, and says which of them it catches.
What it is called with:

- ch02: `invariant(pool, held)`, a BlockAllocator and the ids that callers hold, one entry for each
  reference;
- ch03: `invariant(tables, texts, memory)`, a BlockTables, {seq_id: tokens}, and a list in which
  slot s of a block holds a token (a number from 1 on; what nobody wrote is None);
- ch05: `invariant(kv, texts)`, a PagedKV in which the key of a token, in every layer and every
  element, is the token's number in `texts`, and the value minus that number.

It may assert, or return False. Nothing is reserved ahead in ch02 and ch03.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

from bookkit.check import Verdict, check
from labcore import blocks as healthy
from labcore.blocks import DoubleFree, OutOfBlocks, UnknownBlock

SEEDS, STEPS = range(6), 60
ERRORS = ("OutOfBlocks", "DoubleFree", "UnknownBlock")


@dataclass(frozen=True)
class Mutant:
    """A bug: what it does, where it was met, its edits (old, new) and who hunts it.  Given."""

    name: str
    story: str
    source: str
    edits: tuple[tuple[str, str], ...]
    chapters: tuple[str, ...]
    module: str = "blocks"


OURS = "made for this zoo"
ZOO = (
    Mutant(
        "counts from 0",
        "a new block has no holder until somebody shares it",
        "Wenyueh/MinivLLM, issue 70; at commit 47efb8c still in src/sparse_code",
        (("_ref_counts[block_id] = 1\n", "_ref_counts[block_id] = 0\n"),),
        ("ch02",),
    ),
    Mutant(
        "half a refusal",
        "takes the free blocks one by one, and keeps what it has when it must refuse",
        "inference-sim/inference-sim, issues 200 and 1061",
        (
            ("        if n > self.num_free:\n", "        if n > (free := self.num_free):\n"),
            (
                '            raise OutOfBlocks(f"need {n} blocks, {self.num_free} of ',
                "            [self.allocate() for _ in range(free)]\n"
                '            raise OutOfBlocks(f"need {n} blocks, {free} of ',
            ),
        ),
        ("ch02",),
    ),
    Mutant(
        "silent double free",
        "a block that nobody holds goes on the free list once more",
        "vllm-project/vllm, issue 1584, where a user silenced the error",
        (
            ('raise DoubleFree(f"block {block_id} has 0 holders")', "continue"),
            ("            if count == 0:\n", "            if count <= 0:\n"),
        ),
        ("ch02",),
    ),
    Mutant(
        "a block too early",
        "a full last block makes it take the next one, for a token that has not come",
        "Wenyueh/MinivLLM, issue 75; proposed to nano-vllm as a repair, pull requests 65 and 66",
        (("    return full + (rest > 0)\n", "    return full + 1\n"),),
        ("ch03",),
    ),
    Mutant(
        "free before copy",
        "lets go of a shared block before it has its own: if refused, it has lost both",
        "vllm-project/vllm, vllm/core/block/common.py of 2024, where a check beforehand shields it",
        (
            (
                "        fresh = iter(self.allocator.allocate_many(total))\n",
                "        for seq_id, logical in copying.items():\n"
                "            self.allocator.free(self._tables[seq_id][logical])\n"
                "        fresh = iter(self.allocator.allocate_many(total))\n",
            ),
            ("                self.allocator.free(table[logical])\n", ""),
        ),
        ("ch03", "ch05"),
    ),
    Mutant(
        "copies, then writes the original",
        "makes the copy and leaves the shared block in its table",
        OURS,
        (("                table[logical] = copies[-1][1]\n", ""),),
        ("ch03", "ch05"),
    ),
    Mutant(
        "one list for two",
        "a fork gets the parent's list itself: what one appends, both have",
        OURS,
        (("self._tables[parent][:num_blocks]", "self._tables[parent]"),),
        ("ch03", "ch05"),
    ),
    Mutant(
        "a watermark on growth",
        "keeps a block back from those who run, and not only from newcomers",
        OURS,
        (("<= self.allocator.num_free\n", "<= self.allocator.num_free - 1\n"),),
        ("ch03",),
    ),
    Mutant(
        "forgets one",
        "drops the table and gives back all of its blocks but the first",
        "jjang-ai/vmlx, pull request 68, where all of them were forgotten",
        (("_give_up(table[::-1])", "_give_up(table[:0:-1])"),),
        ("ch03",),
    ),
    Mutant(
        "keys only",
        "copies the keys of a block and not its values",
        OURS,
        (("for pool in (self.keys, self.values):", "for pool in (self.keys,):"),),
        ("ch05",),
        "caches",
    ),
)


def cages(chapter: str) -> list[Mutant]:
    """The mutants that the exercise of a chapter hunts: "ch02", "ch03" or "ch05".  Given."""
    return [mutant for mutant in ZOO if chapter in mutant.chapters]


def source(module: str, mutant: Mutant | None = None) -> str:
    """The text of labcore/`module`.py, with the mutant's edits if it lives there.  Given."""
    text = Path(healthy.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    for old, new in mutant.edits if mutant and mutant.module == module else ():
        assert old in text, f"{mutant.name}: {module}.py has no {old!r}"
        text = text.replace(old, new)
    return text


def compiled(mutant: Mutant | None, *modules: str) -> SimpleNamespace:
    """What labcore's `modules` define, mutated; the classes of errors are labcore's own.  Given."""
    names = {}
    for name in modules:
        module = ModuleType(f"labcore.{name}")
        exec(compile(source(name, mutant), f"<{name}, mutated>", "exec"), vars(module))
        vars(module).update({key: names[key] for key in vars(module) if key in names})
        vars(module).update({key: getattr(healthy, key) for key in ERRORS})
        names |= {key: value for key, value in vars(module).items() if not key.startswith("__")}
    return SimpleNamespace(healthy=mutant is None, **names)


def work_with_a_pool(names: SimpleNamespace, rng: random.Random) -> Iterator[tuple]:
    """Take, share and give back, some of it in vain: (pool, held) after every step.  Given."""
    pool, held, was_held = names.BlockAllocator(6), [], set()
    while True:
        move = rng.choice(["take", "take", "share", "give", "give", "again"])
        gone = sorted(was_held - set(held))
        if move == "take" or not held:
            with suppress(OutOfBlocks):
                held += pool.allocate_many(rng.randint(1, 4))
        elif move == "share":
            held.append(rng.choice(held))
            pool.retain(held[-1])
        elif move == "give":
            pool.free(held.pop(rng.randrange(len(held))))
        elif gone:
            with suppress(DoubleFree, UnknownBlock):
                pool.free(rng.choice(gone))
        was_held |= set(held)
        yield pool, list(held)


def grow(tables, texts: dict, rng: random.Random, reserve: Callable, write: Callable) -> None:
    """Add, fork, drop or grow: `reserve` finds the blocks, `write` stores a token.  Given."""
    move = rng.choice(["add", "fork", "drop", "grow", "grow", "grow"])
    new = max(texts, default=0) + 1
    some = rng.sample(sorted(texts), min(len(texts), rng.randint(1, 3)))
    if move == "add" or not some:
        tables.add(new)
        texts[new], some = [], [new]
    elif move == "fork":
        tables.fork(some[0], new)
        texts[new], some = list(texts[some[0]]), []
    elif move == "drop":
        tables.drop(some[0])
        del texts[some[0]]
        some = []
    growth = {seq_id: rng.choice([1, 1, 1, 4]) for seq_id in some}
    with suppress(OutOfBlocks):
        reserve(growth)
        for seq_id, n in growth.items():
            for _ in range(n):
                texts[seq_id].append(rng.randint(1, 999))
                write(seq_id, len(texts[seq_id]) - 1, texts[seq_id][-1])


def work_with_tables(names: SimpleNamespace, rng: random.Random) -> Iterator[tuple]:
    """Sequences come, fork, grow, leave: (tables, texts, memory) after every step.  Given."""
    size = rng.choice([1, 3, 4])
    tables = names.BlockTables(names.BlockAllocator(10), size)
    texts, memory = {}, [None] * 10 * size

    def reserve(growth):
        for source, target in tables.append_all(growth):
            at, to = source * size, target * size
            memory[to : to + size] = memory[at : at + size]

    def write(seq_id, position, token):
        memory[tables.slot(seq_id, position)] = token

    while True:
        grow(tables, texts, rng, reserve, write)
        yield tables, {seq_id: list(text) for seq_id, text in texts.items()}, list(memory)


def work_with_a_cache(names: SimpleNamespace, rng: random.Random) -> Iterator[tuple]:
    """The same with keys and values in two layers: (kv, texts) after every step.  Given."""
    from labcore.gpt2 import GPT2Config

    config = GPT2Config(n_layer=2, n_head=2, n_embd=4, vocab_size=1, n_positions=64)
    kv = names.PagedKV(config, 10, rng.choice([1, 3, 4]), allocator=names.BlockAllocator)
    texts = {}

    def reserve(growth):
        kv.reserve(growth)
        kv.tables.append_all(growth)

    def write(seq_id, position, token):
        block, offset = divmod(kv.tables.slot(seq_id, position), kv.tables.block_size)
        kv.keys[:, block, offset], kv.values[:, block, offset] = token, -token

    while True:
        grow(kv.tables, texts, rng, reserve, write)
        yield kv, {seq_id: list(text) for seq_id, text in texts.items()}


WORK = {
    "ch02": (work_with_a_pool, ("blocks",)),
    "ch03": (work_with_tables, ("blocks",)),
    "ch05": (work_with_a_cache, ("blocks", "caches")),
}


def hunt(invariant: Callable | None, chapter: str) -> Verdict:
    """Whether an invariant catches every mutant of a chapter and suspects no healthy one.  Given.

    A mutant that raises in the midst of honest work ends that run, and is not caught by it.
    """
    work, modules = WORK[chapter]
    mutants = cages(chapter)

    def test(invariant):
        alarm = watch(invariant, work, compiled(None, *modules))
        if alarm is not None:
            step, error = alarm
            if isinstance(error, AssertionError):
                words = f" ({error})" if str(error) else ""
                raise AssertionError(f"a false alarm: the healthy one, step {step}{words}.")
            raise error
        lines, large = [], 0
        for mutant in mutants:
            caught = watch(invariant, work, compiled(mutant, *modules))
            large += caught is None
            where = f"caught at step {caught[0]}" if caught else "at large"
            story = "" if caught else f":\n    {mutant.story}"
            lines.append(f"  {where:18} {mutant.name}{story}")
        assert not large, "\n".join([f"{large} of {len(mutants)} at large.", *lines])

    steps = len(SEEDS) * STEPS
    tried = f"all {len(mutants)} are caught, and no false alarm in {steps} healthy steps."
    return check(invariant, test, tried)


def watch(invariant: Callable, work: Callable, names: SimpleNamespace) -> tuple | None:
    """(step, error) of the first alarm in any seed's work, or None.  Given."""
    for seed in SEEDS:
        steps = islice(work(names, random.Random(seed)), STEPS)
        for step in range(1, STEPS + 1):
            try:
                seen = next(steps)
            except Exception:  # a mutant that falls over by itself
                if names.healthy:
                    raise
                break
            try:
                result = invariant(*seen)
                assert result is None or result
            except Exception as error:
                return step, error
    return None
