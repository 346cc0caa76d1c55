"""What the values of a recipe must satisfy: each alone (``RANGES``), and together, the rules on layouts last. Pure.

``violations`` is read by ``load``, which adds where each value came from, and by whoever proposes layouts, so that what
is proposed is what a recipe accepts.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd, lcm
from typing import NamedTuple

from composer3d.recipe.schema import AXES, MOST_RANKS, Range, Recipe
from composer3d.recipe.values import (
    FIELDS,
    divisors,
    either,
    mention,
    multiples_near,
    show,
    use,
    value_of,
)
from composer3d.spec.schedules import SCHEDULES, micro_batches_near, micro_batches_wrong


class Violation(NamedTuple):
    """One broken rule. ``others`` are the further keys that it reads; ``<mesh.tp>`` in ``template`` is one of them."""

    key: str
    template: str
    others: tuple[str, ...] = ()

    def message(self, recipe: Recipe, origins: Mapping[str, str] = {}) -> str:
        """What is wrong, each key as ``mention`` writes it, with its origin where that is given."""
        said = {key: f" ({origin})" for key, origin in origins.items()}
        return re.sub(
            r"<([\w.]+)>",
            lambda match: mention(recipe, match[1]) + said.get(match[1], ""),
            self.template,
        )


Check = Callable[[Recipe], Iterator[str]]
RULES: list[tuple[tuple[str, ...], Check]] = []
RANGES: dict[str, Range] = {
    key: found for key, entry in FIELDS.items() if (found := entry.metadata["range"])
}
PATHS = {  # what data.path and validation.path are, by the sources that read them
    "text": "a text file or a folder of them",
    "jsonl": "a .jsonl file or a folder of them",
    "tokens": "a folder that composer3d prepare made",
}


def violations(recipe: Recipe) -> list[Violation]:
    """Every rule that ``recipe`` breaks. ``mesh.dp_shard`` may still be -1; rules that read it are then passed over."""
    found: list[Violation] = []
    for key, (good, fault) in RANGES.items():
        value = value_of(recipe, key)
        if value is not None and not good(value):
            found.append(Violation(key, f"<{key}> {fault}"))
    unusable = {violation.key for violation in found} | (
        {"mesh.dp_shard"} if recipe.mesh.dp_shard == -1 else set()
    )
    for keys, check in RULES:
        if unusable.isdisjoint(keys):
            found += [Violation(keys[0], template, keys[1:]) for template in check(recipe)]
    return found


def _rule(*keys: str) -> Callable[[Check], Check]:
    """Enters a rule, which yields the template of a message where it is broken.

    The first key is the one at fault. The rule decides by its keys alone, so that none meets a value that its range
    refuses (a zero to divide by).
    """

    def enter(check: Check) -> Check:
        RULES.append((keys, check))
        return check

    return enter


def _must_be(key: str, order: str, bound: str, why: str = "") -> None:
    @_rule(key, bound)
    def _(recipe: Recipe) -> Iterator[str]:
        value, limit = value_of(recipe, key), value_of(recipe, bound)
        if value is not None and not {"above": value > limit, "at most": value <= limit}[order]:
            yield f"<{key}> must be {order} <{bound}>{why}"


def _read_with(
    key: str, switch: str, readers: Sequence[str] | Mapping[str, str], way_out: str = ""
) -> None:
    """``key`` keeps its default where ``switch`` is none of ``readers``; those that say what it is need it."""
    way_out = way_out or f"remove it, or use {switch} = {either(map(show, readers))}"

    @_rule(key, switch)
    def _(recipe: Recipe) -> Iterator[str]:
        value, chosen = value_of(recipe, key), value_of(recipe, switch)
        if chosen not in readers and value != FIELDS[key].default:
            yield f"<{key}> is not read with <{switch}>; {way_out}"
        if chosen in readers and value is None and isinstance(readers, Mapping):
            yield f"<{switch}> needs {key}: {readers[chosen]}"


def _tp_divides(size: str, *others: str) -> None:
    """The way out lists what fits all sizes: of key-value heads every rank has as many, or each has as many ranks."""
    or_multiple = size == "model.n_kv_heads"

    @_rule("mesh.tp", size, *others)
    def _(recipe: Recipe) -> Iterator[str]:
        model, tp, value = recipe.model, recipe.mesh.tp, value_of(recipe, size)
        if value % tp and not (or_multiple and tp % value == 0):
            legal = divisors(gcd(model.n_heads, model.ffn))
            legal = [
                each
                for each in legal
                if model.n_kv_heads % each == 0 or each % model.n_kv_heads == 0
            ]
            yield f"<mesh.tp> must divide <{size}>{' or be a multiple of it' * or_multiple}; {use(legal, tp)}"


@_rule("model.n_heads", "model.dim", "model.head_dim")
def _heads_fill_dim(recipe: Recipe) -> Iterator[str]:
    """The head size, where it is not given, is whole, and even: the rotary embedding turns its two halves."""
    dim, heads = recipe.model.dim, recipe.model.n_heads
    if recipe.model.head_dim is None and dim % (2 * heads):
        width = f"gives heads of {dim // heads}, an odd size that cannot be rotated, with"
        way_out = "use an even model.dim" if dim % 2 else use(divisors(dim // 2), heads)
        yield f"<model.n_heads> {'must divide' if dim % heads else width} <model.dim>; {way_out}"


@_rule("model.n_kv_heads", "model.n_heads")
def _kv_heads_serve_heads(recipe: Recipe) -> Iterator[str]:
    heads, kv_heads = recipe.model.n_heads, recipe.model.n_kv_heads
    if heads % kv_heads:
        yield f"<model.n_kv_heads> must divide <model.n_heads>; {use(divisors(heads), kv_heads)}"


_must_be("model.rope_high_freq", "above", "model.rope_low_freq")


@_rule("model.vocab", "data.source")
def _vocabulary_holds_bytes(recipe: Recipe) -> Iterator[str]:
    if (
        recipe.model.vocab < 256 and recipe.data.source != "tokens"
    ):  # token files say what they need: see load
        yield "<model.vocab> must be at least 256: the tokens of the data are bytes"


_read_with("data.path", "data.source", PATHS)


@_rule("validation.every", "data.source", "validation.path")
def _held_out_source_has_a_path(recipe: Recipe) -> Iterator[str]:
    if recipe.data.source in PATHS and recipe.validation.every and recipe.validation.path is None:
        fault = f"<validation.every> with <data.source> needs validation.path, held-out data: {PATHS[recipe.data.source]}"
        yield f"{fault}; give it, or use validation.every = 0"


_read_with("data.field", "data.source", ["jsonl"])
_read_with("validation.path", "data.source", [*PATHS])
_must_be("optim.warmup", "at most", "run.steps")
_must_be("optim.decay", "above", "optim.warmup", ": the decay starts there")
_DECAYS = ("cosine", "linear", "wsd")
_read_with("optim.decay", "optim.schedule", _DECAYS, "remove it, or use a schedule that decays")
_read_with("optim.min_lr", "optim.schedule", _DECAYS, "use 0, or a schedule that decays")
_read_with("optim.decay_steps", "optim.schedule", ["wsd"])


@_rule("optim.decay_steps", "optim.warmup", "optim.decay", "run.steps", "optim.schedule")
def _wsd_decay_fits(recipe: Recipe) -> Iterator[str]:
    optim = recipe.optim
    end, last, least = (
        ("run.steps", recipe.run.steps, 0)
        if optim.decay is None
        else ("optim.decay", optim.decay, 1)
    )
    room = last - optim.warmup
    if optim.schedule == "wsd" and least <= room < (
        optim.decay_steps or 0
    ):  # with less, it is the warmup's fault
        way_out = f"use at most {room}" if room else "shorten the warmup"
        yield f"<optim.decay_steps> after <optim.warmup> would end beyond <{end}>; {way_out}"


_must_be("optim.min_lr", "at most", "optim.lr")
_tp_divides("model.n_heads")
_tp_divides("model.n_kv_heads", "model.n_heads", "model.ffn")
_tp_divides("model.ffn")


@_rule("mesh.cp", "parallel.cp_method", "model.n_heads", "model.n_kv_heads", "mesh.tp")
def _ulysses_cuts_heads(recipe: Recipe) -> Iterator[str]:
    model, cp, tp = recipe.model, recipe.mesh.cp, recipe.mesh.tp
    heads, kv_heads = model.n_heads // tp, max(1, model.n_kv_heads // tp)
    if recipe.parallel.cp_method == "ulysses" and (heads % cp or kv_heads % cp):
        of_tp = f", of which a rank of <mesh.tp> has {heads} and {kv_heads}" if tp > 1 else ""
        fault = f"<mesh.cp> with <parallel.cp_method> must divide <model.n_heads> and <model.n_kv_heads>{of_tp}"
        yield f'{fault}; {use(divisors(gcd(heads, kv_heads)), cp)}, or parallel.cp_method = "ring"'


@_rule("mesh.tp", "model.vocab")
def _every_rank_has_vocabulary(recipe: Recipe) -> Iterator[str]:
    vocab, tp = recipe.model.vocab, recipe.mesh.tp
    chunk = -(-vocab // tp)
    if chunk * (tp - 1) >= vocab:
        fault = f"<mesh.tp> cuts <model.vocab> into {-(-vocab // chunk)} chunks of {chunk}, which leaves ranks without"
        yield f"{fault}; use a smaller mesh.tp, or model.vocab = {chunk * tp}"


@_rule("mesh.tp", "model.vocab", "model.dim", "mesh.dp_shard", "mesh.cp", "parallel.zero")
def _uneven_vocabulary_has_even_columns(recipe: Recipe) -> Iterator[str]:
    """FSDP cuts the columns of what tp cuts into uneven rows, and takes even columns only."""
    model, mesh = recipe.model, recipe.mesh
    if model.vocab % mesh.tp and model.dim % (mesh.dp_shard * mesh.cp) and recipe.parallel.zero:
        shards = "<mesh.dp_shard> x <mesh.cp>, which shard it"
        fault = f"<mesh.tp> does not divide <model.vocab>, so <model.dim> must be a multiple of {shards}"
        yield f"{fault}; change them, or use model.vocab = {-(-model.vocab // mesh.tp) * mesh.tp}"


@_rule("data.seq_len", "mesh.tp", "mesh.cp", "parallel.sequence_parallel", "parallel.cp_balance")
def _sequence_divides(recipe: Recipe) -> Iterator[str]:
    """cp cuts a sequence into one or two chunks a rank, sequence parallelism what a rank has of it into tp parts."""
    seq_len, cp = recipe.data.seq_len, recipe.mesh.cp
    tp = recipe.mesh.tp if recipe.parallel.sequence_parallel else 1
    chunks = 2 if cp > 1 and recipe.parallel.cp_balance == "zigzag" else 1
    unit = cp * lcm(chunks, tp)
    what, way_out = (
        "<mesh.tp> with <parallel.sequence_parallel>",
        ", or parallel.sequence_parallel = false",
    )
    if cp > 1:
        again = f", {what} cuts a rank's again" if tp > 1 else ""
        what, way_out = f"{unit}: <mesh.cp> cuts it into {chunks * cp} chunks{again}", ""
    if seq_len % unit:
        yield f"<data.seq_len> must be a multiple of {what}; use {multiples_near(seq_len, unit)}{way_out}"


@_rule(*(f"mesh.{axis}" for axis in AXES))
def _world_can_be_started(recipe: Recipe) -> Iterator[str]:
    if recipe.world_size > MOST_RANKS:
        axes = " x ".join(f"<mesh.{axis}>" for axis in AXES)
        yield f"{axes} is a world of {recipe.world_size:_} processes; it must be at most {MOST_RANKS:_}"


@_rule("mesh.pp", "parallel.virtual_stages", "parallel.schedule", "model.n_layers")
def _stages_have_layers(recipe: Recipe) -> Iterator[str]:
    each, layers, pp = recipe.parallel.stages_per_rank, recipe.model.n_layers, recipe.mesh.pp
    if pp > 1 and pp * each > layers:
        ranks = "<mesh.pp>" + (f", with {each} stages a rank," if each > 1 else "")
        fewer = (
            f"at most {layers // each}"
            if layers >= each
            else "more layers or fewer parallel.virtual_stages"
        )
        yield f"{ranks} is more than <model.n_layers>: a stage needs a layer; use {fewer}"


@_rule("parallel.virtual_stages", "parallel.schedule")
def _schedule_takes_virtual_stages(recipe: Recipe) -> Iterator[str]:
    (least, most, _), wanted = (
        SCHEDULES[recipe.parallel.schedule].stages,
        recipe.parallel.virtual_stages,
    )
    if wanted is not None and not least <= wanted <= most:
        need = f"{least}" if least == most else f"{least} or more"
        fault = (
            f"<parallel.virtual_stages> does not fit <parallel.schedule>, whose ranks hold {need}"
        )
        yield f"{fault}; use {need}, or leave it out"


@_rule(
    "parallel.stages", "mesh.pp", "parallel.virtual_stages", "parallel.schedule", "model.n_layers"
)
def _cut_fits(recipe: Recipe) -> Iterator[str]:
    stages, pp = recipe.parallel.stages, recipe.mesh.pp
    each = recipe.parallel.stages_per_rank if pp > 1 else 1
    if stages is None:
        return
    if len(stages) != pp * each:
        fault = f"<parallel.stages> has {len(stages)} stages, but <mesh.pp> with {each} a rank makes {pp * each}"
        yield f"{fault}; give {pp * each} numbers, or leave it out"
    elif min(stages) < 1:
        yield "<parallel.stages> must give every stage a layer"
    elif sum(stages) != recipe.model.n_layers:
        yield f"<parallel.stages> holds {sum(stages)} layers, but <model.n_layers>; make it add up"


_read_with("parallel.schedule_csv", "parallel.schedule", {"csv": "the file of the schedule"})
_BATCH = ("data.micro_batch", "mesh.dp_replicate", "mesh.dp_shard")
_PRODUCT = " x ".join(f"<{key}>" for key in _BATCH)


@_rule("data.global_batch", *_BATCH)
def _batch_divides(recipe: Recipe) -> Iterator[str]:
    batch, unit = recipe.data.global_batch, recipe.data.micro_batch * recipe.mesh.batch_ranks
    if batch % unit:
        way_out = f"use {multiples_near(batch, unit)}"
        yield f"<data.global_batch> must be a multiple of {_PRODUCT}, which is {unit}; {way_out}"


@_rule("data.global_batch", *_BATCH, "parallel.schedule", "mesh.pp")
def _enough_micro_batches(recipe: Recipe) -> Iterator[str]:
    unit, pp, schedule = (
        recipe.data.micro_batch * recipe.mesh.batch_ranks,
        recipe.mesh.pp,
        recipe.parallel.schedule,
    )
    count, rest = divmod(recipe.data.global_batch, unit)
    need = micro_batches_wrong(schedule, count, pp, "<mesh.pp>")
    if need is not None and pp > 1 and not rest:
        near = micro_batches_near(schedule, count, pp)
        way_out = f"use data.global_batch = {either(unit * each for each in near)}"
        way_out += "" if near[0] < count else ', or parallel.schedule = "GPipe", which takes fewer'
        fault = f"<data.global_batch> over {_PRODUCT} gives a rank {count} micro-batch{'es' * (count > 1)}"
        yield f"{fault}, but <parallel.schedule> needs {need}; {way_out}"


@_rule("parallel.zero", "mesh.dp_shard", "mesh.dp_replicate")
def _replicas_are_no_shards(recipe: Recipe) -> Iterator[str]:
    if recipe.parallel.zero == 0 and recipe.mesh.dp_shard > 1:
        way_out = f"use mesh.dp_shard = 1 with mesh.dp_replicate = {recipe.mesh.batch_ranks}, or parallel.zero = 1 or 3"
        yield f"<parallel.zero> keeps whole parameters, but <mesh.dp_shard> cuts them; {way_out}"


@_rule("parallel.zero", "mesh.pp")
def _pipeline_reduces_once(recipe: Recipe) -> Iterator[str]:
    if recipe.parallel.zero == 2 and recipe.mesh.pp > 1:
        whole = "with <mesh.pp> they stay whole until the last one"
        yield f"<parallel.zero> reduces gradients after each micro-batch, but {whole}; use parallel.zero = 1 or 3"


@_rule("precision.compute", "precision.params")
def _compute_fits_params(recipe: Recipe) -> Iterator[str]:
    params = recipe.precision.params
    legal = ("float32", "bfloat16") if params == "float32" else (params,)
    if recipe.precision.computes_in not in legal:
        yield f"<precision.compute> does not fit <precision.params>; use {either(map(show, legal))}"


@_rule("compile.enabled", "parallel.schedule", "mesh.pp")
def _split_backward_is_eager(recipe: Recipe) -> Iterator[str]:
    if recipe.compile.enabled and recipe.mesh.pp > 1 and SCHEDULES[recipe.parallel.schedule].splits:
        whole = either(show(name) for name, kind in SCHEDULES.items() if not kind.splits)
        fault = "<compile.enabled> makes one graph of a block's backward, which <parallel.schedule> runs in two halves"
        yield f"{fault}; use compile.enabled = false, or parallel.schedule = {whole}"
