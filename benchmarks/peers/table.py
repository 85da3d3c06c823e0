"""Write the race's tables and picture into docs/peers.md and docs/pictures/peers.svg.

python -m benchmarks.peers.table [--cpu results/peers/cpu.json] [--gpu results/peers/gpu.json results/peers/gpu-several.json]
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Standing, standings
from benchmarks.peers.install import ROOT
from benchmarks.peers.race import CPU_JOBS, RESULTS

PAGE, PICTURE = ROOT / "docs" / "peers.md", ROOT / "docs" / "pictures" / "peers.svg"
GPU_RACES = ("gpu.json", "gpu-several.json")
TITLES = {
    "cnn": "Training-bound: LeNet-5 (61,706 parameters), batch 32, 10 local steps",
    "resnet18": "Training-bound: ResNet-18, batch 16, 4 local steps",
    "overhead": "Overhead-bound: LeNet-5, one local step on 2 examples",
}
COLUMNS = [
    "over the bare loop, per step used",
    "the same, fastest turns",
    "per step made",
    "CPU time per step made",
    "ms per update beyond the bare loop",
    "the same, fastest turns",
    "start, s",
    "run, s",
    "turns × updates",
    "updates/s",
    "made for nothing",
    "peak, MB",
]
DISTURBED = 0.8
"""Nobody's SGD step can be much cheaper than the best bare loop's; ``flat_steps`` says what ours saves."""
HEAD = f"| | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}"


def cpu_table(name: str, race: dict[str, Any]) -> str:
    machine = f"{race['cores']} cores of {race['cpu']}, Python {race['python']}, torch {race['torch']}, {race['date']}"
    turns = len(race["turns"])
    load = f"load before it began {race['load_before']}, {'medians of the turns' if turns > 1 else 'one turn'}"
    if race["load_before"] > race["cores"]:
        load += ". **The machine was busy with other work, so the times are provisional**"
    found = standings(race)
    floor = min(one.cpu for one in found if not one.error and one.name.startswith("bare"))
    if min(one.cpu for one in found if not one.error) < DISTURBED * floor:
        load += ". **Some need less processor time a step than any bare loop: the floor was disturbed, the ratios say little**"
    rows = [_row(one) for one in found]
    return "\n".join([f"**{TITLES[name]}.** {machine}; {load}.", "", HEAD, *rows])


def _row(one: Standing) -> str:
    title = f"{one.name}{f' ({one.versions})' if one.versions else ''}"
    if one.error:
        return f"| {title} | no figure: {one.error} {' |' * (len(COLUMNS) - 1)}"
    ratios = f"{one.per_used_step:.2f} | {one.fastest:.2f} | {one.per_made_step:.2f} | {one.cpu:.2f}"
    ratios += f" | {one.beyond_ms:.2f} | {one.fastest_beyond_ms:.2f}"
    ratios += f" | {one.start_s:.1f} | {one.run_s:.1f} | {one.turns} × {one.updates}"
    return f"| {title} | {ratios} | {one.updates_per_s:.1f} | {one.wasted:.0%} | {one.peak_mb:,.0f} |"


def gpu_table(file: Path) -> str:
    told = json.loads(file.read_text())
    rows = [f"| {one['name']} | {_rate(one)} | {one['num_updates']} | {_memory(one)} |" for one in told["results"]]
    head = "| | images/s | updates | GPU memory, MB |\n|---|---:|---:|---:|"
    several = any("processes" in one["name"] for one in told["results"])
    title = "A process each, and several on the card" if several else "A process each"
    return "\n".join([f"**{title}.** {told['machine']}, torch {told['torch']}.", "", head, *rows])


def _rate(one: dict[str, Any]) -> str:
    return f"{one['images_per_s']:,.0f}" if "images_per_s" in one else f"no figure: {one['error']}"


def _memory(one: dict[str, Any]) -> str:
    """Of the process that speaks at the end, which may be one of several."""
    return f"{one['gpu_bytes'] / 1e6:,.0f}{' each' if 'processes' in one['name'] else ''}" if one.get("gpu_bytes") else ""


def put(page: str, mark: str, text: str) -> str:
    """The page with ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
    if not re.search(pattern, page, flags=re.DOTALL):
        raise ValueError(f"{PAGE} has no place marked {mark}")
    return re.sub(pattern, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL)


def draw(races: dict[str, Any]) -> None:
    """A panel for each job: time for each step made over the bare loop, or milliseconds per update."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [name for name in CPU_JOBS if name in races]
    style = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "peers",
        "svg.fonttype": "none",
    }
    with rc_context(style):
        drawing = Figure(figsize=(8.4, 2.9 * len(names)), layout="constrained")
        for place, name in enumerate(names):
            axes = drawing.add_subplot(len(names), 1, place + 1)
            _panel(axes, name, [one for one in standings(races[name]) if not one.error][::-1])
        PICTURE.parent.mkdir(exist_ok=True)
        drawing.savefig(PICTURE, metadata={"Date": None})


def _panel(axes: Any, name: str, shown: list[Standing]) -> None:
    overhead = name == "overhead"
    if overhead:
        shown = [one for one in shown if not one.name.startswith("bare")]
    values = [one.beyond_ms if overhead else one.per_made_step for one in shown]
    most = 6.0 if overhead else 1.8
    colours = ["#3949ab" if one.name.startswith("ours") else "#9e9e9e" if "bare" in one.name else "#ffb74d" for one in shown]
    bars = axes.barh([one.name for one in shown], [min(value, most) for value in values], color=colours)
    axes.bar_label(bars, [f"{value:,.2f}{' (beyond)' if value > most else ''}" for value in values], padding=3)
    axes.set_title(TITLES[name], loc="left", fontsize=8)
    axes.set_xlim(0, most * 1.12)
    axes.set_xlabel(
        "milliseconds per update beyond the bare loop, medians"
        if overhead
        else "time for each step made, used or not, over the bare loop's, medians"
    )
    if not overhead:
        axes.axvline(1.0, color="#616161", linewidth=0.8, linestyle=":")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=Path, default=RESULTS)
    parser.add_argument("--gpu", type=Path, nargs="+", default=[RESULTS.with_name(name) for name in GPU_RACES])
    options = parser.parse_args()
    page = PAGE.read_text()
    for option, files in (("cpu", [options.cpu]), ("gpu", options.gpu)):
        for file in files:
            if getattr(options, option) != parser.get_default(option) and not file.exists():
                parser.error(f"argument --{option}: there is no {file}")
    if options.cpu.exists():
        races = json.loads(options.cpu.read_text())["jobs"]
        tables = [cpu_table(name, races[name]) if name in races else f"**{TITLES[name]}.** Not run yet." for name in CPU_JOBS]
        page = put(page, "cpu", "\n\n".join(tables))
        draw(races)
    if tables := [gpu_table(file) for file in options.gpu if file.exists()]:
        page = put(page, "gpu", "\n\n".join(tables))
    PAGE.write_text(page)
    print(f"written: {PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
