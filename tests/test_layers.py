"""The import rules between the folders."""

import ast
import subprocess
import sys
from pathlib import Path

import fedecho

ROOT = Path(fedecho.__file__).parent
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "storage": {"core"},
    "distill": {"core", "storage"},
    "learning": {"core"},
    "algorithms": {"core", "storage", "distill", "learning"},
    "executors": {"core", "storage", "learning"},
    "gpu": {"core", "distill", "learning", "executors"},
    "tasks": {"core", "storage", "gpu"},
    "simulation": {"core", "storage", "executors"},
    "tracking": {"core", "storage"},
    "runs": {
        *("core", "storage", "distill", "learning", "algorithms", "executors", "gpu", "tasks", "simulation", "tracking"),
    },
    "paper": {"storage", "runs"},
    "flower": {"core", "storage", "distill", "learning", "runs"},
    "report": {"core", "storage", "runs", "simulation"},
    "cli": {
        *("core", "storage", "algorithms", "executors", "flower", "paper", "report", "runs", "simulation", "tasks", "tracking"),
    },
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


UNPICKLING = {
    "executors/ray_actor.py",  # what the process that started it sends
    "runs/job_processes.py",  # the same
    "tasks/vision/cifar_files.py",  # an unpickler that allows five names
}
LOADERS = {"load", "loads", "Unpickler", "read_pickle"}


def test_pickles_are_read_where_the_docs_say_and_nowhere_else() -> None:
    """Of files, only CIFAR's official ones."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in LOADERS and isinstance(node.value, ast.Name):
                assert node.value.id not in ("torch", "joblib", "dill", "marshal"), path
                if node.value.id in ("pickle", "cloudpickle"):
                    found.add(str(path.relative_to(ROOT)))
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
    assert found == UNPICKLING


def test_no_folder_or_file_is_named_for_nothing() -> None:
    for path in ROOT.rglob("*"):
        assert path.stem not in {"utils", "common", "helpers", "base", "misc"}, path


def test_the_public_names_are_sorted_and_there() -> None:
    names = [name for name in fedecho.__all__ if name.isupper()]
    assert names == sorted(names)
    assert all(hasattr(fedecho, name) for name in fedecho.__all__)
    assert fedecho.__version__ in (ROOT.parent.parent / "pyproject.toml").read_text()


def test_the_table_of_lazy_names_is_the_list_of_imports() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imported = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module and node.module.startswith("fedecho.") and alias.name != "__version__"
    }
    assert imported == fedecho.WHERE
    assert sorted({*fedecho.WHERE, "__version__"}) == sorted(fedecho.__all__)
    assert {*fedecho.__all__} <= {*dir(fedecho)}


def test_only_flower_and_its_commands_import_flwr() -> None:
    for path in ROOT.rglob("*.py"):
        found = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert path.parent.name == "flower" or not any(name.split(".")[0] == "flwr" for name in found), path


def test_what_a_clients_process_imports_is_free_of_torch() -> None:
    code = "import sys, fedecho.flower.client_app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_flower_the_extra_is_named() -> None:
    code = "import sys; sys.modules['flwr'] = None\nimport fedecho; fedecho.load('digits')\nimport fedecho.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: fedecho.flower needs Flower: pip install 'fedecho[flower]'" in done.stderr


PROCESS = """
import logging, os, pkgutil, signal, sys, warnings
import torch, torch._dynamo
for library in ("flwr.serverapp", "matplotlib", "peft", "ray", "tensorboard", "transformers"):
    try:
        __import__(library)
    except ImportError:
        pass
torch._inductor.config


def seen():
    told = {"folder": os.getcwd(), "path": list(sys.path), "hook": sys.excepthook, "umask": os.umask(0o022)}
    os.umask(told["umask"])
    told |= {"environment": dict(os.environ), "warnings": list(warnings.filters), "log": list(logging.getLogger().handlers)}
    told |= {"levels": (logging.getLogger().level, logging.getLogger("torch").level, logging.raiseExceptions)}
    told |= {"threads": (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), torch.is_grad_enabled())}
    told |= {"limits": torch._dynamo.config.recompile_limit if hasattr(torch._dynamo.config, "recompile_limit") else None}
    backends = torch.backends
    told |= {"gpu": (backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32)}
    return told | {"signals": [signal.getsignal(number) for number in signal.valid_signals()]}


before = seen()
import fedecho
for module in pkgutil.walk_packages(fedecho.__path__, "fedecho."):
    if not module.name.endswith("__main__"):
        try:
            __import__(module.name)
        except ImportError as error:
            assert not str(error.name).startswith("fedecho"), error
from dataclasses import replace
from fedecho import load, FedEcho
from fedecho.runs.execution import Execution
from fedecho.executors.ray_address import check_ray
for executor in ("serial", "pool", "ray"):
    try:
        Execution(executor=executor, workers=1)
    except ValueError:
        assert executor == "ray"
replace(load("digits", algorithm="fedecho"), name="mine")
after = seen()
for name in before:
    assert before[name] == after[name], name
"""


def test_imports_and_constructors_change_nothing_of_the_process() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROCESS], check=True)


def test_the_core_needs_no_extra() -> None:
    """A run, its report's numbers and every command's help, with all optional packages missing."""
    extras = ["ray", "flwr", "transformers", "tokenizers", "peft", "diffusers", "PIL", "matplotlib", "plotly", "tensorboard"]
    extras += ["wandb", "mlflow", "dp_accounting", "triton", "pandas"]
    code = f"""
import sys
for name in {extras}:
    sys.modules[name] = None
from fedecho import load, simulate
from fedecho.cli.program import app
from typer.testing import CliRunner
simulate(load("digits", versions=1, settings=["task.width=1", "local.num_local_steps=1"]))
for command in ("run", "compare", "resume", "table", "cost", "schedule", "report", "inspect", "watch", "export", "serve", "submit"):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, (command, result.output, result.exception)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
