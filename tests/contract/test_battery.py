"""The contract that every algorithm of the table must keep."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from fedecho import Arrival, ClientUpdate, Experiment, FedAsync, FedEcho, GlobalModel, resume, simulate
from fedecho.core.algorithm import demands
from fedecho.core.loop import Moment, drive
from fedecho.core.types import Dispatch
from fedecho.runs.build import Simulation, assembled
from fedecho.runs.identity import model_digest
from fedecho.storage.checkpoint import _digest, encode


def state_digest(state: Any) -> str:
    tensors: dict[str, torch.Tensor] = {}
    return _digest(repr(encode(state, tensors)), tensors)


def test_published_models_stay_bit_unchanged(experiment: Experiment) -> None:
    published: list[tuple[GlobalModel, str, str]] = []

    def note(model: GlobalModel) -> None:
        correction = "" if model.correction is None else model.correction.numpy().tobytes().hex()
        published.append((model, model_digest(model.weights), correction))

    with assembled(experiment) as simulation:
        note(simulation.server.model)
        drive(
            simulation.server,
            simulation.transport,
            num_versions=experiment.num_versions,
            watch=lambda moment: note(moment.step.model) if moment.step else None,
        )
    assert len(published) == experiment.num_versions + 1
    for model, digest, correction in published:
        assert model_digest(model.weights) == digest
        if model.correction is not None:
            assert model.correction.numpy().tobytes().hex() == correction
    assert len({digest for _, digest, _ in published}) == len(published), "every version moved the model"


def zero_update(dispatch: Dispatch, with_correction: bool) -> ClientUpdate:
    weights = dispatch.model.weights
    zero = torch.zeros_like(weights.params)
    correction = zero.clone() if with_correction else None
    return ClientUpdate(dispatch.client, dispatch.model.version, zero, weights.buffers.clone(), 10, 2, correction)


def answer_all(simulation: Simulation, answer: Callable[[Dispatch], ClientUpdate], num_versions: int) -> list[GlobalModel]:
    """Answer dispatches in the order they were sent."""
    server, waiting, models = simulation.server, [], [simulation.server.model]
    waiting += server.refill()
    while server.model.version < num_versions:
        server.receive(answer(waiting.pop(0)))
        waiting += server.refill()
        if server.ready:
            models.append(server.advance().model)
            waiting += server.refill()
    return models


def test_zero_deltas_are_a_fixed_point(experiment: Experiment) -> None:
    """For all but FedAsync, which pulls x to a stale y whatever its delta, and FedEcho, whose distillation moves x on purpose."""
    if isinstance(experiment.algorithm, FedEcho):
        distiller = replace(experiment.algorithm.distiller, num_distill_steps=0)
        experiment = replace(experiment, algorithm=replace(experiment.algorithm, distiller=distiller))
    if isinstance(experiment.algorithm, FedAsync):
        experiment = replace(experiment, concurrency=1)  # nothing is stale then
    corrects = demands(experiment.algorithm).control_variates
    with assembled(experiment) as simulation:
        models = answer_all(simulation, lambda dispatch: zero_update(dispatch, corrects), 4)
    for model in models[1:]:
        torch.testing.assert_close(model.weights.params, models[0].weights.params, rtol=0, atol=0)
        torch.testing.assert_close(model.weights.buffers, models[0].weights.buffers, rtol=1e-6, atol=1e-7)


def copy_of(model: GlobalModel) -> GlobalModel:
    correction = None if model.correction is None else model.correction.clone()
    return replace(model, weights=model.weights.clone(), correction=correction)


def overwrite(*values: GlobalModel | ClientUpdate) -> None:
    """As a caller may, who goes on in the same memory."""
    for value in values:
        weights = (
            [value.weights.params, value.weights.buffers] if isinstance(value, GlobalModel) else [value.delta, value.buffers]
        )
        for tensor in (*weights, value.correction):
            if tensor is not None:
                tensor.fill_(-77.0)


def test_a_state_owns_its_tensors(variant: Experiment) -> None:
    """Neither what came in nor what was published is a part of the state, so that nobody else can change it."""
    corrects = demands(variant.algorithm).control_variates
    with assembled(variant) as simulation:
        algorithm, first = simulation.server.algorithm, simulation.server.model
        model = copy_of(first)
        state = algorithm.init(model)
        before = state_digest(state)
        overwrite(model)
        assert state_digest(state) == before
        base = current = first
        for number in range(12):
            rng = torch.Generator().manual_seed(number)
            delta = torch.randn(len(current.weights.params), generator=rng) / 100
            correction = delta.clone() if corrects else None
            update = ClientUpdate(number % 8, base.version, delta, current.weights.buffers.clone(), 10, 2, correction)
            arrival = Arrival(update, copy_of(base), copy_of(current))
            state = algorithm.receive(state, arrival)
            before = state_digest(state)
            overwrite(update, arrival.base, arrival.current)
            assert state_digest(state) == before
            if algorithm.ready(state):
                given = copy_of(current)
                advance = algorithm.advance(state, given)
                state, base = advance.state, current
                current = copy_of(GlobalModel(current.version + 1, advance.weights, advance.correction))
                before, published = state_digest(state), state_digest(advance.weights)
                overwrite(given)
                assert state_digest(advance.weights) == published, "what is published is new"
                overwrite(GlobalModel(0, advance.weights, advance.correction))
                assert state_digest(state) == before
        assert current.version >= 2


class CrashError(Exception):
    pass


@pytest.mark.parametrize("stop_after", [1, 4, 7])
def test_a_run_that_crashed_in_mid_buffer_resumes_to_the_same_bytes(
    experiment: Experiment, stop_after: int, tmp_path: Path
) -> None:
    whole = simulate(experiment)
    seen = 0

    def crash(moment: Moment, scores: object) -> None:
        nonlocal seen
        seen += 1
        if seen > stop_after:
            raise CrashError

    with pytest.raises(CrashError):
        simulate(experiment, out=tmp_path, checkpoint_s=0.0, watch=crash)
    resumed = resume(tmp_path)
    assert resumed.summary.model_sha256 == whole.summary.model_sha256
    assert resumed.summary.arrivals_sha256 == whole.summary.arrivals_sha256
    assert [line["accuracy"] for line in resumed.evaluations] == [line["accuracy"] for line in whole.evaluations]


def spoilt(update: ClientUpdate) -> dict[str, ClientUpdate]:
    bad_delta = update.delta.clone()
    bad_delta[3] = nan
    bad_buffers = update.buffers.clone()
    bad_buffers[0] = inf
    return {
        "delta is not finite": replace(update, delta=bad_delta),
        "buffers are not finite": replace(update, buffers=bad_buffers),
        "delta has shape": replace(update, delta=update.delta[1:]),
        "buffers has shape": replace(update, buffers=update.buffers[1:]),
        "delta has dtype": replace(update, delta=update.delta.double()),
        "based on version": replace(update, base_version=update.base_version + 1),
        "num_examples": replace(update, num_examples=0),
        "num_steps": replace(update, num_steps=0),
    }


def test_wrong_updates_are_rejected_and_replaced_with_the_state_untouched(experiment: Experiment) -> None:
    corrects = demands(experiment.algorithm).control_variates
    with assembled(experiment) as simulation:
        server, waiting = simulation.server, []
        waiting += server.refill()
        if experiment.buffer_size != 1:
            server.receive(zero_update(waiting.pop(0), corrects))  # in the middle of a buffer
            waiting += server.refill()
        before, model = state_digest(server.state), server.model
        for reason in spoilt(zero_update(waiting[0], corrects)):
            dispatch = waiting.pop(0)
            receipt = server.receive(spoilt(zero_update(dispatch, corrects))[reason])
            assert receipt.status == "rejected"
            assert reason in receipt.reason
            assert state_digest(server.state) == before
            assert server.model is model
            (replacement,) = server.refill()
            waiting.append(replacement)
        stranger = zero_update(waiting[0], corrects)
        for client in (-1, 8):
            assert server.receive(replace(stranger, client=client)).status == "rejected"
        assert server.receive(replace(stranger, client=server.idle[0])).reason == "update was not asked for"
        assert state_digest(server.state) == before
        assert server.counts["rejected"] == len(spoilt(stranger)) + 3
