"""Rules about the globs of ``optim.train``, ``optim.groups`` and ``optim.matrices``.

``parallel.compose`` refuses the same, but it needs torch and the whole job. A user's own
architecture has no table of its parameters, so only ``compose`` can check it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from composer3d.models.registry import architecture
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.rates import group_of
from composer3d.recipe.rules.rule import Rule, rule
from composer3d.recipe.schema import Recipe
from composer3d.recipe.stages import stage_ranges

_SHOWN = 6  # names of parameters in a message


@rule("optim.train")
def globs_match_parameters(recipe: Recipe) -> Iterator[str]:
    """Each glob of ``optim.train`` matches a parameter that can train."""
    if recipe.optim.train is None or not _has_table(recipe):
        return
    names = [name for unit in recipe.parameters.trainable_names() for name in unit]
    shown = ", ".join([*names[:_SHOWN], "..."])
    for number, glob in enumerate(recipe.optim.train, 1):
        if not _matches(names, [glob]):
            # The glob may hold any characters, so the message does not repeat it.
            place = "" if len(recipe.optim.train) == 1 else f" at place {number}"
            yield (
                f"<optim.train> has a glob{place} that matches no parameter that can train; those "
                f"are {shown}"
            )


@rule("optim.groups", "optim.train")
def groups_have_parameters(recipe: Recipe) -> Iterator[str]:
    """Each glob of ``optim.groups`` matches a parameter that trains and is in no earlier group."""
    optim = recipe.optim
    if optim.groups is None or not _has_table(recipe):
        return
    trained = [
        name
        for unit in recipe.parameters.trainable_names()
        for name in unit
        if optim.train is None or _matches([name], optim.train)
    ]
    shown = ", ".join([*trained[:_SHOWN], "..."])
    for number, group in enumerate(optim.groups, 1):
        if not all(_matches(trained, [glob]) for glob in group.train):
            yield (
                f"<optim.groups> has a glob in table {number} that matches no parameter that "
                f"trains; those are {shown}"
            )
        elif not any(group_of(name, optim) is group for name in trained):
            yield (
                f"<optim.groups>: all that table {number} matches is in earlier ones; move it up, "
                "or remove it"
            )


@rule("optim.matrices")
def globs_match_matrices(recipe: Recipe) -> Iterator[str]:
    """Each glob of ``optim.matrices`` matches a parameter of two dims or more."""
    optim = recipe.optim
    if optim.matrices is None or not optim.optimizer.has_matrices or not _has_table(recipe):
        return
    chosen = architecture(recipe.model.architecture)
    for number, glob in enumerate(optim.matrices, 1):
        if not matrices_of(chosen, recipe.model, replace(optim, matrices=(glob,))):
            place = "" if len(optim.matrices) == 1 else f" at place {number}"
            yield (
                f"<optim.matrices> has a glob{place} that matches no matrix of the model; those of "
                'its blocks have names such as "blocks.0.attn.wq.weight"'
            )


@rule(
    "optim.train",
    "mesh.pp",
    "parallel.virtual_stages",
    "parallel.schedule",
    "parallel.stages",
    "model.n_layers",
)
def every_stage_trains(recipe: Recipe) -> Iterator[str]:
    """Each pipeline stage has a parameter that trains: torch asks every stage for gradients."""
    globs = recipe.optim.train
    if globs is None or recipe.mesh.pp == 1 or not _has_table(recipe):
        return
    if not _is_cut(recipe):
        return  # other rules report it
    first, *of_blocks, last = recipe.parameters.trainable_names()
    cut = stage_ranges(recipe)
    for stage, blocks in enumerate(cut):
        names = [name for block in blocks for name in of_blocks[block]]
        if stage == 0:
            names += first
        if stage == len(cut) - 1:
            names += last
        if not _matches(names, globs):
            yield (
                f"<optim.train> trains nothing in stage {stage} of {len(cut)} of <mesh.pp>, with "
                f"blocks {blocks.start} to {blocks.stop - 1}; match a parameter of every stage, "
                "use mesh.pp = 1, or another cut (parallel.stages)"
            )


def _matches(names: Sequence[str], globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def _has_table(recipe: Recipe) -> bool:
    return architecture(recipe.model.architecture).table is not None


def _is_cut(recipe: Recipe) -> bool:
    """Return whether the layers can be cut into the stages of the recipe."""
    layers, stages = recipe.model.n_layers, recipe.parallel.stages
    n_stages = recipe.mesh.pp * recipe.parallel.stages_per_rank
    if stages is None:
        return n_stages <= layers
    return len(stages) == n_stages and min(stages) >= 1 and sum(stages) == layers


RULES: tuple[Rule, ...] = (
    globs_match_parameters,
    groups_have_parameters,
    globs_match_matrices,
    every_stage_trains,
)
