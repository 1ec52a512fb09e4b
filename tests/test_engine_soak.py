"""2,000 requests, many of them cancelled or refused, and at the end every block is free."""

from collections import Counter
from random import Random

import pytest
from engines import check, check_all_free, make_engine, stub
from models import NAN, poison

from labcore.admission import fewest_generated, lowest_priority, newest, oldest

NUM_REQUESTS = 2_000


def submit_any(engine, random):
    """A short request, or a group, or one that never fits; sampled answers end by themselves."""
    kind = random.random()
    samples = random.choice([2, 3]) if kind < 0.2 else 1
    length = random.randint(60, 90) if kind > 0.95 else random.randint(1, 12)
    engine.submit([random.randrange(1, 32) for _ in range(length)], random.randint(1, 8), samples)


def reconcile(engine, outcomes):
    """Every request is in exactly one place, and every block is free or held."""
    check(engine)
    places = {
        "waiting": len(engine.waiting),
        "running": len(engine.running),
        "answered": len(engine.answers),
        "refused": len(engine.refusals),
        "cancelled": outcomes["cancelled"],
    }
    assert sum(places.values()) == engine.num_requests, places
    allocator = engine.kv.tables.allocator
    tables = [engine.kv.tables.block_table(seq_id) for seq_id in engine.kv.tables.seq_ids()]
    held = {block_id for table in tables for block_id in table}
    assert allocator.num_free + len(held) == allocator.num_blocks
    host = engine.host.tables
    on_host = sum(len(host.block_table(seq_id)) for seq_id in host.seq_ids())
    assert host.allocator.num_free + on_host == host.allocator.num_blocks


@pytest.mark.parametrize("victim", ["newest", "any"])
def test_two_thousand_requests_end_with_every_block_free(victim):
    random, outcomes = Random(victim), Counter()
    rules = [newest, oldest, fewest_generated, lowest_priority([i % 3 for i in range(2_000)])]

    def any_of_them(running):
        return random.choice(rules)(running)

    def choose(logits, rows, step):
        return [random.randrange(32) for _ in rows]  # 0 is end-of-text

    engine = make_engine(
        stub(eos=0),
        num_blocks=20,
        block_size=3,
        watermark=0.1,
        max_context=60,
        host_blocks=7,
        victim=newest if victim == "newest" else any_of_them,
        choose=choose,
    )
    while engine.num_requests < NUM_REQUESTS or engine.waiting or engine.running:
        while engine.num_requests < NUM_REQUESTS and len(engine.waiting) < 10:
            submit_any(engine, random)
            if engine.num_requests % 100 == 0:
                reconcile(engine, outcomes)
                poison(engine.kv, NAN)
        engine.step()
        present = [*engine.waiting, *engine.running]
        if present and random.random() < 0.2:
            request = random.choice(present)
            outcomes["on the host"] += (request.index, 0) in engine.host.tables.seq_ids()
            outcomes["in a group"] += len(request.answers) > 1
            engine.cancel(request.index)
            outcomes["cancelled"] += 1
    reconcile(engine, outcomes)
    check_all_free(engine)
    assert len(engine.answers) > 1_500
    assert len(engine.refusals) > 50
    assert min(outcomes.values()) > 0, outcomes
    assert len(engine.history.victims) > engine.host.swaps > 50
