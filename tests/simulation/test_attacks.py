"""Attackers do what they claim, and honest clients are unchanged."""

from dataclasses import dataclass, replace

import pytest
import torch
from small_attack import UPDATE, dispatch
from torch import nn

from fedecho import DigitsTask, DirichletPartitioner, Experiment, load, simulate
from fedecho.core.types import Arrival, GlobalModel, Weights
from fedecho.runs.build import assembled, training_task
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import defended
from fedecho.runs.summary import Summary
from fedecho.simulation.attacks import Attack

SMALL = ["task.num_clients=10", "concurrency=5", "local.epochs=1"]


def test_a_share_of_the_clients_attacks_and_the_seed_says_who() -> None:
    attack = Attack(kind="noise", share=0.2)
    assert len(attack.attackers(20, 0)) == 4
    assert attack.attackers(20, 0) == attack.attackers(20, 0) != attack.attackers(20, 1)
    assert Attack().attackers(20, 0) == frozenset()


def test_an_attack_by_less_than_one_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attack.share is 0.05, which of 10 clients is less than one: choose at least 0.1"):
        load("digits", algorithm="fedbuff", settings=[*SMALL, "attack.kind=noise", "attack.share=0.05"])
    for share in ("0", "0.1"):
        load("digits", algorithm="fedbuff", settings=[*SMALL, "attack.kind=noise", f"attack.share={share}"])
    load("digits", algorithm="fedbuff", settings=[*SMALL, "attack.share=0.05"])


@pytest.mark.parametrize(
    ("kind", "factor"), [("sign_flip", -3.0), ("scaled", 3.0), ("logit_backdoor", 3.0), ("label_flip", 1.0)]
)
def test_what_becomes_of_an_update(kind: str, factor: float) -> None:
    sent = Attack(kind=kind, scale=3.0).sent(dispatch(), UPDATE)  # type: ignore[arg-type]
    assert torch.equal(sent.delta, factor * UPDATE.delta)


def test_noise_has_the_norm_and_nothing_of_the_update() -> None:
    sent = Attack(kind="noise", scale=3.0).sent(dispatch(), UPDATE)
    assert float(sent.delta.norm()) == pytest.approx(3.0 * float(UPDATE.delta.norm()), rel=1e-5)
    assert torch.equal(sent.delta, Attack(kind="noise", scale=3.0).sent(dispatch(), UPDATE).delta)


@pytest.mark.parametrize("kind", ["label_flip", "logit_backdoor"])
def test_attackers_alone_see_false_labels(kind: str) -> None:
    one = load("digits", algorithm="fedbuff", settings=[*SMALL, f"attack.kind={kind}", "attack.target=3"])
    poisoned, attackers = training_task(one), one.attack.attackers(10, 0)
    rng, rows = torch.Generator(), torch.arange(5)
    for client in range(10):
        (images, labels), (true_images, true) = (task.batch(client, rows, rng) for task in (poisoned, one.task))
        false = torch.full_like(true, 3) if kind == "logit_backdoor" else 9 - true
        assert torch.equal(labels, false if client in attackers else true)
        assert torch.equal(images, true_images)


def test_a_flooding_client_is_fifty_times_as_fast() -> None:
    calm = load("digits", algorithm="fedbuff", settings=SMALL)
    with assembled(calm) as plain, assembled(replace(calm, attack=Attack(kind="flood"))) as flooded:
        attackers = Attack(kind="flood").attackers(10, 0)
        for client in range(10):
            ratio = plain.runtimes.draw(client, 7) / flooded.runtimes.draw(client, 7)
            assert ratio == pytest.approx(50.0 if client in attackers else 1.0)


@pytest.mark.parametrize(
    "extra",
    [
        ["attack.kind=flood"],
        pytest.param(["privacy.noise_multiplier=0.5"], marks=pytest.mark.slow),
        pytest.param(["attack.kind=noise"], marks=pytest.mark.slow),
    ],
)
def test_the_same_bytes_for_serial_and_pool(extra: list[str]) -> None:
    one = load("digits", algorithm="fedbuff", versions=4, settings=[*SMALL, *extra])
    runs = [simulate(one).summary, simulate(one, executor="pool", workers=2).summary]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert runs[0].arrivals_sha256 == runs[1].arrivals_sha256


def test_poisoned_statistics_rise_and_leave_the_delta_alone() -> None:
    update = replace(UPDATE, buffers=torch.tensor([1.0, 2.0]), correction=torch.tensor([1.0, 0.0, -1.0]))
    model = GlobalModel(0, Weights(torch.zeros(3), torch.tensor([3.0, 0.0])))
    sent = Attack(kind="statistics", scale=10.0).sent(replace(dispatch(), model=model), update)
    assert torch.equal(sent.delta, UPDATE.delta)
    assert sent.buffers.tolist() == [23.0, 20.0]
    assert sent.correction is not None
    assert sent.correction.tolist() == [10.0, 0.0, -10.0]


def scored(experiment: Experiment) -> Summary:
    return simulate(replace(experiment, eval_every=1)).summary


ONE_OF_TWENTY = ["task.partition.alpha=0.3", "task.width=8", "local.epochs=1"]
METHODS = ["fedavg", "fedasync", "fedbuff", "ca2fl", "fedac", "fadas", "fedecho"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("defence", [False, True])
def test_one_client_with_poisoned_statistics_ruins_no_method(method: str, defence: bool) -> None:
    """1e18 times as far, from the first report on; it costs what the loss of one client's data costs."""
    clean = load("digits", algorithm=method, versions=120 if method == "fedasync" else 40, settings=ONE_OF_TWENTY)
    attacked = replace(clean, attack=Attack(kind="statistics", share=0.05, scale=1e18))
    clean, attacked = (defended(one) if defence else one for one in (clean, attacked))
    calm, held = scored(clean), scored(attacked)
    assert calm.rejected == 0, calm.reasons
    assert held.reasons["statistics"] == held.rejected > 0
    assert held.last10_accuracy > calm.last10_accuracy - 0.05


@dataclass(frozen=True, kw_only=True)
class FlatDigits(DigitsTask):
    """A user's own task, without BatchNorm."""

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("scale", [1e6, 1e18])
@pytest.mark.parametrize("defence", [False, True])
def test_one_client_with_a_poisoned_control_variate_does_not_ruin_fedac(scale: float, defence: bool) -> None:
    task = FlatDigits(num_clients=20, partition=DirichletPartitioner(alpha=0.3))
    clean = replace(load("digits", algorithm="fedac", versions=60), task=task)
    attacked = replace(clean, attack=Attack(kind="statistics", share=0.05, scale=scale))
    clean, attacked = (defended(one) if defence else one for one in (clean, attacked))
    calm, held = scored(clean), scored(attacked)
    assert held.reasons["correction norm"] == held.rejected > 0
    assert held.last10_accuracy > calm.last10_accuracy - 0.05


def test_every_method_has_a_robust_rule_for_its_statistics_and_a_users_own_is_left_alone() -> None:
    rules = {method: defended(load("digits", algorithm=method)).algorithm for method in METHODS}
    assert {name: rules[name].combine for name in ("fedavg", "fedbuff", "fedac", "fadas")} == dict.fromkeys(
        ("fedavg", "fedbuff", "fedac", "fadas"), "clipped"
    )
    assert {name: rules[name].statistics for name in ("ca2fl", "fedasync")} == {"ca2fl": "median", "fedasync": "median"}


@pytest.mark.parametrize("method", ["fedavg", "fedasync", "fedbuff", "ca2fl", "fedac", "fadas"])
def test_statistics_within_the_bounds_do_not_move_a_defended_model(method: str) -> None:
    """What admission lets in, the median leaves out."""
    model = GlobalModel(0, Weights(torch.zeros(3), torch.tensor([0.0, 1.0])), torch.zeros(3))
    method_ = defended(load("digits", algorithm=method)).algorithm
    state = method_.init(model)
    for client, high in enumerate((1.0, 1.1, 50.0, 0.9, 1.0)):
        update = replace(UPDATE, client=client, buffers=torch.tensor([0.1, high]), correction=torch.ones(3))
        state = method_.receive(state, Arrival(update, model, model))
    advance = method_.advance(state, model)
    torch.testing.assert_close(advance.weights.buffers, torch.tensor([0.1, 1.0]))


def test_a_control_variate_within_the_bounds_is_cut_in_a_defended_fedac() -> None:
    """The mean of five norms would be 20.8, and of one step."""
    model = GlobalModel(0, Weights(torch.zeros(3), torch.zeros(0)), torch.zeros(3))
    method = replace(defended(load("digits", algorithm="fedac")).algorithm, num_clients=5)  # type: ignore[type-var]
    state = method.init(model)
    for client, factor in enumerate((1.0, 1.0, 100.0, 1.0, 1.0)):
        update = replace(UPDATE, client=client, correction=torch.tensor([factor, 0.0, 0.0]))
        state = method.receive(state, Arrival(update, model, model))
    correction = method.advance(state, model).correction
    torch.testing.assert_close(correction, torch.tensor([1.0, 0.0, 0.0]))


def test_the_default_defence_sets_what_it_says() -> None:
    one = defended(load("digits", algorithm="fedecho"))
    assert one.admission.max_norm_ratio == 3.0
    assert (one.algorithm.distiller.teacher, one.algorithm.inner.combine) == ("trimmed", "clipped")  # type: ignore[attr-defined]
    assert defended(load("digits", algorithm="ca2fl")).admission.max_norm_ratio == 3.0


def test_the_defence_saves_most_of_what_a_sign_flip_costs() -> None:
    settings = ["task.partition.alpha=0.3", "algorithm.buffer_size=5", "attack.kind=sign_flip", "attack.scale=10"]
    attacked = load("digits", algorithm="fedbuff", versions=25, settings=settings)
    clean = simulate(replace(attacked, attack=Attack())).accuracy
    lost, lost_defended = clean - simulate(attacked).accuracy, clean - simulate(defended(attacked)).accuracy
    assert lost > 0.3
    assert lost_defended < lost / 3


def test_every_clients_epsilon_is_in_the_summary() -> None:
    one = load("digits", algorithm="fedecho", versions=4, settings=[*SMALL, "privacy.noise_multiplier=2.0"])
    summary = simulate(one).summary
    assert summary.privacy is not None
    spent = summary.privacy["epsilon"]
    assert 0 < len(spent) <= 10
    assert summary.privacy["largest_epsilon"] == pytest.approx(max(spent.values()), abs=1e-4)
    assert min(spent.values()) > 1.0  # one report at sigma 2


@pytest.mark.parametrize(
    ("method", "extra", "message"),
    [
        ("fedac", ["privacy.noise_multiplier=1.0"], "privacy does not cover control variates"),
        ("fedecho", ["privacy.noise_multiplier=1.0", "privacy.where=server"], "not FedEcho's teachers"),
        ("fedbuff", ["attack.kind=charm"], "attack.kind must be"),
        ("fedbuff", ["attack.share=1.0"], "attack.share must be"),
        ("fedbuff", ["attack.scale=0.0"], "attack.scale must be"),
        ("fedbuff", ["attack.target=-1"], "attack.target must be"),
        ("fedbuff", ["privacy.clip_norm=0.0"], "privacy.clip_norm must be"),
        ("fedbuff", ["privacy.noise_multiplier=-1.0"], "privacy.noise_multiplier must be"),
        ("fedbuff", ["privacy.delta=1.0"], "privacy.delta must be"),
        ("fedbuff", ["privacy.where=space"], "privacy.where must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(method: str, extra: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("digits", algorithm=method, settings=extra)
