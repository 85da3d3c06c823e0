"""Where a run resumes: on the same device in the same arithmetic, also after a program stopped it."""

from pathlib import Path

import pytest

from fedecho import load, resume, simulate
from fedecho.runs.execution import Execution, check_same_arithmetic, resume_options
from fedecho.runs.run import Interrupted

ON_GPU = {"executor": "cuda", "workers": 6, "precision": "fp32", "deterministic": True, "device": "a GPU"}
EXACT = {"precision": "fp32", "deterministic": True}


def test_a_run_on_a_gpu_goes_on_there_in_the_same_arithmetic() -> None:
    assert resume_options(ON_GPU) == {"executor": "cuda", "device": None, **EXACT}
    assert resume_options(ON_GPU, "pool") == {"executor": "pool", "device": "cuda", **EXACT}
    assert resume_options({"executor": "pool", "workers": 2})["executor"] == "pool"
    check_same_arithmetic(Path("run"), ON_GPU, Execution(executor="cuda", **EXACT))  # type: ignore[arg-type]
    for other in (Execution(), Execution(executor="cuda"), Execution(executor="cuda", precision="fp32")):
        with pytest.raises(ValueError, match="run was computed on a GPU in fp32, deterministic, but is to be resumed on a"):
            check_same_arithmetic(Path("run"), ON_GPU, other)


def test_python_too_goes_on_where_a_gpu_run_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the CPU, which is the default for a new run; where there is no GPU it says so."""
    simulate(load("digits", algorithm="fedbuff", versions=1), out=tmp_path)
    (tmp_path / "summary.json").unlink()
    record = tmp_path / "run.jsonl"
    on_gpu = '"execution":{"device":"a GPU","precision":"bf16","deterministic":false,"executor":"cuda"'
    record.write_text(record.read_text().replace('"execution":{"executor":"serial"', on_gpu, 1))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        resume(tmp_path)


def test_a_program_stops_a_run_without_a_signal_and_resumes_it(tmp_path: Path) -> None:
    experiment, asked = load("digits", algorithm="fedbuff", versions=2), 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 5

    with pytest.raises(Interrupted, match=r"stopped at version [01] of 2; resume with"):
        simulate(experiment, out=tmp_path, stop=stop)
    assert resume(tmp_path).summary.arrivals_sha256 == simulate(experiment).summary.arrivals_sha256
