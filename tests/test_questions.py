"""The pages that lead into the chapters: questions, exercises, limits."""

import re
import sys

import pytest
from chapters import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))
from evidence_register import read_exercises, read_register

BOOK = ROOT / "book"
CLAIM = re.compile(r"\{claim\}`([^`]+)`")
TO_A_SECTION = re.compile(r"\]\(\.\./notebooks/\w+\.md#[\w-]+\)")


def answers() -> dict[str, str]:
    """The questions and what is said to each."""
    text = (BOOK / "questions.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (.+)$", text, flags=re.M)[1:]
    return {q: a.split("\n## ")[0] for q, a in zip(parts[::2], parts[1::2], strict=True)}


def typed_numbers(text: str) -> list[str]:
    """Find what stands outside links, claims and code and holds a digit."""
    prose = re.sub(r"\{\w+\}`[^`]*`|`[^`]*`|\]\([^)]*\)", "", text)
    prose = re.sub(r"[Cc]hapters? \d+[a-z]?( and \d+[a-z]?)?|GPT-2|float\d\d", "", prose)
    return re.findall(r"\S*\d\S*", prose)


def test_twenty_questions_are_answered_by_a_section_of_a_chapter_each():
    assert len(answers()) == 20
    assert [q for q, answer in answers().items() if not TO_A_SECTION.search(answer)] == []


@pytest.mark.parametrize("page", ["questions", "limits"])
def test_no_result_is_typed_and_every_claim_is_one_of_the_register(page):
    text = (BOOK / f"{page}.md").read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    shown = {s.claim.id for s in read_register(ROOT)}
    assert CLAIM.findall(text) and set(CLAIM.findall(text)) <= shown
    assert typed_numbers(text) == []


def test_a_typed_number_is_found():
    assert typed_numbers("In chapter 10a, {claim}`ch01-a`, [2 ways](b.md#3): 98%.") == [
        "[2",
        "98%.",
    ]


def test_the_index_marks_the_seven_exercises_of_the_reference():
    text = (BOOK / "exercises.md").read_text(encoding="utf-8")
    marked = re.search(r"```\{exercises\}\n(.*?)```", text, re.S)[1].split("\n")[:-1]
    known = {e.name for chapter in read_exercises(ROOT).values() for e in chapter}
    assert len(marked) == len(set(marked)) == 7 and set(marked) <= known
