"""Both lists of pinned versions agree with each other, with the dependencies and with what is installed."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def lock() -> Any:
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_lists_agree_in_names_and_versions() -> None:
    """Else `make lock` was forgotten."""
    pins, left_out = lock().pins, lock().LEFT_OUT
    plain = pins((ROOT / "constraints.txt").read_text())
    hashed = pins((ROOT / "constraints-hashes.txt").read_text())
    assert hashed == {name: version for name, version in plain.items() if name not in left_out}
    assert left_out <= set(plain)
    assert len(hashed) > 40


def test_every_version_has_a_hash_of_its_own() -> None:
    text = (ROOT / "constraints-hashes.txt").read_text()
    digests = re.findall(r"^    --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    assert len(digests) == len(set(digests)) == text.count("==")


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {re.split(r"[<>=\[ ]", line)[0].lower() for line in [*project["dependencies"], *extras["dev"]]}
    assert names <= set(lock().pins((ROOT / "constraints.txt").read_text()))


def test_the_spelling_of_a_name_does_not_matter() -> None:
    text = "# a note\nTyping_Extensions==4.1\nruamel.yaml==1.0 \\\n    --hash=sha256:00\n"
    assert lock().pins(text) == {"typing-extensions": "4.1", "ruamel-yaml": "1.0"}
