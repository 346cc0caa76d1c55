"""Makes the folder from which Sphinx builds the site: ``python -m tools.site.pages FOLDER``."""

import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from setup import replace_links
from tools.prove.paths import ROOT

# The pages of docs/, by part of the navigation. Those of an unnamed part are only linked to.
PARTS: Mapping[str, tuple[str, ...]] = {
    "Begin": ("first_model", "fine_tuning", "guide", "recipes", "reference", "cli"),
    "Axes": ("axis-pp", "axis-dp", "axis-cp", "axis-tp", "experts", "optimizers"),
    "Plan": ("plan", "planner_table", "dryrun", "timeline", "scale", "doctor"),
    "Run": ("data", "launching", "jobs", "checkpoints", "review", "generate"),
    "Trust": ("proofs", "performance", "gpu", "comparison", "coming_from_elsewhere"),
    "Build": ("library", "api", "own_model", "architecture"),
    "": ("matrix",),
}
_CONFIGURATION = """project = "composer3d"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "composer3d"
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 4
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Collectives"]
exclude_patterns = [".doctrees"]
"""


def write(folder: Path) -> None:
    """Write the pages, the reference of the library, and what Sphinx needs, into a folder."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tools/bench/README.md"):
        _copy(name, folder)
    for path in (ROOT / "docs").iterdir():
        _copy(f"docs/{path.name}", folder)
    readme = folder / "README.md"
    (folder / "index.md").write_text(readme.read_text() + _navigation())
    readme.unlink()
    (folder / "docs" / "api.md").write_text(api_page())
    (folder / "conf.py").write_text(_CONFIGURATION)
    (folder / "llms.txt").write_text(llms_page())


def _copy(name: str, folder: Path) -> None:
    """Copy a file, and if it is a page, the files that it links to."""
    target = folder / name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not name.endswith(".md"):
        shutil.copyfile(ROOT / name, target)
        return
    here = (ROOT / name).parent

    def link(match: re.Match[str]) -> str:
        picture, words, to, anchor = match.groups()
        path = (here / to).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            raise SystemExit(f"{name}: the link {to} leads nowhere")
        if path.is_dir():
            return str(words)  # a folder has no page
        if path == ROOT / "README.md":
            to = to.replace("README.md", "index.md")
        elif path.suffix != ".md":
            _copy(str(path.relative_to(ROOT)), folder)
        return f"{picture}[{words}]({to}{anchor or ''})"

    text = replace_links((ROOT / name).read_text(), link)
    if name == "docs/matrix.md":
        # A table of thousands of rows would be the answer to most searches.
        text = f"---\norphan: true\nnosearch: true\n---\n{text}"
    target.write_text(text)


def _navigation() -> str:
    lines = []
    for part, names in PARTS.items():
        if part:
            pages = "\n".join(f"docs/{name}" for name in names)
            lines.append(f"\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n{pages}\n```\n")
    others = "CONTRIBUTING\nCHANGELOG\ntools/bench/README"
    return "".join(lines) + f"\n```{{toctree}}\n:hidden:\n:caption: Project\n\n{others}\n```\n"


def api_page() -> str:
    """Return the page of the public names, by the package that they come from."""
    from composer3d import _MODULES
    from composer3d import __getattr__ as value_of

    packages: dict[str, list[str]] = defaultdict(list)
    for name, module in _MODULES.items():
        packages[module.split(".")[1]].append(name)
    lines = [
        "# Reference of the library",
        "",
        "All public names, from `composer3d` itself: `from composer3d import ...`. "
        "[library.md](library.md) shows how they go together.",
    ]
    for package, names in packages.items():
        lines += ["", f"## {package}", ""]
        for name in names:
            value = value_of(name)
            kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
            lines += ["```{eval-rst}", f".. auto{kind}:: composer3d.{name}"]
            if kind == "class":
                # The docstring of a class says what its fields are.
                fields = getattr(value, "__annotations__", {})
                lines += ["   :members:", f"   :exclude-members: {', '.join(fields)}"]
            lines.append("```")
    return "\n".join(lines) + "\n"


def llms_page() -> str:
    """Return ``llms.txt``: each page with its title and its first sentence (llmstxt.org)."""
    lines = ["# composer3d", "", f"> {_beginning((ROOT / 'README.md').read_text())[1]}"]
    for part, names in PARTS.items():
        lines += ["", f"## {part or 'Tables'}", ""]
        for name in names:
            text = api_page() if name == "api" else (ROOT / "docs" / f"{name}.md").read_text()
            title, sentence = _beginning(text)
            lines.append(f"- [{title}](docs/{name}/): {sentence}")
    return "\n".join(lines) + "\n"


def _beginning(text: str) -> tuple[str, str]:
    """Return the title of a page, and its first sentence, without links."""
    title, _, rest = text.removeprefix("# ").partition("\n")
    paragraphs = re.sub(r"^```.*?^```$", "", rest, flags=re.M | re.S).strip().split("\n\n")
    paragraph = " ".join(paragraphs[0].split())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return title, re.split(r"(?<=[.:!?])\s", plain)[0].rstrip(":")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
