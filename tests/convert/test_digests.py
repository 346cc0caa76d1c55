"""Torch files of convert carry digests of their content, which are checked."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert.convert import convert
from composer3d.convert.formats import facts_digest, open_source
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError, UserError
from tests.convert.changes import flip, refusal, rewrite_torch
from tests.convert.sample_checkpoints import make_dcp, same, tensors


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, beside the checkpoint ``dcp`` that it was made from."""
    folder = tmp_path_factory.mktemp("exported")
    convert(make_dcp(folder / "dcp"), folder / "a", "torch")
    return folder / "a"


@pytest.fixture
def export(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(exported, tmp_path))


def test_an_export_is_whole_and_torch_reads_it(exported: Path) -> None:
    report = inspect(exported)
    assert (report["whole"], report["notes"], report["problems"]) == (True, [], [])
    assert same(tensors(exported), tensors(exported.with_name("dcp")))
    held = torch.load(exported, weights_only=True)
    assert held["digests"].shape == (1 + report["count"], 16)
    assert all(map(any, held["digests"].tolist()))  # every row was written


def test_a_flipped_bit_of_a_tensor_is_found(export: Path) -> None:
    first, *_, last = torch.load(export, map_location="meta", weights_only=True)["model"].items()
    for name, tensor in (first, last):
        begin = tensor.untyped_storage()._checkpoint_offset
        flip(export, begin + tensor.nbytes - 1)
        problem = f"{export}: 'model.{name}' has another digest than the file says; copy it again"
        assert inspect(export)["problems"] == [problem]
        assert refusal(export, export.with_name("b"), "hf") == [problem]
        flip(export, begin + tensor.nbytes - 1)
    assert open_source(export).problems == []


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["composer3d"].update(step=6),
        lambda held: held["composer3d"]["data"].update(at=41),
        lambda held: held["files"].update({"merges.txt": "{}"}),
    ],
)
def test_a_changed_description_of_the_model_is_found(export: Path, change: Any) -> None:
    rewrite_torch(export, change)
    problem = (
        f"{export}: the description of its model has another digest than the file says; "
        "copy it again"
    )
    assert inspect(export)["problems"] == [problem]


def add_later_field(held: dict[str, Any], value: Any) -> None:
    """Add a field of a later version to the facts, with the right digest."""
    held["composer3d"]["later"] = value
    specs = {
        f"{part}.{name}": TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for part in ("model", "optim")
        for name, tensor in flat(held[part])
    }
    digest = facts_digest(held["composer3d"], held["files"], specs)
    held["digests"][0] = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


def flat(tree: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of nested dicts with the names of their paths."""
    return [
        (".".join((name, *rest)), tensor)
        for name, value in tree.items()
        for rest, tensor in (
            [((inner,), each) for inner, each in flat(value)]
            if isinstance(value, dict)
            else [((), value)]
        )
    ]


def test_a_file_of_a_later_version_is_not_damaged(export: Path) -> None:
    rewrite_torch(export, lambda held: add_later_field(held, {"a": [1, "b"]}))
    with pytest.raises(UserError) as caught:
        inspect(export)
    assert not isinstance(caught.value, CheckpointError)
    assert caught.value.lines == (
        f"{export} has the field 'later', which this version does not know; use a newer composer3d",
    )
    # One that its digest does not fit is damaged.
    rewrite_torch(export, lambda held: held["composer3d"].update(later=1))
    (problem,) = inspect(export)["problems"]
    assert problem.startswith(f"{export}: the description of its model has another digest")


def test_a_later_field_that_no_version_writes_is_refused_before_it_is_digested(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "composer3d.convert.formats.facts_digest", lambda *arguments: pytest.fail("it was digested")
    )
    for value in (["x" * 1000] * 2000, torch.ones(1), {1: 2}):
        rewrite_torch(export, lambda held, value=value: held["composer3d"].update(later=value))
        (problem,) = inspect(export)["problems"]
        assert "it has a field 'later', which no manifest has" in problem


@pytest.mark.parametrize(
    "files",
    [
        {"x.json": "{}"},
        {"merges.txt": ["{}"]},
        {"merges.txt": 1},
        [],
        None,
        {"merges.txt": "x" * 2000},
    ],
)
def test_files_that_no_export_carries_are_refused_before_they_are_digested(
    export: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer3d.convert.carried.TOTAL_LIMIT", 1000)
    monkeypatch.setattr(
        "composer3d.convert.formats.facts_digest", lambda *arguments: pytest.fail("it was digested")
    )
    rewrite_torch(export, lambda held: held.update(files=files))
    assert inspect(export)["problems"] == [
        f"{export} carries files that no export has; copy it again"
    ]


def test_many_names_over_one_storage_are_refused_before_they_are_digested(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(held: dict[str, Any]) -> None:
        one = torch.zeros(64, 1024)
        held["model"].update({f"x{at}": one for at in range(100)})
        held["digests"] = torch.zeros(len(held["digests"]) + 100, 16, dtype=torch.uint8)

    rewrite_torch(export, change)
    monkeypatch.setattr(
        "composer3d.convert.formats.digest_of", lambda tensor: pytest.fail("it was digested")
    )
    assert (
        f"{export} has fewer bytes than its tensors; copy it again" in inspect(export)["problems"]
    )


@pytest.mark.parametrize(
    "digests",
    [torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(0), [1], None, "x", torch.zeros(10**4)],
)
def test_digests_of_a_wrong_form_are_refused(export: Path, digests: Any) -> None:
    rewrite_torch(export, lambda held: held.update(digests=digests))
    assert (
        f"{export} has no digest for each of its tensors; copy it again"
        in inspect(export)["problems"]
    )


def test_an_export_without_digests_is_read_with_a_note(export: Path) -> None:
    """Files that do not belong to a model are dropped from it."""
    whole = tensors(export)
    rewrite_torch(export, lambda held: held.pop("digests"))
    rewrite_torch(export, lambda held: held["files"].update({"x.json": "{}", "../README.md": ""}))
    report = inspect(export)
    assert report["carried"] == []
    assert report["whole"]
    note = (
        f"nothing verifies {export}: an earlier composer3d wrote it without digests; "
        "convert adds them"
    )
    assert report["notes"] == [note]
    assert same(tensors(export), whole)
    assert convert(export, export.with_name("b"), "torch")["notes"] == [note]
    assert inspect(export.with_name("b"))["notes"] == []
