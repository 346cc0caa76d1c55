"""Whatever a file holds, an import makes a recipe or refuses it, and does nothing else."""

import os
import random
from pathlib import Path

import pytest

from composer3d.facts.errors import RecipeError, UserError
from composer3d.imports.result import import_file
from composer3d.imports.source import MOST_BYTES
from composer3d.imports.translation import Translation
from composer3d.recipe.resolve import load
from tests.imports.configurations import DEEPSPEED, MEGATRON, NANOTRON, TORCHTITAN, imported

FILES = {"a.sh": MEGATRON, "b.json": DEEPSPEED, "c.toml": TORCHTITAN, "d.yaml": NANOTRON}


@pytest.mark.parametrize("name", FILES)
def test_the_text_is_the_recipe(name: str, tmp_path: Path) -> None:
    made = imported(tmp_path, name, FILES[name], model="llama3-8b", gpus=32)
    (tmp_path / "out.toml").write_text(made.text)
    assert load(tmp_path / "out.toml").recipe == made.resolved.recipe
    # Each value has its words beside it.
    lines = [line for line in made.text.splitlines() if " = " in line]
    assert all(" # " in line for line in lines)


def test_values_of_set_win_and_are_written(tmp_path: Path) -> None:
    made = imported(tmp_path, "a.sh", MEGATRON, ["optim.lr=1e-5", "run.name=mine"])
    assert made.resolved.recipe.optim.lr == 1e-5
    assert 'name = "mine"                  # --set run.name=mine' in made.text


def test_errors_name_the_words_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        imported(tmp_path, "a.sh", MEGATRON.replace("heads 16", "heads 15"))
    assert all("recipe.toml" not in line for line in error.value.lines)
    assert any("--num-attention-heads 15" in line for line in error.value.lines)
    with pytest.raises(RecipeError, match=r"--set mesh.zz=1: unknown key 'mesh.zz'"):
        imported(tmp_path, "a.sh", MEGATRON, ["mesh.zz=1"])


def test_nothing_is_executed_and_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.sh").write_text("TP=4\n")
    text = (
        "source other.sh\n. ./other.sh\n$(touch made1)\n`touch made2`\nX=$(touch made3)\n"
        "eval 'touch made4'\ntouch made5\n" + MEGATRON
    )
    before = sorted(os.listdir(tmp_path))
    assert imported(tmp_path, "a.sh", text).resolved.recipe.mesh.tp == 2
    python = "config = {'num_layers': __import__('os').system('touch made6'), 'tp': open('x', 'w')}"
    with pytest.raises(RecipeError):
        imported(tmp_path, "b.py", python)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "a.sh", "b.py"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", b"\xff\xfe", "must be UTF-8"),
        ("a.sh", b" " * (MOST_BYTES + 1), "is larger than"),
        ("a.sh", b"echo hello", "has no words of"),
        ("a.sh", b"", "has no words of"),
        ("a.json", b"[1]", "must be a JSON object"),
        ("a.json", b"{", "not JSON"),
        ("a.json", b'{"a":' * 40_000, "nests too deep"),
        ("a.json", b'{"train_batch_size": NaN}', "which JSON does not have"),
        ("a.json", b'{"train_batch_size": ' + b"9" * 9000 + b"}", "not JSON"),
        ("a.doc", b"x", "the ending .doc is unknown"),
        ("a.py", b"x = 1", "has no words of"),
        # A program needs two words of its own; other files have words that many share.
        ("a.json", b'{"lr": 1e-4, "seed": 1, "batch_size": 8, "hidden_size": 64}', "has no words"),
        (
            "a.json",
            b'{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}',
            "two must be one program's",
        ),
        ("a.json", b'{"train_batch_size": 8, "epochs": 3}', "two must be one program's"),
        ("a.json", b'{"name": "x", "version": "1", "dependencies": {}}', "has no words of"),
        (
            "a.json",
            b'{"model_type": "bert", "hidden_size": 64, "num_attention_heads": 2}',
            "is a config.json of Hugging Face",
        ),
        ("a.toml", b"[project]\nname = 'x'\n[tool.x]\ntraining = 1\n", "has no words of"),
        ("a.toml", b"[model]\nname = 'x'\n[training]\nlr = 1\n", "two must be one program's"),
        ("a.yaml", b"model: {hidden_size: 8}\noptimizer: {lr: 1}\n", "has no words of"),
        ("a.sh", b"python train.py --lr 1e-4 --bf16 --max-steps 5 --seed 1", "has no words of"),
    ],
)
def test_a_hostile_file_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=message) as error:
        import_file(str(tmp_path / name), gpus=8)
    assert all("\n" not in line and len(line) < 5000 for line in error.value.lines)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    for path in (tmp_path / "pipe.sh", tmp_path, tmp_path / "none.sh"):
        with pytest.raises(RecipeError):
            import_file(str(path))


def test_words_of_theirs_stay_on_one_line(tmp_path: Path) -> None:
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, '
    text += '"x\\n[run]\\nname": "y\\u001b[2J"}'
    made = imported(tmp_path, "a.json", text, gpus=8, model="debug-tiny")
    lines = [*made.made.taken, *made.made.lost, *made.made.assumed, *made.text.splitlines()]
    assert all(line.isprintable() for line in lines)
    for value in ("8\\n9", "x" * 9000):
        wrong = text.replace('"train_batch_size": 8', f'"train_batch_size": "{value}"')
        with pytest.raises(RecipeError) as error:
            imported(tmp_path, "b.json", wrong, gpus=8, model="debug-tiny")
        assert all(line.isprintable() and len(line) < 500 for line in error.value.lines)
    evil = MEGATRON.replace("--lr 3.0e-4", '--lr 3e-4 --data-path "a\n[run]\nsteps = 5"')
    made = imported(tmp_path, "a.sh", evil)
    assert made.resolved.recipe.run.steps == 1000


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_make_a_recipe_or_lines(seed: int, tmp_path: Path) -> None:
    """Bytes are changed, doubled and cut, and numbers replaced: no exception of another kind."""
    chance = random.Random(seed)
    for number in range(60):
        name, text = chance.choice(sorted(FILES.items()))
        letters = list(text)
        for _ in range(chance.randint(1, 12)):
            place = chance.randrange(len(letters))
            letters[place] = chance.choice(
                [
                    "",
                    letters[place] * 3,
                    "\0",
                    "$",
                    '"',
                    "'",
                    "(",
                    ")",
                    "{",
                    "}",
                    "-1",
                    "0",
                    "9" * 30,
                    "1e999",
                    "é",
                    "\n",
                ]
            )
        if chance.random() < 0.3:
            letters = letters[: chance.randrange(len(letters))]
        path = tmp_path / f"{number}-{name}"
        path.write_text("".join(letters))
        lines: tuple[str, ...] = ()
        try:
            import_file(str(path), gpus=chance.choice([None, 1, 8, 48]), model="llama3-8b")
        except UserError as error:
            lines = error.lines or ("",)
        assert all(line and "\n" not in line for line in lines)


def test_lists_have_an_end() -> None:
    made = Translation("DeepSpeed", "x", {})
    made.lost += [f"line {number}" for number in range(2000)]
    made.finish()
    assert len(made.lost) == 501
    assert made.lost[-1] == "and 1,500 more"


def test_an_import_leaves_out_only_what_is_optional(tmp_path: Path) -> None:
    text = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = 1001\n[compile]\n"
    text += "enable = true\n[parallelism]\npipeline_parallel_degree = 2\n"
    text += "pipeline_parallel_schedule = 'ZBVZeroBubble'\n"
    made = imported(tmp_path, "x.toml", text, gpus=16)
    assert not made.resolved.recipe.compile.enabled
    (line,) = [line for line in made.made.lost if line.startswith("compile.enable = true: ")]
    assert line.endswith("two halves; the recipe has compile.enabled = false")
    # A mesh that does not fit the sequence is not changed.
    text += "tensor_parallel_degree = 2\n"
    with pytest.raises(RecipeError, match=r"data.seq_len = 1001 must be a multiple of mesh.tp = 2"):
        imported(tmp_path, "y.toml", text, gpus=16)
