"""Training starts from a Hugging Face folder: each rank reads its shards of the tensors alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.convert import start
from composer3d.convert.formats import Source, open_source
from composer3d.facts.errors import CheckpointError
from composer3d.models.llama.huggingface import make_config
from composer3d.models.llama.shape import ModelShape
from composer3d.models.llama.table import table
from composer3d.parallel.init import local_part
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from tests.models.names_in_files import hf_names

# The sizes are not divisible by 3 ranks.
SHAPE: dict[str, Any] = {
    "dim": 40,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn": 56,
    "vocab": 259,
}


def write_model(
    folder: Path, *, files: int = 2, dtype: torch.dtype = torch.float32, **fields: Any
) -> None:
    """Write random weights in ``files`` files, their config.json and a recipe.

    ``fields`` override those of ``SHAPE``.
    """
    shape = ModelShape(**SHAPE | fields)
    generator = torch.Generator().manual_seed(3)
    names = hf_names(shape)
    tensors = {
        names[name]: torch.randn(size, generator=generator).to(dtype)
        for name, size in table(shape).shapes().items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "x.toml").write_text(
        f'[model]\nhf = "{folder}"\n[data]\nmicro_batch = 2\nglobal_batch = 16\n'
    )
    (folder / "config.json").write_text(
        json.dumps(make_config(shape, str(dtype).removeprefix("torch.")))
    )
    write_weights(folder, tensors, files)


def write_weights(folder: Path, tensors: dict[str, Tensor], files: int = 2) -> None:
    """Write tensors in ``files`` safetensors files, with an index if there are several."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    index = {
        name: f"model-{number % files + 1:05}.safetensors" for number, name in enumerate(tensors)
    }
    for file in set(index.values()):
        save_file(
            {name: tensor for name, tensor in tensors.items() if index[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


class CountingTensor:
    """A tensor in a file that counts the bytes that are read from it."""

    bytes_read = 0  # of all tensors

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def __getitem__(self, box: Any) -> Tensor:
        part = self._whole[box]
        CountingTensor.bytes_read += part.numel() * part.element_size()
        return part


def open_counting(path: Path) -> Source:
    """Open a checkpoint whose tensors count the bytes that are read from them."""
    source = open_source(path)
    for name, tensor in source.tensors.items():

        def read(read_whole: Callable[[], Tensor] = tensor.read) -> Any:
            return CountingTensor(read_whole())

        source.tensors[name] = tensor._replace(read=read)
    return source


class Loaded(NamedTuple):
    """What one rank has loaded.

    Attributes:
        wrong: the names of parameters that differ from the files.
        bytes_held: the size of the rank's shards, in the dtype of the files.
        bytes_read: the bytes that the rank read from the files.
    """

    wrong: list[str]
    bytes_held: int
    bytes_read: int


def load_and_compare(folder: str, recipe: Recipe, in_files: dict[str, Tensor]) -> Loaded:
    """Load the weights in ``folder`` into the stages of this rank.

    Args:
        folder: of Hugging Face.
        recipe: of the run.
        in_files: what the folder holds, by our names.
    """
    with pool_world() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "open_source", open_counting)
        patch.setattr(CountingTensor, "bytes_read", 0)
        stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
        start.load_hf(folder, stages)
        wrong = []
        bytes_held = 0
        for name, parameter in stages.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(whole.detach(), in_files[name].to(whole.dtype)):
                wrong.append(name)
            bytes_held += local_part(parameter)[0].numel() * in_files[name].element_size()
        return Loaded(wrong, bytes_held, CountingTensor.bytes_read)


def load_on_rank(folder: str, sets: list[str]) -> Loaded:
    recipe = load(f"{folder}/x.toml", sets, check_files=False).recipe
    by_their_names = read_weights(Path(folder))
    names = hf_names(recipe.model)
    return load_and_compare(
        folder, recipe, {name: by_their_names[theirs] for name, theirs in names.items()}
    )


LAYOUTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "more tp than kv heads": (4, ["mesh.tp=4"], {"qkv_bias": True}),
    "uneven shards of tp": (
        6,
        ["mesh.dp_shard=3", "data.global_batch=18", "mesh.tp=2"],
        {"vocab": 260, "qk_norm": True},
    ),
    "columns of an uneven vocabulary": (4, ["mesh.dp_shard=2", "mesh.tp=2"], {}),
    "pp with shards, tied": (4, ["mesh.pp=2", "mesh.dp_shard=2"], {"tied": True}),
    "stages in a V, with cp": (
        4,
        ["mesh.pp=2", "mesh.cp=2", "parallel.schedule=ZBVZeroBubble"],
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_shards_and_no_more(pool: Pool, tmp_path: Path, layout: str) -> None:
    world, sets, fields = LAYOUTS[layout]
    write_model(tmp_path, **fields)
    results = pool.run(load_on_rank, {"folder": str(tmp_path), "sets": sets}, world_size=world)
    assert [result.wrong for result in results] == [[]] * world
    assert all(result.bytes_read == result.bytes_held > 0 for result in results)
    size = sum(tensor.nbytes for tensor in read_weights(tmp_path).values())
    assert max(result.bytes_read for result in results) < 0.8 * size


def test_other_dtypes_are_converted(pool: Pool, tmp_path: Path) -> None:
    write_model(tmp_path, files=1, dtype=torch.bfloat16)
    (result,) = pool.run(load_on_rank, {"folder": str(tmp_path), "sets": []}, world_size=1)
    assert (result.wrong, result.bytes_held) == ([], result.bytes_read)
    assert result.bytes_held == 2 * sum(
        tensor.numel() for tensor in read_weights(tmp_path).values()
    )


def load_refused(folders: list[str]) -> list[list[str]]:
    """Load each folder on one of two stages; return the lines that refuse it.

    The parameters must keep their values.
    """
    lines: list[list[str]] = []
    recipe = load(f"{folders[0]}/x.toml", ["mesh.pp=2"], check_files=False).recipe
    with pool_world() as device:
        stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
        before = [parameter.detach().clone() for parameter in stages.parameters()]
        for folder in folders:
            with pytest.raises(CheckpointError) as caught:
                start.load_hf(folder, stages)
            lines.append(list(caught.value.lines))
            untouched = all(
                torch.equal(*pair) for pair in zip(before, stages.parameters(), strict=True)
            )
            assert untouched, folder
    return lines


LAST = "model.layers.3.mlp.up_proj.weight"  # of the second stage
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def damage(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Damage the files of a tied model as the folder's name says.

    Returns how the line that refuses them begins.
    """
    match folder.name:
        case "lacks":
            del tensors[LAST]
            line = f"{folder} has no '{LAST}' (56, 40)"
        case "head":
            tensors[HEAD] = tensors[EMBED].clone()
            tensors[HEAD][258, 39] += 1
            line = f"{folder} holds an '{HEAD}' that is not the embedding"
        case "none":
            (folder / "model.safetensors.index.json").unlink()
            return f"{folder} is not a checkpoint"
        case "other":
            write_model(folder, tied=True, n_layers=5, ffn=64)
            return (
                f"{folder} holds 'model.blocks.0.ffn.w1.weight' as (64, 40), "
                "but the model needs (56, 40)"
            )
    write_weights(folder, tensors)
    return line


CASES = ["lacks", "head", "none", "other"]


def test_a_folder_that_does_not_fit_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    folders = [tmp_path / case for case in CASES]
    beginnings = []
    for folder in folders:
        write_model(folder, tied=True)
        beginnings.append(damage(folder, read_weights(folder)))
    first, last = pool.run(
        load_refused, {"folders": [str(folder) for folder in folders]}, world_size=2
    )
    assert first == last
    for lines, beginning in zip(first, beginnings, strict=True):
        assert lines[0].startswith(beginning), lines
    assert len(first[-1]) == 9
    assert first[-1][-1].endswith("21 differences; remove the sizes that [model] overrides")


def test_redundant_tensors_are_ignored(pool: Pool, tmp_path: Path) -> None:
    write_model(tmp_path, tied=True)
    tensors = read_weights(tmp_path)
    tensors |= {
        HEAD: tensors[EMBED].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5),
    }
    write_weights(tmp_path, tensors)
    task = {"folder": str(tmp_path), "sets": ["mesh.pp=2"]}
    results = pool.run(load_on_rank, task, world_size=2)
    assert [result.wrong for result in results] == [[], []]
