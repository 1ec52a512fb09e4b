"""The timer: contenders take turns, and ratios are taken turn by turn."""

import time

import pytest

from bookkit.timing import bench, machine, ratio


def test_contenders_take_turns_after_a_warm_up():
    calls = []
    bench({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, seconds=0)
    assert "".join(calls) == "aabb" + "ab" * 3


def test_a_call_that_takes_longer_has_a_ratio_above_one():
    times = bench({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.01)}, 3, 0.001)
    middle, low, high = ratio(times, "long", "short")
    assert 1 < low <= middle <= high


def test_ratios_are_of_the_same_turn():
    times = {"slow": [2.0, 40.0, 6.0], "fast": [1.0, 10.0, 2.0]}
    assert ratio(times, "slow", "fast") == (3.0, 2.0, 4.0)


def test_the_machine_is_named():
    assert "cores, Python 3." in machine()


def test_a_contender_that_fails_says_so():
    with pytest.raises(ZeroDivisionError):
        bench({"broken": lambda: 1 / 0})
