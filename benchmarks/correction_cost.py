"""What FedEcho+'s correction costs per arrival, and what the diagnostics cost per version, as ratios of CPU time.

    python -m benchmarks.correction_cost                 both models: some minutes
    python -m benchmarks.correction_cost digits          only one of: digits, resnet18

Arrival: the server's work, which is inference on all of U and ``Bank.put``, with ``prior_correction`` 1 against 0. Version: M such
arrivals, the teacher and Q distillation steps, with the diagnostics against without. Both banks and all steps are timed in turns
in one process, and medians are compared. CPU time, because other processes of a busy machine take wall time from whoever is
running. A pass over all of U takes minutes on one core for ResNet-18, so its inference and its distillation are timed on some rows
and multiplied.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.arguments import at_least_one
from fedecho import load
from fedecho.core.layout import Layout
from fedecho.core.types import Weights
from fedecho.distill import Bank, Distiller
from fedecho.distill.diagnostics import diagnose, teacher_kl
from fedecho.distill.distiller import Adam
from fedecho.distill.student import Student
from fedecho.distill.teachers import PriorCorrection
from fedecho.runs.build import one_thread
from fedecho.tasks.vision.resnet import resnet18

NUM_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A server's sizes. Only ``num_timed`` rows of U pass through the network; their time counts for all ``num_unlabeled``."""

    make: Callable[[], nn.Module]
    image: tuple[int, ...]
    num_unlabeled: int
    num_timed: int
    num_clients: int
    buffer_size: int
    distiller: Distiller

    @property
    def scale(self) -> float:
        return self.num_unlabeled / self.num_timed


def cases() -> dict[str, Case]:
    digits = load("digits")
    return {
        "digits": Case(lambda: digits.task.network(0), (1, 8, 8), 300, 300, 20, 3, Distiller(distill_lr=1e-4, batch_size=30)),
        "resnet18": Case(lambda: resnet18(NUM_CLASSES), (3, 32, 32), 5000, 100, 50, 5, Distiller()),
    }


@dataclass(frozen=True)
class Costs:
    """Medians in seconds of CPU time."""

    infer: float
    put: float
    corrected: float
    teacher: float
    distill: float
    diagnostics: float
    buffer_size: int

    @property
    def of_correction(self) -> float:
        return (self.infer + self.corrected) / (self.infer + self.put)

    @property
    def of_diagnostics(self) -> float:
        version = self.buffer_size * (self.infer + self.put) + self.teacher + self.distill
        return (version + self.diagnostics) / version


def measured(case: Case, repeats: int) -> Costs:
    network = Layout.of(module := case.make()).bind(module)
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(case.num_timed, *case.image, generator=draws)
    # Rows beyond the timed ones are the same images again: diagnostics' sample is of all of U.
    student = Student(network, lambda net, rows: net(images[rows % case.num_timed]), case.num_unlabeled)
    timed = Student(network, lambda net, rows: net(images[rows]), case.num_timed)
    said = [4 * torch.randn(case.num_unlabeled, NUM_CLASSES, generator=draws) for _ in range(case.num_clients)]
    plain, corrected = _bank(case, 0.0), _bank(case, 1.0)
    for client, logits in enumerate(said):
        plain.put(client, logits, 0)
        corrected.put(client, logits, 0)
    plain.coverage()
    start = network.weights.clone()
    stepped = Weights(start.params * 1.01, start.buffers)
    times: dict[str, list[float]] = {}

    def timing(name: str, work: Callable[[], object], factor: float = 1.0) -> None:
        began = time.process_time()
        work()
        times.setdefault(name, []).append(factor * (time.process_time() - began))

    for repeat in range(repeats):
        new = [(client, said[(client + repeat) % case.num_clients]) for client in range(case.buffer_size)]
        timing("infer", partial(timed.infer, stepped), case.scale)
        for client, logits in new:
            timing("put", partial(plain.put, client, logits, 1))
            timing("corrected", partial(corrected.put, client, logits, 1))
        timing("teacher", plain.teacher)
        teacher = plain.teacher()
        adam, some = Adam.fresh(start.params), teacher[: case.num_timed]
        timing("distill", partial(case.distiller.distill, timed, adam, stepped, some, 0), case.scale)
        timing("diagnostics", partial(_diagnosed, student, plain, teacher, start, stepped))
    middle = {name: median(values) for name, values in times.items()}
    return Costs(**middle, buffer_size=case.buffer_size)


def _bank(case: Case, strength: float) -> Bank:
    correction = PriorCorrection(strength=strength)
    return Bank(case.num_unlabeled, NUM_CLASSES, torch.device("cpu"), correction=correction)


def _diagnosed(student: Student, bank: Bank, teacher: Tensor, start: Weights, stepped: Weights) -> None:
    before = teacher_kl(student, stepped, teacher)
    found = diagnose(student, bank, teacher, start=start, stepped=stepped, distilled=stepped, kl_before=before)
    found.as_metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="digits|resnet18")
    parser.add_argument("--repeats", type=at_least_one, default=15)
    options = parser.parse_args()
    if unknown := set(options.names) - set(cases()):
        parser.error(f"there is no {min(unknown)}: choose digits or resnet18")
    print("| model | infer (ms) | put (ms) | put, corrected (ms) | arrival, ratio | diagnostics (ms) | version, ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, case in cases().items():
        if options.names and name not in options.names:
            continue
        with one_thread():
            costs = measured(case, options.repeats)
        each = [f"{1e3 * value:.2f}" for value in (costs.infer, costs.put, costs.corrected)]
        last = [f"{costs.of_correction:.4f}", f"{1e3 * costs.diagnostics:.2f}", f"{costs.of_diagnostics:.4f}"]
        print(f"| {' | '.join([name, *each, *last])} |", flush=True)


if __name__ == "__main__":
    main()
