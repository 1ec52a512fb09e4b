"""Answers that the checks of chapter 10b must refuse."""

import numpy as np

from bookkit.exercises.ch10b import FIVE, check_five, check_order, check_shuffled, check_tight
from bookkit.quantiles import quantiles

TIGHT = [(5, 0.041), (5, 0.038), (10, 0.105), (5, 0.042)]


def five(requests, percent=FIVE, kinds=("prompts", "outputs")):
    rows = {
        kind: [np.percentile(getattr(requests, source), percent).tolist()]
        for kind, source in zip(("prompts", "outputs"), kinds, strict=True)
    }
    return {"percent": percent} | rows


def mean_for_median(requests):
    table = five(requests)
    table["prompts"][0][1] = requests.prompts.mean()
    return table


def off_by_one(requests):
    n = len(requests)
    places = [min(n * p // 100 + (p < 100), n - 1) for p in FIVE]
    rows = {kind: [np.sort(getattr(requests, kind))[places]] for kind in ("prompts", "outputs")}
    return {"percent": FIVE} | rows


WRONG = {
    check_shuffled: [[1.0, 1.0], [1.0, 2.3], [0.5, 1.1], [0.93], 1.0],
    check_tight: [
        [(1, 0.05)] * 4,
        [(10, 0.105)] * 4,
        [(mark, 100 * more) for mark, more in TIGHT],
        TIGHT[:3],
        [TIGHT[0], *TIGHT[:3]],
        [(3, 0.04)] * 4,
        [mark for mark, _ in TIGHT],
    ],
    check_five: [
        quantiles,
        lambda requests: quantiles(requests, bands=1),
        lambda requests: five(requests, [0, 50, 90, 95, 100]),
        lambda requests: five(requests, kinds=("outputs", "prompts")),
        mean_for_median,
        off_by_one,
    ],
    check_order: [
        lambda day: np.arange(len(day)),
        lambda day: np.argsort(day.outputs, kind="stable"),
        lambda day: np.argsort(-day.prompts, kind="stable"),
        lambda day: [int(day.outputs.argmax())] * len(day),
        lambda day: np.argsort(-day.outputs, kind="stable")[:-1],
        lambda day: day,
    ],
}
