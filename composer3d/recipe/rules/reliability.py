"""Rules about what a run does about failures, and what it watches."""

from collections.abc import Iterator

from composer3d.recipe.rules.rule import Breach, Rule, breach, only_used_with, remove, rule, use
from composer3d.recipe.schema import MetricsTable, Recipe, ReliabilityTable


@rule("reliability.digest_every", "mesh.dp_replicate", "mesh.dp_shard")
def digests_need_data_parallel_ranks(recipe: Recipe) -> Iterator[Breach]:
    """Only data-parallel ranks can compute the same micro-batch twice."""
    if recipe.reliability.digest_every and recipe.mesh.batch_ranks == 1:
        yield breach(
            "<reliability.digest_every> compares data-parallel ranks, and there is one: "
            "<mesh.dp_replicate>, <mesh.dp_shard>",
            "raise one of these",
            use("reliability.digest_every", 0),
        )


@rule("reliability.on_bad_step", "checkpoint.every", "checkpoint.every_minutes")
def rollbacks_need_checkpoints(recipe: Recipe) -> Iterator[str]:
    """A run can go back only to a checkpoint that it saved before its end."""
    checkpoint = recipe.checkpoint
    never_saves = checkpoint.every == 0 and checkpoint.every_minutes == 0
    if recipe.reliability.on_bad_step == "rollback" and never_saves:
        yield (
            "<reliability.on_bad_step> goes back to a checkpoint, but <checkpoint.every> and "
            "<checkpoint.every_minutes> save none before the end; raise checkpoint.every"
        )


@rule("reliability.spike_window", "reliability.spike_sigma")
def spike_window_needs_spikes(recipe: Recipe) -> Iterator[Breach]:
    """The window has no use unless a spike makes a step bad."""
    table = recipe.reliability
    if table.spike_sigma == 0 and table.spike_window != ReliabilityTable().spike_window:
        yield breach(
            "<reliability.spike_window> is not used with <reliability.spike_sigma>",
            remove("reliability.spike_window", "remove it"),
            use("reliability.spike_sigma", 6),
        )


@rule("metrics.profile_ranks", "metrics.profile_steps")
def profiled_ranks_are_ranks(recipe: Recipe) -> Iterator[str]:
    """Ranks are chosen for a profile only."""
    table = recipe.metrics
    if table.profile_steps is None and table.profile_ranks != MetricsTable().profile_ranks:
        yield "<metrics.profile_ranks> is not used without metrics.profile_steps; remove it"
    elif max(table.profile_ranks) >= recipe.world_size and table.profile_steps is not None:
        yield (
            f"<metrics.profile_ranks> must be below the number of ranks of [mesh], "
            f"{recipe.world_size}; use 0 to {recipe.world_size - 1}"
        )


@rule("metrics.profile_steps", "metrics.timeline_steps")
def a_step_is_traced_or_profiled(recipe: Recipe) -> Iterator[str]:
    """Both watch the actions of the pipeline, and the profiler would lengthen those of a trace."""
    profiled, traced = recipe.metrics.profile_steps, recipe.metrics.timeline_steps
    if profiled is None or traced is None:
        return
    if profiled[0] <= traced[1] and traced[0] <= profiled[1]:
        yield (
            "<metrics.profile_steps> and <metrics.timeline_steps> have a step in common; use "
            "different steps"
        )


RULES: tuple[Rule, ...] = (
    digests_need_data_parallel_ranks,
    rollbacks_need_checkpoints,
    spike_window_needs_spikes,
    profiled_ranks_are_ranks,
    a_step_is_traced_or_profiled,
    only_used_with("reliability.max_bad_steps", "reliability.on_bad_step", ["skip"]),
    only_used_with("reliability.max_rollbacks", "reliability.on_bad_step", ["rollback"]),
)
