"""Generate an unlabeled set U with an unconditional diffusion model (the paper uses google/ddpm-cifar10-32).

Image i depends only on the noise at (seed, i). Results are bit-identical on the same machine with the same versions and batches;
a resumed run keeps its batches and is therefore bit-exact. Another batch size or machine may sum in another order, so round-off
can differ.
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
from fedecho.storage.files import file_sha256, write_atomically
from fedecho.tasks.text.readers import json_of, read_text, with_keys
from fedecho.tasks.vision.unlabeled import PAPER_MODEL, sidecar

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
INDEX = "model_index.json"
SETTINGS = "settings.json"
MODEL_FILES = (INDEX, "*config.json", "*.safetensors", "*.bin")
NEEDED = {"batch_size", "generator", "num_inference_steps", "output_type"}
NAMES = {"model", "commit"}  # a model's name does not matter; its files identify it


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
    """Draw ``num`` images into ``out``, a .npy file [num, size, size, 3] of bytes, and their origin into ``<out>.json``.

    ``model`` is a folder or, if there is no such folder, a hub name; ``steps`` defaults to the pipeline's own number. After an
    interruption, a call with the same settings resumes from the last finished batch.
    """
    for name, number in {"num": num, "size": size, "batch_size": batch_size}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    device, diffusers = _device(device), _diffusers()
    folder = _find(model, diffusers)
    pipeline = _load(model, folder, diffusers).to(device)
    steps = _steps(pipeline, steps)
    settings = _origin(model, folder, pipeline)
    settings |= {"steps": steps, "seed": seed, "count": num, "size": size, "batch_size": batch_size}
    settings |= {"device": pipeline.device.type, "diffusers": diffusers.__version__, "torch": str(torch.__version__)}
    parts = sidecar(out, ".parts")
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


def _diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ValueError(f"drawing images needs diffusers ({error}): pip install 'fedecho[synthetic]'") from error


def _device(name: str | None) -> str:
    if name is not None and name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device for device={name!r}: omit it or use cpu")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _find(model: str, diffusers: Any) -> Path:
    """Return the model's folder. Only a possible hub name that is not a local folder is downloaded."""
    is_local = Path(model).is_dir()
    if not is_local and not HUB_NAME.fullmatch(model):
        raise ValueError(f"there is no model folder {model}: give an existing folder or a hub name such as {PAPER_MODEL}")
    download = importlib.import_module("huggingface_hub").snapshot_download
    # Fetch the index first, to reject an unsuitable model before downloading gigabytes.
    folder = Path(model) if is_local else _fetch(model, partial(download, allow_patterns=[INDEX]))
    _check_unconditional(model, folder, diffusers)
    return folder if is_local else _fetch(model, diffusers.DiffusionPipeline.download)


def _fetch(name: str, download: Callable[[str], str]) -> Path:
    try:
        return Path(download(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no model folder {name}, and downloading it from the hub failed: "
            "check the name and the network, or give a folder with a copy of the model"
        ) from error


def _check_unconditional(model: str, folder: Path, diffusers: Any) -> None:
    if not (folder / INDEX).is_file():
        raise ValueError(f"{model} contains no {INDEX}: give a folder that a diffusers pipeline was saved to")
    kind = _table(folder / INDEX).get("_class_name")
    # For a pipeline that this diffusers does not have, the needed arguments are missing too.
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
        "commit": folder.name if folder.parent.name == "snapshots" else None,  # as in the hub's cache
        "model_sha256": {path.relative_to(folder).as_posix(): file_sha256(path) for path in files},
        "pipeline": type(pipeline).__name__,
        "scheduler": type(pipeline.scheduler).__name__,
    }


def _is_finished(out: Path, parts: Path, settings: dict[str, Any]) -> bool:
    """Whether the set is finished; raise if the place holds a set, finished or partial, with other settings."""
    existing, source = (out, sidecar(out, ".json")) if out.exists() else (parts, parts / SETTINGS)
    if not source.exists():
        if out.exists():
            raise ValueError(f"{out} exists and its origin is unknown: remove it or choose another path")
        return False
    recorded = _table(source)
    different = [key for key in settings if key not in NAMES and recorded.get(key) != settings[key]]
    if different:
        raise ValueError(f"{existing} was made with a different {', '.join(different)}: remove it or choose another path")
    return out.exists()


def _draw(pipeline: Any, seed: int, rows: range, steps: int) -> NDArray[np.float32]:
    generators = [torch_rng(seed, "synthesize", row) for row in rows]
    drawn = pipeline(batch_size=len(rows), generator=generators, num_inference_steps=steps, output_type="np")
    return np.asarray(drawn.images, dtype=np.float32)


def _pixels(images: NDArray[np.float32], size: int) -> NDArray[np.uint8]:
    """Convert [n, height, width, channels] in [0, 1] to bytes [n, size, size, 3]."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    channels, height, width = pixels.shape[1:]
    if channels not in (1, 3) or height != width or height < size:
        raise ValueError(
            f"the model draws {height} x {width} x {channels} images, which cannot be converted to {size} x {size} x 3"
        )
    if not pixels.isfinite().all():
        raise ValueError("the model drew pixels that are not finite: its weights may be damaged")
    if height > size:
        pixels = functional.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)
    whole = (pixels.expand(-1, 3, -1, -1) * 255).round().clamp(0, 255).to(torch.uint8)
    return whole.permute(0, 2, 3, 1).contiguous().numpy()


def _join(out: Path, parts: Path, settings: dict[str, Any]) -> None:
    data = _npy(np.concatenate([np.load(path) for path in sorted(parts.glob("part-*.npy"))]))
    # Write the array last: if it exists, the JSON file belongs to it.
    write_atomically(sidecar(out, ".json"), _json({**settings, "sha256": hashlib.sha256(data).hexdigest()}))
    write_atomically(out, data)


def _remove(parts: Path) -> None:
    # In name order, so that the settings are removed last: parts without settings could belong to any set.
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
