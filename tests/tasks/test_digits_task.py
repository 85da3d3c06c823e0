"""The embedded digits: contents, partition, and a network that depends only on its seed."""

from collections import Counter
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.tasks import TASKS, DigitsTask
from fedecho.tasks.classification import top1
from fedecho.tasks.partition import IidPartitioner
from fedecho.tasks.vision.digits import NUM_TEST, read_digits, small_cnn


def pictures(images: Tensor) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for image in images)


def everything(task: DigitsTask) -> list[Tensor]:
    """The images of every client, of U and of the test set, asked for as a user of the task would."""
    generator = torch.Generator()
    clients = [task.batch(c, torch.arange(task.num_examples(c)), generator)[0] for c in range(task.num_clients)]
    seen: list[Tensor] = []

    class Look(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return torch.zeros(len(images), 10)

    task.logits(Look(), torch.arange(task.num_unlabeled))
    task.evaluate(Look())
    return [*clients, seen[0], torch.cat(seen[1:])]


@pytest.fixture(scope="module")
def original() -> tuple[np.ndarray, np.ndarray]:
    path = Path(str(files("fedecho.tasks.vision").joinpath("digits.npz")))
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]


def test_there_are_1797_images_of_ten_digits(original: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = original
    assert images.shape == (1797, 8, 8)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (int(images.min()), int(images.max())) == (0, 16)


def test_reading_splits_once_and_for_all() -> None:
    (train, test), (again, _) = read_digits(), read_digits()
    assert (len(train.labels), len(test.labels)) == (1797 - NUM_TEST, NUM_TEST)
    assert train.images.shape == (1437, 1, 8, 8)
    assert train.images.dtype == torch.float32
    assert train.labels.dtype == torch.int64
    assert (float(train.images.min()), float(train.images.max())) == (0.0, 1.0)
    assert torch.equal(train.images, again.images)
    assert torch.bincount(test.labels, minlength=10).min() > 20


@pytest.mark.parametrize("num_unlabeled", [0, 300, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_clients_u_and_test_set_share_no_image(original: tuple[np.ndarray, np.ndarray], num_unlabeled: int, seed: int) -> None:
    """Together they are the 1,797 images, each exactly once."""
    task = DigitsTask(num_clients=7, num_unlabeled=num_unlabeled, seed=seed)
    parts = everything(task)
    assert sum(map(len, parts)) == 1797
    assert len(parts[-2]) == num_unlabeled
    assert len(parts[-1]) == NUM_TEST
    whole = torch.from_numpy(original[0].astype(np.float32) / 16)[:, None]
    assert sum((pictures(part) for part in parts), Counter()) == pictures(whole)


def test_the_test_set_does_not_move_with_the_seed_and_the_rest_does() -> None:
    one, other = everything(DigitsTask(seed=0)), everything(DigitsTask(seed=1))
    assert torch.equal(one[-1], other[-1])
    assert pictures(one[-2]) != pictures(other[-2])
    assert [len(part) for part in one[:-2]] != [len(part) for part in other[:-2]]


def test_images_keep_their_labels(original: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = original
    known = {(image.astype(np.float32) / 16).tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
    task = DigitsTask(num_clients=5)
    for client in range(5):
        rows = torch.arange(task.num_examples(client))
        mine, wanted = task.batch(client, rows, torch.Generator())
        assert [known[image.numpy().tobytes()] for image in mine] == wanted.tolist()


def test_rows_of_a_batch_are_the_clients_own() -> None:
    task = DigitsTask(num_clients=3, partition=IidPartitioner())
    whole = task.batch(1, torch.arange(task.num_examples(1)), torch.Generator())
    rows = torch.tensor([5, 0, 9])
    images, labels = task.batch(1, rows, torch.Generator())
    assert torch.equal(images, whole[0][rows])
    assert torch.equal(labels, whole[1][rows])


def test_equal_seeds_give_equal_networks_and_other_seeds_others() -> None:
    task = DigitsTask()
    first, same, other = (task.network(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_making_a_network_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    DigitsTask().network(1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("width", [1, 2, 16])
def test_the_network_has_two_convolutions_two_norms_and_a_linear_layer(width: int) -> None:
    size = 9 * width + 2 * width + 9 * width * 2 * width + 4 * width + 10 * (2 * width * 4 * 4) + 10
    assert sum(param.numel() for param in DigitsTask(width=width).network(0).parameters()) == size
    assert small_cnn(num_classes=7, width=width)(torch.zeros(2, 1, 8, 8)).shape == (2, 7)


def test_loss_and_logits_are_those_of_the_module() -> None:
    task = DigitsTask(num_clients=4)
    module = task.network(0).eval()
    batch = task.batch(2, torch.arange(6), torch.Generator())
    log_p = module(batch[0]).log_softmax(dim=1)
    assert float(task.loss(module, batch).detach()) == pytest.approx(-float(log_p[torch.arange(6), batch[1]].detach().mean()))
    unlabeled = everything(task)[-2]
    rows = torch.tensor([3, 1])
    assert torch.equal(task.logits(module, rows), module(unlabeled[rows]))


def test_accuracy_is_the_share_of_right_answers_whatever_the_chunk() -> None:
    images, labels = torch.randn(25, 4), torch.arange(25) % 4
    module = nn.Linear(4, 4)
    found = [top1(module, images, labels, chunk) for chunk in (3, 25, 1000)]
    logits = module(images).detach()
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, labels, strict=True))
    for each in found:
        assert each["accuracy"] == right / 25
        assert each["loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)


def test_tasks_are_frozen_and_in_the_table() -> None:
    assert TASKS["digits"] is DigitsTask
    task = DigitsTask(num_clients=3)
    task.num_examples(0)
    assert replace(task) == task
    assert "_clients" not in replace(task).__dict__, "a copy carries nothing that was computed"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_clients": 0}, r"num_clients must be at least 1, got 0"),
        ({"num_unlabeled": -1}, r"num_unlabeled must be between 0 and 1000, got -1"),
        ({"num_unlabeled": 1001}, r"num_unlabeled must be between 0 and 1000, got 1001"),
        ({"width": 0}, r"width must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DigitsTask(**wrong)
