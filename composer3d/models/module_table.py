"""The table of parameters of a model without one: a user's own, read from its module and plan."""

from collections.abc import Iterator

import torch

from composer3d.models import claims, fit
from composer3d.models.contract import Decoder, ShardingPlan
from composer3d.models.registry import Reference, resolve
from composer3d.models.shape import DecoderShape
from composer3d.models.table import ParameterTable, Row


def read_table(model: Reference, plan: Reference, shape: DecoderShape) -> ParameterTable:
    """Build the model of an architecture on the meta device, and return its table.

    Args:
        model, plan, shape: as in ``registry.Architecture``.

    Raises:
        PlanError: the plan does not fit the model.
    """
    return table_of_module(
        resolve(model)(shape, dtype=torch.float32, device="meta"), resolve(plan)(shape)
    )


def table_of_module(model: Decoder, plan: ShardingPlan) -> ParameterTable:
    """Return the table of a whole model.

    Whether backward reads what a module returns is taken from the module, not from the plan's
    ``unread``: a plan may leave it out.

    Raises:
        PlanError: the plan does not fit the model.
    """
    fit.check(model, plan)
    rows = dict(_rows(model, plan))
    units: dict[str, list[Row]] = {"first": [], "last": []}
    units |= {f"blocks.{number}": [] for number in model.blocks}
    for name, row in rows.items():
        unit = name.removesuffix(f".{row.name}")
        units[unit].append(row)

    # Blocks of a kind share one tuple of rows.
    kinds: dict[str, tuple[Row, ...]] = {}
    first_of_kind = claims.first_of_kind(model)
    for number in set(first_of_kind.values()):
        unread = claims.unread_modules(model, model.blocks[number]) or frozenset()
        kinds[number] = tuple(
            row._replace(is_unread=row.module in unread) for row in units[f"blocks.{number}"]
        )
    return ParameterTable(
        first=tuple(units["first"]),
        blocks=tuple(kinds[first] for first in first_of_kind.values()),
        last=tuple(units["last"]),
        attention=_attention(model, plan),
        first_only_looks_up=plan.first_only_looks_up,
    )


def _rows(model: Decoder, plan: ShardingPlan) -> Iterator[tuple[str, Row]]:
    """Yield the row of each parameter, also of a tied one, by its global name."""
    originals = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = originals[parameter]
        module = name.rpartition(".")[0]
        style, init = plan.style_of(module), plan.init_of(original)
        # ``models.fit.check`` refuses a parameter without either.
        assert init is not None, name
        assert style is not None or plan.holds_experts(module), name
        unit = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        yield (
            name,
            Row(
                name.removeprefix(f"{unit}."),
                tuple(parameter.shape),
                "experts" if style is None or plan.holds_experts(module) else style,
                init,
                gather=_gather_above(module.removeprefix(f"{unit}."), unit, plan),
                float8=plan.multiplies_in_float8(module),
                trains=parameter.requires_grad,
                tied_to="" if original == name else original,
            ),
        )


def _gather_above(module: str, unit: str, plan: ShardingPlan) -> str:
    """Return the innermost module of style "gather" around a module; empty if there is none."""
    while module:
        module = module.rpartition(".")[0]
        if plan.style_of(f"{unit}.{module}" if module else unit) == "gather":
            return module
    return ""


def _attention(model: Decoder, plan: ShardingPlan) -> str:
    """Return the name, within a block, of the module that attends; empty if there is none."""
    for number, block in model.blocks.items():
        for name, _ in block.named_modules():
            if plan.attends(f"blocks.{number}.{name}"):
                return name
    return ""
