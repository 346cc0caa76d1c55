"""Only listed files in a model's own folder are carried with it."""

import json
import os
import socket
from pathlib import Path

import pytest

from composer3d.convert import carried
from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError
from composer3d.models.llama.huggingface import read_shape
from tests.convert.sample_checkpoints import CARRIED, make_dcp, make_hf, same, tensors

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/id_rsa").write_bytes(SECRET)
    return tmp_path / "home/id_rsa"


def files_with(path: Path, content: bytes) -> list[str]:
    """Return the names of the files at or below ``path`` that contain ``content``."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [file.name for file in files if content in file.read_bytes()]


def test_only_names_on_the_list_are_carried(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "a")
    for name in (".env", "notes.txt", "secrets.json", "modeling.py", "x.md"):
        (folder / name).write_bytes(SECRET)
    (folder / "README.md").write_text("a model")
    (folder / "LICENSE").write_text("a licence")
    report = convert(folder, tmp_path / "b", "hf")
    assert set(report["carried"]) == {"config.json", "README.md", "LICENSE", *CARRIED}
    assert files_with(tmp_path / "b", SECRET) == []


MORE = "additional_chat_templates"


def test_further_chat_templates_are_carried(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "a")
    (folder / MORE / "x").mkdir(parents=True)
    names = ("tool_use.jinja", "rag.jinja", "x.txt", "x/y.jinja", ".z.jinja")
    for name in names:
        (folder / MORE / name).write_bytes(name.encode())
    carried_names = {f"{MORE}/{name}" for name in names[:2]}
    path = folder
    for to in ("dcp", "torch", "hf"):
        report = convert(path, tmp_path / to, to)
        path = tmp_path / to
        assert set(report["carried"]) == {"config.json", *CARRIED, *carried_names}
    assert {file.name for file in (path / MORE).iterdir()} == {*names[:2]}
    assert (path / MORE / "rag.jinja").read_bytes() == b"rag.jinja"

    (folder / MORE).rename(tmp_path / "private")
    (folder / MORE).symlink_to(tmp_path / "private")
    files, refusals = carried.read_carried_files(folder)
    assert not carried_names & files.keys()
    assert refusals == [f"{folder / MORE} is not copied: it is a link, which is not followed here"]


def test_pipes_folders_sockets_and_cycles_of_links_are_not_copied(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "a")
    for name in CARRIED:
        (folder / name).unlink()
    (folder / "special_tokens_map.json").symlink_to("special_tokens_map.json")
    os.mkfifo(folder / "tokenizer.json")
    (folder / "tokenizer.model").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(folder)  # the whole path would be too long for a socket
        try:
            listener.bind("generation_config.json")
        finally:
            os.chdir(before)
        files, refusals = carried.read_carried_files(folder)
    assert set(files) == {"config.json"}
    assert sorted(line.split(": it ")[1] for line in refusals) == [
        "is a folder, not a plain file",
        "is a named pipe or a socket, not a plain file",
        "is a named pipe, not a plain file",
        "is a symbolic link, which is not followed here",
    ]


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_hf(tmp_path / "a")
    (folder / "tokenizer.json").write_bytes(b"x" * 2000)
    monkeypatch.setattr(carried, "FILE_LIMIT", 1999)
    files, refusals = carried.read_carried_files(folder)
    assert refusals == [f"{folder}/tokenizer.json is not copied: it has more than 1,999 bytes"]
    assert "tokenizer.json" not in files
    monkeypatch.setattr(carried, "FILE_LIMIT", 2000)
    monkeypatch.setattr(carried, "TOTAL_LIMIT", 2100)
    assert sum(map(len, carried.read_carried_files(folder)[0].values())) <= 2100


def hub(tmp_path: Path) -> tuple[Path, Path]:
    """Make a snapshot as the Hugging Face hub does; return it and its repository."""
    repository = tmp_path / "hub/models--a--b"
    snapshot = repository / "snapshots/0123"
    snapshot.parent.mkdir(parents=True)
    make_hf(snapshot)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = repository / f"blobs/{number:040x}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, snapshot))
    return snapshot, repository


def test_all_files_of_a_hub_snapshot_are_copied(tmp_path: Path) -> None:
    snapshot, repository = hub(tmp_path)
    report = convert(snapshot, tmp_path / "b", "hf")
    assert set(report["carried"]) == {"config.json", *CARRIED}
    assert report["notes"] == []
    assert same(tensors(tmp_path / "b"), tensors(make_hf(tmp_path / "again")))
    # The repositories of a cache may share a store, which names files by their digests.
    digest = "ab" * 32
    shared = tmp_path / "hub/blobs/ab" / digest
    shared.parent.mkdir(parents=True)
    blob = (snapshot / "tokenizer.json").resolve()
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, repository / "blobs"))
    assert carried.read_carried_files(snapshot)[0]["tokenizer.json"] == CARRIED["tokenizer.json"]


def test_a_hub_snapshot_cannot_link_elsewhere(tmp_path: Path, secret: Path) -> None:
    snapshot, repository = hub(tmp_path)
    other = tmp_path / "hub/models--other/blobs/0"
    other.parent.mkdir(parents=True)
    other.write_bytes(SECRET)
    (repository / "blobs/evil").symlink_to(secret)
    (repository / "out").symlink_to(secret.parent)
    targets = [secret, repository / "blobs/evil", other, repository / "out/id_rsa"]
    link = snapshot / "tokenizer.json"
    for target in targets:
        link.unlink()
        link.symlink_to(target)
        files, refusals = carried.read_carried_files(snapshot)
        assert "tokenizer.json" not in files, target
        assert len(refusals) == 1, target
    # The store itself is a link.
    (repository / "blobs").rename(repository / "real")
    (repository / "blobs").symlink_to(secret.parent)
    link.unlink()
    link.symlink_to("../../blobs/id_rsa")
    assert "tokenizer.json" not in carried.read_carried_files(snapshot)[0]


def test_weights_and_the_shape_may_be_links_to_plain_files(tmp_path: Path) -> None:
    whole = make_hf(tmp_path / "a")
    (tmp_path / "linked").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "linked" / name).symlink_to(whole / name)
    assert read_shape(tmp_path / "linked") == read_shape(whole)
    convert(tmp_path / "linked", tmp_path / "b", "torch")
    assert same(tensors(tmp_path / "b"), tensors(whole))


def test_a_folder_in_the_recipe_of_a_checkpoint_is_not_read(tmp_path: Path) -> None:
    other = make_hf(tmp_path / "private")
    make_dcp(tmp_path / "a", recipe=f'[model]\nhf = "{other}"\n')
    report = convert(tmp_path / "a", tmp_path / "b", "hf")
    assert report["carried"] == []
    assert report["notes"][0] == f"{tmp_path / 'a'} has no assets: no tokenizer is copied"
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_assets_that_are_a_link_are_not_read(tmp_path: Path) -> None:
    other = make_hf(tmp_path / "private")
    (make_dcp(tmp_path / "a") / "assets").symlink_to(other)
    report = inspect(tmp_path / "a")
    assert report["carried"] == []
    assert (
        f"{tmp_path / 'a'}/assets is a link, which is not followed: none of its files is copied"
        in report["notes"]
    )


def test_a_carried_config_must_be_an_object(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "a")
    convert(folder, tmp_path / "meta", "meta")
    for text in ("[]", "[" * 100_000, '{"eos_token_id": NaN}'):
        (tmp_path / "meta/config.json").write_text(text)
        with pytest.raises(
            CheckpointError, match=r"the config.json that .*meta carries cannot be read: ValueError"
        ):
            convert(tmp_path / "meta", tmp_path / "b", "hf")
        assert not (tmp_path / "b").exists()


def test_an_export_does_not_name_python_files_of_the_author(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "x--modeling.X"}})
    )
    convert(folder, tmp_path / "b", "hf")
    assert "auto_map" not in json.loads((tmp_path / "b/config.json").read_text())
    assert open_source(tmp_path / "b").format == "hf"
