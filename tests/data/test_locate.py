from pathlib import Path

import pytest

from fedecho.tasks.data_files import FOLDERS, MissingDataError, data_folder, find


def test_the_argument_comes_before_the_variable_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDECHO_DATA", raising=False)
    assert data_folder() == Path("data")
    monkeypatch.setenv("FEDECHO_DATA", "")
    assert data_folder() == Path("data")
    monkeypatch.setenv("FEDECHO_DATA", "elsewhere")
    assert data_folder() == Path("elsewhere")
    assert data_folder(Path("here")) == Path("here")


def test_a_home_folder_is_spelled_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDECHO_DATA", "~/sets")
    assert data_folder() == tmp_path / "sets"


@pytest.mark.parametrize("name", FOLDERS)
def test_any_distribution_of_a_set_will_do(tmp_path: Path, name: str) -> None:
    for folder in reversed(FOLDERS[name]):
        (tmp_path / folder).mkdir()
        assert find(name, tmp_path) == tmp_path / folder
        assert find(folder, tmp_path) == tmp_path / folder


def test_the_variable_is_used_to_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stl10_binary").mkdir()
    monkeypatch.setenv("FEDECHO_DATA", str(tmp_path))
    assert find("stl10") == tmp_path / "stl10_binary"


@pytest.mark.parametrize("name", ["cifar10", "cifar-10-batches-bin"])
def test_what_is_missing_is_said_in_one_line_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(MissingDataError) as caught:
        find(name, tmp_path)
    said = str(caught.value)
    assert "\n" not in said
    for part in (name, str(tmp_path), "`fedecho data fetch cifar10`", "--data-dir", "FEDECHO_DATA"):
        assert part in said


def test_a_folder_nobody_publishes_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="--data-dir") as caught:
        find("my-images", tmp_path)
    assert "fetch" not in str(caught.value)


def test_a_file_in_the_place_of_a_folder_is_not_it(tmp_path: Path) -> None:
    (tmp_path / "stl10_binary").write_text("")
    with pytest.raises(MissingDataError):
        find("stl10", tmp_path)
