"""LABCORE_MODEL switches the chapters on a real model: they run on GPT-2s of other shapes, too."""

import shutil
from pathlib import Path

import jupytext
import pytest
from chapters import NOTEBOOKS, ROOT
from nbclient import NotebookClient
from transformers import GPT2Config, GPT2LMHeadModel

CHAPTERS = ["ch04_gpt2", "ch05_paged_gpt2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint as transformers saves it: random weights, half the positions, our tokenizer."""
    folder = tmp_path_factory.mktemp("other gpt2")
    config = GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=2_048, n_positions=512)
    GPT2LMHeadModel(config).save_pretrained(folder)
    shutil.copy(ROOT / "labcore/tiny/tokenizer.json", folder)
    return folder


@pytest.mark.slow
def test_the_chapters_run_on_another_gpt2(folder, monkeypatch):
    """One after another in one kernel; that each of them runs in its own, nbval sees."""
    monkeypatch.setenv("LABCORE_MODEL", str(folder))
    notebooks = [jupytext.read(NOTEBOOKS / f"{name}.md") for name in CHAPTERS]
    together = notebooks[0]
    together.cells = [cell for notebook in notebooks for cell in notebook.cells]
    NotebookClient(together, timeout=120, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    outputs = [output for cell in together.cells for output in cell.get("outputs", [])]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
