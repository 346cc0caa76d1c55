"""``composer3d verify --full``: the shrunk proof and the structure of the job, as one verdict."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer3d.full.check import Structure, check_structure
from composer3d.full.predicates import completed
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.verify.judge import Verdict
from composer3d.verify.proof import prove_recipes
from composer3d.verify.shrink import shrink

# What each check has compared, in words that follow the count.
_COMPARED = {
    "predicates": "predicates of the job and its proofs",
    "groups": "ranks whose groups are those of a formula",
    "collectives": "operations of all pipeline ranks, by axis, as predicted",
    "messages": "messages of small models in a pipeline, each sent once and received once",
    "gradients": "gradients summed once, over the right ranks",
    "seams": "activations, gradients and divisors that vary over the right axes, and weights "
    "that are updated once",
    "peers": "calls that ranks at other places make alike",
}


@dataclass(frozen=True)
class FullVerdict:
    """Whether a job is proven: by small models that stand for it, and by its own structure.

    Attributes:
        proof: the worst verdict on the small recipes.
        proofs: how many small recipes were proven.
        structure: what the checks of the full-size job found.
    """

    proof: Verdict
    proofs: int
    structure: Structure

    @property
    def passed(self) -> bool:
        """Whether the proof and the structure have both passed."""
        return self.proof.passed and self.structure.passed

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for ``--json``: that of the proof, and ``structure``."""
        structure = asdict(self.structure) | {"passed": self.structure.passed}
        return asdict(self.proof) | {
            "passed": self.passed,
            "proofs": self.proofs,
            "structure": structure,
        }

    def __str__(self) -> str:
        structure = self.structure
        word = "sound  " if structure.passed else "WRONG  "
        lines = [
            str(self.proof),
            f"{word} structure of {structure.world_size:,} ranks, in {structure.seconds:.0f} s",
        ]
        problems = Counter(finding.check for finding in structure.findings)
        for check, words in _COMPARED.items():
            count = structure.counts.get(check, 0)
            if problems[check]:
                lines.append(f"  {count:>9,} checked for {check}, and there are problems")
            elif count:
                lines.append(f"  {count:>9,} {words}")
        if structure.micro_batches_run < structure.micro_batches:
            lines.append(
                f"  the full-size model ran a reduced step: {structure.micro_batches_run:,} of "
                f"{structure.micro_batches:,} micro-batches, which show every kind of action"
            )
        lines += [f"  not kept by any proof: {words}" for words in structure.left_out]
        lines += [f"  not checked: {words}" for words in structure.unchecked]
        lines += [f"  {finding}" for finding in structure.findings]
        return "\n".join(lines)


def verify_full(
    pool: Pool, folder: Path, full: Recipe, *, dtype: str | None = None, steps: int
) -> FullVerdict:
    """Prove a recipe's layout as ``verify`` does, and check the structure of the job itself.

    The small recipes are those of ``shrink``, and others that keep the predicates which these lose
    (``predicates.completed``).

    Args:
        pool, folder, dtype, steps: as for ``verify.proof.verify_layout``.
        full: the whole recipe.

    Raises:
        UserError: the recipe cannot be made small, or cannot be composed.
        WorkerError: a worker process of the checks failed for another reason.
    """
    small_recipes = shrink(full)
    small_recipes += completed(full, small_recipes)
    structure = check_structure(pool, full, small_recipes)
    proof = prove_recipes(pool, folder, full, small_recipes, dtype=dtype, steps=steps)
    return FullVerdict(proof, len(small_recipes), structure)
