"""The simulator against a lean step loop: ints and lists, one pass over the running a step.

Ratios are lean loop's time / ours, in one process, taken in turns. The lean loop counts steps and
preemptions and measures nothing else; both must count the same.
Run: python benchmarks/simulator.py
"""

import resource
from statistics import median
from time import perf_counter

from bookkit.contiguous import Buddy, FirstFit
from bookkit.timing import bench, machine, ratio
from labcore.admission import (
    Limits,
    decaying_ratio,
    expect_like_others,
    fewest_generated,
    future_peak,
    least_computed,
    lowest_priority,
    newest,
    oldest,
    oracle,
    paged,
    reserve_limit,
    reserve_max,
    reserve_power_of_2,
)
from labcore.costs import Costs, Recovery, Roofline
from labcore.simulator import simulate
from labcore.workloads import SHAPES, draw

BLOCK_SIZE, NUM_BLOCKS = 16, 2_048
GOAL = 15
MOST_SECONDS = 5  # for 3,000 requests, whatever the rule


def lean_loop(requests, headroom):
    """Steps and preemptions of the paged policy, the newest sequence the victim."""
    waiting = [(prompt, prompt + output) for prompt, output in reversed(requests)]
    stored, lengths, room = [], [], []  # of the running sequences, oldest first
    free, steps, preemptions = NUM_BLOCKS, 0, 0
    while waiting or stored:
        while waiting:
            tokens, length = waiting[-1]
            needed = -(-tokens // BLOCK_SIZE)
            if free - needed < (headroom if stored else 0):
                break
            waiting.pop()
            free -= needed
            stored.append(tokens)
            lengths.append(length)
            room.append(needed * BLOCK_SIZE)
        i, ended = 0, False
        while i < len(stored):
            if stored[i] == room[i]:
                while free == 0 and i < len(stored):
                    tokens, length, held = stored.pop(), lengths.pop(), room.pop()
                    waiting.append((tokens, length))
                    free += held // BLOCK_SIZE
                    preemptions += 1
                if i == len(stored):
                    break
                free -= 1
                room[i] += BLOCK_SIZE
            stored[i] += 1
            ended = ended or stored[i] == lengths[i]
            i += 1
        steps += 1
        if ended:
            free += sum(
                held // BLOCK_SIZE
                for tokens, length, held in zip(stored, lengths, room, strict=True)
                if tokens == length
            )
            kept = [k for k in range(len(stored)) if stored[k] != lengths[k]]
            stored, lengths, room = (
                [column[k] for k in kept] for column in (stored, lengths, room)
            )
    return steps, preemptions


def compare(name, watermark):
    """One row: sequence-steps a second of the lean loop, its time, ours, and the ratio."""
    workload = draw(name)
    requests = list(zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True))
    headroom = Limits(NUM_BLOCKS, BLOCK_SIZE, watermark=watermark).headroom
    ours = simulate(paged, workload, watermark=watermark)
    assert lean_loop(requests, headroom) == (ours.steps, ours.preemptions)
    times = bench(
        {
            "lean": lambda: lean_loop(requests, headroom),
            "ours": lambda: simulate(paged, workload, watermark=watermark),
        },
        repeats=21,
    )
    middle, low, high = ratio(times, "lean", "ours")
    lean, fast = (1e3 * median(times[who]) for who in times)
    rate = int(workload.outputs.sum()) / lean / 1e3
    print(
        f"{name:12} {watermark:9.0%} {rate:7.1f} M/s {lean:8.1f} ms {fast:7.2f} ms "
        f"{middle:6.1f} {low:6.1f} to {high:5.1f}"
    )


def once(call):
    """The result of one call, and its seconds."""
    start = perf_counter()
    result = call()
    return result, perf_counter() - start


def runs(workload):
    """Every policy, every victim and every price: what `simulate` is given, by name."""
    kept_free = {"policy": paged, "watermark": 0.05}
    roofline = Roofline(14e9, 524_288, 2e12, 14e9, 300e12)  # a 7B model in 16 bits
    recovery = Recovery(prefill_rate=20_000, host_blocks=1_000, block_seconds=0.0003)
    return {
        "reserve_max": {"policy": reserve_max},
        "reserve_limit": {"policy": reserve_limit},
        "reserve_power_of_2": {"policy": reserve_power_of_2, "declared": workload.outputs},
        "paged, 5%": kept_free,
        "paged, 0%": {"policy": paged},
        "decaying_ratio": {"policy": decaying_ratio()},
        "future_peak, expect_declared": {"policy": future_peak()},
        "future_peak, expect_like_others": {"policy": future_peak(expect_like_others())},
        "oracle": {"policy": oracle(workload.outputs)},
        "paged, newest, in seconds": {"policy": paged, "victim": newest, "costs": Costs()},
        "paged, oldest": {"policy": paged, "victim": oldest},
        "paged, fewest_generated": {"policy": paged, "victim": fewest_generated},
        "paged, least_computed": {"policy": paged, "victim": least_computed},
        "paged, lowest_priority": {
            "policy": paged,
            "victim": lowest_priority([i % 3 for i in range(len(workload))]),
        },
        "reserve_limit, first fit": {"policy": reserve_limit, "memory": FirstFit},
        "reserve_limit, buddies": {"policy": reserve_limit, "memory": Buddy},
        "paged, roofline and swap": kept_free | {"costs": Costs(roofline, recovery)},
        "paged, 512 tokens a step": kept_free | {"costs": Costs(roofline, token_budget=512)},
        "paged, groups of 4": kept_free | {"samples": 4},
    }


def requests_per_second(num_requests=3_000):
    """Print a row for each of `runs`: requests a second, on chat and on long answers."""
    workloads = [draw(name, num_requests) for name in ("chat", "long_answer")]
    print(f"\nRequests a second, {num_requests:,} requests; goal: at most {MOST_SECONDS} s a run")
    print(f"{'':32} {'chat':>10} {'long_answer':>12}")
    slowest = 0
    for label in runs(workloads[0]):
        rates = []
        for workload in workloads:
            _, seconds = once(lambda w=workload, name=label: simulate(workload=w, **runs(w)[name]))
            rates.append(num_requests / seconds)
            slowest = max(slowest, seconds)
        print(f"{label:32} {rates[0]:10,.0f} {rates[1]:12,.0f}")
    print(f"The slowest run took {slowest:.1f} s")


def main():
    print(machine())
    print(f"\nPaged, 3,000 requests; goal on chat at 5%: at least {GOAL} times")
    print(f"{'workload':12} {'watermark':>9} {'lean loop':>11} {'':>11} {'ours':>10} {'ratio':>6}")
    for name in SHAPES:
        for watermark in (0.05, 0.0):
            compare(name, watermark)

    requests_per_second()

    print("\nTen times the requests, chat at 5%; goal: at most 12 times as long")
    small, large = draw("chat", 30_000), draw("chat", 300_000)
    times = bench(
        {
            "30,000": lambda: simulate(paged, small, watermark=0.05),
            "300,000": lambda: simulate(paged, large, watermark=0.05),
        },
        repeats=7,
    )
    print("{:.1f} times ({:.1f} to {:.1f})".format(*ratio(times, "300,000", "30,000")))

    million, seconds = once(lambda: simulate(paged, draw("chat", 1_000_000), watermark=0.05))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"\nA million chat requests: {million.finished:,} finished in {million.steps:,} steps, "
        f"{seconds:.1f} s, peak {peak:.2f} GiB (goal: under 1)"
    )


if __name__ == "__main__":
    main()
