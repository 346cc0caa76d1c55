"""Claim the folder of a run for one job, and keep the recipe in it."""

import os
from pathlib import Path

import torch.distributed as dist

from composer3d.facts import files, trace
from composer3d.facts.errors import UserError
from composer3d.recipe.changes import values_of
from composer3d.recipe.schema import TRACKERS
from composer3d.reliability.lock import Claim, read_note
from composer3d.runtime import process_group
from composer3d.runtime.files import write_atomic

# The claims of this process that ``claim_for_process`` has made, by folder.
_claims: dict[Path, Claim] = {}


def claim_for_process(folder: Path) -> Claim | None:
    """Claim a folder as ``claim_folder`` does, until this process ends.

    A process may call it again for the same folder. Collective over all ranks.

    Args:
        folder: the run's folder.

    Returns and raises what ``claim_folder`` does.
    """
    key = folder.absolute()
    claim = claim_folder(folder, held=_claims.get(key))
    if claim is not None:
        _claims[key] = claim
    return claim


def claim_folder(
    folder: Path, told: Path | None = None, *, held: Claim | None = None
) -> Claim | None:
    """Make the run's folder, lock it for this job, and check that all ranks see the same folder.

    Collective over all ranks.

    Args:
        folder: the run's folder.
        told: where rank 0 tells the launcher of the job which folder it is (``Claim.tell``).
        held: a claim of this process on the same path, which is returned if it still holds.

    Returns:
        The claim on rank 0, and None on the others.

    Raises:
        UserError: the folder cannot be written, another job has locked it, or the nodes do not
            share it. Raised on every rank.
    """
    process_group.on_all("run.out_dir", lambda: _refuse_foreign_links(folder))
    is_main = dist.get_rank() == 0

    def make_claim() -> Claim:
        if held is not None and held.is_held():
            return held
        claim = Claim(folder)
        if told is not None:
            claim.tell(told)
        return claim

    claim = process_group.on_all("run.out_dir", lambda: make_claim() if is_main else None)
    try:
        note = read_note(folder)
    except OSError as error:
        note = f"no note of the job ({error.strerror})"
    process_group.check_same(f"the folder {folder} (run.out_dir)", note)
    return claim


def _refuse_foreign_links(folder: Path) -> None:
    names = ("checkpoints", trace.FOLDER, "by_tokens", "profile", *TRACKERS)
    for path in (folder, *(folder / name for name in names)):
        try:
            files.refuse_foreign_link(path)
        except OSError as error:
            raise UserError(f"run.out_dir: {path} {error.strerror}") from None


def write_recipe(folder: Path, resolved_toml: str, *, steps_done: int) -> None:
    """Write ``resolved_toml`` to ``recipe.toml`` in the run's folder.

    If steps are done and the former recipe has other values, it is kept as ``recipe-STEP.toml``,
    where STEP is ``steps_done``. An existing file of that name is not replaced: it is the recipe
    that made those steps. Nothing is written through a link.

    Raises OSError if a file cannot be read or written.
    """
    path = folder / "recipe.toml"
    if steps_done:
        kept = folder / f"recipe-{steps_done:08d}.toml"
        try:
            former = files.read_plain(path, limit=files.MIB, follow_links=False)
        except (FileNotFoundError, files.NotPlainFileError):
            former = resolved_toml.encode()
        if not _same_values(former, resolved_toml) and not os.path.lexists(kept):
            write_atomic(kept, former)
    write_atomic(path, resolved_toml)


def _same_values(former: bytes, resolved_toml: str) -> bool:
    try:
        return values_of(former.decode()) == values_of(resolved_toml)
    except ValueError:
        return False
