"""``composer3d eval --tasks``: the figures of lm-eval are those of its adapter to transformers.

The tests that need lm-eval skip themselves without it, as composer3d[dev] does not have it: with
its own needs it takes 350 MB. These commands install and run them:

    .venv-test/bin/pip install -c tools/constraints.txt lm-eval==0.4.13 accelerate
    bash tools/test tests/generate/test_tasks.py
"""

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import composer3d
from composer3d import cli
from composer3d.commands import eval_tasks
from composer3d.facts.errors import DataError
from composer3d.generate import tasks
from composer3d.models.llama.shape import ModelShape
from composer3d.runtime.launch import Pool
from tests.data.sample_chats import END, write_tokenizer
from tests.generate.jobs import MODELS, answer_of, make_checkpoint, run_command
from tests.models.moe.transformers_models import SMALL, compute_in_float64, load_folder
from tests.test_readme import blocks
from tools.prove.paths import ROOT

NEEDED = ("lm_eval", "accelerate")
needs_lm_eval = pytest.mark.skipif(
    not all(map(find_spec, NEEDED)),
    reason="lm-eval or accelerate is not installed: .venv-test/bin/pip install -c "
    "tools/constraints.txt lm-eval==0.4.13 accelerate",
)
# Other packages warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = ModelShape(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn=96, vocab=512, rope_theta=1e4)
LONGEST = 48
TEXT = "hello there friend what is the weather it sunny and warm today then"
CONFIGS: dict[str, str] = {
    # Answers of one token share their context, and others have several tokens.
    "choices": (
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    ),
    "likelihood": (
        'output_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: perplexity}, {metric: acc}]\n"
    ),
    # Up to 100 tokens, in windows of 48.
    "rolling": (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{long}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    ),
    # The context is cut to 28 tokens for some documents.
    "answers": (
        'output_type: generate_until\ndoc_to_text: "{{long}}"\ndoc_to_target: "{{text}}"\n'
        'generation_kwargs: {until: ["he", " t"], max_gen_toks: 20}\n'
        "metric_list: [{metric: exact_match}]\n"
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of small tasks over a local file of documents, which no text repeats."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(4)

    def text(count: int) -> str:
        return " ".join(draw.choice(TEXT.split()) for _ in range(count))

    documents = [
        {
            "question": text(5 + number) + "?",
            "choices": ["a", "b", text(1), text(3)],
            "gold": number % 4,
            "text": text(3),
            "long": text(number * 9 + 2),
        }
        for number in range(6)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    for name, config in CONFIGS.items():
        write_task(folder, name, config)
    return folder


def write_task(folder: Path, name: str, config: str) -> str:
    """Write a task over the documents of ``folder``; return its path."""
    file = folder / f"{name}.yaml"
    file.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n"
        f"  data_files: {{test: {folder}/data.jsonl}}\n  cache_dir: {folder}/cache\n"
        f"test_split: test\nfewshot_split: test\n{config}"
    )
    return str(file)


def paths_of(files: Path) -> list[str]:
    return [str(files / f"{name}.yaml") for name in CONFIGS]


def save_model(
    folder: Path,
    name: str = "llama, tied",
    *,
    longest: int = LONGEST,
    wide: pytest.MonkeyPatch | None = None,
) -> Any:
    """Save a random model of MODELS in float64, with a tokenizer that begins a text with <s>.

    Returns:
        The model of transformers, which computes in float64 throughout if ``wide`` lets it.
    """
    write_tokenizer(folder, eos=END)
    torch.manual_seed(15)
    family, settings = MODELS[name]
    sizes = {"vocab_size": 512, "max_position_embeddings": longest, "eos_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**SMALL | settings | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.double().save_pretrained(folder)
    if wide is not None:
        compute_in_float64(wide, config.model_type)
    return load_folder(folder, torch.float64)


def evaluate_with(model: Any, names: list[str], **options: Any) -> dict[str, Any]:
    """Evaluate tasks of files as a user of lm-eval does."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    chosen = {"tasks": names, "task_manager": manager, "bootstrap_iters": 100, **options}
    found: dict[str, Any] = lm_eval.simple_evaluate(model=model, **chosen)
    return found


def evaluate_by_transformers(
    model: Any,
    folder: Path,
    names: list[str],
    *,
    hflm: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    adapter = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, **(hflm or {}))
    return evaluate_with(adapter, names, **options)


def assert_close(ours: Any, theirs: Any) -> None:
    """Require the same structure, texts and truths, and numbers up to float64's rounding."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True)
    else:
        assert ours == theirs


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Require the same figures, and the same answers to each request of each document."""
    for key in ("results", "n-samples", "n-shot"):
        assert_close(ours[key], theirs[key])
    for task, samples in theirs["samples"].items():
        for one, other in zip(ours["samples"][task], samples, strict=True):
            for key in ("doc_id", "arguments", "resps", "filtered_resps"):
                assert_close(one[key], other[key])


@needs_lm_eval
@pytest.mark.parametrize(
    ("name", "shots", "batch"),
    [
        ("llama, tied", 0, 1),
        ("llama, tied", 2, 3),
        ("mistral, window 7", 1, 4),
        ("qwen 3 moe", 1, 4),
    ],
)
def test_answers_and_figures_are_those_of_transformers(
    name: str,
    shots: int,
    batch: int,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every log-likelihood, every text and every figure, on each kind of task."""
    model = save_model(tmp_path / "m", name, wide=monkeypatch)
    theirs = evaluate_by_transformers(model, tmp_path / "m", paths_of(files), num_fewshot=shots)
    with composer3d.lm_eval_model(tmp_path / "m", batch=batch, device="cpu") as ours:
        assert_same(evaluate_with(ours, paths_of(files), num_fewshot=shots), theirs)
    answers = [sample["resps"] for sample in theirs["samples"]["answers"]]
    assert len({str(answer) for answer in answers}) > 2
    assert len({len(answer[0][0]) for answer in answers}) > 2


@needs_lm_eval
@pytest.mark.parametrize(
    ("eos", "adds", "longest"),
    [(END, False, None), ("<|im_end|>", True, 32), (END, True, 40)],
)
def test_special_tokens_and_lengths_are_those_of_transformers(
    eos: str, adds: bool, longest: int | None, files: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Also a tokenizer that names no token to begin a text, so that the one that ends it does."""
    folder = tmp_path / "m"
    model = save_model(folder, wide=monkeypatch)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = eos
    if longest == 40:
        del config["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    hflm = {"max_length": longest, "add_bos_token": None if adds else False}
    theirs = evaluate_by_transformers(model, folder, paths_of(files), hflm=hflm)
    with composer3d.lm_eval_model(
        folder, device="cpu", adds_special_tokens=adds, longest=longest
    ) as ours:
        assert_same(evaluate_with(ours, paths_of(files)), theirs)


@needs_lm_eval
def test_chats_are_those_of_transformers(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples are turns before the question, and the template gives the first token."""
    model = save_model(tmp_path / "m", longest=400, wide=monkeypatch)
    names = [path for path in paths_of(files) if "rolling" not in path]
    options: dict[str, Any] = {"num_fewshot": 1, "apply_chat_template": True}
    theirs = evaluate_by_transformers(model, tmp_path / "m", names, **options)
    with composer3d.lm_eval_model(tmp_path / "m", device="cpu", has_chat=True) as ours:
        assert_same(evaluate_with(ours, names, **options), theirs)


@needs_lm_eval
def test_texts_that_repeat_themselves_have_each_token_scored(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows of one text are equal but for the tokens that are scored.

    The adapter to transformers must not keep logits: it would score the first tokens of the longer
    one in place of the last.
    """
    model = save_model(tmp_path / "m", wide=monkeypatch)
    config = CONFIGS["rolling"].replace("{{long}}", "{% for _ in range(60) %} hello{% endfor %}")
    names = [write_task(files, "repeats", config)]
    hflm = {"logits_cache": False}
    theirs = evaluate_by_transformers(model, tmp_path / "m", names, hflm=hflm)
    with composer3d.lm_eval_model(tmp_path / "m", device="cpu") as ours:
        assert_same(evaluate_with(ours, names), theirs)


@needs_lm_eval
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_command_prints_these_figures(
    world_size: int, files: Path, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one process, and on two that share each layer, of which only the first one prints."""
    model = save_model(tmp_path / "m")
    theirs = evaluate_by_transformers(
        model, tmp_path / "m", paths_of(files), num_fewshot=1, limit=5, bootstrap_iters=100000
    )
    command = ["eval", str(tmp_path / "m"), "--tasks", ",".join(paths_of(files)), "--shots", "1"]
    command += ["--limit", "5", "--batch", "3", "--device", "cpu"]
    command += ["--json", "--out", str(tmp_path / "out.jsonl")]
    if world_size == 1:
        results = [run_command(command)]
    else:
        results = pool.run(run_command, {"arguments": command}, world_size=world_size)
    assert [status for status, _, _ in results] == [0] * world_size, results
    assert all(printed == "" for _, printed, _ in results[1:])

    figures = answer_of(results[0][1])["figures"]
    assert [figure["task"] for figure in figures] == [name for name in CONFIGS for _ in "12"][:-1]
    for figure in figures:
        expected = theirs["results"][figure["task"]]
        assert (figure["shots"], figure["documents"], figure["filter"]) == (1, 5, "none")
        # transformers' norms and positions are in float32.
        value = expected[f"{figure['metric']},none"]
        assert figure["value"] == pytest.approx(value, rel=1e-6)
        stderr = expected[f"{figure['metric']}_stderr,none"]
        assert figure["stderr"] == (
            None if stderr == "N/A" else pytest.approx(stderr, rel=1e-6, abs=1e-12)
        )
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for name in CONFIGS:
        ours = [line["resps"] for line in lines if line["task"] == name]
        others = [sample["resps"] for sample in theirs["samples"][name]]
        numbers, other_numbers = (numbers_of(each) for each in (ours, others))
        assert numbers == pytest.approx(other_numbers, rel=1e-6)
        assert texts_of(ours) == texts_of(others)


def numbers_of(answers: Any) -> list[float]:
    """Return all floats in nested lists."""
    if isinstance(answers, list | tuple):
        return [number for answer in answers for number in numbers_of(answer)]
    return [answers] if isinstance(answers, float) else []


def texts_of(answers: Any) -> list[str | bool]:
    """Return all texts and truths in nested lists."""
    if isinstance(answers, list | tuple):
        return [text for answer in answers for text in texts_of(answer)]
    return [answers] if isinstance(answers, str | bool) else []


@needs_lm_eval
def test_a_table_has_a_line_for_each_figure(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples precede the questions unless a task rules them out; lm-eval prints nothing there."""
    save_model(tmp_path / "m")
    bare = write_task(files, "bare", CONFIGS["choices"] + "num_fewshot: 0\n")
    names = [bare, str(files / "likelihood.yaml")]
    command = ["eval", str(tmp_path / "m"), "--tasks", ",".join(names), "--device", "cpu"]
    assert cli.main([*command, "--shots", "2"]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines[0] == ["task", "shots", "documents", "metric", "value", "stderr"]
    assert [line[:4] for line in lines[1::2]] == [
        ["bare", "0", "6", "acc"],
        ["likelihood", "2", "6", "perplexity"],
    ]
    assert [line[0] for line in lines[2::2]] == ["acc_norm", "acc"]
    assert "bootstrapping" in printed.err


@needs_lm_eval
def test_the_program_of_the_page_runs(
    files: Path, tmp_path: Path, own_names: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model and a task of this test in place of those that it names."""
    (program,) = blocks(ROOT / "docs" / "generate.md", "python")
    save_model(tmp_path / "m")
    for printed, ours in (("runs/quickstart", str(tmp_path / "m")), ("hellaswag", "choices")):
        assert printed in program
        program = program.replace(printed, ours)
    exec(compile(program, "generate.md", "exec"), {})
    assert "'acc,none': " in capsys.readouterr().out


# --- requests ---


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[Any]:
    """Open a checkpoint as a model of lm-eval; it is saved first if it is not there."""
    if not folder.exists():
        save_model(folder)
    with composer3d.lm_eval_model(folder, device="cpu", **options) as model:
        yield model


def requests_of(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


@needs_lm_eval
def test_generation_stops_with_the_text_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after all tokens that the task allows."""
    counts: list[int] = []
    with opened(tmp_path / "m") as model:
        right = model._crew.generate

        def watched(*arguments: Any, **keywords: Any) -> Any:
            found = right(*arguments, **keywords)
            counts.extend(len(completion.tokens) for completion in found)
            return found

        monkeypatch.setattr(model._crew, "generate", watched)
        (whole,) = model.generate_until(requests_of(("hello", {"until": [], "max_gen_toks": 30})))
        stop = whole[12:14]
        place = whole.index(stop)
        settings = {"until": [stop], "max_gen_toks": 30}
        assert model.generate_until(requests_of(("hello", settings))) == [whole[:place]]
    assert counts[0] == 30
    assert 0 < counts[1] < 30


@needs_lm_eval
def test_samples_of_one_request_differ_and_are_drawn_again(tmp_path: Path) -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    greedy = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 1.5}
    requests = requests_of(*[("hello", settings)] * 3, *[("hello", greedy)] * 2)
    with opened(tmp_path / "m") as model:
        texts = model.generate_until(requests)
        assert model.generate_until(requests) == texts
    assert len(set(texts)) == 4
    assert texts[3] == texts[4]


@needs_lm_eval
@pytest.mark.parametrize(
    ("method", "arguments", "problem"),
    [
        (
            "generate_until",
            ("a", {"num_beams": 4, "repetition_penalty": 2.0}),
            "sets num_beams, repetition_penalty for generation, which is not supported",
        ),
        ("generate_until", ("a", {"do_sample": True}), "do_sample without a temperature above 0"),
        (
            "generate_until",
            ("a", {"max_gen_toks": LONGEST}),
            "up to 48 new tokens, and a sequence may have 48, of which some must be the context",
        ),
        ("generate_until", ("a", {}), "up to 256 new tokens"),
        ("loglikelihood", ("a", "b" * 49), "has 49 tokens; from 1 to 48"),
        ("loglikelihood", ("a", ""), "has 0 tokens; from 1 to 48"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(
    method: str, arguments: tuple[Any, ...], problem: str, tmp_path: Path
) -> None:
    with opened(tmp_path / "m") as model, pytest.raises(DataError, match=problem):
        getattr(model, method)(requests_of(arguments))


@needs_lm_eval
def test_the_tokenizer_must_be_that_of_the_model(tmp_path: Path) -> None:
    """Its tokens are below the vocabulary, and it knows what stands before a text."""
    path = make_checkpoint(tmp_path / "small", "llama", replace(SHAPE, vocab=200))
    with opened(path, tokenizer="bytes") as model:
        assert model.prefix_token_id == model.eot_token_id == 0
        assert model.tok_encode("ab") == [97, 98]
        with pytest.raises(DataError, match="token 226 is beyond the model's vocabulary of 200"):
            model.tok_encode("€")
    write_tokenizer(tmp_path / "nameless")
    (tmp_path / "nameless" / "tokenizer_config.json").unlink()
    content = (tmp_path / "nameless" / "tokenizer.json").read_text()
    for name in (END, "<|im_end|>"):
        content = content.replace(name, f"<{len(name)}>")
    (tmp_path / "nameless" / "tokenizer.json").write_text(content)
    other = make_checkpoint(tmp_path / "other", "llama", SHAPE)
    with opened(other, tokenizer=str(tmp_path / "nameless")) as model:
        assert model.loglikelihood(requests_of(("a", "b")))[0][0] < 0
        with pytest.raises(DataError, match="names no token that begins or ends a text"):
            model.loglikelihood(requests_of(("", "b")))
    with pytest.raises(DataError, match=r"has no tokenizer.json"), opened(other):
        pass


# --- what cannot be evaluated ---


@pytest.fixture
def own_names(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lm-eval know the tasks of ``files`` by name, and no other: its own take 20 s to find."""
    import lm_eval.tasks

    class Manager(lm_eval.tasks.TaskManager):
        def __init__(self, include_defaults: bool = True, **options: Any) -> None:
            paths = [files] if include_defaults else []
            super().__init__(include_path=paths, include_defaults=False, **options)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Manager)
    monkeypatch.setattr("lm_eval.evaluator.TaskManager", Manager)


@needs_lm_eval
def test_tasks_are_named_by_name_pattern_or_file(files: Path, own_names: None) -> None:
    assert list(tasks.load_tasks(["choices", str(files / "rolling.yaml")])["tasks"]) == [
        "choices",
        "rolling",
    ]
    assert set(tasks.load_tasks(["*li*"])["tasks"]) == {"likelihood", "rolling"}


@needs_lm_eval
def test_tasks_that_cannot_be_used_are_refused(
    files: Path, own_names: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file of the name of a task is not read, as it could name code.
    (tmp_path / "choises").write_text("task: choises\n")
    monkeypatch.chdir(tmp_path)
    broken = write_task(tmp_path, "broken", "output_type: [\n")
    absent = write_task(tmp_path, "absent", CONFIGS["choices"])
    unsafe = write_task(files, "unsafe", CONFIGS["answers"] + "unsafe_code: true\n")
    shown = write_task(files, "shown", CONFIGS["answers"] + "doc_to_image: [question]\n")
    (tmp_path / "both.yaml").write_text("group: both\ntask: [choices, answers]\n")
    for names, problem in (
        (["both.yaml"], "--tasks both.yaml: it is a group; name the files of its tasks"),
        (["choises"], r"--tasks choises: lm-eval .* has no such task; the nearest are choices; a "),
        (["none.yaml"], r"--tasks none.yaml: cannot be read: No such file"),
        ([broken], r"--tasks .*broken.yaml: ParserError: .*"),
        ([absent], r"--tasks .*absent.yaml: FileNotFoundError: .*data.jsonl"),
        (["choices", "choices"], "--tasks choices: choices is named already"),
        ([unsafe], "--tasks unsafe: it runs code that the model writes"),
        ([shown], "--tasks shown: it shows images or sounds"),
    ):
        with pytest.raises(DataError, match=problem) as caught:
            tasks.load_tasks(names)
        assert len(caught.value.lines) == 1


@needs_lm_eval
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_of_a_task_ends_all_ranks(
    world_size: int, files: Path, tmp_path: Path, pool: Pool
) -> None:
    """Whether it is found before the model is loaded, or while the other ranks wait."""
    save_model(tmp_path / "m")
    config = CONFIGS["answers"].replace("max_gen_toks: 20", "max_gen_toks: 20, num_beams: 2")
    for name, problem in (
        (write_task(files, "beams", config), "--tasks: a task sets num_beams for generation"),
        (str(files / "none.yaml"), "none.yaml: cannot be read: No such file"),
    ):
        command = ["eval", str(tmp_path / "m"), "--tasks", name, "--device", "cpu", "--json"]
        if world_size == 1:
            results = [run_command(command)]
        else:
            results = pool.run(run_command, {"arguments": command}, world_size=world_size)
        assert [status for status, _, _ in results] == [2] * world_size, results
        (line,) = answer_of(results[0][1])["errors"]
        assert problem.removeprefix("--tasks: ") in line


@needs_lm_eval
@pytest.mark.parametrize("task", ["choices", "answers"])
def test_an_error_of_the_model_ends_all_ranks(
    task: str, files: Path, tmp_path: Path, pool: Pool
) -> None:
    """The ranks that follow find it as rank 0 does, and wait until it dismisses them."""
    model = save_model(tmp_path / "m")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(tmp_path / "m")
    command = ["eval", str(tmp_path / "m"), "--tasks", str(files / f"{task}.yaml")]
    command += ["--device", "cpu", "--json"]
    results = pool.run(run_command, {"arguments": command}, world_size=2)
    assert [status for status, _, _ in results] == [2, 2], results
    (line,) = answer_of(results[0][1])["errors"]
    assert line.startswith("the model gives a logit that is not finite")


@pytest.mark.parametrize(
    ("found", "shown"), [(None, "none is installed"), ("0.4.9", "0.4.9 is installed")]
)
def test_lm_eval_is_asked_for(
    found: str | None,
    shown: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the command and by the library, before anything is loaded."""

    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(tasks, "version", version)
    assert cli.main(["eval", str(tmp_path / "none"), "--tasks", "hellaswag"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"tasks need the package lm-eval, 0.4.13 or newer, and {shown}; install it with pip "
        "install 'composer3d[eval]'"
    )
    with pytest.raises(DataError, match="tasks need the package"):
        composer3d.lm_eval_model(tmp_path).__enter__()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "one of the arguments DATA --tasks is required"),
        (["data", "--tasks", "a"], "argument --tasks: not allowed with argument DATA"),
        (["--tasks", "a", "--shots", "-1"], "must be a whole number of at least 0, got -1"),
        (["--tasks", "a", "--limit", "0"], "must be a whole number above 0"),
        (["--tasks", "a,,b"], "--tasks has an empty name"),
        (["--tasks", "a", "--packing", "none"], "--packing has no effect without DATA; give both"),
        (["--tasks", "a", "--set", "mesh.tp=2"], "--set has no effect without DATA; give both"),
        (["data", "--chat"], "--chat has no effect without --tasks; give both"),
        (["data", "--shots", "0"], "--shots has no effect without --tasks; give both"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(tmp_path), *arguments]) == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


def test_a_sequence_is_not_longer_than_the_model_allows(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "m", "llama", SHAPE, assets={"config.json": {"max_position_embeddings": 64}}
    )

    def longest(wanted: int | None) -> int:
        request = tasks.TasksRequest(src=str(path), longest=wanted)
        return tasks.open_tasks_session(request).longest

    assert (longest(None), longest(64), longest(3)) == (64, 64, 3)
    with pytest.raises(DataError, match=r"--seq-len 65: the longest sequence of the model has 64"):
        longest(65)
    unsaid = make_checkpoint(tmp_path / "n", "llama", SHAPE)
    request = tasks.TasksRequest(src=str(unsaid))
    assert tasks.open_tasks_session(request).longest == 2048


def test_figures_that_are_no_numbers_are_none() -> None:
    results = {
        "results": {
            "a": {"alias": "a", "f1,none": math.nan, "f1_stderr,none": "N/A", "acc,x": 0.5},
            "g": {"alias": "g", " ": " "},
        },
        "n-samples": {"a": {"original": 9, "effective": 4}},
        "n-shot": {"a": 2},
        "versions": {"a": 1.0},
    }
    common = {"task": "a", "version": "1.0", "shots": 2, "documents": 4, "stderr": None}
    assert tasks._figures_of(results) == [
        tasks.Figure(metric="f1", filter="none", value=None, **common),
        tasks.Figure(metric="acc", filter="x", value=0.5, **common),
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (1234, "1,234"), (1234.5, "1,234.5000"), (-2.5e19, "-2.5000e+19")],
)
def test_figures_are_shown_in_few_characters(number: float | None, text: str) -> None:
    assert eval_tasks._text_of(number) == text
