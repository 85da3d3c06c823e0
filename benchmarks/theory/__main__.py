"""The mean squared gradient norm over T, over M and over staleness, beside the theorem's rates.

python -m benchmarks.theory                  half an hour on 2 busy cores; writes results/theory/theory.json,
                                             the numbers in docs/theory.md and its pictures
python -m benchmarks.theory --quick          half a minute; prints the tables and writes nothing
python -m benchmarks.theory --page           runs nothing: page and pictures from the file of results
"""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arguments import at_least_one
from benchmarks.derived import ROOT, fill, write_json
from benchmarks.theory.page import parts
from benchmarks.theory.pictures import draw_all
from benchmarks.theory.sweeps import FULL, QUICK, Size, swept

RESULTS = ROOT / "results" / "theory" / "theory.json"
PAGE = ROOT / "docs" / "theory.md"


def watched(size: Size, workers: int) -> dict[str, Any]:
    """A bar on a terminal, a line every tenth elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=None)

        def told(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)
            if not console.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                console.print(f"{done} of {total} runs")

        return swept(size, workers, told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, and nothing is written")
    parser.add_argument("--page", action="store_true", help="page and pictures from the file of results")
    parser.add_argument("--workers", type=at_least_one, default=2)
    options = parser.parse_args()
    if not options.page:
        results = watched(QUICK if options.quick else FULL, options.workers)
        print("\n\n".join(parts(results).values()))
        if options.quick:
            return
        write_json(RESULTS, results)
    results = json.loads(RESULTS.read_text())
    fill(PAGE, parts(results))
    draw_all(results, PAGE.parent / "pictures")


if __name__ == "__main__":
    main()
