"""``docs/axis-*.md``: their tables say what a recipe sends, and their pictures are new."""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from composer3d.cli import main
from composer3d.models.counts import parameters
from composer3d.planner.traffic import DTYPE_BYTES, flows
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from tools.prove.paths import ROOT

OPERATIONS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "send": "send",
}
# Sizes that differ from each other, so that a wrong symbol gives a wrong number.
SIZES = ("model.n_layers=6", "data.seq_len=96", "data.micro_batch=2", "data.global_batch=24")


class Row(NamedTuple):
    """A row of a table: calls and bytes are formulas, and bytes may be those of all calls."""

    name: str
    operation: str
    calls: str
    bytes: str


def table(page: str, title: str) -> tuple[str, list[Row]]:
    """The heads and the rows of the table below the comment ``traffic: TITLE``."""
    text = (ROOT / "docs" / page).read_text()
    lines = text.partition(f"<!-- traffic: {title} -->\n")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    return lines[0], [Row(*row) for row in cells[2:]]


def symbols(recipe: Recipe) -> dict[str, float]:
    """The values of the letters on the pages."""
    shape, mesh = recipe.model, recipe.mesh
    blocks = parameters(recipe.parameters) - 2 * shape.vocab * shape.dim - shape.dim
    values = {
        "B": recipe.data.micro_batch,
        "T": recipe.data.seq_len,
        "M": recipe.micro_batches,
        "L": shape.n_layers,
        "C": shape.dim,
        "H": shape.n_heads,
        "K": shape.n_kv_heads,
        "D": shape.head_width,
        "R": shape.latent_width,
        "V": recipe.parallel.stages_per_rank,
        "N": parameters(recipe.parameters),
        "N_blocks": blocks,
        "e": DTYPE_BYTES[recipe.precision.computes_in],
        "p": DTYPE_BYTES[recipe.precision.params],
        "w": max(4, DTYPE_BYTES[recipe.precision.computes_in]),
        "tp": mesh.tp,
        "cp": mesh.cp,
        "pp": mesh.pp,
        "dp": mesh.dp_shard * mesh.cp,
    }
    return {name: float(value) for name, value in values.items()}


BF16 = ("precision.compute=bfloat16",)
LATENTS = ("model.architecture=deepseek", "model.preset=debug-deepseek")
TABLES = [
    ("axis-tp.md", "tp", "tp", ("mesh.tp=2",)),
    ("axis-tp.md", "tp", "tp", ("mesh.tp=4", "mesh.cp=2", *BF16)),
    ("axis-cp.md", "cp, ring", "cp", ("mesh.cp=3", "mesh.tp=2", *BF16)),
    ("axis-cp.md", "cp, latents", "cp", (*LATENTS, "mesh.cp=2", "mesh.tp=2", *BF16)),
    ("axis-cp.md", "cp, allgather", "cp", ("mesh.cp=2", "parallel.cp_method=allgather", *BF16)),
    ("axis-cp.md", "cp, ulysses", "cp", ("mesh.cp=2", "parallel.cp_method=ulysses")),
    ("axis-pp.md", "pp", "pp", ("mesh.pp=2", "mesh.tp=2", "mesh.cp=2")),
    (
        "axis-pp.md",
        "pp",
        "pp",
        ("mesh.pp=2", "parallel.schedule=Interleaved1F1B", "parallel.virtual_stages=3"),
    ),
    ("axis-pp.md", "pp, a V", "pp", ("mesh.pp=2", "parallel.schedule=ZBVZeroBubble", *BF16)),
    ("axis-pp.md", "pp, a V", "pp", ("mesh.pp=3", "parallel.schedule=DualPipeV")),
    ("axis-dp.md", "dp, zero 3", "fsdp", ("mesh.dp_shard=2", "parallel.zero=3", *BF16)),
    ("axis-dp.md", "dp, zero 1", "fsdp", ("mesh.dp_shard=2", "mesh.cp=2", "parallel.zero=1")),
]


@pytest.mark.parametrize(("page", "title", "axis", "sets"), TABLES)
def test_a_table_says_what_a_recipe_sends(
    page: str, title: str, axis: str, sets: tuple[str, ...]
) -> None:
    recipe = load(str(ROOT / "recipes" / "debug-1-single.toml"), [*SIZES, *sets]).recipe
    sent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for flow in flows(recipe):
        if flow.axis == axis and flow.phase != "step":
            total = sent[f"{flow.phase}: {flow.purpose}", flow.operation]
            total[0] += flow.count
            total[1] += flow.sent_bytes

    heads, rows = table(page, title)
    letters = symbols(recipe)
    printed = {}
    for row in rows:
        calls, size = (eval(formula, {}, letters) for formula in (row.calls, row.bytes))
        size *= 1 if "in all calls" in heads else calls
        printed[row.name, OPERATIONS[row.operation]] = [calls, size]
    assert len(printed) == len(rows) > 0
    # With one stage on a rank, the first pipeline rank sends no gradients.
    printed = {key: numbers for key, numbers in printed.items() if numbers[0]}
    assert printed == {key: pytest.approx(numbers) for key, numbers in sent.items()}


@pytest.mark.parametrize(
    ("axis", "recipe"), [("tp", "debug-4-dp-tp"), ("cp", "debug-2-cp"), ("dp", "debug-2-dp")]
)
def test_the_picture_of_an_axis_is_up_to_date(
    axis: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / f"axis-{axis}.md").read_text()
    assert re.search(rf"\]\(axis-{axis}\.svg\)", page)
    monkeypatch.chdir(ROOT)
    out = tmp_path / "axis.svg"
    assert main(["layout", f"recipes/{recipe}.toml", "-o", str(out)]) == 0
    assert out.read_text() == (ROOT / "docs" / f"axis-{axis}.svg").read_text()
