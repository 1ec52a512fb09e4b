"""Workloads drawn with a seed, and given as pairs."""

import numpy as np
import pytest

from labcore.admission import paged
from labcore.simulator import simulate
from labcore.workloads import Request, Workload, draw, draw_log_normal, from_pairs

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


def test_a_head_keeps_what_belongs_to_its_requests():
    workload = Workload(
        "w",
        np.array([3, 4, 5]),
        np.array([1, 2, 3]),
        np.array([0.0, 0.5, 2.0]),
        ((1,), (2,), (3,)),
        {"no output": 2},
        ("a note", "another", "a third"),
    )
    head = workload.head(2)
    assert list(head) == [Request(3, 1, 0.0), Request(4, 2, 0.5)]
    assert head.prefix_ids == ((1,), (2,))
    assert head.notes == workload.notes


def test_only_reasons_that_apply_are_named():
    workload = Workload("w", np.array([3]), np.array([1]), set_aside={"a": 0, "b": 1})
    assert str(workload) == "w: 1 requests; 1 row set aside: b"


def test_lengths_are_one_a_request():
    with pytest.raises(ValueError, match="2 prompts but 1 outputs"):
        Workload("w", np.array([1, 2]), np.array([1]))


def test_lengths_are_rounded_to_the_nearest():
    rng, workload = np.random.default_rng(0), draw("chat", 500)
    exact = rng.lognormal(np.log(180), 0.6, 500)
    assert (abs(workload.prompts - exact)[exact < 1_000] <= 0.5).all()


@pytest.mark.parametrize("lengths", [[1.5], [[1, 2]], ["a"]], ids=repr)
def test_lengths_that_are_no_whole_numbers_are_refused(lengths):
    with pytest.raises(ValueError, match="prompts are one whole number a request"):
        Workload("w", np.array(lengths), np.array([1]))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, list])
def test_small_integers_do_not_overflow(kind):
    lengths = [100, 200] if kind is list else np.array([100, 200], kind)
    workload = Workload("w", lengths, lengths)
    assert list(workload) == [Request(100, 100), Request(200, 200)]
    assert simulate(paged, workload).output_tokens == 300


@pytest.mark.parametrize("shape", [(-5, 0.6), (float("nan"), 0.6), (0, 0.6), (180, -1)])
def test_a_shape_that_is_no_distribution_is_refused(shape):
    with pytest.raises(ValueError, match="a median is above 0"):
        draw_log_normal("w", shape, (120, 0.7), 5)
