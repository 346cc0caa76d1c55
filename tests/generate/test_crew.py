"""The ranks of tp compute what rank 0 asks, and it is what one process computes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d.commands import job, tp
from composer3d.facts.errors import CheckpointError
from composer3d.generate.crew import Crew
from composer3d.generate.load import open_checkpoint
from composer3d.generate.model import compose_generator, load_generator
from composer3d.generate.sampling import Sampling
from composer3d.generate.scores import Passage
from composer3d.models.llama.shape import ModelShape
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.resolve import Resolved
from composer3d.runtime.launch import Pool
from tests.generate.jobs import make_checkpoint

SHAPE = ModelShape(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn=96, vocab=131, rope_theta=1e4)
PASSAGES = [Passage((5, 6, 7, 8), 2), Passage((9, 8), 1), Passage((5, 6, 7, 9), 3)]
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def ask(crew: Crew) -> dict[str, Any]:
    """Let a crew score and generate, with texts that rank 0 ends by itself."""
    scores = crew.score(PASSAGES)
    completions = crew.generate(
        PROMPTS,
        max_tokens=9,
        sampling=Sampling(),
        wants_stop=lambda prompt, tokens: len(tokens) == 3 + prompt,
    )
    samples = crew.generate(PROMPTS, max_tokens=5, sampling=Sampling(temperature=1.0, seed=3))
    return {
        "scores": [list(score) for score in scores],
        "completions": [list(completion) for completion in completions],
        "samples": [list(completion) for completion in samples],
    }


def run_crew(path: str, out: str) -> int:
    """Run a crew as a rank of the pool. Rank 0 writes what it has found to ``out``."""
    arguments = {"path": path, "out": out}
    return tp.run_ranks("eval", crew_rank, arguments, src=path, own=None, tp=2, device="cpu")


def crew_rank(document: ParsedRecipe, path: str, out: str) -> int:
    return tp.run_rank(document, partial(join_crew, path=path, out=out), as_json=False)


def join_crew(resolved: Resolved, rank: int, *, path: str, out: str) -> int:
    options: dict[str, Any] = {"dtype": torch.float64, "end_tokens": ()}
    with job.join(resolved, rank, timeout_s=60.0, advice=lambda: "") as world:
        checkpoint = open_checkpoint(Path(path))
        generator = compose_generator(checkpoint, resolved.recipe, device=world.device, **options)
        crew = Crew(generator, device=world.device, batch=2, has_others=True)
        if rank > 0:
            crew.follow()
            return 0
        found = ask(crew)
        # An error of the model is one of all ranks, and the others go on following.
        with torch.no_grad():
            generator._model.last.norm.weight.fill_(torch.nan)
        with pytest.raises(CheckpointError):
            crew.score(PASSAGES)
        crew.dismiss()
        Path(out).write_text(json.dumps(found))
    return 0


def test_ranks_compute_what_one_process_does(tmp_path: Path, pool: Pool) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", SHAPE)
    cpu = torch.device("cpu")
    generator = load_generator(
        open_checkpoint(path), dtype=torch.float64, device=cpu, end_tokens=()
    )
    expected = ask(Crew(generator, device=cpu, batch=2))
    assert [len(tokens) for tokens, _ in expected["completions"]] == [3, 4, 5]

    arguments = {"path": str(path), "out": str(tmp_path / "found.json")}
    assert pool.run(run_crew, arguments, world_size=2) == [0, 0]
    found = json.loads((tmp_path / "found.json").read_text())
    for one, other in zip(found.pop("scores"), expected.pop("scores"), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-12)
        assert one[1] == other[1]
    assert found == json.loads(json.dumps(expected))
