"""What the tests of the engine share: a model that costs next to nothing, and ways to run."""

from collections.abc import Iterable
from functools import cache

from models import NAN, paged_cache, poison

from labcore.admission import Limits, Policy, paged
from labcore.engine import Engine
from labcore.gpt2 import GPT2, GPT2Config, random_gpt2
from labcore.swap import HostPool


@cache
def stub(eos: int | None = None) -> GPT2:
    """A model for tests in which it does not matter what it says. 1,024 positions, 32 tokens."""
    return random_gpt2(GPT2Config(1, 1, 4, 32, 1_024, eos_token_id=eos))


class CountingPool(HostPool):
    """A host pool that knows how many sequences came."""

    swaps = 0

    def swap_out(self, seq_id):
        super().swap_out(seq_id)
        self.swaps += 1


def make_engine(
    model: GPT2,
    num_blocks: int,
    block_size: int,
    policy: Policy = paged,
    *,
    watermark: float = 0.0,
    max_context: int | None = None,
    host_blocks: int = 0,
    **rules,
) -> Engine:
    """An engine on a pool full of NaN; without `host_blocks` it has no host pool."""
    kv = paged_cache(model, num_blocks, block_size)
    max_context = max_context or model.config.n_positions
    limits = Limits(num_blocks, block_size, max_context=max_context, watermark=watermark)
    host = CountingPool(kv, host_blocks) if host_blocks else None
    return Engine(model, kv, limits, policy, host=host, **rules)


def finish(engine: Engine, spoil: bool = False) -> Engine:
    """Step to the end and check in each step; `spoil` puts NaN into all that holds no token."""
    while engine.waiting or engine.running:
        assert engine.steps < 10_000, "a run that should end did not"
        engine.step()
        check(engine)
        if spoil:
            poison(engine.kv, NAN)
    check_all_free(engine)
    return engine


def check(engine: Engine) -> None:
    """No request is lost, and every block is free or held by one that runs or lies on the host."""
    engine.check_invariants()
    places = (engine.waiting, engine.running, engine.answers, engine.refusals)
    assert sum(map(len, places)) <= engine.num_requests  # the others were cancelled
    running = {seq_id for request in engine.running for seq_id in request.seq_ids}
    assert set(engine.kv.tables.seq_ids()) == running
    if engine.host is not None:
        engine.host.check_invariants()
        assert set(engine.host.tables.seq_ids()) <= {
            (request.index, 0) for request in engine.waiting
        }


def check_all_free(engine: Engine) -> None:
    for pool in filter(None, (engine.kv, engine.host)):
        assert pool.tables.allocator.num_free == pool.tables.allocator.num_blocks


def ask(engine: Engine, requests: Iterable[tuple[list[int], int]], samples: int = 1) -> Engine:
    """Submit (prompt, max_new_tokens) pairs; returns the engine."""
    for prompt, max_new_tokens in requests:
        engine.submit(prompt, max_new_tokens, samples)
    return engine
