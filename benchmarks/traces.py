"""The tables of quantiles that labcore ships, and what the simulator makes of the real traces.

Run: LABCORE_TRACES=folder python benchmarks/traces.py [--record]
The folder holds azure2023/AzureLLMInferenceTrace_conv.csv and ..._code.csv. Prints each trace
beside workloads fitted to it, with ten bands and with one; --record writes bookkit/azure2023.json
and book/results/azure2023.json.
"""

import json
import os
import re
import sys
from pathlib import Path

from bookkit.quantiles import TABLES, draw_quantiles, quantiles
from bookkit.traces import read_trace
from labcore.admission import paged
from labcore.simulator import simulate
from labcore.workloads import TOO_LONG

RESULT = Path(__file__).resolve().parent.parent / "book/results/azure2023.json"
NAMES = {"azure_conv": "conv", "azure_code": "code"}
HEAD = {
    "source": "Azure LLM inference trace 2023, https://github.com/Azure/AzurePublicDataset",
    "attribution": "Pratyush Patel, Esha Choukse, Chaojie Zhang, Aashaka Shah, Íñigo Goiri, Saeed "
    "Maleki, Ricardo Bianchini: Splitwise: Efficient generative LLM inference using phase "
    "splitting, ISCA 2024",
    "license": "Creative Commons Attribution 4.0 International (CC BY 4.0), "
    "https://creativecommons.org/licenses/by/4.0/",
    "changes": "reduced to quantiles of the lengths, in ten bands by the length of the prompt",
    "command": "python benchmarks/traces.py --record",
}
SERVERS = {1_024: 32_768, 16_384: 131_072}  # context: budget, in tokens


def real(name, max_context=None):
    """One of the Azure traces."""
    file = f"azure2023/AzureLLMInferenceTrace_{NAMES[name]}.csv"
    return read_trace(Path(os.environ["LABCORE_TRACES"]) / file, max_context)


def tables():
    """What bookkit/azure2023.json holds."""
    return HEAD | {"tables": {name: quantiles(real(name)) for name in NAMES}}


def figures(workload, max_context):
    """What a server of paged blocks, 5% kept free, makes of a workload."""
    run = simulate(paged, workload, SERVERS[max_context], watermark=0.05, max_context=max_context)
    long = workload.set_aside[TOO_LONG]
    return {
        "requests": len(workload),
        "too_long": round(long / (long + len(workload)), 3),
        "mean_prompt": round(workload.prompts.mean(), 1),
        "mean_output": round(workload.outputs.mean(), 1),
        "utilization": round(run.utilization, 4),
        "mean_resident": round(run.mean_resident, 1),
        "steps": run.steps,
    }


def compared(name, max_context):
    """A trace, and the mean of ten draws of as many requests from its quantiles."""
    whole = real(name)
    rows = {"real": figures(real(name, max_context), max_context)}
    for bands in (10, 1):
        table = quantiles(whole, bands)
        draws = [
            figures(draw_quantiles(table, len(whole), seed, max_context), max_context)
            for seed in range(10)
        ]
        rows["ten bands" if bands == 10 else "one band"] = {
            key: round(sum(draw[key] for draw in draws) / len(draws), 4) for key in draws[0]
        }
    return rows


def results():
    """What book/results/azure2023.json holds: the real traces' figures, and the draws' beside."""
    return HEAD | {
        "changes": "reduced to figures of simulations",
        "runs": [
            {"trace": name, "max_context": max_context, "budget": SERVERS[max_context]}
            | compared(name, max_context)
            for name in NAMES
            for max_context in SERVERS
        ],
    }


def write(path, content):
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"\s+(?=\d)", " ", text) + "\n", encoding="utf-8")  # a row, a line


def main():
    found = results()
    for run in found["runs"]:
        print(f"{run['trace']}, context {run['max_context']:,}, budget {run['budget']:,}")
        for kind in ("real", "ten bands", "one band"):
            print(f"  {kind:>9}  " + "  ".join(f"{k} {v:,}" for k, v in run[kind].items()))
    if "--record" in sys.argv[1:]:
        write(TABLES, tables())
        write(RESULT, found)


if __name__ == "__main__":
    main()
