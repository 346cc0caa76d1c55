"""Training starts from Hugging Face's files: every rank has its boxes of the tensors, and reads nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.convert import start
from composer3d.convert.formats import Source
from composer3d.models.llama.huggingface import config_of
from composer3d.models.llama.names import hf_names, shapes
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel.init import local_part
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.spec.errors import CheckpointError
from composer3d.training.build import build_stages

# Sizes that three ranks do not divide.
SHAPE: dict[str, Any] = {
    "dim": 40,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn": 56,
    "vocab": 259,
}


def written(
    folder: Path, *, files: int = 2, dtype: torch.dtype = torch.float32, **more: Any
) -> None:
    """Random weights of a shape in ``files`` files, and its config.json."""
    shape = ModelShape(**SHAPE | more)
    generator = torch.Generator().manual_seed(3)
    names = hf_names(shape)
    tensors = {
        names[n]: torch.randn(s, generator=generator).to(dtype) for n, s in shapes(shape).items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "x.toml").write_text(
        f'[model]\nhf = "{folder}"\n[data]\nmicro_batch = 2\nglobal_batch = 16\n'
    )
    (folder / "config.json").write_text(
        json.dumps(config_of(shape, str(dtype).removeprefix("torch.")))
    )
    put(folder, tensors, files)


def put(folder: Path, tensors: dict[str, Tensor], files: int = 2) -> None:
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


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


class Counting:
    """A tensor of a file that counts the bytes that are asked of it."""

    read = 0

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def __getitem__(self, box: Any) -> Tensor:
        part = self._whole[box]
        Counting.read += part.numel() * part.element_size()
        return part


def loaded(folder: str, sets: list[str]) -> tuple[list[str], int, int]:
    """Names of this rank whose whole tensor is not the file's; bytes that it holds, and that it read."""
    recipe = load(f"{folder}/x.toml", sets, check_files=False).recipe
    with pool_world() as device, pytest.MonkeyPatch.context() as patch:
        right = Source.read
        patch.setattr(Source, "read", lambda source, name: Counting(right(source, name)))
        stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
        start.load_hf(folder, stages)
        files, wrong, held, names = tensors_of(Path(folder)), [], 0, hf_names(recipe.model)
        for name, parameter in stages.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(whole.detach(), files[names[name]].to(whole.dtype)):
                wrong.append(name)
            held += local_part(parameter)[0].numel() * files[names[name]].element_size()
        return wrong, held, Counting.read


SHARDS = ["mesh.dp_shard=3", "data.global_batch=18"]
LAYOUTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "tp": (2, ["mesh.tp=2"], {"qk_norm": True}),
    "more tp than kv heads": (4, ["mesh.tp=4"], {"qkv_bias": True}),
    "uneven shards": (3, SHARDS, {}),
    "uneven shards of tp": (6, [*SHARDS, "mesh.tp=2"], {"vocab": 260}),
    "columns of an uneven vocabulary": (4, ["mesh.dp_shard=2", "mesh.tp=2"], {}),
    "pp with shards, tied": (4, ["mesh.pp=2", "mesh.dp_shard=2"], {"tied": True}),
    "stages in a V, with cp": (
        4,
        ["mesh.pp=2", "mesh.cp=2", "parallel.schedule=ZBVZeroBubble"],
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_part_and_no_more(pool: Pool, tmp_path: Path, layout: str) -> None:
    world, sets, more = LAYOUTS[layout]
    written(tmp_path, **more)
    results = pool.run(loaded, {"folder": str(tmp_path), "sets": sets}, world_size=world)
    assert [wrong for wrong, _, _ in results] == [[]] * world
    assert all(read == held > 0 for _, held, read in results)
    assert max(read for _, _, read in results) < 0.8 * sum(
        tensor.nbytes for tensor in tensors_of(tmp_path).values()
    )


def test_other_dtypes_are_converted(pool: Pool, tmp_path: Path) -> None:
    written(tmp_path, files=1, dtype=torch.bfloat16)
    ((wrong, held, read),) = pool.run(loaded, {"folder": str(tmp_path), "sets": []}, world_size=1)
    assert (wrong, held) == ([], read)
    assert held == 2 * sum(tensor.numel() for tensor in tensors_of(tmp_path).values())


def refused(folders: list[str]) -> list[list[str]]:
    """What a rank of two stages is told of each folder."""
    told: list[list[str]] = []
    recipe = load(f"{folders[0]}/x.toml", ["mesh.pp=2"], check_files=False).recipe
    with pool_world() as device:
        stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
        before = [parameter.detach().clone() for parameter in stages.parameters()]
        for folder in folders:
            with pytest.raises(CheckpointError) as caught:
                start.load_hf(folder, stages)
            told.append(list(caught.value.lines))
            untouched = all(
                torch.equal(*pair) for pair in zip(before, stages.parameters(), strict=True)
            )
            assert untouched, folder
    return told


LAST = "model.layers.3.mlp.up_proj.weight"  # the second stage's
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Damage the files of a tied model as the folder's name says; returns a part of the line that refuses them."""
    match folder.name:
        case "lacks":
            del tensors[LAST]
            line = f"{folder} has no '{LAST}' (56, 40)"
        case "shape":
            tensors[LAST] = torch.ones(56, 41)
            line = f"{folder} holds '{LAST}' as (56, 41)"
        case "dtype":
            tensors[LAST] = torch.ones(56, 40, dtype=torch.int8)
            line = f"{folder} holds '{LAST}' in int8"
        case "head":
            tensors[HEAD] = tensors[EMBED].clone()
            tensors[HEAD][258, 39] += 1
            line = f"{folder} holds an '{HEAD}' that is not the embedding"
        case "none":
            (folder / "model.safetensors.index.json").unlink()
            return f"{folder} is not a checkpoint"
        case "other":
            written(folder, tied=True, n_layers=5, ffn=64)
            return f"{folder} holds 'model.blocks.0.ffn.w1.weight' as (64, 40), but the model needs (56, 40)"
    put(folder, tensors)
    return line


CASES = ["lacks", "shape", "dtype", "head", "none", "other"]


def test_what_does_not_fit_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    folders = [tmp_path / case for case in CASES]
    wanted = []
    for folder in folders:
        written(folder, tied=True)
        wanted.append(changed(folder, tensors_of(folder)))
    first, last = pool.run(refused, {"folders": [str(folder) for folder in folders]}, world_size=2)
    assert first == last
    for found, line in zip(first, wanted, strict=True):
        assert found[0].startswith(line), found
    assert len(first[-1]) == 9
    assert first[-1][-1].endswith("21 differences; let [model] override no sizes of it")


def test_tensors_that_say_nothing_new_are_ignored(pool: Pool, tmp_path: Path) -> None:
    written(tmp_path, tied=True)
    tensors = tensors_of(tmp_path)
    tensors |= {
        HEAD: tensors[EMBED].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5),
    }
    put(tmp_path, tensors)
    sets = ["mesh.pp=2"]
    assert [
        wrong
        for wrong, _, _ in pool.run(loaded, {"folder": str(tmp_path), "sets": sets}, world_size=2)
    ] == [
        [],
        [],
    ]
