"""The walk through docs/first_model.md. ``tools/prove/run newcomer`` does it from a wheel."""

import json
import shlex
from pathlib import Path

import pytest

from composer3d.recipe.resolve import load
from tools.prove.newcomer import PAGE, README, TESTS, Step, Walk, compare, steps_of

STEPS = steps_of(PAGE.read_text())


def test_the_page_goes_from_text_to_transformers() -> None:
    commands = [shlex.split(step.text)[1] for step in STEPS if step.language == "bash"]
    words = ["prepare", "check", "plan", "verify", "train", "report", "generate", "convert"]
    assert list(dict.fromkeys(word for word in commands if word in words)) == words
    assert [step.language for step in STEPS if step.language != "bash"] == ["toml", "py"]


def test_the_recipe_of_the_page_fits_its_commands(tmp_path: Path) -> None:
    (content,) = (step.text for step in STEPS if step.language == "toml")
    path = tmp_path / "first.toml"
    path.write_text(content)
    recipe = load(str(path), check_files=False).recipe
    assert recipe.world_size == 4
    (prepare,) = (step.text for step in STEPS if "prepare" in step.text)
    assert f"--train-tokenizer {recipe.model.vocab}" in prepare
    (train,) = (step.text for step in STEPS if "train first" in step.text)
    assert train.endswith(path.name)
    assert f"{recipe.run.out_dir}/{recipe.run.name}" in " ".join(step.text for step in STEPS)


def test_both_programs_get_the_same_prompt_and_as_many_tokens() -> None:
    sample, generate = (step.text for step in STEPS if step.text.startswith("composer3d generate"))
    # A reader looks at a sample; the last text is the one that is compared.
    assert "--temperature" in sample
    assert "--temperature" not in generate
    (program,) = (step.text for step in STEPS if step.language == "py")
    words = shlex.split(generate)
    assert f'tokenizer("{words[words.index("--prompt") + 1]}"' in program
    assert f"max_new_tokens={words[words.index('--max-tokens') + 1]}," in program


class Pretended(Walk):
    """A walk that runs nothing."""

    def __init__(self, folder: Path, theirs: str, ours: str = "ab", status: int = 0) -> None:
        super().__init__(folder, folder)
        self._theirs, self._ours, self._status = theirs, ours, status
        self.shown: list[str] = []
        (folder / "runs" / "first").mkdir(parents=True)
        (folder / "runs" / "first" / "report.html").touch()

    def run(self, command: list[str], shown: str) -> str:
        self.shown.append(shown)
        if self._status:
            self.problems.append(shown)
        if shown.endswith("--json"):
            return json.dumps({"completions": [{"tokens": [7, 8]}]}) + "\n"
        return self._theirs if command[-1] == "program.py" else f"{self._ours}\n"


@pytest.mark.parametrize(
    ("theirs", "problems"),
    [
        ("ab\n[7, 8]\n", []),
        ("ab\n[7, 9]\n", ["the tokens differ"]),
        ("ac\n[7, 8]\n", ["the texts differ"]),
    ],
)
def test_other_tokens_or_texts_are_a_problem(
    theirs: str, problems: list[str], tmp_path: Path
) -> None:
    walk = Pretended(tmp_path, theirs)
    compare(walk)
    assert [problem.partition(": ")[0] for problem in walk.problems] == problems
    assert len(walk.shown) == len(STEPS)  # without the recipe, and with the tokens


def test_the_walk_ends_at_a_command_that_fails(tmp_path: Path) -> None:
    walk = Pretended(tmp_path, "", status=1)
    compare(walk)
    assert walk.problems == walk.shown == [STEPS[0].text]


def test_the_commands_of_the_readme_begin_with_the_quickstart() -> None:
    commands = [step.text for step in steps_of(README.read_text()) if step.language == "bash"]
    assert commands[0] == "bash tools/quickstart"
    assert set(TESTS) < set(commands)


def test_a_page_with_another_language_has_no_step_of_it() -> None:
    page = "```bash\na # b\n\nc\n```\n```sh\nd\n```\n"
    assert steps_of(page) == [Step("bash", "a"), Step("bash", "c")]
