"""A deployed run that is killed and submitted again loses only the jobs in flight and repeats none."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from loop_grid import LoopGrid
from test_wire_equals_simulator import CONFIG, MADE, small
from typer.testing import CliRunner

from fedecho import Experiment, resume, simulate, trained
from fedecho.cli import app
from fedecho.flower import Waiting, make_client_app, server_app
from fedecho.flower.codec import Codec
from fedecho.flower.server_app import run_experiment
from fedecho.learning.privacy import Privacy
from fedecho.runs import journal
from fedecho.runs import privacy_budget as accounting
from fedecho.runs.build import bound_network, server_of
from fedecho.runs.config import ConfigError, to_config
from fedecho.runs.record import read_header, read_record
from fedecho.runs.summary import Summary
from fedecho.simulation.attacks import Attack

Spoil = Callable[[Message, Message], Message | None]


class KilledError(BaseException):
    """No Exception: the transport takes those for what unpacking an answer raises."""


def grid_for(experiment: Experiment, nodes: int = 8) -> LoopGrid:
    MADE["now"] = experiment
    sizes = [experiment.task.num_examples(client) for client in range(experiment.task.num_clients)]
    runtimes = experiment.runtimes.assign(sizes, experiment.seed)
    app = make_client_app("test_wire_equals_simulator:made")
    return LoopGrid(app, nodes, runtimes.draw, CONFIG | {"key": str(id(experiment))})


def run(experiment: Experiment, grid: LoopGrid, folder: Path | None, **options: Any) -> Summary:
    waiting = Waiting(min_nodes=len(grid.contexts), poll_s=0, nodes_s=0)
    return run_experiment(grid, experiment, waiting, folder, **options)


def killed_after(grid: LoopGrid, answers: int) -> None:
    left = answers

    def kill(order: Message, reply: Message) -> Message:
        nonlocal left
        if order.metadata.message_type == "train":
            left -= 1
            if left < 0:
                raise KilledError
        return reply

    grid.spoil = kill


def accepted(folder: Path) -> list[int]:
    return [line["dispatch"] for line in read_record(folder) if line.get("status") == "accepted"]


@pytest.mark.parametrize(("share", "kept"), [(0, 10), (1e9, 9)], ids=["every arrival is saved", "only versions are"])
@pytest.mark.parametrize("name", ["fedecho", "fedac", "fedavg"])
def test_a_killed_server_goes_on_and_counts_each_update_once(
    name: str, share: float, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SAVE_SHARE", share)
    experiment, buffer_size = small(name), 3
    grid = grid_for(experiment)
    killed_after(grid, 10)
    with pytest.raises(KilledError):
        run(experiment, grid, tmp_path)
    before = accepted(tmp_path)
    assert len(before) == 10
    said: list[str] = []
    summary = run(experiment, grid_for(experiment), tmp_path, say=said.append)
    assert said[0] == f"resuming the run in {tmp_path} from version 3"
    done = accepted(tmp_path)
    assert done[:kept] == before[:kept], "what was saved is kept, in the middle of a buffer too"
    assert not set(done) & set(before[kept:]), "what was not is never counted"
    assert len(done) == len(set(done)) == 8 * buffer_size == summary.accepted
    versions = [line["version"] for line in read_record(tmp_path) if line["event"] == "version"]
    assert versions == list(range(1, 9))
    assert [line["version"] for line in read_record(tmp_path) if line["event"] == "evaluation"] == versions
    in_flight = experiment.concurrency - (kept % buffer_size if name == "fedavg" else 0)
    assert summary.reasons == {"in flight when the server stopped": in_flight}
    assert summary.num_versions == 8
    assert not list(tmp_path.glob("checkpoint-*"))


def test_fedacs_c_stays_the_mean_of_what_nodes_keep_after_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes forget c_i when an app is submitted again. A c that was kept would grow by a whole mean at every resume."""
    monkeypatch.setattr(journal, "SAVE_SHARE", 0)
    experiment = replace(small("fedac"), num_versions=40)
    servers: list[Any] = []
    monkeypatch.setattr(server_app, "server_of", lambda *parts: servers.append(server_of(*parts)) or servers[-1])
    for _ in range(4):
        grid = grid_for(experiment)
        killed_after(grid, 24)
        with pytest.raises(KilledError):
            run(experiment, grid, tmp_path)
        codec = Codec(bound_network(experiment.task, experiment.seed).layout)
        kept = [codec.read_control(context.state) for context in grid.contexts.values()]
        mean = torch.stack([c for c in kept if c is not None]).sum(0) / len(kept)
        correction = servers[-1].model.correction
        assert 0.3 < float(correction.norm() / mean.norm()) < 1.7
        assert float(torch.cosine_similarity(correction, mean, dim=0)) > 0.5


def test_what_is_damaged_is_passed_over_and_what_is_of_another_run_refused(tmp_path: Path) -> None:
    experiment = small("fedbuff")
    grid = grid_for(experiment)
    killed_after(grid, 10)
    with pytest.raises(KilledError):
        run(experiment, grid, tmp_path)
    newest = max(tmp_path.glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[:-5] + b"break")
    said: list[str] = []
    assert run(experiment, grid_for(experiment), tmp_path, say=said.append).accepted == 24
    assert newest.name in said[0]


def spoilt(content: RecordDict, shape: bool) -> RecordDict:
    arrays = dict(content["arrays"])
    name = min(arrays)
    values = arrays[name].numpy().copy()
    values.fill(float("nan"))
    arrays[name] = Array(values.reshape(-1)[:3] if shape else values)
    return RecordDict({**content, "arrays": ArrayRecord(arrays)})


def test_every_fault_is_named_and_the_run_finishes(tmp_path: Path) -> None:
    experiment = small("fedecho")
    grid, seen = grid_for(experiment), 0

    def spoil(order: Message, reply: Message) -> Message:
        nonlocal seen
        if order.metadata.message_type != "train":
            return reply
        seen += 1
        if seen == 3:
            return Message(spoilt(reply.content, shape=False), reply_to=order)
        if seen == 5:
            return Message(spoilt(reply.content, shape=True), reply_to=order)
        if seen == 7:
            grid.stop_node(order.metadata.dst_node_id)
            return grid.reply_to(order)
        if seen == 9:
            there = {int(context.node_config["partition-id"]) for context in grid.contexts.values()}
            grid.start_node(2001, min(set(range(8)) - there))
        return reply

    grid.spoil = spoil
    summary = run(experiment, grid, tmp_path)
    assert summary.accepted == 24 == len(set(accepted(tmp_path)))
    assert summary.reasons == {"not finite": 1, "unreadable": 1, "node gone": 1}
    assert {line["reason"] for line in read_record(tmp_path) if line.get("status") in ("rejected", "lost")} == {
        "delta is not finite",
        "the answer cannot be read: '0.weight' must have shape (2, 1, 3, 3), got (3,)",
        "the node disconnected",
    }
    assert (summary.rejected, summary.lost) == (2, 1)
    statuses = [line["status"] for line in read_record(tmp_path) if line["event"] == "arrival"]
    assert "joined" in statuses, "the node that was started anew is welcome"


def test_a_client_that_raises_is_lost_with_its_words(tmp_path: Path) -> None:
    """It introduced itself as client 2 and is another when it shall train, so the ClientApp itself raises."""
    experiment = small("fedbuff")
    grid = grid_for(experiment)
    context = grid.contexts[1003]

    def forget(order: Message, reply: Message) -> Message:
        if order.metadata.message_type == "query" and order.metadata.dst_node_id == 1003:
            context.node_config["partition-id"] = 4
        return reply

    grid.spoil = forget
    summary = run(experiment, grid, tmp_path)
    assert summary.accepted == 24
    words = "the dispatch is for client 2, but this node is client 4"
    lost = [line for line in read_record(tmp_path) if line.get("status") == "lost"]
    assert lost
    assert all(line["client"] == 2 and words in line["reason"] for line in lost)
    assert summary.reasons == {"client failed": len(lost)}


def test_a_node_that_does_not_know_who_it_is_is_said_to_be_so(tmp_path: Path) -> None:
    experiment = small("fedbuff")
    grid = grid_for(experiment)
    del grid.contexts[1003].node_config["partition-id"]
    said: list[str] = []
    waiting = Waiting(min_nodes=7, poll_s=0, nodes_s=0)
    summary = run_experiment(grid, experiment, waiting, tmp_path, say=said.append)
    assert summary.accepted == 24
    assert sum("partition-id is missing from this node's configuration" in text for text in said) == 3


def test_one_client_that_raises_at_once_neither_ends_the_run_nor_gets_all_the_work(tmp_path: Path) -> None:
    """Its exception goes through Flower's own handling, the transport and the server."""
    experiment = small("fedbuff")
    grid = grid_for(experiment)
    grid.runtime = lambda client, dispatch: 0.0 if client == 2 else 100.0
    jobs = Counter[int]()

    def spoil(order: Message, reply: Message) -> Message:
        if order.metadata.message_type == "train":
            jobs[order.metadata.dst_node_id] += 1
            if order.metadata.dst_node_id == 1003:
                return Message(Error(2, "<class 'RuntimeError'>:<'no disk'>"), reply_to=order)
        return reply

    grid.spoil = spoil
    summary = run(experiment, grid, tmp_path)
    assert summary.accepted == 24
    assert summary.lost == jobs[1003] <= 10, "five strikes, and aside"
    assert summary.reasons == {"client failed": jobs[1003]}
    lost = [line["reason"] for line in read_record(tmp_path) if line.get("status") == "lost"]
    assert lost[0] == "its app raised: <class 'RuntimeError'>:<'no disk'>"


def test_a_run_that_gets_nowhere_ends(tmp_path: Path) -> None:
    experiment = small("fedbuff")
    grid = grid_for(experiment)

    def spoil(order: Message, reply: Message) -> Message:
        return reply if order.metadata.message_type == "query" else Message(RecordDict(), reply_to=order)

    grid.spoil = spoil
    words = r"none of the last (\d+) jobs returned an update: every connected client failed in the same way \(unreadable\)"
    with pytest.raises(ConfigError, match=f"{words}; the last one: the answer cannot be read") as caught:
        run(experiment, grid, tmp_path)
    assert 16 <= int(re.search(words, str(caught.value))[1]) <= 50, "eight clients, each at least twice"


def test_where_everybody_fails_in_many_ways_the_run_ends_later(tmp_path: Path) -> None:
    experiment = small("fedbuff")
    grid = grid_for(experiment)

    def spoil(order: Message, reply: Message) -> Message:
        if order.metadata.message_type == "query":
            return reply
        codes = {0: 2, 1: 3}
        place = len(grid.orders) % 3
        return Message(Error(codes[place], "no"), reply_to=order) if place in codes else Message(RecordDict(), reply_to=order)

    grid.spoil = spoil
    with pytest.raises(ConfigError, match="none of the last 100 jobs returned an update; the last one"):
        run(experiment, grid, tmp_path)


def test_a_network_that_fails_everybody_for_a_while_ends_no_run(tmp_path: Path) -> None:
    """Sixty answers in a row are lost on their way; no client did that."""
    experiment = small("fedbuff")
    grid, left = grid_for(experiment), 60

    def spoil(order: Message, reply: Message) -> Message:
        nonlocal left
        if order.metadata.message_type == "query" or left == 0:
            return reply
        left -= 1
        return Message(Error(3, "expired"), reply_to=order)

    grid.spoil = spoil
    summary = run(experiment, grid, tmp_path)
    assert (summary.accepted, summary.reasons) == (24, {"answer lost": 60})


def test_a_run_of_before_there_was_a_setting_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(experiment: Experiment) -> Any:
        tree = to_config(experiment)
        del tree["local"]["corrected"]
        return tree

    experiment = replace(small("fedbuff"), num_versions=3)
    grid = grid_for(experiment)
    killed_after(grid, 5)
    with monkeypatch.context() as patch:
        patch.setattr("fedecho.runs.identity.config_of", before)
        with pytest.raises(KilledError):
            run(experiment, grid, tmp_path)
    assert "corrected" not in read_header(tmp_path)["config"]["local"]
    said: list[str] = []
    assert run(experiment, grid_for(experiment), tmp_path, say=said.append).num_versions == 3
    assert said[0].endswith("from version 1")


def test_a_finished_folder_another_experiment_and_a_second_server_are_refused(tmp_path: Path) -> None:
    experiment = replace(small("fedbuff"), num_versions=2)
    run(experiment, grid_for(experiment), tmp_path / "done")
    with pytest.raises(ConfigError, match="already holds a finished run"):
        run(experiment, grid_for(experiment), tmp_path / "done")
    grid = grid_for(experiment)
    killed_after(grid, 2)
    with pytest.raises(KilledError):
        run(experiment, grid, tmp_path / "stopped")
    other = replace(experiment, seed=5)
    with pytest.raises(ConfigError, match="another configuration: seed is 0 there and 5 here"):
        run(other, grid_for(other), tmp_path / "stopped")
    grid = grid_for(experiment)

    def start_another(order: Message, reply: Message) -> Message:
        with pytest.raises(ConfigError, match="in use by another process"):
            run(experiment, grid_for(experiment), tmp_path / "two")
        return reply

    grid.spoil = start_another
    run(experiment, grid, tmp_path / "two")


def test_the_folder_is_that_of_a_simulation(tmp_path: Path) -> None:
    experiment = replace(small("fedbuff"), num_versions=2)
    summary = run(experiment, grid_for(experiment), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run.jsonl", "summary.json"]
    assert Summary.read(tmp_path) == summary
    assert experiment.task.evaluate(trained(tmp_path))["accuracy"] == summary.final_accuracy
    header = read_header(tmp_path)
    assert header["config"]["algorithm"]["name"] == "fedbuff"
    assert header["execution"]["executor"] == "flower"
    with pytest.raises(ConfigError, match="finished run"):
        resume(tmp_path)
    in_memory = run(experiment, grid_for(experiment), None)
    assert in_memory.model_sha256 == summary.model_sha256


@pytest.mark.parametrize("options", [[], ["--executor", "pool"], ["--json"]], ids=" ".join)
def test_resume_of_a_finished_deployed_run_says_that_it_is_finished(options: list[str], tmp_path: Path) -> None:
    experiment = replace(small("fedbuff"), num_versions=2)
    run(experiment, grid_for(experiment), tmp_path)
    done = CliRunner().invoke(app, ["resume", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    if options == ["--json"]:
        assert json.loads(done.output)["num_versions"] == 2
    else:
        assert done.output.count("\n") == 1
        assert "is already finished; to run its app again, submit it with another run folder" in done.output
        assert "executor" not in done.output


def test_a_stopped_deployed_run_goes_on_from_its_app_alone(tmp_path: Path) -> None:
    """Neither the command nor the library simulates the rest of it."""
    experiment = replace(small("fedbuff"), num_versions=2)
    grid = grid_for(experiment)
    killed_after(grid, 4)
    with pytest.raises(KilledError):
        run(experiment, grid, tmp_path)
    before = (tmp_path / "run.jsonl").read_bytes()
    told = CliRunner().invoke(app, ["resume", str(tmp_path)])
    assert told.exit_code == 2
    assert "submit its app again with the same run folder to resume it (fedecho submit)" in told.output
    for attempt in (lambda: resume(tmp_path), lambda: simulate(experiment, out=tmp_path)):
        with pytest.raises(ConfigError, match="submit its app again with the same run folder"):
            attempt()
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_epsilon_covers_what_was_sent_and_then_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every order that went out may have been answered, before the kill, behind the checkpoint and at the end."""
    monkeypatch.setattr(journal, "SAVE_SHARE", 1e9)
    monkeypatch.setattr(server_app, "check_accountant", lambda: None)
    monkeypatch.setattr(accounting, "epsilon", lambda noise, count, delta: float(count))
    experiment = replace(small("fedbuff"), privacy=Privacy(clip_norm=1.0, noise_multiplier=5.0))
    sent = Counter[int]()
    for last in (False, True):
        grid = grid_for(experiment)
        if not last:
            killed_after(grid, 11)
            with pytest.raises(KilledError):
                run(experiment, grid, tmp_path)
        else:
            summary = run(experiment, grid, tmp_path)
        sent.update(int(order.content["config"]["client"]) for order in grid.orders if "config" in order.content)
    assert summary.privacy is not None
    for client, count in sent.items():
        assert summary.privacy["epsilon"][str(client)] >= count
    assert "accuracy" in summary.scores


def test_an_attack_is_not_deployed() -> None:
    experiment = replace(small("fedbuff"), attack=Attack(kind="sign_flip"))
    with pytest.raises(ConfigError, match=r"attack.kind = 'sign_flip' can only be simulated"):
        run(experiment, grid_for(experiment), None)


def test_other_software_goes_on_only_where_it_is_allowed(tmp_path: Path) -> None:
    experiment = small("fedbuff")
    grid = grid_for(experiment)
    killed_after(grid, 0)
    with pytest.raises(KilledError):
        run(experiment, grid, tmp_path)
    record = tmp_path / "run.jsonl"
    assert {"source", "numpy", "cpu", "flwr"} <= set(read_header(tmp_path)["software"])
    record.write_text(record.read_text().replace(f'"torch":"{torch.__version__}"', '"torch":"2.0.1"', 1))
    with pytest.raises(ConfigError, match=r"was computed with torch 2\.0\.1; resuming it with torch .* --other-software"):
        run(experiment, grid_for(experiment), tmp_path)
    assert run(experiment, grid_for(experiment), tmp_path, other_software=True).num_versions == experiment.num_versions
    (line,) = [line for line in read_record(tmp_path) if line["event"] == "software"]
    assert line["software"]["torch"] == torch.__version__


def test_a_run_killed_between_its_summary_and_the_clean_up_is_finished(tmp_path: Path) -> None:
    experiment = replace(small("fedbuff"), num_versions=2)
    summary = run(experiment, grid_for(experiment), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "checkpoint-00000006.safetensors").write_bytes(b"of the last version")
    (tmp_path / ".lock").write_text("1\n")
    said: list[str] = []
    grid = grid_for(experiment)
    assert run(experiment, grid, tmp_path, say=said.append) == summary
    assert said == [
        f"the run in {tmp_path} had already finished when its server was killed: its checkpoints are removed, nothing is trained"
    ]
    assert not grid.orders
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ConfigError, match=r"already holds a finished run: choose another folder \(out\)"):
        run(experiment, grid_for(experiment), tmp_path)
