"""From what a file says of ranks, batches and ZeRO to the keys of a recipe: the shared part."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer3d.imports.translation import Translation, Value
from composer3d.recipe.values import nearest_multiples
from composer3d.spec.schedules import SCHEDULES


@dataclass
class Layout:
    """What a file says of the layout. None is what it does not say.

    Attributes:
        tp, pp, cp, ep: ranks of each axis.
        dp: data-parallel ranks.
        world: all ranks.
        replicas: groups of data-parallel ranks that shard on their own; -1: all of them do.
        zero: the level of ZeRO.
        micro_batch: samples that a rank processes at once.
        accumulation: micro-batches of a rank in a step.
        global_batch: samples in a step.
        schedule: the pipeline schedule, in our words.
        virtual_stages: stages of each pipeline rank.
        names: the words of these attributes in the file.
    """

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    world: int | None = None
    replicas: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    schedule: str = "1F1B"
    virtual_stages: int | None = None
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def set(self, attribute: str, value: int | str | None, *names: str) -> None:
        """Set an attribute, and the words that it comes from."""
        setattr(self, attribute, value)
        self.names[attribute] = names

    def names_of(self, *attributes: str) -> tuple[str, ...]:
        """Return the words that attributes come from."""
        return tuple(name for one in attributes for name in self.names.get(one, ()))


def read_layout(made: Translation, words: Mapping[str, str]) -> Layout:
    """Read what a file says of the layout in whole numbers.

    Args:
        made: has the settings, and gets a problem if the level of ZeRO is none.
        words: the word of each attribute of ``Layout`` that the program has.
    """
    layout = Layout()
    for attribute, word in words.items():
        number = made.number(word)
        if attribute == "zero" and number is not None and number > 3:
            made.problems.append(f"{made.file}: {made.words(word)}: must be 0, 1, 2 or 3")
        elif number is not None:
            layout.set(attribute, number, word)
    return layout


def schedule_of(name: str) -> str | None:
    """Return our name of a pipeline schedule that may be spelled with other capitals, or None."""
    known = {schedule.lower(): schedule for schedule in SCHEDULES if schedule != "csv"}
    return known.get(name.lower())


def set_layout(made: Translation, layout: Layout, gpus: int | None) -> int | None:
    """Set the keys of the mesh, of the pipeline and of the batch.

    Returns:
        The data-parallel ranks; None if they are not known, which is a problem then.
    """
    for axis in ("tp", "pp", "cp", "ep"):
        size = made.override(f"mesh.{axis}") or getattr(layout, axis)
        setattr(layout, axis, size)
        if size == 0:
            words = made.words(*layout.names_of(axis))
            made.problems.append(f"{made.file}: {words}: must be at least 1")
            return None
        if size is not None and f"mesh.{axis}" not in made.overridden:
            made.take(f"mesh.{axis}", size, *layout.names_of(axis))
    layout.micro_batch = made.override("data.micro_batch") or layout.micro_batch
    layout.global_batch = made.override("data.global_batch") or layout.global_batch
    dp = _data_parallel_ranks(made, layout, gpus)
    if dp is None:
        return None
    _set_zero(made, layout, dp)
    _set_batch(made, layout, dp, gpus)
    return dp


def _data_parallel_ranks(made: Translation, layout: Layout, gpus: int | None) -> int | None:
    tp, pp, cp = layout.tp or 1, layout.pp or 1, layout.cp or 1
    model_ranks = tp * pp * cp
    product = " x ".join(
        f"{axis} {size}" for axis, size in (("tp", tp), ("pp", pp), ("cp", cp)) if size > 1
    )
    product = f"{product} = {model_ranks}" if product else "1"
    dp_words = made.words(*layout.names_of("dp"))
    world_words = made.words(*layout.names_of("world"))
    made.ignore(*layout.names_of("dp", "world"))
    dp, world = layout.dp, layout.world
    for words, value in ((dp_words, dp), (world_words, world)):
        if value == 0:
            made.problems.append(f"{made.file}: {words}: must be at least 1")
            return None

    shards = made.override("mesh.dp_shard")
    if shards:
        return shards * (made.override("mesh.dp_replicate") or 1)
    if gpus is not None:
        if gpus % model_ranks:
            made.problems.append(
                f"--gpus {gpus} must be a multiple of {product}; use "
                f"{nearest_multiples(gpus, model_ranks)}"
            )
            return None
        chosen = gpus // model_ranks
        if dp is not None and dp != chosen:
            made.contradict(
                f"{dp_words}, but --gpus {gpus} / ({product}) = {chosen}: {chosen} is used"
            )
        if world is not None and world != gpus:
            made.contradict(f"{world_words}, but --gpus {gpus}: --gpus is used")
        made.taken.append(f"--gpus {gpus} -> {chosen} data-parallel ranks{_over(gpus, product)}")
        return chosen

    if dp is not None:
        counted = dp * model_ranks
        ep = layout.ep or 1
        if world is not None and world != counted and world == counted * ep:
            made.contradict(
                f"{dp_words} x {product} is {counted} ranks, not {world_words}: ep {ep} is counted "
                f"as a factor of its own. Here ep is a part of dp_shard x cp x tp, so there are "
                f"{dp} x {ep} = {dp * ep} data-parallel ranks on the same {world} GPUs"
            )
            return dp * ep
        if world is not None and world != counted:
            made.contradict(
                f"{dp_words} x ({product}) = {counted} ranks, not {world_words}: "
                f"{dp} data-parallel ranks are used; --gpus N says otherwise",
                "data_parallel_size",
            )
        times = f": {dp} x ({product})" if model_ranks > 1 else ""
        made.taken.append(f"{dp_words} -> {counted} GPUs{times}")
        return dp

    if world is not None:
        if world % model_ranks:
            chosen = max(1, world // model_ranks)
            made.contradict(
                f"{world_words} is {world} GPUs, no multiple of {product}: {chosen} data-parallel "
                f"ranks are used, {chosen * model_ranks} GPUs; --gpus N says otherwise",
                "world_size",
            )
            return chosen
        chosen = world // model_ranks
        made.taken.append(f"{world_words} -> {chosen} data-parallel ranks{_over(world, product)}")
        return chosen

    micro, steps, batch = layout.micro_batch, layout.accumulation, layout.global_batch
    if micro and steps and batch and batch % (micro * steps) == 0:
        chosen = batch // (micro * steps)
        words = made.words(*layout.names_of("global_batch", "micro_batch", "accumulation"))
        made.taken.append(
            f"{words} -> {chosen} data-parallel ranks: {batch} / ({micro} x {steps}), so "
            f"{chosen * model_ranks} GPUs"
        )
        return chosen
    made.problems.append(
        f"{made.file}: the file does not say on how many GPUs it runs; give --gpus N"
        f"{f', a multiple of {product}' if model_ranks > 1 else ''}"
    )
    return None


def _over(count: int, product: str) -> str:
    return f": {count} / ({product})" if product != "1" else ""


def _set_zero(made: Translation, layout: Layout, dp: int) -> None:
    given = made.override("parallel.zero")
    zero, names = (layout.zero or 0) if given is None else given, layout.names_of("zero")
    replicas = dp if layout.replicas == -1 else layout.replicas or 1
    pp = layout.pp or 1
    if zero == 2 and pp > 1:
        made.lose(
            "with pp, gradients stay whole until the last micro-batch: parallel.zero = 1", *names
        )
        zero = 1
    if (layout.ep or 1) > 1 and zero == 0:
        made.lose(
            "ep groups ranks of dp_shard, cp and tp, so the data-parallel ranks are dp_shard, with "
            "parallel.zero = 1: the same numbers with less memory",
            *names,
        )
        zero, replicas = 1, 1
    if zero == 0:
        replicas = dp
    if dp % replicas:
        made.contradict(
            f"{made.words(*layout.names_of('replicas'))} does not divide {dp} data-parallel ranks: "
            "1 is used",
            layout.names_of("replicas")[0],
        )
        replicas = 1
    is_said = bool(made.words(*names))
    reason = "the default" if zero else "no sharding is asked for"
    made.take("parallel.zero", zero, *names, note="" if is_said else reason)
    made.ignore(*layout.names_of("replicas"))
    shown = made.words(*layout.names_of("dp", "world"))
    ranks = f"{shown}: {dp} data-parallel ranks" if shown else f"{dp} data-parallel ranks"
    if replicas > 1:
        made.values["mesh.dp_replicate"] = Value(
            replicas, made.words(*layout.names_of("replicas")) or ranks
        )
    made.values["mesh.dp_shard"] = Value(dp // replicas, ranks)
    sizes = f"mesh.dp_replicate = {replicas}, " if replicas > 1 else ""
    made.taken.append(f"{dp} data-parallel ranks -> {sizes}mesh.dp_shard = {dp // replicas}")


def _set_batch(made: Translation, layout: Layout, dp: int, gpus: int | None) -> None:
    micro, steps, batch = layout.micro_batch, layout.accumulation, layout.global_batch
    is_changed = gpus is not None or any(
        key.startswith(("mesh.", "data.")) for key in made.overridden
    )
    micro_names, steps_names = layout.names_of("micro_batch"), layout.names_of("accumulation")
    batch_names = layout.names_of("global_batch")
    for names, value in ((micro_names, micro), (steps_names, steps), (batch_names, batch)):
        if value == 0:
            made.problems.append(f"{made.file}: {made.words(*names)}: must be at least 1")
            return
    if micro is None and batch is not None and steps is not None and batch % (steps * dp) == 0:
        micro = batch // (steps * dp)
        made.take(
            "data.micro_batch",
            micro,
            *batch_names,
            *steps_names,
            note=f"{batch} / ({steps} x {dp} data-parallel ranks)",
        )
    elif micro is None:
        micro = 1
        made.assume("data.micro_batch", 1, "the file does not say")
    else:
        made.take("data.micro_batch", micro, *micro_names)

    unit = micro * dp
    shape = f"micro-batch {micro} x {dp} data-parallel ranks"
    if batch is None:
        batch = unit * (steps or 1)
        text = f"{shape} x {steps or 1} micro-batches = {batch}"
        if steps:
            made.take("data.global_batch", batch, *steps_names, note=text)
        else:
            made.assume("data.global_batch", batch, text)
    else:
        note = ""
        if steps is not None and steps * unit != batch:
            kept = f"the recipe keeps {batch}"
            if batch % unit == 0:
                kept += f", as {batch // unit} micro-batches of {micro} on each rank"
            made.contradict(
                f"{made.words(*batch_names)}, but {made.words(*micro_names)} x "
                f"{made.words(*steps_names)} x {dp} data-parallel ranks = "
                f"{steps * unit}: {kept}",
                # With --gpus and --set, the user changes the ranks, and the batch is kept.
                "" if is_changed else steps_names[0],
            )
        elif batch % unit:
            made.contradict(f"{made.words(*batch_names)} is no multiple of {shape} = {unit}")
        else:
            note = f"{shape} x {batch // unit} micro-batches"
        made.ignore(*steps_names)
        made.take("data.global_batch", batch, *batch_names, note=note)
    _set_schedule(made, layout, batch // unit)


def _set_schedule(made: Translation, layout: Layout, micro_batches: int) -> None:
    pp, stages, schedule = layout.pp or 1, layout.virtual_stages, layout.schedule
    names = layout.names_of("schedule")
    if pp == 1:
        if stages is not None and stages > 1:
            made.contradict(f"{made.words(*names)}, but there is one pipeline rank: it is dropped")
        made.ignore(*names)
        return
    if schedule == "1F1B" and stages is not None and stages > 1:
        schedule = "Interleaved1F1B"
    if schedule == "1F1B" and 0 < micro_batches < pp:
        made.lose(
            f"1F1B needs as many micro-batches as pp {pp}, and a rank has {micro_batches}: "
            'parallel.schedule = "GPipe", which runs them in about the same order'
        )
        schedule = "GPipe"
    made.take("parallel.schedule", schedule, *names)
    facts = SCHEDULES[schedule].stages
    if stages is not None and facts.most_per_rank > 1:
        made.take("parallel.virtual_stages", stages, *names)
