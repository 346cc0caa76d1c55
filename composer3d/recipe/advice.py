"""Say how the user can continue a run that has ended early. No torch here."""

from composer3d.facts.remote import place_of, same_folder
from composer3d.recipe.schema import Recipe


def way_to_go_on(recipe: Recipe) -> str:
    """Return what continues a run that has checkpoints, as the beginning of "... from it".

    The same command does, unless ``refuses_newer_checkpoints``.
    """
    if refuses_newer_checkpoints(recipe):
        return 'the same command with checkpoint.resume = "auto" goes on'
    return "the same command goes on"


def refuses_newer_checkpoints(recipe: Recipe) -> bool:
    """Return whether the recipe asks to begin anew, or from a checkpoint of this run.

    ``training.resume`` then refuses to discard newer checkpoints.
    """
    resume = recipe.checkpoint.resume
    if resume in ("auto", "none"):
        return resume == "none"
    return same_folder(place_of(resume).parent, recipe.checkpoint_folder)


def nothing_to_do(recipe: Recipe, steps_done: int) -> str:
    """Return what is said of a run whose steps are all done, and how to train on."""
    keys = "run.steps and set optim.decay" if decays_over_run(recipe) else "run.steps"
    return (
        f"nothing to do: {steps_done} of {recipe.run.steps} steps are done; raise {keys} to train "
        "on"
    )


def stopped_by_signal(recipe: Recipe, steps_done: int, signal: int) -> tuple[str, str]:
    """Return what is said of a run that a signal has stopped: the cause alone, and a whole line."""
    cause = f"stopped by signal {signal}"
    if steps_done < recipe.run.steps:
        return cause, f"{cause} after step {steps_done}; {way_to_go_on(recipe)} from there"
    cause = f"{cause} in the validation"
    return cause, f"{cause} after the last step; all {steps_done} steps are saved"


def decays_over_run(recipe: Recipe) -> bool:
    """Return whether the learning rate of a step depends on ``run.steps``."""
    return recipe.optim.schedule != "constant" and recipe.optim.decay is None
