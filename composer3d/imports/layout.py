"""From what a file says of ranks, batches and ZeRO to the keys of a recipe: the shared part."""

from dataclasses import dataclass, field

from composer3d.facts.schedules import SCHEDULES
from composer3d.imports.translation import Translation, Value, is_known
from composer3d.recipe.schema import ParallelTable
from composer3d.recipe.values import describe_type, nearest_multiples


@dataclass
class StatedLayout:
    """What a file says of the layout. None is what it does not say.

    Attributes:
        made: has the settings.
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

    made: Translation
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

    def is_refused(self, attribute: str) -> bool:
        """Return whether an attribute is 0, and add a problem if it is."""
        if getattr(self, attribute) != 0:
            return False
        self.made.problems.append(f"{self.made.file}: {self.words(attribute)}: must be at least 1")
        return True

    @property
    def model_ranks(self) -> int:
        """The ranks that share one copy of the model."""
        return (self.tp or 1) * (self.pp or 1) * (self.cp or 1)

    @property
    def product(self) -> str:
        """The product of ``model_ranks``, for messages."""
        sizes = [(axis, getattr(self, axis) or 1) for axis in ("tp", "pp", "cp")]
        factors = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
        return f"{factors} = {self.model_ranks}" if factors else "1"

    def over(self, count: int) -> str:
        """Return a quotient by ``model_ranks``, for messages; empty if it divides by 1."""
        return f": {count} / ({self.product})" if self.model_ranks > 1 else ""

    def names_of(self, *attributes: str) -> tuple[str, ...]:
        """Return the words that attributes come from."""
        return tuple(name for one in attributes for name in self.names.get(one, ()))

    def words(self, *attributes: str) -> str:
        """Return the words that attributes come from, with their values, as the file has them."""
        return self.made.words(*self.names_of(*attributes))


def read_layout(made: Translation) -> StatedLayout:
    """Read what a file says of the layout in whole numbers.

    Args:
        made: has the settings, and gets a problem if the level of ZeRO is none.
    """
    layout = StatedLayout(made)
    for attribute, word in made.known.layout.items():
        number = made.number(word)
        if attribute == "zero" and number is not None and number > 3:
            made.problems.append(f"{made.file}: {made.words(word)}: must be 0, 1, 2 or 3")
        elif number is not None:
            layout.set(attribute, number, word)
    return layout


def read_world(made: Translation, layout: StatedLayout, gpus: int | None) -> None:
    """Read the number of all ranks from the options of a launcher.

    With ``--gpus``, it need not be known.
    """
    words = ("nnodes", "nproc_per_node")
    found = [made.settings[word] for word in words if word in made.settings]
    if gpus is not None and not all(is_known(one.value) for one in found):
        return
    nodes, per_node = (made.number(word) for word in words)
    if per_node is not None and (nodes is not None or "nnodes" not in made.settings):
        layout.set("world", per_node * (1 if nodes is None else nodes), *words)


def read_schedule(made: Translation, layout: StatedLayout, word: str) -> None:
    """Read the pipeline schedule, which may be spelled with other capitals; 1F1B by default.

    Args:
        made: gets an open point if the schedule is not there.
        layout: gets the schedule if there is a pipeline.
        word: the word that gives it.
    """
    if (layout.pp or 1) == 1:
        made.ignore(word)
        return
    name = made.text(word)
    known = {schedule.lower(): schedule for schedule in SCHEDULES if schedule != "csv"}
    if name is not None and name.lower() not in known:
        names = describe_type(ParallelTable.__dataclass_fields__["schedule"].type)
        made.ask(
            f'not there: parallel.schedule = "1F1B"; the schedules are {names}',
            word,
            ours="parallel.schedule",
        )
    layout.set("schedule", known.get((name or "").lower(), "1F1B"), word)


def set_layout(made: Translation, layout: StatedLayout, gpus: int | None) -> None:
    """Set the keys of the mesh, of the pipeline and of the batch."""
    for axis in ("tp", "pp", "cp", "ep"):
        size = made.override(f"mesh.{axis}") or getattr(layout, axis)
        setattr(layout, axis, size)
        if layout.is_refused(axis):
            return
        if size is not None and f"mesh.{axis}" not in made.overridden:
            made.take(f"mesh.{axis}", size, *layout.names_of(axis))
    layout.micro_batch = made.override("data.micro_batch") or layout.micro_batch
    layout.global_batch = made.override("data.global_batch") or layout.global_batch
    dp = _data_parallel_ranks(made, layout, gpus)
    if dp is not None:
        _set_zero(made, layout, dp)
        _set_batch(made, layout, dp, gpus)


def _data_parallel_ranks(made: Translation, layout: StatedLayout, gpus: int | None) -> int | None:
    """Return the data-parallel ranks, or None and add a problem.

    The user's word counts first, then the file's word for them, that for all ranks, and the batch.
    """
    for attribute in ("dp", "world"):
        made.ignore(*layout.names_of(attribute))
        if layout.is_refused(attribute):
            return None
    shards = made.override("mesh.dp_shard")
    if shards:
        return shards * (made.override("mesh.dp_replicate") or 1)
    if gpus is not None:
        return _ranks_of_gpus(made, layout, gpus)
    if layout.dp is not None:
        return _ranks_as_said(made, layout, layout.dp)
    if layout.world is not None:
        return _ranks_of_world(made, layout, layout.world)
    return _ranks_of_batch(made, layout)


def _ranks_of_gpus(made: Translation, layout: StatedLayout, gpus: int) -> int | None:
    """Return the ranks on the GPUs that ``--gpus`` gives, whatever the file says."""
    if gpus % layout.model_ranks:
        made.problems.append(
            f"--gpus {gpus} must be a multiple of {layout.product}; use "
            f"{nearest_multiples(gpus, layout.model_ranks)}"
        )
        return None
    ranks = gpus // layout.model_ranks
    if layout.dp is not None and layout.dp != ranks:
        made.contradict(
            f"{layout.words('dp')}, but --gpus {gpus} / ({layout.product}) = "
            f"{ranks}: {ranks} is used"
        )
    if layout.world is not None and layout.world != gpus:
        words = layout.words("world")
        made.contradict(f"{words}, but --gpus {gpus}: --gpus is used")
    made.taken.append(f"--gpus {gpus} -> {ranks} data-parallel ranks{layout.over(gpus)}")
    return ranks


def _ranks_as_said(made: Translation, layout: StatedLayout, dp: int) -> int:
    """Return the ranks of the file's own word, compared with its number of all ranks."""
    words, product = layout.words("dp"), layout.product
    world_words = layout.words("world")
    counted, ep = dp * layout.model_ranks, layout.ep or 1
    if layout.world not in (None, counted) and layout.world == counted * ep:
        # Some texts count experts as a factor of its own; the GPUs are the same.
        made.contradict(
            f"{words} x {product} is {counted} ranks, not {world_words}: ep {ep} is counted as a "
            f"factor of its own. Here ep is a part of dp_shard x cp x tp, so there are {dp} x {ep} "
            f"= {dp * ep} data-parallel ranks on the same {layout.world} GPUs"
        )
        return dp * ep
    if layout.world not in (None, counted):
        made.contradict(
            f"{words} x ({product}) = {counted} ranks, not {world_words}: {dp} data-parallel ranks "
            "are used; --gpus N says otherwise",
            "data_parallel_size",
        )
    times = f": {dp} x ({product})" if layout.model_ranks > 1 else ""
    made.taken.append(f"{words} -> {counted} GPUs{times}")
    return dp


def _ranks_of_world(made: Translation, layout: StatedLayout, world: int) -> int:
    """Return the ranks on all GPUs of the file; what is left over is a contradiction."""
    words, ranks = layout.words("world"), world // layout.model_ranks
    if world % layout.model_ranks:
        ranks = max(1, ranks)
        made.contradict(
            f"{words} is {world} GPUs, no multiple of {layout.product}: {ranks} data-parallel "
            f"ranks are used, {ranks * layout.model_ranks} GPUs; --gpus N says otherwise",
            "world_size",
        )
    else:
        made.taken.append(f"{words} -> {ranks} data-parallel ranks{layout.over(world)}")
    return ranks


def _ranks_of_batch(made: Translation, layout: StatedLayout) -> int | None:
    """Return the ranks that follow from the batch, as in a configuration of DeepSpeed."""
    micro, steps, batch = layout.micro_batch, layout.accumulation, layout.global_batch
    if micro and steps and batch and batch % (micro * steps) == 0:
        ranks = batch // (micro * steps)
        words = layout.words("global_batch", "micro_batch", "accumulation")
        made.taken.append(
            f"{words} -> {ranks} data-parallel ranks: {batch} / ({micro} x {steps}), so "
            f"{ranks * layout.model_ranks} GPUs"
        )
        return ranks
    multiple = f", a multiple of {layout.product}" if layout.model_ranks > 1 else ""
    made.problems.append(
        f"{made.file}: the file does not say on how many GPUs it runs; give --gpus N{multiple}"
    )
    return None


def _set_zero(made: Translation, layout: StatedLayout, dp: int) -> None:
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
            f"{layout.words('replicas')} does not divide {dp} data-parallel ranks: 1 is used",
            layout.names_of("replicas")[0],
        )
        replicas = 1
    is_said = bool(made.words(*names))
    reason = "the default" if zero else "no sharding is asked for"
    made.take("parallel.zero", zero, *names, note="" if is_said else reason)
    made.ignore(*layout.names_of("replicas"))
    shown = layout.words("dp", "world")
    ranks = f"{shown}: {dp} data-parallel ranks" if shown else f"{dp} data-parallel ranks"
    if replicas > 1:
        made.values["mesh.dp_replicate"] = Value(replicas, layout.words("replicas") or ranks)
    made.values["mesh.dp_shard"] = Value(dp // replicas, ranks)
    sizes = f"mesh.dp_replicate = {replicas}, " if replicas > 1 else ""
    made.taken.append(f"{dp} data-parallel ranks -> {sizes}mesh.dp_shard = {dp // replicas}")


def _set_batch(made: Translation, layout: StatedLayout, dp: int, gpus: int | None) -> None:
    micro, steps, batch = layout.micro_batch, layout.accumulation, layout.global_batch
    is_changed = gpus is not None or any(
        key.startswith(("mesh.", "data.")) for key in made.overridden
    )
    micro_names, steps_names = layout.names_of("micro_batch"), layout.names_of("accumulation")
    batch_names = layout.names_of("global_batch")
    if any(layout.is_refused(name) for name in ("micro_batch", "accumulation", "global_batch")):
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


def _set_schedule(made: Translation, layout: StatedLayout, micro_batches: int) -> None:
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
