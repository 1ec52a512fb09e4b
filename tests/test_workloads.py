"""Workloads drawn with a seed, and given as pairs."""

import numpy as np
import pytest

from labcore.workloads import Request, draw, from_pairs

REFERENCE_MEANS = {"chat": (217, 154), "long_prompt": (627, 47), "long_answer": (47, 359)}


@pytest.mark.parametrize("name", REFERENCE_MEANS)
def test_means_come_close_to_the_reference(name):
    workload = draw(name, num_requests=30_000)
    means = workload.prompts.mean(), workload.outputs.mean()
    assert means == pytest.approx(REFERENCE_MEANS[name], rel=0.05)


@pytest.mark.parametrize("name", REFERENCE_MEANS)
def test_prompt_and_output_fit_into_the_context(name):
    workload = draw(name, seed=3, max_context=256)
    assert (workload.prompts + workload.outputs).max() <= 256
    assert min(workload.prompts.min(), workload.outputs.min()) >= 1


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    first, again, other = draw("chat"), draw("chat"), draw("chat", seed=1)
    assert first.prompts.tobytes() == again.prompts.tobytes()
    assert first.outputs.tobytes() == again.outputs.tobytes()
    assert not np.array_equal(first.prompts, other.prompts)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'chatt'.*chat, long_prompt, long_answer"):
        draw("chatt")


def test_pairs_become_requests():
    workload = from_pairs([(3, 1), [5, 2]])
    assert list(workload) == [Request(3, 1), Request(5, 2)]
    assert list(workload.head(1)) == [Request(3, 1)]
    assert len(from_pairs([])) == 0


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(3, 0)], "request 0: output of 0 tokens"),
        ([(3, 1), (-2, 1)], "request 1: prompt of -2 tokens"),
        ([(3, 1.5)], "whole numbers"),
        ([(3,)], "whole numbers"),
        ([("a", "b")], "whole numbers"),
        ([3, 1], "whole numbers"),
        ([(True, False)], "whole numbers"),
    ],
)
def test_pairs_that_are_no_requests_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        from_pairs(pairs)
