"""Synthesize images with a tiny but real diffusion model: determinism, provenance and interruption."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedecho.core.randomness import torch_rng
from fedecho.tasks.vision import synthesize as module
from fedecho.tasks.vision.synthesize import synthesize

diffusers = pytest.importorskip("diffusers", reason="needs the extra [synthetic]")

SMALL = {"num": 7, "batch_size": 3, "size": 8, "device": "cpu"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save_model(folder: Path, channels: int = 3, seed: int = 0) -> str:
    torch.manual_seed(seed)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=5)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def stop_at(images: int) -> Callable[[int, int], None]:
    def progress(done: int, num: int) -> None:
        if done == images:
            raise KeyboardInterrupt

    return progress


def test_the_set_has_its_count_shape_and_papers(model: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = synthesize(model, tmp_path / "new" / "set.npy", **SMALL, progress=lambda done, num: seen.append((done, num)))
    images = np.load(out)
    assert (images.shape, images.dtype) == ((7, 8, 8, 3), np.uint8)
    assert images.std() > 10, "noise through a net without training is no single colour"
    assert seen == [(3, 7), (6, 7), (7, 7)]
    assert sorted(path.name for path in out.parent.iterdir()) == ["set.npy", "set.npy.json"]
    weights = Path(model, "unet", "diffusion_pytorch_model.safetensors")
    papers = json.loads(out.with_name("set.npy.json").read_text())
    files = papers.pop("model_sha256")
    assert files["unet/diffusion_pytorch_model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert set(files) >= {"model_index.json", "unet/config.json", "scheduler/scheduler_config.json"}
    assert papers == {
        "model": model,
        "commit": None,
        "pipeline": "DDPMPipeline",
        "scheduler": "DDPMScheduler",
        "steps": 5,
        "seed": 0,
        "count": 7,
        "size": 8,
        "batch_size": 3,
        "device": "cpu",
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
    }


def test_the_bytes_are_those_of_the_pipeline_itself(model: str, tmp_path: Path) -> None:
    images = np.load(synthesize(model, tmp_path / "set.npy", **SMALL | {"num": 3}, seed=4, steps=2))
    pipeline = diffusers.DDPMPipeline.from_pretrained(model, low_cpu_mem_usage=False)
    generators = [torch_rng(4, "synthesize", i) for i in range(3)]
    pictures = pipeline(batch_size=3, generator=generators, num_inference_steps=2).images
    np.testing.assert_array_equal(images, np.stack([np.asarray(picture) for picture in pictures]))


def test_the_same_settings_give_the_same_bytes_whatever_torch_drew_before(model: str, tmp_path: Path) -> None:
    one = synthesize(model, tmp_path / "one.npy", **SMALL)
    torch.manual_seed(99)
    assert synthesize(model, tmp_path / "two.npy", **SMALL).read_bytes() == one.read_bytes()
    assert synthesize(model, tmp_path / "three.npy", **SMALL, seed=1).read_bytes() != one.read_bytes()


def test_an_image_depends_on_its_number_and_not_on_its_batch(model: str, tmp_path: Path) -> None:
    one = np.load(synthesize(model, tmp_path / "one.npy", **SMALL))
    other = np.load(synthesize(model, tmp_path / "other.npy", **SMALL | {"num": 9, "batch_size": 4}))
    assert np.abs(one.astype(int) - other[:7]).max() <= 1
    assert len({image.tobytes() for image in other}) == 9


@pytest.mark.parametrize("images", [3, 6, 7])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    model: str, tmp_path: Path, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = synthesize(model, tmp_path / "whole.npy", **SMALL)
    out = tmp_path / "stopped.npy"
    with pytest.raises(KeyboardInterrupt):
        synthesize(model, out, **SMALL, progress=stop_at(images))
    assert not out.exists()
    drawn: list[int] = []
    monkeypatch.setattr(module, "torch_rng", lambda *address: drawn.append(address[-1]) or torch_rng(*address))
    synthesize(model, out, **SMALL)
    assert drawn == list(range(images, 7)), "what was there is not drawn again"
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name("stopped.npy.parts").exists()


@pytest.mark.parametrize("failing", ["stopped.npy.json", "stopped.npy"])
def test_a_run_stopped_while_joining_goes_on_too(
    model: str, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.write_atomically

    def write(path: Path, data: bytes) -> None:
        if path.name == failing:
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(module, "write_atomically", write)
    with pytest.raises(KeyboardInterrupt):
        synthesize(model, tmp_path / "stopped.npy", **SMALL)
    monkeypatch.undo()
    out = synthesize(model, tmp_path / "stopped.npy", **SMALL)
    assert out.read_bytes() == synthesize(model, tmp_path / "whole.npy", **SMALL).read_bytes()


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 1}, "seed"), ({"num": 8}, "count"), ({"batch_size": 2, "size": 4}, "size, batch_size"), ({"steps": 4}, "steps")],
)
def test_other_settings_in_the_same_place_are_refused(
    model: str, tmp_path: Path, finished: bool, change: dict[str, int], named: str
) -> None:
    out = tmp_path / "set.npy"
    if finished:
        synthesize(model, out, **SMALL)
    else:
        with pytest.raises(KeyboardInterrupt):
            synthesize(model, out, **SMALL, progress=stop_at(3))
    place = "set.npy" if finished else "set.npy.parts"
    with pytest.raises(ValueError, match=rf"/{place} was made with a different {named}: remove it or choose another path$"):
        synthesize(model, out, **SMALL | change)


def test_a_model_is_known_by_its_files_and_not_by_its_name(model: str, tmp_path: Path) -> None:
    out = synthesize(model, tmp_path / "set.npy", **SMALL)
    before = out.stat().st_mtime_ns
    copy = shutil.copytree(model, tmp_path / "copy")
    assert synthesize(str(copy), out, **SMALL).stat().st_mtime_ns == before, "it is there already"
    with pytest.raises(ValueError, match="was made with a different model_sha256"):
        synthesize(save_model(tmp_path / "other", seed=1), out, **SMALL)


def test_a_file_of_unknown_origin_is_left_alone(model: str, tmp_path: Path) -> None:
    out = tmp_path / "set.npy"
    out.write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists and its origin is unknown"):
        synthesize(model, out, **SMALL)
    assert out.read_bytes() == b"mine"


def test_larger_images_are_resized_as_pillow_does_it(model: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    large = np.load(synthesize(model, tmp_path / "large.npy", **SMALL))
    small = np.load(synthesize(model, tmp_path / "small.npy", **SMALL | {"size": 4}))
    expected = [np.asarray(image.fromarray(each).resize((4, 4), image.Resampling.BILINEAR)) for each in large]
    assert np.abs(small.astype(int) - np.stack(expected)).max() <= 1
    with pytest.raises(ValueError, match="the model draws 8 x 8 x 3 images, which cannot be converted to 9 x 9 x 3"):
        synthesize(model, tmp_path / "larger.npy", **SMALL | {"size": 9})


def test_grey_images_get_three_equal_channels(tmp_path: Path) -> None:
    images = np.load(synthesize(save_model(tmp_path / "grey", channels=1), tmp_path / "set.npy", **SMALL))
    assert images.shape == (7, 8, 8, 3)
    assert (images == images[..., :1]).all()


def test_a_model_with_its_files_in_one_folder_is_read_as_well(model: str, tmp_path: Path) -> None:
    """So google/ddpm-cifar10-32 keeps them."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in Path(model).rglob("*.*"):
        shutil.copy(path, flat)
    one, other = (synthesize(each, tmp_path / f"{i}.npy", **SMALL) for i, each in enumerate([model, str(flat)]))
    assert one.read_bytes() == other.read_bytes()


def test_weights_that_give_no_numbers_are_noticed(tmp_path: Path) -> None:
    pipeline = diffusers.DDPMPipeline.from_pretrained(save_model(tmp_path / "broken"), low_cpu_mem_usage=False)
    torch.nn.init.constant_(pipeline.unet.conv_in.weight, float("nan"))
    pipeline.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="the model drew pixels that are not finite"):
        synthesize(str(tmp_path / "broken"), tmp_path / "set.npy", **SMALL)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty, and no way to the hub."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_name_at_the_hub_is_taken_from_its_cache_with_its_commit(model: str, offline: Path, tmp_path: Path) -> None:
    repository = offline / "models--fedecho--tiny"
    shutil.copytree(model, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    out = synthesize("fedecho/tiny", tmp_path / "set.npy", **SMALL)
    assert json.loads(out.with_name("set.npy.json").read_text())["commit"] == COMMIT
    assert out.read_bytes() == synthesize(model, tmp_path / "local.npy", **SMALL).read_bytes()


def test_a_name_that_the_hub_does_not_give_is_one_line(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^there is no model folder google/ddpm-cifar10-32, and downloading it from the hub failed.*model$"
    ):
        synthesize("google/ddpm-cifar10-32", tmp_path / "set.npy")
    assert not (tmp_path / "set.npy.parts").exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "./tiny", "../tiny", "models/of/mine"])
def test_a_folder_that_is_missing_is_not_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(module, "_fetch", lambda *asked: pytest.fail(f"asked for {asked}"))
    with pytest.raises(
        ValueError, match=f"^there is no model folder {name}: give an existing folder or a hub name such as google/"
    ):
        synthesize(name, tmp_path / "set.npy")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "contains no model_index.json: give a folder that a diffusers pipeline was saved to"),
        (
            {"_class_name": "StableDiffusionPipeline"},
            r"is a StableDiffusionPipeline, .* \(text-to-image needs a prompt\): give",
        ),
        ({"_class_name": "DiTPipeline"}, "is a DiTPipeline, which does not draw images from noise alone"),
        ({"_class_name": ["mine", "MyPipeline"]}, "does not draw images from noise alone"),
        ({"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}, "cannot be loaded: "),
    ],
)
def test_folders_that_hold_no_unconditional_model_are_refused(index: Any, message: str, tmp_path: Path) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        synthesize(str(tmp_path), tmp_path / "set.npy")


def test_without_the_package_the_command_is_named(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ValueError, match=r"^drawing images needs diffusers \(.*\): pip install 'fedecho\[synthetic\]'$"):
        synthesize(model, tmp_path / "set.npy")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num": 0}, "num must be at least 1, got 0"),
        ({"size": -1}, "size must be at least 1, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"steps": 0}, "steps must be from 1 to the 5 that the model was trained with, got 0"),
        ({"steps": 6}, "steps must be from 1 to the 5 that the model was trained with, got 6"),
    ],
)
def test_numbers_out_of_range_are_refused(model: str, tmp_path: Path, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize(model, tmp_path / "set.npy", **SMALL | wrong)
