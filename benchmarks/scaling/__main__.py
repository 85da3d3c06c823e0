"""Cost of an update beyond training against N, Mc, M, model size, |U| and workers, with fitted exponents.

python -m benchmarks.scaling                     two and a half minutes on a quiet machine; writes results/scaling/scaling.json,
                                                 the numbers in docs/scaling.md and its pictures
python -m benchmarks.scaling clients model       only these axes; the others keep their results
python -m benchmarks.scaling --quick             seconds; prints the table and writes nothing
python -m benchmarks.scaling --page              measures nothing: page and pictures from the file of results
"""

import argparse
import json
import os
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.derived import ROOT, fill, machine, write_json
from benchmarks.scaling.axes import AXES, FULL, QUICK, Size
from benchmarks.scaling.page import parts, summary
from benchmarks.scaling.pictures import draw_all

RESULTS = ROOT / "results" / "scaling" / "scaling.json"
PAGE = ROOT / "docs" / "scaling.md"


def measured(names: list[str], size: Size) -> dict[str, Any]:
    """The chosen axes, one after the other, with what is being measured on the standard error."""
    found: dict[str, Any] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in names:
            began, bar = time.perf_counter(), progress.add_task(f"{name}: warming up", total=None)
            rounds, load = 0, os.getloadavg()[0]

            def told(where: str, name: str = name, bar: Any = bar) -> None:
                nonlocal rounds
                rounds += 1
                progress.update(bar, description=f"{name}: {where}, round {rounds}")

            curves = AXES[name].measure(size, told)
            progress.update(bar, description=f"{name}: done", total=1, completed=1)
            if curves:
                found[name] = {"series": curves, "seconds": round(time.perf_counter() - began), "load": round(load, 1)}
    return found


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[*AXES, []], help="all by default")
    parser.add_argument("--quick", action="store_true", help="small, and nothing is written")
    parser.add_argument("--page", action="store_true", help="page and pictures from the file of results")
    options = parser.parse_args()
    if not options.page:
        found = measured(options.axes or list(AXES), QUICK if options.quick else FULL)
        if options.quick:
            print(summary({"axes": found}))
            print("too small for exponents: it shows that everything runs; workers are left out")
            return
        before = json.loads(RESULTS.read_text())["axes"] if options.axes and RESULTS.exists() else {}
        together = before | found
        write_json(RESULTS, {"made": machine(), "axes": {name: together[name] for name in AXES if name in together}})
    results = json.loads(RESULTS.read_text())
    print(summary(results))
    fill(PAGE, parts(results))
    draw_all(results, PAGE.parent / "pictures")


if __name__ == "__main__":
    main()
