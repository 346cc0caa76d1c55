"""What the prediction of a recipe leaves out. No torch here."""

from composer3d.facts.hardware import Hardware
from composer3d.models.registry import is_ours
from composer3d.planner.trained import has_frozen
from composer3d.recipe.schema import Recipe


def caveats(recipe: Recipe, hardware: Hardware, *, has_times: bool = True) -> list[str]:
    """Return a sentence for each thing that a prediction leaves out.

    Without ``has_times``, only those that concern memory.
    """
    found = []
    if not is_ours(recipe.model.architecture):
        found.append(
            "The architecture is your own: parameters and messages are those of your model; "
            "activations and the time of products are those of a Llama of the same sizes."
        )
    if has_frozen(recipe):
        found.append(
            "optim.train: gradients and the state of the optimizer are those of what it trains; "
            "activations and time are those of training all parameters, so they are upper bounds."
        )
    packing = recipe.data.packing
    if packing != "none" and has_times:
        found.append(
            f'data.packing = "{packing}": times, tokens/s and MFU are those of attention over '
            "whole samples; a run computes it within documents, so it is faster, and its MFU "
            "counts fewer FLOPs."
        )
    if not hardware.is_fitted and has_times:
        found.append(
            f"{hardware.name}: few or no training runs on it were among those that the planner "
            "was fitted to (nearly all on A100, A800, H100 and H200), so its times are less sure."
        )
    return found
