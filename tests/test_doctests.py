"""Every example in a docstring is run."""

import doctest
import importlib
from pathlib import Path

import pytest

import fedecho

ROOT = Path(fedecho.__file__).parent
SHOWN = [path for path in sorted(ROOT.rglob("*.py")) if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_examples_in_docstrings_say_what_they_give(path: Path) -> None:
    name = ".".join(("fedecho", *path.relative_to(ROOT).with_suffix("").parts))
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0
