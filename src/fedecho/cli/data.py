"""``fedecho data fetch`` and ``fedecho data synthesize``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedecho.cli.console import USER_PATH, DataDir, check_writable, err, one_line_errors, print_line, say, with_checked_options
from fedecho.core.ranges import Seed, at_least
from fedecho.tasks.data_files import data_folder
from fedecho.tasks.vision.fetch import fetch

data = typer.Typer(
    name="data",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Download image datasets or generate an unlabeled one.",
)


@data.command("fetch")
@with_checked_options
def fetch_set(name: Annotated[str, typer.Argument(metavar="cifar10|cifar100|stl10")], data_dir: DataDir = None) -> None:
    """Download a dataset from its authors, verify and unpack it. Resumes an interrupted download."""
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with one_line_errors():
        check_writable(data_folder(data_dir))
        with Progress(*columns, console=err, disable=not err.is_terminal) as bars:
            bar = bars.add_task(name, total=None)
            folder = fetch(name, data_dir, lambda done, total: bars.update(bar, completed=done, total=total), say)
        print_line(f"{name} is in {folder}")


@data.command("synthesize")
@with_checked_options
def synthesize_set(
    model: Annotated[str, typer.Argument(help="A folder or a Hugging Face Hub name of an unconditional diffusion pipeline.")],
    num: Annotated[int, at_least(1, most=10**8), typer.Option(help="Number of images.")] = 2000,
    seed: Annotated[Seed, typer.Option(help="The seed of the images.")] = 0,
    steps: Annotated[
        int | None, at_least(1, most=10**6), typer.Option(help="Denoising steps. Default: the model's own.")
    ] = None,
    batch_size: Annotated[int, at_least(1, most=10**6), typer.Option(help="Images per batch.")] = 64,
    target: Annotated[
        Path | None,
        typer.Option("--out", click_type=USER_PATH, help="Output file. Default: synthetic-32.npy in the data folder."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Sample images from a diffusion model as an unlabeled set for a task. Resumes if interrupted."""
    with one_line_errors():
        from fedecho.tasks.vision.synthesize import synthesize

        path = target or data_folder(data_dir) / "synthetic-32.npy"
        check_writable(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with Progress(console=err, disable=not err.is_terminal) as bars:
            bar = bars.add_task("images", total=num)
            made = synthesize(
                model,
                path,
                num=num,
                seed=seed,
                steps=steps,
                batch_size=batch_size,
                progress=lambda done, total: bars.update(bar, completed=done),
            )
        print_line(f"{num} images are in {made}")
