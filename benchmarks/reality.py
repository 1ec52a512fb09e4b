"""Two trials that take longer than a page has, or need a log that we may not ship; see chapter 10a.

The sweep is ten seeds at five watermarks, and then other constants. The log is replayed where
LABCORE_TRACES names the folder of traces; of the real one only summaries are written.
Run: python benchmarks/reality.py [sweep] [log] [--record]
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from bookkit.engine_log import read_engine_log
from bookkit.timing import machine, write_record
from bookkit.trials import LLAMA_ON_4090, QWEN_ON_GB200, SWEEP, replay_log, sweep_run
from labcore.costs import Costs

RESULTS = Path(__file__).resolve().parent.parent / "book" / "results"
LOG = "RTX4090_Llama-3.1-8B_requests.jsonl"
SEEDS, FEW_SEEDS = range(10), range(3)


def rows_of(seeds, costs=None):
    """Each watermark's runs: preemptions, tokens a second, tokens lost, steps, residents."""
    rows = {}
    for watermark in SWEEP:
        runs = [sweep_run(watermark, seed, costs) for seed in seeds]
        rows[str(watermark)] = {
            "preemptions": [run.preemptions for run in runs],
            "tokens_per_second": [round(run.tokens_per_second, 1) for run in runs],
            "recomputed_tokens": [run.recomputed_tokens for run in runs],
            "steps": [run.steps for run in runs],
            "residents": [round(run.mean_resident, 1) for run in runs],
        }
        print(watermark, rows[str(watermark)], flush=True)
    return rows


def sweep():
    """The sweep, and what becomes of it with other constants."""
    rows = rows_of(SEEDS)
    off = rows["0.0"]
    tokens = np.mean(off["tokens_per_second"])
    output = 450 * 5_000
    overhead = output * (1 / SWEEP[0.0][1] - 1 / tokens) / np.mean(off["steps"])
    gb200 = QWEN_ON_GB200
    others = {
        "half the bandwidth": replace(gb200, bandwidth=gb200.bandwidth / 2),
        "half the arithmetic": replace(gb200, flops_per_second=gb200.flops_per_second / 2),
        "half of both": replace(
            gb200, bandwidth=gb200.bandwidth / 2, flops_per_second=gb200.flops_per_second / 2
        ),
        f"{1e3 * overhead:.1f} ms more a step": replace(gb200, overhead=overhead),
    }
    costs = {name: Costs(step, token_budget=8_192) for name, step in others.items()}
    costs["2,048 tokens a step"] = Costs(gb200, token_budget=2_048)
    what_if = {}
    for name, prices in costs.items():
        print(name)
        what_if[name] = rows_of(FEW_SEEDS, prices)
    return {"seeds": len(SEEDS), "rows": rows, "few_seeds": len(FEW_SEEDS), "what_if": what_if}


def summary(run):
    """Mean running, mean KV use, and the end of a replay, by its own seconds."""
    running, kv_use = run.at(np.arange(1, run.ends[-1]))
    return {
        "running": round(running.mean(), 2),
        "kv_use": round(kv_use.mean(), 4),
        "end": round(run.ends[-1], 2),
        "preemptions": run.preemptions,
    }


def log():
    """The replay beside the log, and how much they agree if our clock is stretched."""
    folder = Path(os.environ["LABCORE_TRACES"])
    real = read_engine_log(next(folder.rglob(LOG)))
    run, card = replay_log(real.workload), LLAMA_ON_4090
    to_the_end = real.last_token.max() / run.ends[-1]
    stretches = sorted([*np.arange(0.9, 1.305, 0.02).round(2), round(to_the_end, 4)])
    middle = (real.seconds >= 30) & (real.seconds <= 150)  # all have come, and it is full

    def agree(stretch, part=slice(None)):
        ours = run.at(real.seconds, stretch)[0]
        return round(np.corrcoef(ours[part], real.running[part])[0, 1], 3)

    others = {
        "512 tokens a step": {"token_budget": 512},
        "8,192 tokens a step": {"token_budget": 8_192},
        "half the bandwidth": {"step": replace(card, bandwidth=card.bandwidth / 2)},
        "half the arithmetic": {"step": replace(card, flops_per_second=card.flops_per_second / 2)},
    }
    every = np.arange(2, run.ends[-1], 2)
    running, kv_use = run.at(every)
    return {
        "real": {
            "running": round(real.running.mean(), 2),
            "kv_use": round(real.kv_use.mean(), 4),
            "end": round(real.last_token.max(), 2),
        },
        "ours": summary(run),
        "stretch_to_the_end": round(to_the_end, 4),
        "agreement": [[float(stretch), agree(stretch)] for stretch in stretches],
        "middle": [agree(1, middle), agree(to_the_end, middle)],
        "what_if": {
            name: summary(replay_log(real.workload, **other)) for name, other in others.items()
        },
        "seconds": every.tolist(),
        "running": running.tolist(),
        "kv_use": kv_use.round(3).tolist(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trials", nargs="*", help="sweep, log, or both, which is the default")
    parser.add_argument("--record", action="store_true", help="write the results for the book")
    chosen = parser.parse_args()
    print(machine())
    files = {"sweep": (sweep, "watermark_sweep.json"), "log": (log, "engine_log.json")}
    for name in chosen.trials or files:
        trial, file = files[name]
        result = trial()
        if not chosen.record:
            print(json.dumps(result))
            continue
        write_record(RESULTS / file, f"python benchmarks/reality.py {name} --record", result)


if __name__ == "__main__":
    main()
