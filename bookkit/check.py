"""Exercises that check themselves: an answer is tried on cases that its author has not seen."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real

NOTHING = "there is nothing here yet."


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and what was tried or what went wrong.  Given."""

    right: bool
    text: str

    def __repr__(self) -> str:
        """Return 'Right: ...' or 'Not yet: ...'."""
        return f"{'Right' if self.right else 'Not yet'}: {self.text}"


def check(attempt, test: Callable, tried: str) -> Verdict:
    """The verdict on an answer: `test(attempt)` returns if it is right, and asserts otherwise.

    An assertion says which input showed it, what was expected and what came. `tried` says what a
    right answer has passed. None, and a function that raises NotImplementedError, are no answers
    yet; any other exception is told by its type and its words.  Given.
    """
    if attempt is None:
        return Verdict(False, NOTHING)
    try:
        test(attempt)
    except NotImplementedError:
        return Verdict(False, NOTHING)
    except AssertionError as error:
        return Verdict(False, str(error) or "a case fails that has no words for it.")
    except Exception as error:
        return Verdict(False, f"it raises {type(error).__name__}: {error}")
    return Verdict(True, tried)


@contextmanager
def told_with(case: str) -> Iterator[None]:
    """Let an exception of an answer be told with the case that raised it.  Given."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(f"{case}: it raises {type(error).__name__}: {error}") from error


def expect(found, expected, case: str) -> None:
    """Assert that a case came out as it should; the message holds all three.  Given."""
    assert found == expected, f"{case}: expected {expected!r}, got {found!r}."


def compare(guess: float | None, answer: float, within: float, why: str) -> Verdict:
    """The verdict on a guessed number: right `within` so much of the answer, else which way to go.

    A NaN and what is no number are not right, whatever the answer.  Given.
    """
    if guess is None:
        return Verdict(False, NOTHING)
    if isinstance(guess, bool) or not isinstance(guess, Real) or guess != guess:  # a NaN
        return Verdict(False, f"a number is asked for, got {guess!r}.")
    try:
        float(guess)
    except OverflowError:  # 10**400, say
        guess = math.inf if guess > 0 else -math.inf
    if abs(guess - answer) <= within:
        return Verdict(True, why)
    return Verdict(False, f"{guess:,} is too {'low' if guess < answer else 'high'}.")


def each_guess(
    guess: Sequence[float] | None, answers: Mapping[str, tuple[float, float]], why: str
) -> Verdict:
    """`compare` for some numbers at once; `answers` is {case: (answer, within)}.  Given."""

    def test(numbers):
        numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers  # of NumPy
        asked = f"{len(answers)} numbers in a list are asked for, got {numbers!r:.60}."
        assert isinstance(numbers, list | tuple) and len(numbers) == len(answers), asked
        for number, (case, (answer, within)) in zip(numbers, answers.items(), strict=True):
            verdict = compare(number, answer, within, why)
            assert verdict.right, f"{case}: {verdict.text}"

    return check(guess, test, why)
