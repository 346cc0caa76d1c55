"""``composer3d plan``: rank the legal layouts of a recipe by predicted time. It needs no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from composer3d.commands.arguments import (
    argument,
    gpus_option,
    gpus_per_node_option,
    json_option,
    positive,
    recipe_argument,
    set_option,
)
from composer3d.commands.goodput import (
    PUBLISHED,
    Question,
    goodput_words,
    predict_goodput,
    read_question,
)
from composer3d.commands.why import AS_IT_IS, as_json, explain, in_words, read_other
from composer3d.facts import hardware
from composer3d.facts.calibration import MOST_OBSERVATIONS, Observation, toml_of
from composer3d.facts.errors import DeviceError, UserError
from composer3d.facts.text import gib_form, one_line
from composer3d.planner.calibrate import observe, problem_of
from composer3d.planner.caveats import caveats
from composer3d.planner.compare import MEMORY_KINDS
from composer3d.planner.goodput import RESTART_S, STORAGE_BYTES_S
from composer3d.planner.intervals import Interval
from composer3d.planner.memory import GIB, RankMemory
from composer3d.planner.predict import Prediction
from composer3d.planner.search import (
    CLOSE,
    Device,
    Plan,
    ScalePoint,
    price,
    scaling,
    search,
    work_share,
)
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import as_toml
from composer3d.runtime.progress import Progress

_MOST_TOKENS_S = 1e15
# The layouts that are shown by default. With fewer, as many are improved, so that the first one is
# as close to the best for any --top.
_TOP = 10
_SCALING = (8, 64, 512, 2048)
_NEEDED = "needed: the sum of the columns before it, which decides whether the recipe fits"
_NOT_COUNTED = """
CUDA: the least that its context takes
(slack), not counted: what the allocator reserves and does not use; short of memory, it returns that
(context), not counted: what CUDA and NCCL usually take in all, of which CUDA is a part"""
_ALL_MEMORY_KINDS = tuple(entry.name for entry in fields(RankMemory))

EXAMPLES = (
    "composer3d plan llama3-8b-8-fsdp --gpu H100",
    "composer3d plan llama3-8b-8-fsdp --gpus 16 --write fastest.toml",
    "composer3d plan llama3-8b-8-fsdp --gpu H100 --calibrate 75000 --keep mine.toml",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option()
    as_json: bool = json_option()
    gpus: int | None = gpus_option(help="devices; default: as many as the recipe's mesh")
    gpu: str = argument(
        "--gpu",
        metavar="NAME|FILE",
        default="H100",
        help="a device, such as A100-80GB, H100, H200, H20, B200, GB200, MI300X or CPU, or a TOML "
        "file with a row of your own; default: %(default)s",
    )
    gpus_per_node: int = gpus_per_node_option(without=("--memory",), unless=("--goodput", "--keep"))
    top: int = argument(
        "--top",
        without=("--memory",),
        metavar="N",
        type=positive,
        default=_TOP,
        help="layouts; default: %(default)s",
    )
    memory: bool = argument(
        "--memory", action="store_true", help="only say whether the recipe, as it is, fits"
    )
    scale: bool = argument(
        "--scale",
        without=("--memory",),
        action="store_true",
        help="also plan for 8, 64, 512 and 2048 devices",
    )
    calibrate: float | None = argument(
        "--calibrate",
        without=("--memory",),
        unless=("--keep", "--goodput"),
        metavar="TOKENS_PER_S",
        type=float,
        help="what a run of the recipe, as it is, reached on this device: tokens/s of all ranks",
    )
    keep: str | None = argument(
        "--keep",
        needs=("--calibrate",),
        metavar="FILE.toml",
        help="make FILE.toml, a row for --gpu that remembers what --calibrate says",
    )
    goodput: str | None = argument(
        "--goodput",
        metavar=f"HOURS|{PUBLISHED}",
        help="also say how much of the time trains, and the best checkpoint.every, if the job "
        "fails once in HOURS, or as often as others published for such devices",
    )
    storage: float | None = argument(
        "--storage",
        needs=("--goodput",),
        metavar="GB_S",
        type=float,
        help="with --goodput: GB/s of all ranks to the storage of checkpoints; default: "
        f"{STORAGE_BYTES_S / 1e9:.3f} for each device, as Llama 3 had",
    )
    restart: float | None = argument(
        "--restart",
        needs=("--goodput",),
        metavar="MINUTES",
        type=float,
        help="with --goodput: from the end of the job until its ranks load; default: "
        f"{RESTART_S / 60:.0f}, published for 100,000 devices",
    )
    why: str | None = argument(
        "--why",
        without=("--memory",),
        metavar="LAYOUT",
        help="also compare the first layout with LAYOUT, term by term: the number of a row, or "
        f"overrides of the recipe as one text, such as 'mesh.tp=2 mesh.pp=4', or {AS_IT_IS}, as it "
        "is",
    )
    write: str | None = argument(
        "--write",
        without=("--memory",),
        metavar="FILE",
        help="make FILE, a recipe with the fastest layout",
    )


def run(options: Options) -> int:
    """Print the fastest layouts, or the memory of the recipe's own layout.

    Returns:
        The exit status: 0, or 1 if nothing fits.

    Raises:
        UserError: the recipe or the device cannot be used.
    """
    question = read_question(options.goodput, options.storage, options.restart)
    device = Device(hardware=find_device(options.gpu), per_node=options.gpus_per_node)
    resolved = load(options.recipe, options.sets, check_files=False, may_import=True)
    if options.gpus is not None and resolved.fills_world:
        resolved = load(
            options.recipe,
            options.sets,
            check_files=False,
            world_size=options.gpus,
            may_import=True,
        )
    if options.memory and options.gpus not in (None, resolved.recipe.world_size):
        raise UserError(
            f"--memory prices the recipe as it is, on {resolved.recipe.world_size:,} devices; for "
            f"--gpus {options.gpus}, change its mesh with --set"
        )
    calibrated = None
    if options.calibrate is not None:
        device, calibrated = _calibrated(resolved.recipe, device, options)
    has_times = question is not None or not options.memory
    less_sure = caveats(resolved.recipe, device.hardware, has_times=has_times)
    if not options.as_json:
        for sentence in less_sure:
            print(sentence)
    if options.memory:
        in_json = {"caveats": less_sure} if options.as_json else None
        return _memory(resolved.recipe, device, question, in_json)

    count = options.gpus or resolved.recipe.world_size
    other = None
    if options.why is not None:
        other = read_other(options.why, options.recipe, options.sets, count)
    with Progress("plan", 0, "predictions") as progress:
        found = search(
            resolved.recipe,
            count,
            device,
            options.top,
            improved=_TOP,
            report=lambda what: progress.advance(note=f"{what} of each layout"),
        )
    if not found.legal:
        batch = resolved.recipe.data.global_batch
        raise UserError(
            f"{options.recipe} has no legal layout on {count:,} devices with "
            f"data.global_batch = {batch}; try a batch that grows with the devices, such as "
            f"--set data.global_batch={_larger_batch(batch, resolved.recipe.world_size, count)}"
        )
    answer: dict[str, Any] = {
        "gpus": count,
        "gpu": device.hardware.name,
        "gpu_is_fitted": device.hardware.is_fitted,
        "caveats": less_sure,
        "legal": found.legal,
        "fitting": found.fitting,
        "fitting_by_keys": found.by_keys,
        "first_is_close_probability": found.close,
        "layouts": [_as_json(plan) for plan in found.plans],
    }
    table = []
    if options.scale:
        with Progress("plan --scale", 0, "predictions") as progress:
            table = scaling(
                resolved.recipe,
                device,
                _SCALING,
                report=lambda what: progress.advance(note=f"{what}, of each layout"),
            )
        answer["scaling"] = [_scale_json(point) for point in table]
    if calibrated is not None:
        answer["calibration"] = calibrated
    fits = found.plans[0].prediction.fits
    if question is not None and fits:
        answer["goodput"] = predict_goodput(question, found.plans[0], device)
    compared = None if other is None else explain(found.plans, other, device)
    if compared is not None:
        answer["why"] = as_json(compared)
    # Nothing above is refused any more, and a file is never replaced.
    if options.write is not None and fits:
        _write(resolved, found.plans[0].recipe, Path(options.write))
    if options.as_json:
        print(json.dumps(answer))
        return 0 if fits else 1
    if calibrated is not None:
        print(_calibration_words(calibrated))
    _print_search(answer, found.plans, device)
    if "goodput" in answer:
        print(*goodput_words(answer["goodput"]), sep="\n")
    elif question is not None:
        print("goodput: no layout fits, so there is none to predict it for")
    if compared is not None:
        print(*in_words(compared, options.why or "", device), sep="\n")
    if table:
        _print_scaling(table)
    if options.write is not None and fits:
        print(f"the fastest layout is written to {one_line(options.write)}")
    return 0 if fits else 1


def _calibrated(recipe: Recipe, device: Device, options: Options) -> tuple[Device, dict[str, Any]]:
    """Return the device with what a run of the recipe says of it, and what has changed by that."""
    measured = options.calibrate
    if measured is None or not 0 < measured < _MOST_TOKENS_S:
        raise UserError(f"--calibrate {measured:g}: give the tokens/s of all ranks, above 0")
    problem = problem_of(recipe)
    if problem:
        raise UserError(f"--calibrate cannot learn from a run of this recipe: {problem}")
    before = price(recipe, device).prediction
    observation = observe(device.setup(recipe), measured / recipe.world_size)
    row = device.hardware
    if len(row.calibration) >= MOST_OBSERVATIONS:
        raise UserError(
            f"{row.name} has {MOST_OBSERVATIONS} calibrations already, as many as it may"
        )
    device = replace(device, hardware=row._replace(calibration=(*row.calibration, observation)))
    after = price(recipe, device).prediction
    if options.keep is not None:
        _keep(options.gpu, row, observation, Path(options.keep))
    return device, {
        "measured_tokens_per_s": measured,
        "predicted_tokens_per_s": before.tokens_s * recipe.world_size,
        "predicted_tokens_per_s_80": before.interval(before.tokens_s * recipe.world_size),
        "now_tokens_per_s": after.tokens_s * recipe.world_size,
        "now_tokens_per_s_80": after.interval(after.tokens_s * recipe.world_size),
    }


def _calibration_words(calibrated: dict[str, Any]) -> str:
    before = _range(calibrated["predicted_tokens_per_s_80"], ",.0f")
    after = _range(calibrated["now_tokens_per_s_80"], ",.0f")
    return (
        f"calibrated: {calibrated['measured_tokens_per_s']:,.0f} tokens/s were measured; predicted "
        f"were {calibrated['predicted_tokens_per_s']:,.0f} ({before}), and now "
        f"{calibrated['now_tokens_per_s']:,.0f} ({after})"
    )


def _keep(gpu: str, row: hardware.Hardware, observation: Observation, path: Path) -> None:
    """Make a file with the row of the device, and with the observation at its end."""
    text = f"base = {json.dumps(row.name)}\n"
    if gpu.endswith(".toml"):
        text = hardware.text_of_row(gpu)
    _make_file("--keep", path, text.rstrip("\n") + "\n" + toml_of(observation))


def _larger_batch(batch: int, world_size: int, gpus: int) -> int:
    """Return a batch with as many samples for each device as the recipe has, and at least one."""
    return max(gpus, batch * gpus // max(1, world_size))


def find_device(name: str) -> hardware.Hardware:
    """Return the row with this name, or the row in this TOML file.

    Raises:
        DeviceError: no row has this name, or the file cannot be used.
    """
    if name.endswith(".toml"):
        return hardware.read_row(name)
    row = hardware.by_name(name)
    if row is None:
        known = ", ".join(device.name for device in hardware.DEVICES)
        raise DeviceError(
            f"--gpu {one_line(name, 80)}: unknown device; known are {known} and CPU; or name a "
            "TOML file with a row of your own"
        )
    return row


def _as_json(plan: Plan) -> dict[str, Any]:
    recipe, prediction = plan.recipe, plan.prediction
    mesh = recipe.mesh
    return {
        "pp": mesh.pp,
        "virtual_stages": recipe.parallel.stages_per_rank if mesh.pp > 1 else 1,
        "dp_replicate": mesh.dp_replicate,
        "dp_shard": mesh.dp_shard,
        "cp": mesh.cp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "zero": recipe.parallel.zero,
        "micro_batch": recipe.data.micro_batch,
        "schedule": recipe.parallel.schedule,
        "activation_checkpoint": recipe.memory.activation_checkpoint,
        "loss_chunks": recipe.memory.loss_chunks,
        "fsdp_blocks": recipe.parallel.fsdp_blocks,
        "cp_method": recipe.parallel.cp_method,
        "stages": recipe.parallel.stages,
        "step_time_s": prediction.time.step_s,
        "step_time_s_80": prediction.interval(prediction.time.step_s),
        "tokens_per_s_per_gpu": prediction.tokens_s,
        "tokens_per_s_per_gpu_80": prediction.interval(prediction.tokens_s),
        "mfu": plan.mfu,
        "mfu_80": None if plan.mfu is None else prediction.interval(plan.mfu),
        "peak_gib": prediction.peak_gib,
        "peak_gib_80": prediction.peak_interval,
        "fits": prediction.fits,
        "fits_probability": prediction.fits_probability,
        "bound_by": plan.bound_by,
        "lever": plan.lever,
    }


def _print_search(answer: dict[str, Any], plans: list[Plan], device: Device) -> None:
    by_keys = answer["fitting_by_keys"]
    print(
        f"{answer['legal']:,} legal layouts on {answer['gpus']:,} x {device.hardware.name}, "
        f"{answer['fitting']:,} fit" + (f", and {by_keys:,} more with further keys" * (by_keys > 0))
    )
    form = gib_form(max((plan.prediction.peak_gib for plan in plans), default=1.0))
    width = 13 if form == ".1f" else 15  # of an interval
    print(
        f"{_LAYOUT_HEADING}    tokens/s          (80%)    MFU     GiB{'(80%)':>{width}}  fits  "
        "bound by"
    )
    for plan in plans:
        prediction = plan.prediction
        speeds, sizes = prediction.interval(prediction.tokens_s), prediction.peak_interval
        print(
            f"{_layout_cells(plan)}{prediction.tokens_s:11,.0f}"
            f"{_range(speeds, ',.0f'):>15} {_mfu_cell(plan)} "
            f"{prediction.peak_gib:7{form}}{_range(sizes, form):>{width}} "
            f"{_probability(prediction.fits_probability):>5}  {plan.bound_by}{_further(plan)}"
        )
    print("80%: four of five measured values are expected in it; fits: the probability of it")
    close = answer["first_is_close_probability"]
    if close is not None and answer["fitting"] + by_keys > 1:
        print(_closeness(close))
    if plans:
        print("why:", *_reasons(plans[0], device), sep="\n  ")


_LAYOUT_HEADING = (
    "  tp  pp x v   dp (replicate x shard)   cp   ep  zero  micro  schedule         checkpoint    "
)


def _layout_cells(plan: Plan) -> str:
    """Return the cells of a layout, below ``_LAYOUT_HEADING``."""
    one, checkpointing = _as_json(plan), plan.recipe.memory.checkpointing
    blocks = str(checkpointing.in_first(None))
    blocks += "" if checkpointing.blocks.stages is None else ", some"
    return (
        f"{one['tp']:4} {one['pp']:3} x {one['virtual_stages']:<2} "
        f"{one['dp_replicate']:>10} x {one['dp_shard']:<10}"
        f"{one['cp']:5}{one['ep']:5}{one['zero']:6}{one['micro_batch']:7}  "
        f"{one['schedule'] if one['pp'] > 1 else '-':16} {blocks:14}"
    )


def _further(plan: Plan) -> str:
    """Return what no cell of a layout says, as overrides in a line of their own, or nothing."""
    parallel, memory = plan.recipe.parallel, plan.recipe.memory
    is_in_some = memory.checkpointing.blocks.stages is not None
    values = {
        "memory.activation_checkpoint": f'"{memory.activation_checkpoint}"' if is_in_some else None,
        "memory.loss_chunks": memory.loss_chunks if memory.loss_chunks > 1 else None,
        "parallel.fsdp_blocks": parallel.fsdp_blocks if parallel.fsdp_blocks > 1 else None,
        "parallel.cp_method": parallel.cp_method if plan.recipe.mesh.cp > 1 else None,
        "parallel.stages": parallel.stages and as_toml(parallel.stages).replace(" ", ""),
    }
    words = " ".join(f"{key}={value}" for key, value in values.items() if value is not None)
    return f"\n      with {words}" if words else ""


def _mfu_cell(plan: Plan) -> str:
    return f"{plan.mfu:6.1%}" if plan.mfu is not None else "     -"


def _mfu_range(plan: Plan) -> str:
    return "-" if plan.mfu is None else _range(plan.prediction.interval(100 * plan.mfu), ".1f")


def _range(interval: Interval, form: str) -> str:
    low, high = interval
    return f"{low:{form}}-{high:{form}}"


def _probability(share: float) -> str:
    """Return a probability in percent. One of 0 or 1 is never claimed."""
    return f"{min(0.99, max(0.01, share)):.0%}"


def _closeness(close: float) -> str:
    words = f"the first layout is within {CLOSE:.0%} of the best with a probability of"
    doubt = "; the planner cannot tell them apart: measure the first few" if close < 0.5 else ""
    return f"{words} {_probability(close)}{doubt}"


def _reasons(plan: Plan, device: Device) -> list[str]:
    """Explain a layout along the decisions that people make."""
    mesh = plan.recipe.mesh
    limit, peak_gib = device.hardware.memory_gib, plan.prediction.peak_gib
    need = f"{peak_gib:{gib_form(peak_gib)}}"
    if not plan.prediction.fits:
        return [
            f"nothing fits {limit:.0f} GiB; the closest layout needs {need} GiB on pipeline rank "
            f"{plan.prediction.largest_rank}"
        ]
    reasons = [f"it needs {need} of {limit:.0f} GiB on a device"]
    if mesh.tp > 1:
        place = "inside a node" if mesh.tp <= device.per_node else "over nodes"
        reasons.append(f"tp {mesh.tp} {place}: it cuts every layer, and its traffic is frequent")
    if mesh.pp > 1:
        reasons.append(f"pp {mesh.pp}: stages cut the memory of parameters with little traffic")
    if plan.recipe.parallel.stages:
        reasons.append("its stages are cut by predicted time, which is faster than by parameters")
    if mesh.cp > 1:
        reasons.append(f"cp {mesh.cp}: a sequence has {plan.recipe.data.seq_len:,} tokens")
    if mesh.ep > 1:
        reasons.append(f"ep {mesh.ep}: each rank holds a part of the experts")
    if mesh.batch_ranks > 1:
        reasons.append(
            f"data parallel with the rest: {mesh.dp_replicate} x {mesh.dp_shard} ranks, "
            f"zero {plan.recipe.parallel.zero}"
        )
    reasons.append(f"bound by {plan.bound_by}; the next lever: {plan.lever}")
    return reasons


def _scale_json(point: ScalePoint) -> dict[str, Any]:
    if point.plan is None:
        return {"gpus": point.gpus, "fits": False}
    return {
        "gpus": point.gpus,
        "efficiency": point.efficiency,
        "work_share": work_share(point.plan.prediction),
        **_as_json(point.plan),
    }


def _print_scaling(table: list[ScalePoint]) -> None:
    print("the fastest layout as devices grow")
    print(f"devices  samples{_LAYOUT_HEADING}  efficiency   work    MFU      (80%)  bound by")
    for point in table:
        print(scale_line(point))
    base = next((point.gpus for point in table if point.efficiency is not None), None)
    if base is not None:
        print(
            f"efficiency: tokens/s of a device, relative to {base:,} devices\n"
            "work: the share of a step that is the model's own work\n"
            "80%: four of five measured values are expected in it"
        )


def scale_line(point: ScalePoint) -> str:
    """Return the row of the table of ``--scale`` for a number of devices."""
    plan = point.plan
    if plan is None:
        return f"{point.gpus:7,}  no layout is legal"
    if point.efficiency is None:
        peak_gib = plan.prediction.peak_gib
        need = f"{peak_gib:,{gib_form(peak_gib, '.0f')}} GiB"
        return f"{point.gpus:7,}  nothing fits; the closest layout needs {need} on a device"
    return (
        f"{point.gpus:7,}  {plan.recipe.data.global_batch:7,}{_layout_cells(plan)}  "
        f"{point.efficiency:10.1%} {work_share(plan.prediction):6.1%} {_mfu_cell(plan)}"
        f"{_mfu_range(plan):>11}  {plan.bound_by}{_further(plan)}"
    )


def _memory(
    recipe: Recipe, device: Device, question: Question | None, in_json: dict[str, Any] | None
) -> int:
    """Print whether the recipe fits as it is, by kind and pipeline rank.

    ``in_json`` is what the JSON has besides; None: words are printed.
    """
    plan = price(recipe, device)
    prediction = plan.prediction
    ranks = [
        {kind: getattr(rank, kind) / GIB for kind in _ALL_MEMORY_KINDS}
        for rank in prediction.memory
    ]
    if in_json is not None:
        answer = in_json | {
            "fits": prediction.fits,
            "largest_rank": prediction.largest_rank,
            "memory_gib": device.hardware.memory_gib,
            "peak_gib": prediction.peak_gib,
            "peak_gib_80": prediction.peak_interval,
            "fits_probability": prediction.fits_probability,
            "needed_gib": prediction.needed_gib,
            "ranks": ranks,
        }
        if question is not None:
            answer["goodput"] = predict_goodput(question, plan, device)
        print(json.dumps(answer))
        return 0 if prediction.fits else 1
    form = gib_form(prediction.allocated_gib)
    _print_memory(prediction, form)
    word = "fits" if prediction.fits else "does not fit"
    print(
        f"the recipe {word} {device.hardware.memory_gib:.0f} GiB of {device.hardware.name}; "
        f"pipeline rank {prediction.largest_rank} needs most, {prediction.peak_gib:{form}} GiB "
        f"(80%: {_range(prediction.peak_interval, form)}); "
        f"probability that it fits: {_probability(prediction.fits_probability)}"
    )
    if question is not None:
        print(*goodput_words(predict_goodput(question, plan, device)), sep="\n")
    return 0 if prediction.fits else 1


def _print_memory(prediction: Prediction, form: str) -> None:
    """Print what each pipeline rank needs, by kind, and on GPUs what does not count.

    ``form`` is the format of the figures.
    """
    needed_gib = prediction.needed_gib
    is_on_gpus = any(rank.context for rank in prediction.memory)
    rows = []
    for rank, needed in zip(prediction.memory, needed_gib, strict=True):
        row = {kind: getattr(rank, kind) / GIB for kind in MEMORY_KINDS}
        if is_on_gpus:
            row["CUDA"] = needed - rank.allocated_bytes / GIB
        row["needed"] = needed
        if is_on_gpus:
            row |= {"(slack)": rank.slack / GIB, "(context)": rank.context / GIB}
        rows.append(row)
    print("GiB        " + "".join(f"{head:>13}" for head in rows[0]))
    for number, row in enumerate(rows):
        print(f"pp rank {number:<3}" + "".join(f"{cell:13{form}}" for cell in row.values()))
    print(_NEEDED + _NOT_COUNTED * is_on_gpus)


def _write(resolved: Resolved, recipe: Recipe, path: Path) -> None:
    """Write a recipe that ``check`` accepts, with the origin of each value that the plan chose."""
    origins = dict(resolved.origins)
    for table in ("mesh", "parallel", "memory", "data"):
        before, after = getattr(resolved.recipe, table), getattr(recipe, table)
        for entry in fields(after):
            if getattr(before, entry.name) != getattr(after, entry.name):
                origins[f"{table}.{entry.name}"] = "composer3d plan"
    text = replace(resolved, recipe=recipe, origins=origins).to_toml()
    _make_file("--write", path, text)


def _make_file(option: str, path: Path, text: str) -> None:
    """Make a file. One that is there is never replaced.

    Raises:
        UserError: the file is there, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{option} {path}: the file cannot be made ({error.strerror})") from None
