"""The folders show the architecture; this keeps them honest."""

import ast
from pathlib import Path

import fedecho

ROOT = Path(fedecho.__file__).parent
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "distill": {"core"},
    "learning": {"core"},
    "data": {"core"},
    "models": set(),
    "algorithms": {"core", "distill"},
    "tasks": {"core", "data", "models"},
    "simulation": {"core", "learning"},
    "tracking": {"core"},
    "experiments": {"core", "distill", "learning", "data", "models", "algorithms", "tasks", "simulation", "tracking"},
    "report": {"core", "experiments", "simulation"},
    "cli": {"core", "algorithms", "data", "experiments", "report", "simulation", "tasks", "tracking"},
}


def imported_layers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: imports are absolute here"
        names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {
            name.split(".")[1] for name in names if name.startswith("fedecho.") and not name.startswith("fedecho.version")
        }
    return found


def test_layers_import_only_what_lies_below() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(ALLOWED)
    for layer, allowed in ALLOWED.items():
        for path in (ROOT / layer).rglob("*.py"):
            assert imported_layers(path) <= allowed | {layer}, path


def test_no_folder_or_file_is_named_for_nothing() -> None:
    for path in ROOT.rglob("*"):
        assert path.stem not in {"utils", "common", "helpers", "base", "misc"}, path


def test_the_public_names_are_sorted_and_there() -> None:
    names = [name for name in fedecho.__all__ if name.isupper()]
    assert names == sorted(names)
    assert all(hasattr(fedecho, name) for name in fedecho.__all__)
    assert fedecho.__version__ in (ROOT.parent.parent / "pyproject.toml").read_text()
