"""An unlabeled set U drawn from an unconditional diffusion model, in the paper google/ddpm-cifar10-32.

Image i is denoised with the noise at (seed, i) alone. Its bytes come out the same on the same machine, with the same versions
and the same batches; a resumed run keeps its batches, so it gives the bytes of one that never stopped. Another batch size or
another machine may sum in another order, and round-off can then change bytes.
"""

import hashlib
import importlib
import inspect
import io
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedecho.core.randomness import torch_rng
from fedecho.storage.checkpoint import write_atomically
from fedecho.storage.files import file_sha256
from fedecho.tasks.text.readers import json_of, read_text, with_keys
from fedecho.tasks.vision.unlabeled import PAPER_MODEL, beside

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
INDEX = "model_index.json"
SETTINGS = "settings.json"
MODEL_FILES = (INDEX, "*config.json", "*.safetensors", "*.bin")
NEEDED = {"batch_size", "generator", "num_inference_steps", "output_type"}
NAMES = {"model", "commit"}  # what a model is called; its files say whether it is the same one


def synthesize(
    model: str,
    out: Path,
    *,
    num: int = 2000,
    seed: int = 0,
    size: int = 32,
    batch_size: int = 64,
    steps: int | None = None,
    device: str | None = None,
    progress: Callable[[int, int], None] = lambda done, num: None,
) -> Path:
    """Draw ``num`` images into ``out``, a .npy file [num, size, size, 3] of bytes; ``<out>.json`` says what they came from.

    ``model`` is a folder or, if there is none of that name, a name at the hub; ``steps`` is the pipeline's own number unless
    given. A run that was stopped goes on from the last finished batch when it is called again with the same settings.
    """
    _check(num=num, size=size, batch_size=batch_size)
    device, diffusers = _device(device), _diffusers()
    folder = _find(model, diffusers)
    pipeline = _load(model, folder, diffusers).to(device)
    steps = _steps(pipeline, steps)
    settings = _origin(model, folder, pipeline)
    settings |= {"steps": steps, "seed": seed, "count": num, "size": size, "batch_size": batch_size}
    settings |= {"device": pipeline.device.type, "diffusers": diffusers.__version__, "torch": str(torch.__version__)}
    parts = beside(out, ".parts")
    if not _is_finished(out, parts, settings):
        parts.mkdir(parents=True, exist_ok=True)
        write_atomically(parts / SETTINGS, _json(settings))
        for start in range(0, num, batch_size):
            stop = min(start + batch_size, num)
            path = parts / f"part-{start:010d}.npy"
            if not path.exists():
                write_atomically(path, _npy(_pixels(_draw(pipeline, seed, range(start, stop), steps), size)))
            progress(stop, num)
        _join(out, parts, settings)
    _remove(parts)
    return out


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ValueError(f"drawing images needs diffusers ({error}): pip install 'fedecho[synthetic]'") from error


def _device(name: str | None) -> str:
    if name is not None and name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here: leave device out, or give cpu instead of {name}")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _find(model: str, diffusers: Any) -> Path:
    """The model's folder. The hub is asked only for what is no folder here and could be a name there."""
    here = Path(model).is_dir()
    if not here and not HUB_NAME.fullmatch(model):
        raise ValueError(f"there is no model folder {model}: give one, or a name at the hub such as {PAPER_MODEL}")
    download = importlib.import_module("huggingface_hub").snapshot_download
    # The index comes first: a model of no use here is refused before gigabytes of it are fetched.
    folder = Path(model) if here else _fetch(model, partial(download, allow_patterns=[INDEX]))
    _check_unconditional(model, folder, diffusers)
    return folder if here else _fetch(model, diffusers.DiffusionPipeline.download)


def _fetch(name: str, download: Callable[[str], str]) -> Path:
    try:
        return Path(download(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no model folder {name}, and the hub did not give a model of that name: "
            "check the name and the network, or give a folder with a copy of the model"
        ) from error


def _check_unconditional(model: str, folder: Path, diffusers: Any) -> None:
    if not (folder / INDEX).is_file():
        raise ValueError(f"{model} holds no {INDEX}: give a folder that a diffusers pipeline was saved into")
    kind = _table(folder / INDEX).get("_class_name")
    # A pipeline that this diffusers does not know, or lacks packages for, takes none of the needed arguments either.
    accepted = set(inspect.signature(getattr(diffusers, str(kind), object).__call__).parameters)
    if not accepted >= NEEDED or "prompt" in accepted:
        raise ValueError(
            f"{model} is a {kind}, which does not draw images from noise alone (text-to-image needs a prompt): "
            f"give an unconditional model such as {PAPER_MODEL}"
        )


def _load(model: str, folder: Path, diffusers: Any) -> Any:
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder), low_cpu_mem_usage=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} cannot be loaded: {str(error).splitlines()[0]}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _steps(pipeline: Any, steps: int | None) -> int:
    default = inspect.signature(type(pipeline).__call__).parameters["num_inference_steps"].default
    most = pipeline.scheduler.config.get("num_train_timesteps") or max(default, steps or 0)
    if steps is not None and not 1 <= steps <= most:
        raise ValueError(f"steps must be from 1 to the {most} that the model was trained with, got {steps}")
    return int(min(default, most) if steps is None else steps)


def _origin(model: str, folder: Path, pipeline: Any) -> dict[str, Any]:
    files = sorted({path for pattern in MODEL_FILES for path in folder.rglob(pattern)})
    return {
        "model": model,
        "commit": folder.name if folder.parent.name == "snapshots" else None,  # so the hub's cache names its folders
        "model_sha256": {path.relative_to(folder).as_posix(): file_sha256(path) for path in files},
        "pipeline": type(pipeline).__name__,
        "scheduler": type(pipeline.scheduler).__name__,
    }


def _is_finished(out: Path, parts: Path, settings: dict[str, Any]) -> bool:
    """Whether the set is there; an error if what is there, whole or begun, is another one."""
    place, source = (out, beside(out, ".json")) if out.exists() else (parts, parts / SETTINGS)
    if not source.exists():
        if out.exists():
            raise ValueError(f"{out} exists, and nothing says what it came from: remove it or give another place")
        return False
    found = _table(source)
    others = [key for key in settings if key not in NAMES and found.get(key) != settings[key]]
    if others:
        raise ValueError(f"{place} was made with another {', '.join(others)}: remove it or give another place")
    return out.exists()


def _draw(pipeline: Any, seed: int, rows: range, steps: int) -> NDArray[np.float32]:
    generators = [torch_rng(seed, "synthesize", row) for row in rows]
    drawn = pipeline(batch_size=len(rows), generator=generators, num_inference_steps=steps, output_type="np")
    return np.asarray(drawn.images, dtype=np.float32)


def _pixels(images: NDArray[np.float32], size: int) -> NDArray[np.uint8]:
    """[n, height, width, channels] in [0, 1] to bytes [n, size, size, 3]."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    channels, height, width = pixels.shape[1:]
    if channels not in (1, 3) or height != width or height < size:
        raise ValueError(f"the model draws {height} x {width} x {channels}: cannot make {size} x {size} x 3 of that")
    if not pixels.isfinite().all():
        raise ValueError("the model drew pixels that are not finite: its weights may be damaged")
    if height > size:
        pixels = functional.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)
    whole = (pixels.expand(-1, 3, -1, -1) * 255).round().clamp(0, 255).to(torch.uint8)
    return whole.permute(0, 2, 3, 1).contiguous().numpy()


def _join(out: Path, parts: Path, settings: dict[str, Any]) -> None:
    data = _npy(np.concatenate([np.load(path) for path in sorted(parts.glob("part-*.npy"))]))
    # The array last: where it stands, the file beside it is its own.
    write_atomically(beside(out, ".json"), _json({**settings, "sha256": hashlib.sha256(data).hexdigest()}))
    write_atomically(out, data)


def _remove(parts: Path) -> None:
    # In order of names, so that the settings go after the parts: parts without settings would be taken for anybody's.
    for path in sorted(parts.glob("*")):
        path.unlink()
    if parts.exists():
        parts.rmdir()


def _npy(array: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _table(path: Path) -> dict[str, Any]:
    return with_keys(json_of(read_text(path), path), (), path, 1)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
