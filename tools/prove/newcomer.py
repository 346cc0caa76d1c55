"""Walk through docs/first_model.md as a new user, with the wheel alone; compare the tokens.

    bash tools/prove/run newcomer                         # in a new environment, which pip fills
    bash tools/prove/run newcomer --environment DIR       # in one that has all packages already
    bash tools/prove/run newcomer --keep DIR              # leaves the folder of the walk in DIR
    bash tools/prove/run newcomer --readme                # the commands of README.md instead

The wheel is built from this checkout and installed into a virtual environment. In an empty folder,
the page's recipe is saved, and its commands and its program run as they are printed, one after
another. The text is a part of the standard library. The text that transformers generates must be
the one that composer3d has generated, and the tokens too.

With ``--readme``, the commands of README.md run in a copy of this checkout. The quickstart makes
their environment. Those that run the tests are left out.

It prints a line for each command, with its seconds.

Exit status: 0 if all commands have the status 0 and the tokens are the same, 1 otherwise.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tools.prove.paths import ROOT
from tools.prove.proof import make_parser

PAGE = ROOT / "docs" / "first_model.md"
README = ROOT / "README.md"
# They take longer than a walk, and run all the time.
TESTS = ("bash tools/test", "bash tools/check")
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
LIMIT_S = 1800.0
# Packages of the standard library whose sources are the text: about 2 MB.
TEXT = ("asyncio", "email", "http", "idlelib", "json", "logging", "unittest", "xml")
# It prints the tokens that the page's program has made its text of.
SHOW_TOKENS = "import json\nprint(json.dumps(new.tolist()))\n"


class Step(NamedTuple):
    """One thing that the page has its reader do: a command, or the content of a file."""

    language: str
    text: str


def steps_of(page: str) -> list[Step]:
    """Return what a page has its reader do, in order. Each line of a bash block is a step."""
    steps = []
    for language, block in re.findall(r"^```(bash|toml|py)\n(.*?)^```$", page, re.DOTALL | re.M):
        if language == "bash":
            commands = [line.partition(" #")[0].strip() for line in block.splitlines()]
            steps += [Step("bash", command) for command in commands if command]
        else:
            steps.append(Step(language, block))
    return steps


class Walk:
    """The walk of a reader through the page, in ``folder``."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        programs = environment / "bin"
        self._python = programs / "python"
        # Nothing of this checkout, and what ``source venv/bin/activate`` sets.
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._environ = kept | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(environment),
        }

    def run(self, command: list[str], shown: str) -> str:
        """Run a command in the folder, print its line, and return its standard output."""
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        word = "ok" if done.returncode == 0 else f"FAILED (status {done.returncode})"
        print(f"{time.monotonic() - start:6.1f} s  {word}  {shown}", flush=True)
        if done.returncode:
            self.problems.append(shown)
            print((done.stdout + done.stderr)[-2000:], flush=True)
        return done.stdout

    def step(self, step: Step) -> str:
        """Do a step of the page, and return what it has printed."""
        match step.language:
            case "toml":
                (self.folder / "first.toml").write_text(step.text)
                return ""
            case "py":
                (self.folder / "program.py").write_text(step.text + SHOW_TOKENS)
                return self.run([str(self._python), "program.py"], "the program of the page")
            case _:
                return self.run(["bash", "-c", step.text], step.text)


def main(arguments: list[str]) -> int:
    """Walk through the page; returns the exit status."""
    parser = make_parser("newcomer", __doc__.partition("\n")[0])
    parser.add_argument("--environment", type=Path, help="a virtual environment to use again")
    parser.add_argument("--keep", type=Path, help="a folder to make, in which the walk remains")
    parser.add_argument("--readme", action="store_true", help="the commands of README.md instead")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="composer3d-newcomer-") as name:
        made = Path(name)
        folder = options.keep or made / "folder"
        if options.readme:
            copy_checkout(folder)
            walk = Walk(folder.resolve() / ".venv", folder.resolve())
            commands = [step for step in steps_of(README.read_text()) if step.language == "bash"]
            for step in commands:
                if step.text not in TESTS:
                    walk.step(step)
            if not commands:
                walk.problems.append(f"{README.name} has no command")
        else:
            folder.mkdir()
            walk = Walk(install(made, options.environment), folder.resolve())
            copy_text(folder / "text")
            compare(walk)
    minutes = (time.monotonic() - start) / 60
    verdict = "FAILED: " + ", ".join(walk.problems) if walk.problems else "all steps hold"
    print(f"newcomer: {verdict}, {minutes:.1f} minutes", flush=True)
    return 1 if walk.problems else 0


def copy_checkout(folder: Path) -> None:
    """Copy the files of this checkout that git would commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def install(made: Path, environment: Path | None) -> Path:
    """Install the wheel in an environment, by default a new one; return the environment."""
    source = made / "source"
    for name in ("composer3d", "recipes"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    start = time.monotonic()
    wheels = made / "wheels"
    _pip(sys.executable, "wheel", "--no-deps", "-w", str(wheels), str(source))
    (wheel,) = wheels.glob("*.whl")
    if environment is None:
        environment = made / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        wanted = [str(wheel), "transformers", "-c", str(CONSTRAINTS)]
    else:
        wanted = [str(wheel), "--no-deps", "--force-reinstall"]
    environment = environment.resolve()
    _pip(str(environment / "bin" / "python"), "install", *wanted)
    print(f"{time.monotonic() - start:6.1f} s  ok  build and install {wheel.name}", flush=True)
    return environment


def _pip(python: str, *arguments: str) -> None:
    # -I: a composer3d in PYTHONPATH would count as installed.
    command = [python, "-I", "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=LIMIT_S)


def copy_text(folder: Path) -> None:
    """Copy sources of the standard library as text files."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder.mkdir()
    for package in TEXT:
        for path in sorted((library / package).rglob("*.py")):
            if "test" not in path.relative_to(library).parts:
                name = "-".join(path.relative_to(library).with_suffix(".txt").parts)
                shutil.copy(path, folder / name)


def compare(walk: Walk) -> None:
    """Walk through the page, and compare what composer3d and transformers have generated."""
    generating = theirs = ours = ""
    for step in steps_of(PAGE.read_text()):
        printed = walk.step(step)
        if walk.problems:
            return
        if step.text.startswith("composer3d generate"):
            generating, ours = step.text, printed
        elif step.language == "py":
            theirs = printed
    if not (walk.folder / "runs" / "first" / "report.html").is_file():
        walk.problems.append("there is no report.html")
    as_json = walk.run(["bash", "-c", f"{generating} --json"], f"{generating} --json")
    tokens = json.loads(as_json.splitlines()[-1])["completions"][0]["tokens"]
    text, _, their_tokens = theirs.rstrip("\n").rpartition("\n")
    if ours.rstrip("\n") != text:
        walk.problems.append(f"the texts differ: {ours!r} and {text!r}")
    if not tokens:
        walk.problems.append("no token was generated")
    if json.loads(their_tokens) != tokens:
        walk.problems.append(f"the tokens differ: {tokens} and {their_tokens}")
    print(f"{len(tokens)} tokens, by composer3d and by transformers:\n{ours.rstrip()}", flush=True)
