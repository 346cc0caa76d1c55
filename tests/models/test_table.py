"""The table of parameters, compared with the real modules of every preset."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from composer3d.models import counts
from composer3d.models.contract import Decoder
from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.llama.shape import ModelShape
from composer3d.models.module_table import table_of_module
from composer3d.models.moe.shape import ExpertsShape, MoeShape
from composer3d.models.olmo2.shape import Olmo2Shape
from composer3d.models.registry import OURS, architecture, resolve
from composer3d.models.shape import DecoderShape
from composer3d.models.table import ParameterTable, Row
from composer3d.parallel.pipeline.stage_cut import cut_into_stages
from composer3d.parallel.tensor import styles
from composer3d.planner.traffic import cut_of
from composer3d.recipe.schema import MeshTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from tests.reference.llama import architecture_of

_UNEVEN = ModelShape(dim=48, n_layers=3, n_heads=6, n_kv_heads=2, ffn=100, vocab=77)
_UNEVEN_MOE = MoeShape(48, 4, 6, 2, 100, 77, experts=5, experts_per_token=3, expert_ffn=28)
_ALL: dict[str, Any] = {"head_dim": 10, "tied": True, "qk_norm": True, "qkv_bias": True}
_OURS = [architecture(name) for name in OURS]
SHAPES: dict[str, DecoderShape] = {
    **{name: shape for ours in _OURS for name, shape in ours.presets.items()},
    "uneven": _UNEVEN,
    "uneven with all": replace(_UNEVEN, **_ALL),
    "uneven with experts": replace(_UNEVEN_MOE, dense_layers=1, moe_every=2),
    "uneven with experts and all": replace(_UNEVEN_MOE, **_ALL, shared_ffn=20, router_bias=True),
    "uneven with a gate": replace(
        _UNEVEN_MOE, n_heads=12, dense_layers=2, qkv_bias=True, shared_ffn=20, shared_gate=True
    ),
    "uneven with wide norms": Olmo2Shape(48, 3, 12, 2, 100, 77, head_dim=10, tied=True),
    "uneven with norms around the layers": Gemma3Shape(48, 3, 12, 2, 100, 77, head_dim=10),
}


def table_of(shape: DecoderShape) -> ParameterTable:
    return architecture_of(shape).table_of(shape)


@cache
def model_of(shape: DecoderShape) -> Decoder:
    return architecture_of(shape).build(shape, dtype=torch.float32, device="meta")


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_those_of_the_model_in_its_order(name: str) -> None:
    table, model = table_of(SHAPES[name]), model_of(SHAPES[name])
    found = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert list(found.items()) == [(name, row.shape) for name, row in table.parameters()]
    assert counts.parameters(table) == sum(weight.numel() for weight in model.parameters())

    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert [name for unit in table.trainable_names() for name in unit] == trainable

    listed = [f"{unit}.{row.name}" for unit, rows in table.units() for row in rows]
    assert listed == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for unit, rows in table.units():
        for row in rows:
            if row.tied_to:
                tied, original = f"{unit}.{row.name}", row.tied_to
                assert model.get_parameter(tied) is model.get_parameter(original)


def as_read(row: Row) -> Row:
    """Leave out what no module says: names elsewhere, and what is gathered with an input."""
    gather = row.gathers if row.style in ("column", "kv_column") else ""
    return row._replace(hf="", meta="", is_rotary=False, gather=gather, gathered=0)


# Their experts depend on values, so that the meta device cannot say what backward reads.
NOT_ON_META = ("uneven with experts", "uneven with experts and all", "uneven with a gate")


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - set(NOT_ON_META)))
def test_a_table_that_is_read_from_the_model_is_the_same(name: str) -> None:
    shape, table = SHAPES[name], table_of(SHAPES[name])
    read = table_of_module(model_of(shape), resolve(architecture_of(shape).plan)(shape))
    for (unit, rows), (_, rows_read) in zip(table.units(), read.units(), strict=True):
        assert list(map(as_read, rows)) == list(map(as_read, rows_read)), unit
    assert (read.attention, read.first_only_looks_up) == ("attn", True)


def few_layers(shape: DecoderShape) -> DecoderShape:
    """Return the same shape with few layers, but each kind of them."""
    is_moe = isinstance(shape, ExpertsShape)
    layers = max(shape.dense_layers + 1, shape.moe_every) if is_moe else 1
    return replace(shape, n_layers=layers)


def local_shapes(tp: int, sequence_parallel: bool) -> dict[str, Any]:
    """Cut models over tp; return what rank 0 holds of each parameter, and which parts it sums."""
    parallel = ParallelTable(sequence_parallel=sequence_parallel)
    found = {}
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(tp=tp, dp_shard=1), device)
        assert mesh.tp is not None
        for name, whole in SHAPES.items():
            keys = whole.n_kv_heads
            if whole.n_heads % tp or (keys % tp and tp % keys):
                continue
            shape = few_layers(whole)
            plan = resolve(architecture_of(shape).plan)(shape)
            model = architecture_of(shape).build(shape, dtype=torch.float32, device="meta")
            (stage,) = cut_into_stages(model, [[0]], 0, parallel)
            cut = styles.apply(stage, plan, mesh.tp, parallel)
            shapes = {
                key: tuple(getattr(value, "_local_tensor", value).shape)
                for key, value in stage.named_parameters()
                if value.requires_grad
            }
            found[name] = shapes, cut.partial_gradients & shapes.keys()
    return found


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(2, True), (2, False), (4, True)], ids=["2", "2, whole", "4"]
)
def test_tp_cuts_parameters_as_the_table_says(tp: int, sequence_parallel: bool, pool: Pool) -> None:
    arguments = {"tp": tp, "sequence_parallel": sequence_parallel}
    found = pool.run(local_shapes, arguments, world_size=tp)[0]
    assert len(found) >= len(SHAPES) - 6
    for name, (shapes, partial_gradients) in found.items():
        shape = few_layers(SHAPES[name])
        expected, expected_partial = {}, set()
        # ``compose`` ties what the cut has separated.
        listed = [(unit, row) for unit, rows in table_of(shape).units() for row in rows]
        for unit, row in listed:
            if not row.trains:
                continue
            cut = cut_of(row, shape, tp=tp, sequence_parallel=sequence_parallel)
            size = list(row.shape)
            if cut in ("rows", "columns"):
                dim = 0 if cut == "rows" else 1
                size[dim] = -(-size[dim] // tp)
            expected[f"{unit}.{row.name}"] = tuple(size)
            if cut == "whole_partial":
                expected_partial.add(f"{unit}.{row.name}")
        assert shapes == expected, name
        assert partial_gradients == expected_partial, name
