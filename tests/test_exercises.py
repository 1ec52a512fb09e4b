"""Every exercise has a stub, a check that can say no, and a solution that the check accepts."""

import json
import pkgutil
import re
from importlib import import_module

import numpy as np
import pytest
from chapters import ROOT

import bookkit.exercises
from bookkit.check import Verdict, check, compare

NAMES = [module.name for module in pkgutil.iter_modules(bookkit.exercises.__path__)]
CHECKS = {
    (name, key): value
    for name in NAMES
    for key, value in vars(import_module(f"bookkit.exercises.{name}")).items()
    if key.startswith("check_")
}
WRONG = {name: import_module(f"wrong_answers.{name}").WRONG for name in NAMES}
REFUSED = [
    pytest.param(check, answer, id=f"{name}-{check.__name__}-{i}")
    for name in NAMES
    for check, answers in WRONG[name].items()
    for i, answer in enumerate(answers)
]
TWINS = sorted((ROOT / "notebooks").glob("ch*.ipynb"))


@pytest.mark.parametrize(("name", "key"), CHECKS, ids="-".join)
def test_a_check_knows_an_empty_page_and_lists_wrong_answers(name, key):
    def stub(*_args, **_kwargs):
        raise NotImplementedError

    nothing = [CHECKS[name, key](None), CHECKS[name, key](stub)]
    assert not any(verdict.right for verdict in nothing)
    assert nothing[0].text == "there is nothing here yet."
    assert len(WRONG[name].get(CHECKS[name, key], [])) >= 2, f"tests/wrong_answers/{name}.py"


@pytest.mark.parametrize(("check", "answer"), REFUSED)
def test_a_check_refuses_a_wrong_answer_in_words(check, answer):
    verdict = check(answer)
    assert not verdict.right
    assert len(verdict.text) > 10 and verdict.text != "there is nothing here yet."


def exercises(twin):
    """(heading, plain outputs) of each exercise in a chapter."""
    found = []
    for cell in json.loads(twin.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for line in "".join(cell["source"]).splitlines():
                if line.startswith(("### Exercise", "## ")):
                    found.append((line, []))
        elif found:
            data = (output.get("data", {}) for output in cell["outputs"])
            found[-1][1].extend("".join(d.get("text/plain", "")) for d in data)
    return [(line, outputs) for line, outputs in found if line.startswith("### Exercise")]


@pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.stem)
def test_each_exercise_is_empty_on_the_page_and_its_solution_right(twin):
    found = exercises(twin)
    assert len(found) >= 3
    for line, outputs in found:
        verdicts = [text.partition(":")[0] for text in outputs]
        assert re.fullmatch(r"### Exercise \d: .+ \((predict|modify|break|measure)\)", line), line
        assert "Not yet" in verdicts and "Right" in verdicts, line
        assert verdicts.index("Not yet") < verdicts.index("Right"), line


def test_a_verdict_says_what_went_wrong():
    def halves(f):
        if f(4) != 2:
            raise AssertionError("half of 4 is 2.")

    assert check(lambda x: x / 2, halves, "one case.") == Verdict(True, "one case.")
    assert repr(check(lambda x: x, halves, "")) == "Not yet: half of 4 is 2."
    assert repr(check(lambda: 2, halves, "")).startswith("Not yet: it raises TypeError")
    assert compare(None, 3, 1, "").text == "there is nothing here yet."
    assert repr(compare(1, 3, 1, "")) == "Not yet: 1 is too low."
    assert repr(compare(float("nan"), 3, 1, "")) == "Not yet: a number is asked for, got nan."
    assert repr(compare(10**5_000, 3.5, 1, "")) == "Not yet: inf is too high."  # it has no float
    assert repr(compare(-(10**400), 3.5, 1, "")) == "Not yet: -inf is too low."
    assert repr(compare(2.5, 3, 1, "because.")) == "Right: because."
    assert compare(np.int64(3), 3, 0, "").right and compare(np.float32(2.9), 3, 0.2, "").right
