"""Whether a sharding plan fits its model: what ``ShardingPlan`` says of names, checked by names.

``models.claims`` checks what a plan says of the backward of a model.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from composer3d.facts.errors import PlanError
from composer3d.models.contract import Decoder, ShardingPlan
from composer3d.models.layers.moe import Experts
from composer3d.models.table import Style

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def check(model: nn.Module, plan: ShardingPlan) -> None:
    """Check that the plan fits the whole model, before it is cut.

    Raises:
        PlanError: the plan does not fit, or the model has values, buffers or dropout, or computes
            what no stage would. The error has a line for each glob that decides nothing, each
            parameter without a glob, each buffer, each style that does not fit its module, a
            missing ``kv_heads``, and each module that ``attend`` or ``experts`` should match or
            should not match.
    """
    lines = [
        *(_unlike_its_stages(model) if isinstance(model, Decoder) else ()),
        *_globs_without_a_match(model, plan),
        *_globs_behind_others(model, plan),
        *_parameters_without_a_place(model, plan),
        *_buffers(model),
        *_dropout(model),
        *_columns_without_a_gather(model, plan),
        *_rows_with_a_vector(model, plan),
        *_float8_of_others(model, plan),
        *_first_that_computes(model, plan),
        *_missing_kv_heads(plan),
        *_seams(model, plan),
    ]
    if lines:
        raise PlanError(lines)


def _globs_without_a_match(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    for table, globs, names, noun in (
        ("tensor", plan.tensor, modules, "module"),
        ("init", plan.init, parameters, "parameter"),
        ("attend", (plan.attend,) if plan.attend else (), modules, "module"),
        ("experts", (plan.experts,) if plan.experts else (), modules, "module"),
        ("unread", plan.unread, modules, "module"),
        ("float8", plan.float8, modules, "module"),
    ):
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names):
                yield (
                    f"the plan's {table} glob {glob!r} matches no {noun} of {type(model).__name__}"
                )


def _globs_behind_others(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    for table, globs, names in (
        ("tensor", list(plan.tensor), modules),
        ("init", list(plan.init), parameters),
    ):
        first_of = [
            next((glob for glob in globs if fnmatchcase(name, glob)), None) for name in names
        ]
        for glob in globs:
            if glob not in first_of and any(fnmatchcase(name, glob) for name in names):
                yield (
                    f"the plan's {table} glob {glob!r} decides nothing: globs before it match all "
                    "that it matches, and the first one counts; move it before them"
                )


def _unlike_its_stages(model: Decoder) -> Iterator[str]:
    for method in ("forward", "hidden", "losses"):
        if getattr(type(model), method) is not getattr(Decoder, method):
            yield (
                f"{type(model).__name__} has a `{method}` of its own, which no stage calls: put "
                "what it computes into first, a block or last"
            )
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in ("first", "blocks", "last"):
            yield f"parameter {name!r} is in none of first, blocks and last, so no stage has it"
        elif not parameter.is_meta:
            yield (
                f"parameter {name!r} has values, which would be lost: build the model on the meta "
                'device (device="meta"), and copy weights into the parameters of `Stages`'
            )
            break


def _parameters_without_a_place(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    for name, _ in model.named_parameters():
        module_name = name.rpartition(".")[0]
        style = plan.style_of(module_name)
        if style is None and not plan.holds_experts(module_name):
            yield f"no glob of the plan's tensor table covers parameter {name!r}"
        elif style == "gather":
            yield (
                f'parameter {name!r} belongs to a module of style "gather", which can have '
                "none: give the module another style, or move the parameter into a submodule"
            )
        if plan.init_of(name) is None:
            yield f"no glob of the plan's init table covers parameter {name!r}"


def _buffers(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_buffers():
        yield (
            f"buffer {name!r} would hold any values: a model is built without memory, and only its "
            "parameters get values afterwards; compute it in `DecoderBlock.prepare`, and keep it "
            "in `seq.shared`"
        )


def _dropout(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _DROPOUTS) and module.p > 0:
            yield (
                f"{name!r} is a dropout of {module.p:g}: a checkpointed block runs again in "
                "backward and would drop others; use 0, or leave it out"
            )


def _columns_without_a_gather(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    for name, _ in model.named_modules():
        if plan.style_of(name) not in ("column", "kv_column"):
            continue
        # The names of the modules around this one: that of the model itself is empty.
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts))]
        if "gather" not in [plan.style_of(ancestor) for ancestor in above]:
            yield (
                f'the plan cuts {name!r} into columns, so a module above it needs style "gather"'
            )


def _rows_with_a_vector(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    for name, module in model.named_modules():
        if plan.style_of(name) != "row":
            continue
        for parameter, value in module.named_parameters(recurse=False):
            if value.ndim != 2:
                yield (
                    f'{name!r} has style "row" and a parameter {parameter!r} that is no matrix: '
                    "every tp rank would add it; leave it out, or add it after the module"
                )


def _float8_of_others(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    for name, module in model.named_modules():
        if not plan.multiplies_in_float8(name):
            continue
        is_cut = plan.style_of(name) in ("column", "kv_column", "row")
        is_known = isinstance(module, Experts) or (type(module) is nn.Linear and is_cut)
        if not is_known or not name.startswith("blocks."):
            yield (
                f"the plan's float8 names {name!r}, which is neither Experts in blocks nor a "
                'torch.nn.Linear in blocks of style "column", "kv_column" or "row"'
            )


def _first_that_computes(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    if not plan.first_only_looks_up:
        return
    for name, _ in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if name.startswith("first.") and not isinstance(module, nn.Embedding):
            yield (
                f"the plan says first_only_looks_up, but {name!r} is a parameter of a module that "
                "is no torch.nn.Embedding, and backward may read it"
            )


def _missing_kv_heads(plan: ShardingPlan) -> Iterator[str]:
    styles: tuple[Style, ...] = ("kv_column", "kv_column_norm")
    for style in styles:
        if style in plan.tensor.values() and plan.kv_heads is None:
            yield f'the plan has modules of style "{style}", so it must give kv_heads'


def _seams(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    for name, module in model.named_modules():
        for seam, glob, is_named in (
            ("attend", "attend", plan.attends(name)),
            ("exchange", "experts", plan.holds_experts(name)),
        ):
            if is_named and not hasattr(module, seam):
                yield f"the plan's {glob} glob matches {name!r}, which has no seam `{seam}`"
            if not is_named and hasattr(module, seam):
                yield f"{name!r} has the seam `{seam}`; the plan's {glob} glob must match it"
