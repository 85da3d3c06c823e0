"""The banks of a language model: exact equals full, in teacher and in gradient; top-k in closed form; a checkpoint goes on."""

import json
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from tiny_text import write_world
from torch import Tensor, nn

from fedecho.core.layout import Layout
from fedecho.core.task import Positions
from fedecho.core.types import Weights
from fedecho.distill import Distiller
from fedecho.distill.distiller import Adam
from fedecho.distill.student import TokenStudent, student_for
from fedecho.distill.token_bank import FullLogits, HiddenStates, TokenBank, TokenTeacher, TopLogits, storage_for
from fedecho.storage.checkpoint import decode, encode
from fedecho.tasks import MathInstructTask

V = 50
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MathInstructTask:
    folder = write_world(tmp_path_factory.mktemp("world"))
    return MathInstructTask(
        model="tiny-llama", train="gsm8k-train", num_unlabeled=7, num_clients=3, lora_rank=2, data_dir=str(folder)
    )


def student_of(task: MathInstructTask, distiller: Distiller) -> TokenStudent:
    module = task.network(0)
    student = student_for(Layout.of(module).bind(module), task, distiller)
    assert isinstance(student, TokenStudent)
    return replace(student, chunk=3)


def clients(student: TokenStudent, num: int = 3) -> list[Weights]:
    """Adapters drawn anew: of the order of trained ones, and far enough apart to tell the clients by."""
    size = student.network.layout.num_params
    draws = 0.3 * torch.randn(num, size, generator=torch.Generator().manual_seed(5))
    return [Weights(draw, student.network.weights.buffers) for draw in draws]


def heard(student: TokenStudent, distiller: Distiller) -> TokenBank:
    bank = student.bank(distiller)
    for client, weights in enumerate(clients(student)):
        bank.put(client, student.infer(weights), client)
    return bank


def test_exact_equals_full_in_teacher_and_in_gradient(task: MathInstructTask) -> None:
    found = {}
    for kind in ("exact", "full"):
        distiller = Distiller(token_bank=kind, batch_size=4, distill_lr=1e-3)
        student = student_of(task, distiller)
        start = clients(student, 4)[3]
        teacher = heard(student, distiller).teacher()
        rows = torch.tensor([4, 0, 2])
        student.network.load(start)
        student.network.grads.zero_()
        seen = distiller.gradient_of(student.network, task.logits(student.network.module.train(), rows), teacher[rows])
        gradient = student.network.grads.clone()
        _, taught, _ = distiller.distill(student, Adam.fresh(start.params), start, teacher, seed=1)
        found[kind] = (teacher[rows], seen, gradient, taught.params - start.params)
    for exact, full in zip(found["exact"], found["full"], strict=True):
        scale = float(full.abs().max())
        assert scale > 0
        assert float((exact - full).abs().max()) < 2e-5 * scale


def test_the_teacher_is_the_mean_of_the_logits_of_unpadded_texts(task: MathInstructTask) -> None:
    """Against the whole model on one text after the other: padding takes no part."""
    distiller = Distiller()
    student = student_of(task, distiller)
    teacher = heard(student, distiller).teacher()
    spans, total = task._unlabeled_spans, None
    for weights in clients(student):
        student.network.load(weights)
        texts = [spans.tokens.padded(torch.tensor([row]), 0)[0] for row in (5, 1)]
        with torch.no_grad():
            logits = torch.cat([student.network.module.eval()(input_ids=ids).logits[0] for ids in texts])
        total = logits if total is None else total + logits
    assert torch.allclose(teacher[torch.tensor([5, 1])], total / 3, atol=1e-5)
    assert int(task.position_counts().sum()) == len(spans.tokens.flat), "every token of a query counts, and nothing else"


def head(bias: bool = False, frozen: bool = True) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(8, V, bias=bias).requires_grad_(not frozen)


def hidden(seed: int) -> Tensor:
    return 3 * torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_the_largest_logits_and_an_even_rest_against_numpy(average: str) -> None:
    k, layer = 5, head()
    storage = TopLogits(V, k, average=average)
    entries = [storage.entry(hidden(seed), layer) for seed in range(3)]
    total = np.zeros((6, V))
    for seed in range(3):
        logits = layer(hidden(seed)).detach().double().numpy()
        for row in logits:
            kept = np.argsort(-row)[:k]
            others = np.setdiff1d(np.arange(V), kept)
            row[others] = np.log(np.mean(np.exp(row[others])))
        if average == "probabilities":
            logits = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        total += logits / 3
    expected = total if average == "logits" else np.log(total)
    np.testing.assert_allclose(storage.teacher(entries).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_all_but_one_logit_kept_is_everything() -> None:
    layer = head()
    full, top = FullLogits(V), TopLogits(V, V - 1)
    entries = [(full.entry(hidden(seed), layer), top.entry(hidden(seed), layer)) for seed in range(3)]
    assert torch.allclose(top.teacher([one for _, one in entries]), full.teacher([one for one, _ in entries]), atol=1e-5)


def test_answers_are_those_of_a_model_that_drops_nothing_out(task: MathInstructTask) -> None:
    module = task.network(0)
    layer = module.get_submodule("model.layers.0.mlp")
    layer.register_forward_hook(lambda layer, inputs, said: nn.functional.dropout(said, 0.5, layer.training))
    network = Layout.of(module).bind(module)
    student = student_for(network, task, Distiller(token_bank="exact"))
    network.module.train()
    one, other = (student.infer(network.weights)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert not network.module.training


def test_how_old_a_teacher_is_counts_from_the_last_word(task: MathInstructTask) -> None:
    distiller = Distiller(token_bank="exact")
    student = student_of(task, distiller)
    bank, entry = student.bank(distiller), student.infer(clients(student)[0])
    for client, version in ((0, 1), (1, 2), (0, 7)):
        bank.put(client, entry, version)
    assert bank.mean_age(10) == 10 - (7 + 2) / 2


def test_half_precision_takes_half_and_stays_near() -> None:
    layer, positions = head(), Positions(torch.tensor([2, 4]))
    for make in (lambda d: HiddenStates(layer, d), lambda d: FullLogits(V, d)):
        banks = [TokenBank(make(dtype), positions, CPU) for dtype in (torch.float32, torch.float16)]
        for bank in banks:
            for seed in range(3):
                bank.put(seed, bank.storage.entry(hidden(seed), layer), 0)
        whole, half = banks
        assert whole.num_bytes == 2 * half.num_bytes
        assert half.bytes_with(10) == half.num_bytes * 10 // 3
        rows = torch.tensor([1, 0])
        assert torch.allclose(whole.teacher()[rows], half.teacher()[rows], atol=0.02)


def test_a_teacher_is_never_larger_than_its_mini_batch() -> None:
    layer, sizes = head(), []

    class Watched(FullLogits):
        def teacher(self, entries: Iterable[tuple[Tensor, ...]]) -> Tensor:
            entries = list(entries)
            sizes.append(max(len(entry[0]) for entry in entries))
            return super().teacher(entries)

    bank = TokenBank(Watched(V), Positions(torch.tensor([2, 1, 3])), CPU)
    bank.put(0, bank.storage.entry(hidden(0), layer), 0)
    assert bank.teacher()[torch.tensor([2])].shape == (3, V)
    assert bank.teacher()[torch.tensor([1, 0])].shape == (3, V)
    assert sizes == [3, 3]


class CountedRows:
    """An entry's tensor that counts how many of the rows taken from it and the others are alive at once."""

    device = CPU
    taken: ClassVar[list[weakref.ref[Tensor]]] = []
    most: ClassVar[int] = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, at: Tensor) -> Tensor:
        rows = self.tensor[at]
        self.taken.append(weakref.ref(rows))
        CountedRows.most = max(self.most, sum(ref() is not None for ref in self.taken))
        return rows


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_a_full_bank_takes_one_clients_rows_at_a_time(average: str) -> None:
    storage, layer, rows = FullLogits(V, torch.float16, average=average), head(), torch.tensor([1])
    bank = TokenBank(storage, Positions(torch.tensor([2, 4])), CPU)
    for seed in range(5):
        bank.put(seed, storage.entry(hidden(seed), layer), 0)
    CountedRows.taken.clear()
    CountedRows.most = 0
    counted = TokenTeacher(storage, [(CountedRows(entry[0]),) for entry in bank.entries.values()], bank.positions)
    expected = torch.stack([entry[0][2:].float() for entry in bank.entries.values()])
    expected = expected.mean(dim=0) if average == "logits" else expected.softmax(dim=-1).mean(dim=0).log()
    assert torch.allclose(counted[rows], expected, atol=1e-5)
    assert (len(CountedRows.taken), CountedRows.most) == (5, 1)


def test_a_small_batch_is_inferred_in_small_chunks(task: MathInstructTask) -> None:
    module = task.network(0)
    network = Layout.of(module).bind(module)
    assert [student_for(network, task, Distiller(batch_size=size)).chunk for size in (3, 50)] == [3, 16]
    assert student_for(network, task, Distiller(batch_size=50), chunk=9).chunk == 9


def test_what_is_not_finite_is_refused_and_the_former_word_stays() -> None:
    layer = head()
    bank = TokenBank(HiddenStates(layer, torch.float16), Positions(torch.tensor([6])), CPU)
    with pytest.raises(ValueError, match="no client has reported yet"):
        bank.teacher()
    bank.put(0, bank.storage.entry(hidden(0), layer), 4)
    bank.put(0, bank.storage.entry(1e6 * hidden(1), layer), 5)
    assert (bank.num_refused, bank.heard_at, bank.mean_age(10)) == (1, {0: 4}, 6.0)
    assert torch.equal(bank.entries[0][0], hidden(0).half())


def test_a_reloaded_bank_goes_on_to_the_last_bit() -> None:
    layer, tensors = head(), {}
    make = lambda: TokenBank(TopLogits(V, 4, torch.float16), Positions(torch.tensor([2, 4])), CPU)  # noqa: E731
    bank = make()
    for client in (3, 0, 3):
        bank.put(client, bank.storage.entry(hidden(client), layer), client)
    again = decode(json.loads(json.dumps(encode(bank, tensors))), tensors, make())
    for each in (bank, again):
        each.put(7, each.storage.entry(hidden(7), layer), 9)
    rows = torch.tensor([1, 0])
    assert torch.equal(again.teacher()[rows], bank.teacher()[rows])
    assert (len(again), again.heard_at, again.mean_age(9)) == (3, bank.heard_at, bank.mean_age(9))


def test_the_storage_is_exact_where_that_is_exact() -> None:
    ask = {"kind": None, "k": 4, "half": False, "average": "logits"}
    assert isinstance(storage_for(head(), V, **ask), HiddenStates)
    assert isinstance(storage_for(head(bias=True), V, **ask), TopLogits)
    assert isinstance(storage_for(head(frozen=False), V, **ask), TopLogits)
    assert isinstance(storage_for(head(), V, **(ask | {"average": "probabilities"})), TopLogits)
    assert isinstance(storage_for(head(), V, **(ask | {"kind": "full"})), FullLogits)
    with pytest.raises(ValueError, match="needs a frozen output head without a bias"):
        storage_for(head(frozen=False), V, **(ask | {"kind": "exact"}))
    with pytest.raises(ValueError, match=r"top_k must be below the vocabulary of 50, got 50"):
        storage_for(head(bias=True), V, **(ask | {"k": V}))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token_bank must be 'exact', 'topk' or 'full', got 'some'"):
        Distiller(token_bank="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"top_k must be at least 1, got 0"):
        Distiller(top_k=0)


def test_full_fine_tuning_keeps_the_largest_logits(task: MathInstructTask, tmp_path: Path) -> None:
    student = student_of(replace(task, lora_rank=None), Distiller(top_k=9))
    assert isinstance(student.storage, TopLogits)
    assert student.storage.k == 9
    assert student.infer(clients(student)[0])[0].shape == (int(task.position_counts().sum()), 9)


def test_clients_last_heard_too_long_ago_are_teachers_no_more() -> None:
    storage, layer, rows = FullLogits(V), head(), torch.tensor([0, 1])
    banks = [TokenBank(storage, Positions(torch.tensor([2, 4])), CPU) for _ in range(2)]
    for seed in range(5):
        banks[0].put(seed, storage.entry(hidden(seed), layer), version=seed)
        if seed >= 3:
            banks[1].put(seed, storage.entry(hidden(seed), layer), version=seed)
    banks[0].forget_before(3)
    assert len(banks[0]) == 2
    assert torch.equal(banks[0].teacher()[rows], banks[1].teacher()[rows])
    assert banks[0].mean_age(4) == 0.5
