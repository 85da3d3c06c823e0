"""Does the teacher know more than the model it is to teach? Both judged on MRPC's labelled validation pairs, version by version.

    python -m benchmarks.teachers [--model FOLDER] [--seeds 0,1,2] [--algorithm fedbuff] [--set KEY=VALUE] [--executor cuda]
        [--json FILE]

The clients' models answer the validation pairs when they arrive, as FedEcho has them answer U, and the mean of their latest logits
is judged beside the server's model. That is looked at and not used: the method runs as it is, FedBuff without any distillation.
`python -m benchmarks.teachers.page` makes the tables and the picture of docs/text-results.md from results.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import listed
from benchmarks.kept import keep
from benchmarks.teachers.page import shown
from benchmarks.teachers.watched import watched_run

FORM = argparse.RawDescriptionHelpFormatter


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.teachers", description=__doc__, formatter_class=FORM)
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="a folder, or its name in FEDECHO_DATA (all-MiniLM-L6-v2)")
    parser.add_argument("--algorithm", default="fedbuff", help="the method that runs (fedbuff)")
    parser.add_argument("--seeds", type=listed(int), default=[0, 1, 2], help="one run each (0,1,2)")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="as of fedecho run mrpc"
    )
    parser.add_argument("--executor", choices=["serial", "cuda"], default="serial", help="a CPU core (serial) or a GPU")
    parser.add_argument("--json", type=Path, help="keep every version's figures there")
    given = parser.parse_args(words)
    if given.json is not None and (given.json.is_dir() or not given.json.resolve().parent.is_dir()):
        parser.error(f"--json {given.json} must be a file in a folder that is there")
    found = []
    try:
        for seed in given.seeds:
            found.append(watched_run(given.model, given.algorithm, given.settings, seed, given.executor))
            keep(given.json, found)  # what comes after it may fail
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"seed {seed}: {error}")
    shown(found)


if __name__ == "__main__":
    main()
