"""Each setting is shown to change a run as it should: a composition that forgot one would be noticed."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedecho import DigitsTask, Experiment, Faults, FedBuff, LocalTraining, load, resume, simulate
from fedecho.core.admission import Admission
from fedecho.core.loop import Moment
from fedecho.distill import Bank

SMALL = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20"]


def statuses(experiment: Experiment) -> Counter[str]:
    seen: Counter[str] = Counter()
    simulate(experiment, watch=lambda moment, scores: seen.update([moment.receipt.status]))
    return seen


def test_faults_and_admission_reach_the_run() -> None:
    experiment = load("digits", algorithm="fedbuff", versions=20, settings=SMALL)
    assert set(statuses(experiment)) == {"accepted"}
    assert statuses(replace(experiment, faults=Faults(dropout=0.3)))["lost"] > 5
    assert statuses(replace(experiment, faults=Faults(available_s=200, unavailable_s=50)))["left"] > 5
    norms: list[float] = []
    simulate(experiment, watch=lambda moment, scores: norms.append(moment.receipt.norm))
    bound = Admission(max_norm=sorted(norms)[len(norms) // 2])
    assert statuses(replace(experiment, admission=bound))["rejected"] > 5


def test_dispatch_after_step_gives_the_new_model() -> None:
    bases: dict[bool, list[int]] = {}
    for after in (False, True):
        experiment = load(
            "digits", algorithm="fedbuff", versions=20, settings=[*SMALL, f"dispatch_after_step={str(after).lower()}"]
        )
        bases[after] = []
        simulate(experiment, watch=lambda moment, scores, after=after: bases[after].append(moment.receipt.base_version))
    assert bases[True] != bases[False]
    assert sum(bases[True]) > sum(bases[False])


class CrashError(Exception):
    pass


@pytest.mark.parametrize("algorithm", ["fedac", "ca2fl", "fedavg"])
def test_resume_with_dropouts_spells_and_memory_in_a_file(algorithm: str, tmp_path: Path) -> None:
    settings = [*SMALL, "faults.dropout=0.2", "faults.available_s=300", "faults.unavailable_s=60", "client_memory=file"]
    settings += ["algorithm.memory=file"] if algorithm == "ca2fl" else []
    experiment = load("digits", algorithm=algorithm, versions=15, settings=settings)
    whole = simulate(experiment)
    left = 3

    def crash(moment: Moment, scores: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            left = 17
            raise CrashError

    for attempt in range(20):
        try:
            again = (
                simulate(experiment, out=tmp_path, checkpoint_s=0.0, watch=crash)
                if attempt == 0
                else resume(tmp_path, checkpoint_s=0.0, watch=crash)
            )
            break
        except CrashError:
            continue
    assert attempt > 1
    assert again.summary.model_sha256 == whole.summary.model_sha256
    assert again.summary.arrivals_sha256 == whole.summary.arrivals_sha256
    record = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(ValueError, match="finished run"):
        resume(tmp_path)
    assert (tmp_path / "run.jsonl").read_bytes() == record


def test_the_method_a_file_names_keeps_its_values_when_it_is_named_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "digits"\n[algorithm]\nname = "fadas"\nserver_lr = 0.5\n')
    assert load(str(path), algorithm="fadas").algorithm.server_lr == 0.5
    assert load(str(path), algorithm="fedbuff").algorithm.server_lr == 1.0


def test_a_task_without_a_seed_takes_the_experiments() -> None:
    local = LocalTraining(client_lr=0.1)
    made = [
        Experiment(task=DigitsTask(), algorithm=FedBuff(buffer_size=2), local=local, concurrency=4, num_versions=1, seed=seed)
        for seed in (0, 7)
    ]
    assert [experiment.task.seed for experiment in made] == [0, 7]
    assert made[0].task.num_examples(0) != made[1].task.num_examples(0) or made[0].task.num_examples(1) != made[
        1
    ].task.num_examples(1)
    with pytest.raises(ValueError, match="control_variates"):
        replace(made[0], local=replace(local, control_variates=True))


def test_one_clients_wild_logits_do_not_ruin_the_bank() -> None:
    bank, good = Bank(4, 3, torch.device("cpu")), torch.randn(5, 4, 3)
    for client in range(4):
        bank.put(client, good[client], 0)
    bank.put(4, torch.full((4, 3), 1e17), 0)
    bank.put(4, good[4], 1)
    torch.testing.assert_close(bank.teacher(), good.mean(dim=0))
    bank.put(4, torch.full((4, 3), float("nan")), 2)
    assert bank.num_refused == 1
    torch.testing.assert_close(bank.teacher(), good.mean(dim=0))
