"""The bug zoo: the tests of the project catch every mutant, and so does a good invariant."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from chapters import ROOT

from bookkit import zoo

TESTS = {  # the file that catches a mutant, or a part of one
    "ch02": ["test_blocks.py"],
    "ch03": ["test_block_tables.py"],
    "ch05": ["test_caches.py", "-k", "c8"],
}
MODEL = {"a watermark on growth": ["test_blocks_model.py"]}
# One process imports what is slow; then each mutant has a fork of it to itself.
FORKS = """
import json, os, sys
import hypothesis, numpy, pytest, safetensors.torch, tokenizers, torch
jobs, options = json.loads(sys.argv[1])
hypothesis.settings.register_profile("zoo", phases=[hypothesis.Phase.generate], derandomize=True)
hypothesis.settings.load_profile("zoo")
for folder, tests in jobs:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(os.open("report", os.O_WRONLY | os.O_CREAT), 1)
        code = pytest.main([*options, *tests])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
OPTIONS = ["-x", "-q", "-o", "addopts=", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
OPTIONS += [f"--rootdir={ROOT}", "-p", "no:xdist", "-p", "no:nbval", "-p", "no:cacheprovider"]


def job(folder, mutant, file, *options):
    """A folder with a copy of labcore that has this mutant in it, and the tests to run on it."""
    shutil.copytree(ROOT / "labcore", folder / "labcore", ignore=shutil.ignore_patterns("__py*"))
    (folder / "bookkit").symlink_to(ROOT / "bookkit")
    for module in ("blocks", "caches"):
        (folder / "labcore" / f"{module}.py").write_text(zoo.source(module, mutant))
    return str(folder), [str(ROOT / "tests" / file), *options]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{name: (exit code, what pytest said)} of each mutant, and of the healthy copy as None."""
    jobs = {
        mutant.name: job(
            tmp_path_factory.mktemp("mutant"),
            mutant,
            *MODEL.get(mutant.name, TESTS[mutant.chapters[0]]),
        )
        for mutant in zoo.ZOO
    }
    for tests in TESTS.values():
        jobs["healthy", *tests] = job(tmp_path_factory.mktemp("healthy"), None, *tests)
    run = subprocess.run(
        [sys.executable, "-B", "-c", FORKS, json.dumps([list(jobs.values()), OPTIONS])],
        capture_output=True,
        text=True,
    )
    codes = map(int, run.stdout.split())
    return {
        name: (code, (Path(folder) / "report").read_text())
        for (name, (folder, _)), code in zip(jobs.items(), codes, strict=True)
    }


@pytest.mark.parametrize("mutant", zoo.ZOO, ids=lambda mutant: mutant.name)
def test_the_tests_of_the_project_catch_each_mutant(mutant, reports):
    code, report = reports[mutant.name]
    assert code == 1 and "1 failed" in report, report


@pytest.mark.parametrize("tests", TESTS.values(), ids=lambda tests: tests[0])
def test_the_same_tests_pass_on_a_copy_without_a_mutant(tests, reports):
    code, report = reports["healthy", *tests]
    assert code == 0 and "passed" in report, report


def test_there_are_ten_and_their_stories_say_where_they_were_met():
    assert len({mutant.name for mutant in zoo.ZOO}) == len(zoo.ZOO) == 10
    assert sum("/" in mutant.source for mutant in zoo.ZOO) >= 2
    for mutant in zoo.ZOO:
        assert zoo.source(mutant.module, mutant) != zoo.source(mutant.module)
        assert mutant.story and len(mutant.story) <= 78
        assert set(mutant.chapters) <= set(zoo.WORK)


def good_pool(pool, held):
    counts = [pool.ref_count(i) for i in range(pool.num_blocks)]
    assert counts == [held.count(i) for i in range(pool.num_blocks)]
    return pool.num_free + len(set(held)) == pool.num_blocks


def good_tables(tables, texts, memory):
    holders = Counter(i for seq_id in texts for i in tables.block_table(seq_id))
    for i in range(tables.allocator.num_blocks):
        assert tables.allocator.ref_count(i) == holders[i]
    for seq_id, text in texts.items():
        table, part_full = tables.block_table(seq_id), len(text) % tables.block_size > 0
        assert [memory[slot] for slot in tables.slot_mapping(seq_id)] == text
        assert tables.can_append(seq_id) or not part_full or holders[table[-1]] > 1


def good_cache(kv, texts):
    for seq_id, text in texts.items():
        slots = torch.tensor(kv.tables.slot_mapping(seq_id), dtype=torch.long)
        expected = torch.tensor(text, dtype=torch.float32)[:, None, None]
        for layer in (0, 1):
            keys, values = kv.read(layer, slots)
            assert (keys == expected).all() and (values == -expected).all()


GOOD = {"ch02": good_pool, "ch03": good_tables, "ch05": good_cache}


@pytest.mark.parametrize("chapter", GOOD)
def test_a_good_invariant_catches_all_and_one_that_nods_catches_none(chapter):
    assert zoo.hunt(GOOD[chapter], chapter).right
    nods, n = zoo.hunt(lambda *_: True, chapter), len(zoo.cages(chapter))
    assert not nods.right and nods.text.startswith(f"{n} of {n} at large.")
    assert nods.text.count("at large  ") == n and "caught" not in nods.text


@pytest.mark.parametrize("chapter", GOOD)
def test_a_false_alarm_is_told_from_a_catch(chapter):
    wolf = zoo.hunt(lambda *_: False, chapter)
    assert repr(wolf) == "Not yet: a false alarm: the healthy one, step 1."
    assert zoo.hunt(lambda *_: 1 / 0, chapter).text.startswith("it raises ZeroDivisionError")


def test_the_invariants_of_labcore_alone_leave_some_at_large():
    """They do not know what callers hold, and what a table was promised to read."""
    pool = zoo.hunt(lambda pool, held: pool.check_invariants(), "ch02")
    assert pool.text.startswith("1 of 3 at large.") and "large           half a" in pool.text
    tables = zoo.hunt(lambda tables, *_: tables.check_invariants(), "ch03")
    assert tables.text.startswith("2 of 6 at large.")
