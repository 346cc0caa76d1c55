"""Folders in an object store, against a server of S3 on this machine."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts import remote
from composer3d.facts.files import FileTooLargeError
from composer3d.facts.remote import (
    RemotePath,
    is_url,
    is_valid_url,
    local_copy,
    place_of,
    same_folder,
    upload,
    whole_file,
)
from tools.object_store import new_folder


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePath:
    """An empty folder."""
    return RemotePath(f"file://{tmp_path}/folder") if request.param == "file" else new_folder()


@pytest.mark.parametrize(
    ("url", "is_right"),
    [
        ("s3://bucket/a/b-1.c", True),
        ("s3://bucket", True),
        ("s3://bucket/a/", True),
        ("gs://bucket/a", True),
        ("az://container/a", True),
        ("file:///tmp/a", True),
        ("s3://bucket//a", False),
        ("s3://bucket/../a", False),
        ("s3://bucket/./a", False),
        ("s3://key:secret@bucket/a", False),
        ("s3://bucket/a?x=1", False),
        ("simplecache::s3://bucket/a", False),
        ("s3://bucket/a::file://b", False),
        ("s3://bucket/a b", False),
        ("s3://", False),
        ("s3://bucket/exp[12]", False),
        ("s3://bucket/*", False),
        ("s3://bucket/a?", False),
        ("s3:///a", False),
        ("file://a/b", False),
        ("file:///tmp/../a", False),
        ("ftp://bucket/a", False),
        ("/tmp/a", False),
    ],
)
def test_only_plain_urls_are_paths(url: str, is_right: bool) -> None:
    assert is_valid_url(url) == is_right
    if is_right:
        assert str(RemotePath(url)) == url.removesuffix("/")
    else:
        with pytest.raises(ValueError, match="must be KIND://BUCKET/PATH, where"):
            RemotePath(url)


def test_paths_have_parts_and_an_order() -> None:
    folder = RemotePath("s3://bucket/run")
    path = folder / "step-2"
    assert (path.name, path.parent, str(path)) == ("step-2", folder, "s3://bucket/run/step-2")
    assert [RemotePath(url).parent for url in ("s3://b", "file:///a")] == [
        RemotePath("s3://b"),
        RemotePath("file:///a"),
    ]
    assert sorted([folder / "step-3", path]) == [path, folder / "step-3"]
    assert len({path, folder / "step-2"}) == 1
    assert place_of("s3://bucket/run") == folder
    assert place_of("runs/a") == Path("runs/a")
    assert [is_url(text) for text in ("s3://", "hf://a/b", "s3:/a")] == [True, False, False]
    assert same_folder(folder, RemotePath("s3://bucket/run/"))
    assert not same_folder(folder, Path("run"))
    for name in ("..", "a b", "*", "a?"):
        with pytest.raises(OSError, match="a name that is not read"):
            folder / name


def test_files_are_written_listed_read_and_removed(place: RemotePath) -> None:
    assert (place.exists(), place.files(), place.folders()) == (False, {}, [])
    (place / "step-1" / "a").write(b"one")
    (place / "step-1" / "in" / "b").write(b"")
    (place / "step-10" / "a").write(b"other")
    told = b""

    def tell(content: Any) -> None:
        nonlocal told
        told += bytes(content)

    with (place / "step-1" / "c").create(tell) as stream:
        stream.write(b"12")
        stream.write(memoryview(b"345"))
        assert stream.tell() == 5
    assert told == b"12345"
    assert place.folders() == ["step-1", "step-10"]
    assert (place / "step-1").files() == {"a": 3, "in/b": 0, "c": 5}
    assert (place / "step-1" / "c").size() == 5
    assert (place / "step-1" / "a").read(3) == b"one"
    (place / "step-1" / "a").write(b"two!")
    assert (place / "step-1" / "a").read(9) == b"two!"
    assert (place / "step-1" / "in" / "b").read(9) == b""
    (place / "step-1" / "a").remove()
    (place / "step-1" / "a").remove()
    (place / "step-1").remove_tree()
    (place / "step-1").remove_tree()
    assert place.files() == {"step-10/a": 5}


def test_a_file_that_is_not_finished_is_not_there() -> None:
    path = new_folder() / "a"

    def fail(content: bytes) -> None:
        with path.create() as stream:
            stream.write(content)
            raise KeyError

    # The second is more than S3 takes in one request: its first part has been sent.
    for content in (b"12", bytes(60 << 20)):
        with pytest.raises(KeyError):
            fail(content)
        assert not path.exists()
    path.write(b"before")
    with pytest.raises(KeyError):
        fail(b"after")
    assert path.read(9) == b"before"


def test_a_large_file_is_read_in_pieces_and_in_ranges(place: RemotePath) -> None:
    content = os.urandom(40 << 20)
    path = place / "large"
    with path.create() as stream:
        stream.write(content)
    assert b"".join(path.pieces()) == content
    with whole_file(path, len(content)) as file:
        assert file.read() == content
        assert os.fstat(file.fileno()).st_size == len(content)
    ranges = [(0, 1), (7, 30 << 20), (len(content) - 3, 3), (5, 0)]
    assert list(path.read_ranges(ranges)) == [content[at : at + size] for at, size in ranges]


def raised_by(function: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the caller compares it
        function()
    return caught.value


def test_errors_say_what_is_wrong_with_which_path(place: RemotePath) -> None:
    path = place / "a"
    missing = raised_by(lambda: path.read(9))
    assert (type(missing), missing.filename) == (FileNotFoundError, str(path))
    assert missing.strerror
    path.write(b"12345")
    for too_large in (lambda: path.read(4), lambda: whole_file(path, 4)):
        error = raised_by(too_large)
        assert isinstance(error, FileTooLargeError)
        assert str(error) == f"{path} is larger than 4 bytes, the limit for such a file"
    error = raised_by(lambda: list(path.read_ranges([(0, 3), (3, 4)])))
    assert (error.errno, error.strerror) == (errno.EIO, "ends within the 4 bytes at 3")


def test_a_bucket_that_is_missing_is_not_made() -> None:
    new_folder()
    path = RemotePath("s3://nobody/a")
    for call in (lambda: path.write(b"1"), path.files, path.size, lambda: path.read(1)):
        assert raised_by(call).filename == str(path)
    assert not path.exists()


def test_a_server_that_is_gone_is_an_error_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(remote, "_system", remote._system.__wrapped__)  # not the one that is known
    error = raised_by((folder / "a").files)
    assert "EndpointConnectionError: Could not connect" in error.strerror


def test_a_missing_package_is_named() -> None:
    error = raised_by(RemotePath("gs://bucket/a").files)
    assert error.strerror == "needs gcsfs: pip install composer3d[gs]"


def test_a_copy_has_all_files_and_goes(place: RemotePath) -> None:
    (place / "a").write(b"one")
    (place / "in" / "b").write(b"two")
    counts: list[int] = []
    with local_copy(place, counts.append) as folder:
        assert [(folder / name).read_bytes() for name in ("a", "in/b")] == [b"one", b"two"]
    assert not folder.exists()
    assert sum(counts) == 6


def test_a_copy_that_does_not_fit_is_not_begun(
    place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "a").write(b"one")
    monkeypatch.setattr(RemotePath, "files", lambda self: {"a": 1 << 60})
    with pytest.raises(OSError, match="bytes would be copied to "), local_copy(place):
        pass


def test_a_folder_on_a_disk_is_not_copied(tmp_path: Path) -> None:
    with local_copy(tmp_path) as folder:
        assert folder == tmp_path
    assert tmp_path.is_dir()


@pytest.mark.parametrize("name", ["../a", "in/../../a", "/a", "a b"])
def test_a_name_that_leads_out_of_the_copy_is_refused(
    place: RemotePath, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (place / "a").write(b"one")
    monkeypatch.setattr(RemotePath, "files", lambda self: {name: 3})
    with pytest.raises(OSError, match="a name that is not read"), local_copy(place):
        pass


def test_a_file_is_copied_too(place: RemotePath) -> None:
    place.write(b"one")
    assert place.sizes() == {"": 3}
    with local_copy(place) as path:
        assert (path.name, path.read_bytes()) == (place.name, b"one")
    assert not path.exists()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    (folder / "in").mkdir(parents=True)
    for name in ("a", "z", "in/a", "in/b"):
        (folder / name).write_bytes(name.encode())
    return folder


def test_an_upload_sends_all_files_and_those_that_publish_it_last(
    place: RemotePath, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    counts: list[int] = []
    create = RemotePath.create
    monkeypatch.setattr(RemotePath, "create", lambda self: names.append(str(self)) or create(self))
    upload(local, place, "a", counts.append)
    assert names == [f"{place}/{name}" for name in ("in/b", "z", "a", "in/a")]
    assert place.files() == {"a": 1, "z": 1, "in/a": 4, "in/b": 4}
    assert (place / "in" / "b").read(9) == b"in/b"
    assert sum(counts) == 10
    upload(local / "in" / "b", place.parent / "file")
    assert (place.parent / "file").read(9) == b"in/b"


def test_an_upload_that_fails_leaves_nothing(place: RemotePath, local: Path) -> None:
    def fail(n_bytes: int) -> None:
        raise KeyError

    for source in (local, local / "a"):
        with pytest.raises(KeyError):
            upload(source, place, report=fail)
        assert not place.exists()
    (local / "a b").write_bytes(b"")
    with pytest.raises(OSError, match="a name that is not read"):
        upload(local, place)
    assert not place.exists()


def test_an_upload_beside_other_files_is_not_published(place: RemotePath, local: Path) -> None:
    (place / "other").write(b"")
    with pytest.raises(OSError, match="another process writes there"):
        upload(local, place, "a")
    assert place.files() == {"other": 0}
