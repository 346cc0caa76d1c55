"""The pages of the web site, before Sphinx makes HTML of them."""

from pathlib import Path

import pytest

from tools.prove.paths import ROOT
from tools.site import pages


def test_every_page_is_in_the_navigation_once() -> None:
    shown = [name for names in pages.PARTS.values() for name in names]
    written = [path.stem for path in (ROOT / "docs").glob("*.md")]
    assert sorted(shown) == sorted([*written, "api"])


def test_the_folder_has_the_pages_and_the_files_that_they_link_to(tmp_path: Path) -> None:
    pages.write(tmp_path)
    index = (tmp_path / "index.md").read_text()
    assert index.startswith("# composer3d\n")
    assert "docs/first_model\ndocs/fine_tuning" in index
    assert "(docs/guide.md)" in index
    assert (tmp_path / "recipes/quickstart.toml").exists()
    assert (tmp_path / "docs/run.svg").exists()
    # A folder has no page: its words stay.
    assert "its files are in\ntools/gpu/results" in (tmp_path / "docs/gpu.md").read_text().lower()
    assert (tmp_path / "docs/matrix.md").read_text().startswith("---\norphan: true\nnosearch: true")


def test_the_reference_has_every_public_name() -> None:
    page = pages.api_page()
    assert ".. autofunction:: composer3d.compose\n" in page
    assert ".. autoclass:: composer3d.Recipe\n   :members:\n" in page
    assert ".. autodata:: composer3d.IGNORE_INDEX\n" in page


def test_llms_txt_lists_each_page_with_its_first_sentence() -> None:
    text = pages.llms_page()
    assert text.startswith("# composer3d\n\n> Train Llama-style models over many devices")
    assert "- [Dry run](docs/dryrun/): `composer3d dryrun RECIPE` runs one training step" in text
    assert "```" not in text


def test_a_link_that_leads_nowhere_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text("# A page\n\n[words](docs/none.md)\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"page.md: the link docs/none.md leads nowhere"):
        pages._copy("page.md", tmp_path / "out")
