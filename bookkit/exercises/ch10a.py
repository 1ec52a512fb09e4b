"""Checks of chapter 10a: three trials."""

from collections.abc import Callable, Sequence

import numpy as np

from bookkit.check import Verdict, check, each_guess, expect
from bookkit.contiguous import Buddy
from bookkit.trials import CONTEXT, MEANS, SLOTS
from labcore.workloads import Workload


def check_orca_max(guess: Sequence[float] | None) -> Verdict:
    """Exercise 1: how many run at a context of 1,024 and of 3,000, and what is external.  Given."""

    def held(context):
        memory = Buddy(SLOTS)
        return sum(memory.allocate(context) is not None for _ in range(SLOTS // context + 1))

    answers = {
        "requests at 1,024": (held(1_024), 0),
        "requests at 3,000": (held(3_000), 0),
        "per cent external at 3,000": (100 - 100 * 3_000 * held(3_000) / SLOTS, 1),
    }
    return each_guess(guess, answers, "a buddy allocator was filled to say so.")


def check_two_shapes(two_shapes: Callable) -> Verdict:
    """Exercise 2: ShareGPT's means, one shape for the inputs and one for the outputs.  Given."""

    def test(draw):
        for shapes in ((0.7, 1.1), (1.2, 0.8), (0.9, 0.9)):
            case, requests = f"shapes {shapes[0]} and {shapes[1]}", draw(*shapes)
            assert isinstance(requests, Workload), f"{case}: no Workload, got {requests!r:.60}."
            expect(len(requests), 3_000, f"{case}, requests")
            columns = requests.prompts, requests.outputs
            assert sum(columns).max() <= CONTEXT, f"{case}: a request passes {CONTEXT:,} tokens."
            for kind, tokens, shape, mean in zip(
                ("inputs", "outputs"), columns, shapes, MEANS["ShareGPT"], strict=True
            ):
                about = f"{case}, {kind}: the mean is {tokens.mean():.1f}, and {mean} is published."
                assert abs(tokens.mean() / mean - 1) < 0.01, about
                low, high = np.percentile(tokens, (25, 75))
                spread = np.log(high / low) / 1.349  # what lies between a normal's quartiles
                about = f"{case}, {kind}: half of them spread as for a shape of {spread:.2f}."
                assert abs(spread - shape) < 0.05, about
            together = np.corrcoef(np.log(columns))[0, 1]
            assert abs(together) < 0.2, f"{case}: long inputs have long outputs ({together:.2f})."

    return check(two_shapes, test, "means, spreads, the cut and the order, for three pairs.")


def check_two_counts(two_counts: Callable) -> Verdict:
    """Exercise 3: cells that match, each at its own best shape, or all at one.  Given."""

    def test(count):
        rng = np.random.default_rng(0)
        for num_cells in (1, 2, 2, 3, 3, 3, *[21] * 20):
            ours = rng.integers(0, 12, (num_cells, 3))
            published, within = rng.integers(0, 12, (2, num_cells, 1))
            within = within // 3  # whole numbers: some are off by just as much as is allowed
            hits = abs(ours - published) <= within
            expected = (int(hits.any(axis=1).sum()), int(hits.sum(axis=0).max()))
            rows = [dict(zip((0.6, 0.7, 0.8), row, strict=True)) for row in ours.tolist()]
            limits = published.ravel().tolist(), within.ravel().tolist()
            cells = list(zip(rows, *limits, strict=True))
            case = f"cells {cells}" if num_cells < 4 else f"{num_cells} cells drawn at random"
            found = np.array(count(cells)).tolist()  # of NumPy's numbers, Python's
            expect(tuple(found) if isinstance(found, list) else found, expected, case)

    return check(two_counts, test, "26 random tables, some cells on the very edge of a match.")
