"""``composer3d.verify``: prove a layout from Python."""

import os
from typing import Literal

from composer3d.facts.errors import UserError
from composer3d.recipe.schema import Recipe
from composer3d.recipe.tables import load_recipe
from composer3d.runtime import environment, starter
from composer3d.runtime.launch import Pool, temporary_folder
from composer3d.verify.judge import Verdict
from composer3d.verify.proof import verify_recipe


def verify(
    recipe: Recipe | str | os.PathLike[str],
    *,
    dtype: Literal["float64", "float32"] | None = None,
    steps: int = 3,
) -> Verdict:
    """Prove that a layout computes what one process computes, as ``composer3d verify``.

    The processes of the layout are started on this machine, on CPUs. The model is shrunk to a size
    that they can run. Neither the data nor the checkpoints of the recipe are read.

    Args:
        recipe: from ``make_recipe`` or ``load_recipe``, or the path of a recipe.
        dtype: the dtype in which the layout computes; the reference computes in float64. None:
            float64, and then, if all is exact, one small model in float32.
        steps: the number of training steps that are compared.

    Returns:
        The verdict: ``passed`` says whether the layout is exact, and ``str()`` is the line that
        the command prints.

    Raises:
        UserError: the recipe cannot be used, or its layout is refused; or this process is a rank
            of a job, or imports a program in which the call is not below
            ``if __name__ == "__main__":``.
    """
    if starter.is_forked:
        # This process imports the module of an architecture, which calls ``verify`` itself.
        raise UserError(
            "verify was called by a process that it has started: put the call below "
            '`if __name__ == "__main__":`, or into a file of its own'
        )
    if environment.is_rank():
        raise UserError(
            "verify starts its own processes, and this one is a rank of a job: call it in a "
            "program that is started alone, or use composer3d verify --here"
        )
    full = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, check_files=False)
    with Pool() as pool, temporary_folder("composer3d-verify-") as folder:
        verdict = verify_recipe(pool, folder, full, dtype=dtype, steps=steps)
    if verdict.refused:
        raise UserError(verdict.error or verdict.layout)
    return verdict
