"""Rules about what a run watches in its ranks."""

from collections.abc import Iterator

from composer3d.recipe.rules.rule import Rule, rule
from composer3d.recipe.schema import Recipe


@rule("reliability.digest_every", "mesh.dp_replicate", "mesh.dp_shard")
def digests_need_data_parallel_ranks(recipe: Recipe) -> Iterator[str]:
    """Only data-parallel ranks can compute the same micro-batch twice."""
    if recipe.reliability.digest_every and recipe.mesh.batch_ranks == 1:
        yield (
            "<reliability.digest_every> compares data-parallel ranks, and there is one: "
            "<mesh.dp_replicate>, <mesh.dp_shard>; raise one of these, or use "
            "reliability.digest_every = 0"
        )


RULES: tuple[Rule, ...] = (digests_need_data_parallel_ranks,)
