"""Claim the folder of a run for one job, and keep the recipe in it."""

import os
import time
from pathlib import Path

import torch.distributed as dist

from composer3d.facts import files, trace
from composer3d.facts.errors import UserError
from composer3d.recipe.changes import values_of
from composer3d.recipe.schema import TRACKERS
from composer3d.reliability.lock import Claim, read_note
from composer3d.runtime import log, process_group
from composer3d.runtime.files import write_atomic

# The nodes of a job may see a new folder late: see ``_shared_note``.
_ROUNDS = 35
_ROUND_S = 2.0

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
            share it, even after 70 s. Raised on every rank.
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
    process_group.check_same(f"the folder {folder} (run.out_dir)", _shared_note(folder))
    return claim


def _shared_note(folder: Path) -> str:
    """Return the note that this rank reads, once all ranks read the same one, or after 70 s.

    Collective over all ranks. Each node has looked for the folder before rank 0 has made it. A
    node with NFS then takes it for missing until what it knows of the folder above is too old,
    which is 60 s by default (``acdirmax``).
    """
    note = _read_note(folder)
    for number in range(_ROUNDS):
        if process_group.is_same(note):
            break
        if number == 0:
            log.get().info(f"waiting until all nodes see what rank 0 has written into {folder}")
        time.sleep(_ROUND_S)
        note = _read_note(folder)
    return note


def _read_note(folder: Path) -> str:
    try:
        return read_note(folder)
    except OSError as error:
        return f"no note of the job ({error.strerror})"


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
