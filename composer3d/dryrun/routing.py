"""How many rows each expert gets in a dry run, where no router can choose. No torch here."""

from composer3d.facts.errors import RecipeError
from composer3d.recipe.schema import Recipe


def check_skew(recipe: Recipe, skew: float) -> None:
    """Check that ``skew`` is possible.

    Raises:
        RecipeError: ``skew`` is below 1, or the experts of one rank cannot get so many rows.
    """
    most = most_skew(recipe)
    if not 1 <= skew <= most:
        raise RecipeError(
            f"--routing-skew {skew:g}: must be from 1 (even) to {most:g}; it is the rows of the "
            f"busiest of {recipe.mesh.ep} ranks of ep, divided by the mean"
        )


def most_skew(recipe: Recipe) -> float:
    """Return the largest skew: all rows on one rank, or all of its experts in every token."""
    ep = recipe.mesh.ep
    experts = getattr(recipe.model, "experts", None)
    per_token = getattr(recipe.model, "experts_per_token", None)
    if ep == 1 or experts is None or per_token is None:
        return float(ep)
    return float(min(ep, experts / per_token))


def rows_of_experts(rows: int, experts: int, ep: int, skew: float) -> list[int]:
    """Share ``rows`` among ``experts``: a number for each.

    The experts of the first rank of ``ep`` get ``skew`` times the mean of a rank, and the others
    the rest. Within both, experts get as many rows as each other, or one more.
    """
    own = experts // ep
    first_rank_rows = min(rows, round(rows * skew / ep))
    counts = _even(first_rank_rows, own)
    return counts + (_even(rows - first_rank_rows, experts - own) if experts > own else [])


def _even(rows: int, experts: int) -> list[int]:
    share, remainder = divmod(rows, experts)
    return [share + (index < remainder) for index in range(experts)]
