"""Class counts by client and accuracy by class, from which the report's chapter on classes is made."""

from pathlib import Path

import numpy as np
import pytest
import torch
from official_files import write_cifar10
from torch import nn

from fedecho import CifarTask, DigitsTask
from fedecho.tasks.classification import top1


def test_digits_counts_are_those_of_the_batches() -> None:
    task = DigitsTask(num_clients=5)
    for client in range(5):
        labels = task.batch(client, torch.arange(task.num_examples(client)), torch.Generator())[1]
        counts = task.label_counts(client)
        assert sum(counts.values()) == task.num_examples(client)
        assert all(int((labels == label).sum()) == count for label, count in counts.items())


def test_cifar_counts_add_up_to_the_set(tmp_path: Path) -> None:
    labels = np.arange(200) % 10
    pixels = np.zeros((200, 32, 32, 3), dtype=np.uint8)
    write_cifar10(tmp_path, (pixels, labels), (pixels[:20], labels[:20]))
    task = CifarTask(num_clients=4, data_dir=str(tmp_path))
    found: dict[int, int] = {}
    for client in range(4):
        for label, count in task.label_counts(client).items():
            found[label] = found.get(label, 0) + count
    assert found == dict.fromkeys(range(10), 20)


def test_accuracy_by_class_on_three_rows() -> None:
    """Class 0 is right once in two, class 1 always, class 2 is not in the set."""
    images = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 5.0, 0.0]])
    scores = top1(nn.Identity(), images, torch.tensor([0, 0, 1]))
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert [scores[f"accuracy_class_{k}"] for k in range(3)] == [0.5, 1.0, 0.0]
