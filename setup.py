"""Makes the text for package indexes from README.md: links into the repository lead nowhere there.

All else that setuptools needs stands in pyproject.toml.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

# A link or picture of Markdown whose target is in the repository.
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)"
)


def replace_links(text: str, link: Callable[[re.Match[str]], str]) -> str:
    """Return a page with each of its ``LINK`` replaced. Those in blocks of code stay."""
    return "".join(
        part if part.startswith("```") else LINK.sub(link, part)
        for part in re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    )


def description(readme: str, address: str | None) -> str:
    """Return README.md for a page that is not in the repository. Pictures are left out.

    Args:
        readme: the text of README.md.
        address: the URL of the repository's files; None: links become text that names the file.
    """

    def link(match: re.Match[str]) -> str:
        picture, words, file, anchor = match.groups()
        if picture:
            return ""
        if address is not None:
            return f"[{words}]({address.rstrip('/')}/{file}{anchor or ''})"
        return file if file.endswith(words) else f"{words} ({file})"

    # A picture that stood alone leaves an empty paragraph.
    return re.sub(r"\n{3,}", "\n\n", replace_links(readme, link))


if __name__ == "__main__":  # tools/site uses the rest, where no setuptools need be
    from setuptools import setup

    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text(encoding="utf-8"))
    setup(
        long_description=description(
            (here / "README.md").read_text(encoding="utf-8"),
            project["tool"].get("composer3d", {}).get("files"),
        ),
        long_description_content_type="text/markdown",
    )
