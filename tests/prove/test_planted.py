"""Modules of a stranger that lie where Python finds them are never imported.

Every command is run on the folder of a run, checkpoints, a Hugging Face folder, tokens, a row of
hardware and files of other programs, all of which name such a module wherever they can.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from composer3d import cli
from composer3d.commands.registry import make_parser
from composer3d.runtime.launch import Pool
from tests.facts.test_hardware import GOOD_ROW
from tests.facts.test_trace import write as write_trace
from tools.prove.hostile.base import CHECKPOINT, make_base
from tools.prove.hostile.case import enter
from tools.prove.hostile.checkpoints import seal, write_manifest
from tools.prove.paths import ROOT

NAME = "runs.evil.payload:X"
RUN, SAVED = "runs/evil", CHECKPOINT.replace("victim", "evil")
_TABLE = f'architecture = "{NAME}"'
# The run whose checkpoints have pickles that name the module.
PICKLED = "runs/pickled"
_OWN = ["own.toml", "--set", "run.name=evil"]
_HF = ["from-hf.toml"]
_CHAT = ["chats.jsonl", "-o", "out7", "--kind", "chat"]
_FILES = ["recipe.py", "recipe.json", "titan.json", "titan.toml", "nano.yaml", "run.sh"]

_OURS = 'architecture = "llama"'
_AS_KEY = json.dumps(f"a = 1 }}\n{_TABLE}\nz = {{ b")
_AS_TABLE = json.dumps(f"model]\n{_TABLE}\n[x")
_AS_VALUE = json.dumps(f'a"\n[model]\n{_TABLE}\n#')

# How the text of a recipe names the module: a part of the text, and what stands in its place.
TEXTS = {
    "a key": (_OURS, _TABLE),
    "an escaped key": (_OURS, f'"arch\\u0069tecture" = "{NAME}"'),
    "a base": ("[run]", 'base = "base.toml"\n[run]'),
    "a key of an inline table": (_OURS, f"junk = {{ {_AS_KEY} = 1 }}"),
    "the name of a table": ("[run]", f"[{_AS_TABLE}]\na = 1\n[run]"),
    "a value": ('name = "victim"', f"name = {_AS_VALUE}"),
}

NAMED = ("a key", "an escaped key", "a base")  # with these, the recipe itself names the module

JOBS = ("train", "doctor", "eval")

# What is run, by command. A command that reads no file that a stranger may have made has what a
# user would run beside such files.
COMMANDS: dict[str, list[list[str]]] = {
    "recipes": [["cp", "quickstart"], ["show", f"{RUN}/recipe.toml"]],
    "check": [_HF, [*_OWN, "--set", f"checkpoint.init={SAVED}"]],
    "plan": [
        [*_HF, "--gpu", "row.toml", "--top", "1", "--write", "plan.toml"],
        [*_OWN, "--gpu", "odd-row.toml"],
    ],
    "layout": [_HF],
    "timeline": [["--measured", RUN], [*_HF, "--gpu", "odd-row.toml", "--set", "mesh.pp=2"]],
    "dryrun": [_HF],
    "doctor": [_HF],
    "verify": [[*_OWN, "--layouts", "layouts.txt"]],
    "train": [
        _HF,
        [*_OWN, "--set", "data.path=odd-tokens"],
        [*_OWN, "--set", "run.name=new", "--set", f"checkpoint.init={SAVED}"],
        [*_OWN, "--set", "run.name=pickled"],
        [*_OWN, "--set", f"checkpoint.resume={SAVED}"],
        _OWN,
    ],
    "sweep": [
        [*_HF, "--set", "run.seed=1,2", "--print"],
        [*_OWN, "--set", "run.seed=1,2", "--print"],
    ],
    "launch": [["cp", "node"]],
    "report": [[RUN], [PICKLED], [RUN, "runs/victim", "--json", "-o", "two.html"]],
    "inspect": [
        [RUN],
        [SAVED],
        [PICKLED],
        ["hf"],
        ["one.pt"],
        ["meta"],
        ["odd-tokens"],
        ["dataset"],
    ],
    "convert": [
        [SAVED, "out", "--to", "hf"],
        [RUN, "out2", "--to", "hf", "--logits"],
        [PICKLED, "out9", "--to", "hf"],
        ["hf", "out3", "--to", "dcp"],
        ["one.pt", "out4", "--to", "hf"],
        ["meta", "out5", "--to", "hf"],
    ],
    "generate": [
        [RUN, "--prompt", "a", "--max-tokens", "1"],
        [PICKLED, "--prompt", "a", "--max-tokens", "1"],
        ["hf", "--prompt", "a", "--max-tokens", "1"],
        ["hf", "--prompt", "a", "--max-tokens", "1", "--chat"],
        ["runs/victim", "--prompt", "a", "--max-tokens", "1", "--tokenizer", "hf/tokenizer.json"],
    ],
    "eval": [[RUN, "tokens"], ["runs/victim", "odd-tokens"], ["hf", "tokens"]],
    "prepare": [
        ["corpus.txt", "-o", "out6", "--tokenizer", "hf/tokenizer.json"],
        [*_CHAT, "--tokenizer", "hf/tokenizer.json"],
        [*_CHAT, "--tokenizer", "bytes", "--chat-template", "odd.jinja"],
        ["dataset", "-o", "out8", "--tokenizer", "bytes"],
    ],
    "import": [[file, "-o", f"{file}.toml"] for file in _FILES],
    "completion": [["bash"]],
}


class Ran(NamedTuple):
    """What a command did: its arguments, its status, what it printed, and whether code ran."""

    arguments: list[str]
    status: int
    output: str
    executed: bool


def plant(folder: Path, old: str, new: str) -> None:
    """Change the valid files in ``folder`` so that they name the module.

    Args:
        folder: the files of ``make_base``.
        old, new: a part of the recipe of a run, and what stands in its place.
    """
    code = f"open({str(folder / 'MARKER')!r}, 'a').write('ran')\n"
    shutil.copytree(folder / "runs/victim", folder / RUN)
    for path in ("payload.py", "runs/__init__.py", "runs/evil/payload.py", "runs/evil/__init__.py"):
        (folder / path).write_text(code)
    text = (folder / RUN / "recipe.toml").read_text()
    assert old in text
    # Without a value of its own, the recipe has that of a base, or one that is smuggled in.
    hostile = text.replace(old, new).replace(_OURS, "#")
    for path in (folder / RUN / "recipe.toml", folder / RUN / "recipe-00000001.toml"):
        path.write_text(hostile)
    (folder / RUN / "base.toml").write_text(f"[model]\n{_TABLE}\n")
    (folder / "base.toml").write_text(f"[model]\n{_TABLE}\n")
    write_trace(folder / RUN)
    for path in (folder / RUN).glob("*/*.jsonl"):
        path.write_text(path.read_text().replace("1F1B", NAME))

    manifest = json.loads((folder / SAVED / "manifest.json").read_text())
    manifest["recipe"] = hostile
    if new == _TABLE:
        manifest["model"]["model.architecture"] = NAME
    write_manifest(folder / SAVED, manifest)
    # A pickle that imports the module when Python's own unpickler reads it.
    shutil.copytree(folder / "runs/victim", folder / PICKLED)
    for file in (
        f"{SAVED}/.metadata",
        "one.pt",
        "meta/consolidated.00.pth",
        "hf/pytorch_model.bin",
    ):
        path = folder / file.replace(RUN, PICKLED)
        path.write_bytes(b"\x80\x02cruns.evil.payload\nX\nq\x00.")
    seal(folder / SAVED.replace(RUN, PICKLED))
    _plant_beside(folder)


def _plant_beside(folder: Path) -> None:
    """Change the files that belong to no run."""
    map_of_classes = {"AutoConfig": "payload.X", "AutoModelForCausalLM": "payload.X"}
    template = "{% import 'payload' as payload %}{{ payload.X }}"
    (folder / "odd.jinja").write_text(template)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / "hf" / name
        content = json.loads(path.read_text()) if path.exists() else {}
        content |= {"auto_map": map_of_classes, "architectures": [NAME], "tokenizer_class": NAME}
        content["chat_template"] = template
        path.write_text(json.dumps(content | {"trust_remote_code": True, "custom_code": NAME}))
    shutil.copytree(folder / "tokens", folder / "odd-tokens")
    manifest = json.loads((folder / "tokens" / "tokens.json").read_text())
    (folder / "odd-tokens" / "tokens.json").write_text(json.dumps(_named(manifest)))
    row = GOOD_ROW.replace('"Mine"', f'"{NAME}"')
    (folder / "row.toml").write_text(row)
    (folder / "odd-row.toml").write_text(f"{row}[model]\n{_TABLE}\n")
    (folder / "dataset").mkdir()
    (folder / "dataset" / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data.arrow"}], "_format_type": NAME})
    )
    (folder / "dataset" / "dataset_info.json").write_text(
        json.dumps({"builder_name": "payload", "features": {"text": {"_type": NAME}}})
    )
    (folder / "dataset" / "data.arrow").write_bytes(b"ARROW1\0\0")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (folder / "layouts.txt").write_text(
        f"model.architecture={NAME}\n model.architecture = {NAME}\n"
    )
    foreign = {
        "num_layers": NAME,
        "spec": [NAME, "X"],
        "architecture": NAME,
        "model": {"name": NAME},
    }
    (folder / "recipe.py").write_text(f"import payload\nargs = dict(num_layers=2, spec={NAME!r})\n")
    (folder / "recipe.json").write_text(json.dumps({"zero_optimization": {"stage": 1}} | foreign))
    titan: dict[str, Any] = {"model": {"name": NAME, "flavor": NAME, "converters": [NAME]}}
    titan |= {"experimental": {"custom_import": "payload"}, "training": {"steps": 2}}
    (folder / "titan.json").write_text(json.dumps(titan))
    (folder / "titan.toml").write_text(
        f'[model]\nname = "{NAME}"\n{_TABLE}\n[experimental]\ncustom_import = "payload"\n'
    )
    (folder / "nano.yaml").write_text(
        "parallelism: {dp: 1}\nmodel: !!python/name:payload.X\ntokens: !!python/module:payload {}\n"
    )
    (folder / "run.sh").write_text("python -c 'import payload'\ntorchrun x.py --spec payload X\n")


def _named(value: Any) -> Any:
    """Replace each text in a JSON value by the name of the module."""
    if isinstance(value, dict):
        return {key: _named(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner) for inner in value]
    return NAME if isinstance(value, str) else value


def serve(folder: str, commands: list[list[str]]) -> list[Ran]:
    """Run commands in this process, as ``PYTHONPATH=. composer3d`` does."""
    enter(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT)])
    found = []
    for arguments in commands:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                status = cli.main(arguments)
            except BaseException:
                status = -1
                traceback.print_exc(file=output)
        marker = Path(folder, "MARKER")
        found.append(Ran(arguments, status, output.getvalue(), marker.exists()))
        marker.unlink(missing_ok=True)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "base"
    make_base(folder, pool)
    own = (folder / "recipe.toml").read_text().replace("steps = 4", "steps = 3")
    (folder / "own.toml").write_text(own)
    head, _, tail = own.partition("[model]")
    shaped = tail.partition("[mesh]")[2]
    (folder / "from-hf.toml").write_text(f'{head}[model]\nhf = "hf"\n[mesh]{shaped}')
    return folder


def test_every_command_is_run_on_planted_files() -> None:
    assert sorted(COMMANDS) == sorted(make_parser().commands or {})


@pytest.mark.parametrize("text", TEXTS)
def test_no_command_runs_a_planted_module(
    tmp_path: Path, base: Path, pool: Pool, text: str
) -> None:
    folder = tmp_path / "planted"
    shutil.copytree(base, folder)
    plant(folder, *TEXTS[text])
    # With another text, only the commands that read the run's recipe are run again.
    lines = [
        [name, *line]
        for name, found in COMMANDS.items()
        for line in found
        if text == "a key" or RUN in line or SAVED in line
    ]
    lines.append(["check", f"{RUN}/recipe.toml"])  # by its name: the trap can be sprung
    # A command that forms groups has a process of its own.
    alone = [[line] for line in lines if line[0] in JOBS]
    tasks = [[line for line in lines if line[0] not in JOBS], *alone]
    ran = []
    for commands in tasks:
        ran += pool.run(serve, {"folder": str(folder), "commands": commands}, world_size=1)[0]
    assert len(ran) == len(lines)
    for one in ran:
        assert one.status in (0, 1, 2), one
        assert "Traceback" not in one.output, one
        assert one.status == 0 or one.output.count("\n") <= 12, one
        assert one.executed == (text in NAMED and one.arguments == lines[-1]), one
