"""FedEcho's bank of 100,000 clients within 2 GB: memory and teacher error of each storage option.

    python -m benchmarks.bank_budget                     both tables: some ten minutes, and 8 GB of disk in --dir
    python -m benchmarks.bank_budget teacher             only one of: teacher, digits
    python -m benchmarks.bank_budget teacher --num-clients 5000 --budget-mb 100       a smaller one

``teacher``: everybody speaks once, in a random order, then one client in ten speaks ten times as seldom as the others, and these
lean to classes of their own; what is said moves as the run goes on. Every way is a process of its own. Its teacher is compared with
that of the unlimited bank, which nobody holds: it is summed anew in float64 from the latest word of each client. L1 is over the
classes of the teachers' probabilities, mean over U; KL is in nats, of the unlimited teacher to this one; drift is how far the
running mean is from one computed anew.

``digits``: the digits recipe with 200 clients, each way against the unlimited bank, mean of the last ten evaluations over seeds.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.arguments import at_least_one, positive
from fedecho import load, simulate
from fedecho.core.randomness import below, uniform
from fedecho.distill import Bank
from fedecho.distill.bank_storage import BankStorage

NUM_UNLABELED, NUM_CLASSES = 2000, 10
POOL = 61
SLOW = 10
"""One client in so many is slow, and speaks so many times as seldom."""

SURE = 3.0
"""How sure clients are of what is right at first; at last, one more."""

Words = NDArray[np.float32]


@dataclass(frozen=True)
class Crowd:
    """Who speaks when, and what: by address, so that any word can be said again."""

    num_clients: int
    num_words: int
    seed: int = 0

    def speakers(self) -> list[int]:
        """One client for each word: everybody once, then the slow ones seldom."""
        said = np.random.default_rng(self.seed).permutation(self.num_clients)[: self.num_words].tolist()
        draw = 0
        while len(said) < self.num_words:
            client = below(self.num_clients, self.seed, "speaks", draw)
            if client % SLOW or uniform(self.seed, "slow", draw) * SLOW < 1:
                said.append(client)
            draw += 1
        return said

    def parts(self) -> tuple[Words, Words]:
        """What is right on U, and noise to be mixed in."""
        rng = np.random.default_rng(self.seed)
        right = np.eye(NUM_CLASSES, dtype=np.float32)[rng.integers(NUM_CLASSES, size=NUM_UNLABELED)]
        return right, rng.normal(size=(POOL, NUM_UNLABELED, NUM_CLASSES)).astype(np.float32)

    def word(self, parts: tuple[Words, Words], client: int, number: int) -> Words:
        """Logits on U: ever surer of what is right, with the client's leaning to some class; the slow lean to the last two."""
        right, noise = parts
        lean = np.zeros(NUM_CLASSES, np.float32)
        lean[NUM_CLASSES - 1 - client // SLOW % 2 if client % SLOW == 0 else client % NUM_CLASSES] = 3.0
        sure = np.float32(SURE + number / self.num_words)
        word: Words = right * sure + noise[(client + number) % POOL] * np.float32(1.5) + lean
        return word


def unlimited(crowd: Crowd) -> Tensor:
    """The mean of the latest word of each client, in float64, from nothing but the words."""
    latest = {client: number for number, client in enumerate(crowd.speakers())}
    parts, total = crowd.parts(), np.zeros((NUM_UNLABELED, NUM_CLASSES))
    for client, number in latest.items():
        total += crowd.word(parts, client, number)
    return torch.from_numpy(total / len(latest))


@dataclass(frozen=True)
class Kept:
    """What one way of keeping the bank came to."""

    teacher: NDArray[np.float32]
    num_teachers: int
    num_bytes: int
    resident_mb: float
    drift: float
    put_us: float


def keep(crowd: Crowd, keeping: BankStorage) -> Kept:
    """In a process of its own, so that its memory can be told."""
    torch.set_num_threads(1)
    parts, speakers = crowd.parts(), crowd.speakers()
    before = _resident_mb()
    bank = Bank(NUM_UNLABELED, NUM_CLASSES, torch.device("cpu"), keeping=keeping)
    spent = 0.0
    for number, client in enumerate(speakers):
        word = torch.from_numpy(crowd.word(parts, client, number))
        began = time.perf_counter()
        bank.put(client, word, number // 100)
        spent += time.perf_counter() - began
    most = _peak_mb() - before
    fresh = torch.zeros_like(bank.total)
    for entry in bank.entries.values():
        fresh.add_(entry)
    drift = float((bank.total - fresh).abs().max()) / len(bank)
    return Kept(bank.teacher().numpy(), len(bank), bank.num_bytes, most, drift, 1e6 * spent / len(speakers))


def _resident_mb() -> float:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0]) / 1024


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ways(budget_mb: float, folder: str) -> dict[str, BankStorage]:
    return {
        "mapped file": BankStorage(place="file", folder=folder),
        "half, mapped file": BankStorage(half=True, place="file", folder=folder),
        f"{budget_mb:g} MB": BankStorage(place="cpu", budget_mb=budget_mb),
        f"half, {budget_mb:g} MB": BankStorage(half=True, place="cpu", budget_mb=budget_mb),
    }


def errors(true: Tensor, teacher: Tensor) -> tuple[float, float, float]:
    """L1 and KL of probabilities, and the share of rows with another best class."""
    p, q = true.log_softmax(dim=1), teacher.double().log_softmax(dim=1)
    kl = (p.exp() * (p - q)).sum(dim=1).mean()
    other = (true.argmax(dim=1) != teacher.argmax(dim=1)).double().mean()
    return float((p.exp() - q.exp()).abs().sum(dim=1).mean()), float(kl), float(other)


def teacher_table(num_clients: int, num_words: int, budget_mb: float, folder: str) -> None:
    crowd = Crowd(num_clients, num_words)
    heard = len(set(crowd.speakers()))
    whole = num_clients * NUM_UNLABELED * NUM_CLASSES * 4 / 1e6
    print(f"{num_clients:,} clients, |U| = {NUM_UNLABELED:,}, C = {NUM_CLASSES}: {whole:,.0f} MB without bounds")
    print(f"{num_words:,} words of {heard:,} clients; budget {budget_mb:,.0f} MB", flush=True)
    true = unlimited(crowd)
    head = f"{'':22}{'teachers':>9}{'bank MB':>9}{'resident MB':>12}{'L1':>10}{'KL':>10}"
    print(f"{head}{'other class':>12}{'drift':>9}{'us a word':>10}")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, keeping in ways(budget_mb, folder).items():
            kept = pool.apply(keep, (crowd, keeping))
            l1, kl, other = errors(true, torch.from_numpy(kept.teacher))
            told = f"{name:22}{kept.num_teachers:>9,}{kept.num_bytes / 1e6:>9,.0f}{kept.resident_mb:>12,.0f}"
            print(f"{told}{l1:>10.1e}{kl:>10.1e}{other:>12.2%}{kept.drift:>9.0e}{kept.put_us:>10.0f}", flush=True)


def digits_table(seeds: list[int], versions: int, num_clients: int) -> None:
    entry_mb = 300 * 10 * 4 / 1e6
    total_mb = 2 * entry_mb
    some = {
        share: f"distiller.bank_budget_mb={total_mb + (num_clients * share + 0.5) * entry_mb:.4f}" for share in (0.5, 0.25, 0.1)
    }
    chosen: dict[str, list[str]] = {
        "unlimited": [],
        "half": ["distiller.half_bank=true"],
        "mapped file": ["distiller.bank_memory=file"],
        "budget of a half of the clients": [some[0.5]],
        "budget of a quarter": [some[0.25]],
        "budget of a tenth": [some[0.1]],
    }
    print(
        f"digits, {num_clients} clients drawn, Mc {num_clients // 4}, M 5, {versions} versions, seeds {seeds}: accuracy, %",
        flush=True,
    )
    world = ["task.partition.name=drawn", "task.partition.alpha=0.05", f"task.num_clients={num_clients}"]
    world += [f"concurrency={num_clients // 4}", "algorithm.inner.buffer_size=5"]
    first: list[float] = []
    for name, settings in chosen.items():
        named = [f"algorithm.{setting}" for setting in settings]
        runs = [
            simulate(load("digits", algorithm="fedecho", seed=seed, versions=versions, settings=[*world, *named]))
            for seed in seeds
        ]
        scores = [100 * run.accuracy for run in runs]
        first = first or scores
        spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
        gap = fmean(score - unbounded for score, unbounded in zip(scores, first, strict=True))
        print(
            f"  {name:32} {fmean(scores):6.2f}{spread}   {gap:+.2f}   bank {runs[0].summary.bank_bytes / 1e6:.2f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=["teacher", "digits"], help="only one of them")
    parser.add_argument("--num-clients", type=at_least_one, default=100_000)
    parser.add_argument(
        "--words", type=at_least_one, help="how often clients are heard; by default twice as often as there are clients"
    )
    parser.add_argument("--budget-mb", type=positive, default=2000.0)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the mapped file lies")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--versions", type=at_least_one, default=100)
    parser.add_argument("--digits-clients", type=at_least_one, default=200)
    options = parser.parse_args()
    if options.table != "digits":
        teacher_table(options.num_clients, options.words or 2 * options.num_clients, options.budget_mb, options.dir)
    if options.table != "teacher":
        digits_table(options.seeds, options.versions, options.digits_clients)


if __name__ == "__main__":
    main()
