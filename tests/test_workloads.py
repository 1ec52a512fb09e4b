"""Workloads drawn with a seed, from a shape or from quantiles, and given as pairs."""

import json

import numpy as np
import pytest

from bookkit.quantiles import TABLES, draw_quantiles, quantiles
from labcore.admission import paged
from labcore.simulator import simulate
from labcore.workloads import TOO_LONG, Request, Workload, draw, from_pairs

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


def test_ids_of_blocks_belong_to_one_prompt_each():
    with pytest.raises(ValueError, match="1 lists of ids for 2 requests"):
        Workload("w", [3, 4], [1, 2], prefix_ids=((1,),))


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
        draw((shape, (120, 0.7)), 5)


def test_a_table_of_quantiles_has_a_row_for_each_band_of_prompts():
    """A band of one request: all its quantiles are that request."""
    table = quantiles(from_pairs([(30, 7), (10, 9), (20, 8)]), bands=3)
    assert [set(row) for row in table["prompts"]] == [{10}, {20}, {30}]
    assert [set(row) for row in table["outputs"]] == [{9}, {8}, {7}]
    assert len(table["percent"]) == len(table["outputs"][0])
    assert json.loads(json.dumps(table)) == table


def test_a_band_has_the_quantiles_of_its_requests():
    table = quantiles(from_pairs([(n, 101 - n) for n in range(1, 101)]), bands=1)
    median, most = table["percent"].index(50), table["percent"].index(99)
    assert table["prompts"][0][0] == 1 and table["prompts"][0][-1] == 100
    assert (table["prompts"][0][median], table["prompts"][0][most]) == (50, 99)


@pytest.mark.parametrize("bands", [0, 3])
def test_there_are_no_more_bands_than_requests(bands):
    with pytest.raises(ValueError, match="2 requests cannot be cut into"):
        quantiles(from_pairs([(1, 1), (2, 2)]), bands)


def test_half_a_band_is_refused():
    with pytest.raises(TypeError, match="float"):
        quantiles(from_pairs([(1, 1), (2, 2), (3, 3)]), 1.5)


def test_draws_lie_evenly_between_two_quantiles():
    table = {"percent": [0, 50, 100], "prompts": [[10, 20, 100]], "outputs": [[5, 5, 5]]}
    workload = draw_quantiles(table, 20_000)
    assert set(workload.outputs) == {5}
    assert (workload.prompts.min(), workload.prompts.max()) == (10, 100)
    assert (workload.prompts <= 20).mean() == pytest.approx(0.5, abs=0.02)
    assert workload.prompts.mean() == pytest.approx((15 + 60) / 2, rel=0.02)


def test_bands_keep_what_a_correlation_does_not_show():
    """Answers are long in the middle: the correlation is 0, and one band forgets it all."""
    pairs = [(100 + n, 400 if 100 <= n < 200 else 50) for n in range(300)]
    for bands, middle in [(3, 400), (1, 167)]:
        drawn = draw_quantiles(quantiles(from_pairs(pairs), bands), 30_000)
        inside = (drawn.prompts >= 205) & (drawn.prompts < 295)
        assert drawn.outputs[inside].mean() == pytest.approx(middle, rel=0.05)
        assert abs(np.corrcoef(drawn.prompts, drawn.outputs)[0, 1]) < 0.02


def test_draws_that_pass_the_context_are_set_aside_and_counted():
    table = {"percent": [0, 100], "prompts": [[8, 8], [9, 9]], "outputs": [[2, 2], [2, 2]]}
    workload = draw_quantiles(table, 100, max_context=10)
    assert set(workload.prompts) == {8}
    assert len(workload) + workload.set_aside[TOO_LONG] == 100
    assert len(draw_quantiles(table, 100, max_context=None)) == 100


def test_the_same_seed_draws_the_same_from_a_table():
    draws = [draw_quantiles("azure_conv", 50, seed).prompts.tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


ROW = {"percent": [0, 100], "prompts": [[1, 2]], "outputs": [[1, 2]]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"percent": [0, 99]},
        {"percent": [1, 100]},
        {"percent": [0, 0, 100], "prompts": [[1, 1, 2]], "outputs": [[1, 1, 2]]},
        {"percent": [0, float("nan"), 100], "prompts": [[1, 1, 2]], "outputs": [[1, 1, 2]]},
        {"percent": []},
        {"percent": 100},
        {"prompts": [[2, 1]]},
        {"prompts": [[0, 1]]},
        {"prompts": [[1, float("nan")]]},
        {"prompts": [[1, float("inf")]]},
        {"prompts": [[1, 2, 3]]},
        {"prompts": [[1, 2], [3, 4]]},
        {"prompts": [1, 2], "outputs": [1, 2]},
        {"prompts": [], "outputs": []},
        {"prompts": np.empty((0, 2)), "outputs": np.empty((0, 2))},
        {"prompts": [["one", "two"]]},
    ],
    ids=str,
)
def test_a_table_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError):
        draw_quantiles(ROW | wrong, 5)


@pytest.mark.parametrize("wrong", [None, [1, 2], {"percent": [0, 100]}, {"prompts": [[1], [1, 2]]}])
def test_what_is_no_table_at_all_is_refused(wrong):
    with pytest.raises(ValueError, match="no table of percent, prompts and outputs"):
        draw_quantiles(wrong, 5)


def test_quantiles_are_those_of_a_workload():
    with pytest.raises(TypeError, match="expected a Workload, got 'chat'"):
        quantiles("chat")


def test_an_unknown_table_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'azure'.*azure_conv, azure_code"):
        draw_quantiles("azure")


PUBLISHED = {  # mean, median and 99th percentile of prompts and outputs
    "azure_conv": ((1155, 1020, 4142), (211, 129, 601)),
    "azure_code": ((2048, 1469, 7436), (28, 13, 252)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_workloads_from_the_shipped_tables_have_the_traces_means_medians_and_tails(name):
    """Means and medians within 3%, the 99th percentiles within 5%."""
    workload = draw_quantiles(name, 50_000, max_context=None)
    for lengths, (mean, median, tail) in zip(
        (workload.prompts, workload.outputs), PUBLISHED[name], strict=True
    ):
        assert lengths.mean() == pytest.approx(mean, rel=0.03)
        assert np.median(lengths) == pytest.approx(median, rel=0.03)
        assert np.percentile(lengths, 99) == pytest.approx(tail, rel=0.05)


def test_more_than_half_of_what_is_drawn_like_azures_conversations_passes_1024_tokens():
    """58% of the trace does."""
    workload = draw_quantiles("azure_conv", 50_000)
    assert workload.set_aside[TOO_LONG] / 50_000 == pytest.approx(0.58, abs=0.015)


def test_a_prompt_of_a_thousand_tokens_gets_an_answer_four_times_as_long_as_one_of_400_does():
    drawn = draw_quantiles("azure_conv", 50_000, max_context=None)
    means = [
        drawn.outputs[abs(drawn.prompts - prompt) < 50].mean() for prompt in (400, 1_000, 4_000)
    ]
    assert 3.5 < means[1] / means[0] < 4.5
    assert means[1] > 4 * means[2]


def test_the_shipped_tables_name_their_source_and_their_license():
    shipped = json.loads(TABLES.read_text(encoding="utf-8"))
    assert "AzurePublicDataset" in shipped["source"]
    assert "Patel" in shipped["attribution"]
    assert "CC BY 4.0" in shipped["license"]
    assert "quantiles" in shipped["changes"]
