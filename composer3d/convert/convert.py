"""``composer3d convert``: write a checkpoint in another format, and prove the copy."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer3d.checkpoint.manifest import Manifest, TensorSpec, model_of
from composer3d.convert.formats import (
    Format,
    Source,
    count_not_finite,
    digest_of,
    nbytes,
    open_source,
    require_valid_path,
)
from composer3d.convert.targets import EMBEDDING, write
from composer3d.facts.errors import CheckpointError, MachineError
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama.shape import ModelShape
from composer3d.models.registry import architecture
from composer3d.runtime.files import publish, sync
from composer3d.runtime.progress import Progress

_SHARD_BYTES = 5 * 10**9  # the largest safetensors file that Hugging Face writes
_LOGITS_TOKENS = 32
_SHOWN_DIFFERENCES = 8


def convert(
    src: Path,
    dst: Path,
    to: Format,
    *,
    dtype: str | None = None,
    weights_only: bool = False,
    logits: bool = False,
    shard: int = _SHARD_BYTES,
) -> dict[str, Any]:
    """Write a copy of the checkpoint ``src`` at ``dst`` in the format ``to``, and prove the copy.

    Memory is limited to a few times the size of the largest tensor: one projection of all experts
    of a layer is one tensor. The proof opens the written
    files again, and compares the names, shapes, dtypes and digests of all tensors with those that
    were read. ``dst`` appears only after the proof has passed. No process group is needed.

    Args:
        src: a checkpoint, or a run's folder, which stands for its newest whole checkpoint.
        dst: the folder to write, or the file for ``torch``. It must not exist.
        to: the format of ``dst``.
        dtype: the name of the parameters' dtype in ``dst``. None keeps the dtype of each
            parameter. The dtypes of the optimizer's state are never changed. The biases by which
            routers choose experts do not become narrower, as training moves them in small steps,
            unless a run goes on from ``dst``: it has all parameters in one dtype.
        weights_only: leave out the optimizer's state, which ``torch`` and ``dcp`` can store.
        logits: also run the models of both checkpoints in float32, and compare their logits. This
            takes memory for a whole model.
        shard: the largest size of one safetensors file, in bytes.

    Returns:
        A report, as values that JSON can represent: ``source``, ``from``, ``target``, ``to``,
        ``tensors`` (their number), ``bytes`` (the size of their elements), ``notes``, ``carried``
        (the names of carried files), ``seconds``, and ``logits`` if it was asked for.

    Raises:
        CheckpointError: ``src`` or ``dst`` cannot be used, a number is out of the range of
            ``dtype``, or the copy differs. ``dst`` is not written then.
        MachineError: the disk of ``dst`` has too little room. Nothing has been written.
    """
    started_s = time.perf_counter()
    _require_absent(dst)
    if to == "torch" and dst.suffix == ".safetensors":
        raise CheckpointError(
            f"{dst}: a file of torch.save is no safetensors file, and could not be read by its "
            "name; name it .pt"
        )
    source = open_source(src)
    staging = _make_staging(source.path, dst, folder=to != "torch")
    cleanup = ExitStack()
    try:
        specs, notes = source.specs(), source.notes

        has_optimizer = any(name.startswith("optim.") for name in specs)
        if has_optimizer and (weights_only or to in ("hf", "meta")):
            reason = "--weights-only" if weights_only else f"{to} cannot hold it"
            notes.append(
                f"left out: the optimizer's state, the step and the position in the data ({reason})"
            )
            specs = {name: spec for name, spec in specs.items() if name.startswith("model.")}
            source.manifest = Manifest(step=0, model={})
        if dtype:
            specs = _in_dtype(source, specs, dtype)
        model = model_of(source.shape, specs[EMBEDDING].dtype, source.architecture)
        source.manifest = replace(source.manifest, model=model)
        if to == "hf":
            notes += _lost_fields(source)

        _require_room(staging, sum(map(nbytes, specs.values())))
        digests: dict[str, str] = {}
        progress = cleanup.enter_context(
            # Each tensor is copied, and read again for the proof.
            Progress("convert", 2 * sum(map(nbytes, specs.values())), "B")
        )
        unwritten = write(
            to, staging, source, specs, _read_tensors(source, specs, digests, progress), shard
        )
        expected_counts = Counter(
            in_file for name in specs for in_file in source.locations[name].names
        )
        if unwritten or source.read_counts != expected_counts:
            raise CheckpointError(
                f"{dst} is not complete: {unwritten} not written, read {source.read_counts}; "
                "this is a bug of composer3d"
            )

        # Syncing is slow, so a thread does it while the proof reads the copy from the page cache.
        with ThreadPoolExecutor(1) as thread:
            syncs = thread.map(sync, (*staging.rglob("*"), staging))
            written = _prove_copy(source, staging, specs, digests, progress)
            list(syncs)  # raises the error of a sync that failed

        report: dict[str, Any] = {
            "source": str(source.path),
            "from": source.format,
            "target": str(dst),
            "to": to,
            "tensors": len(specs),
            "bytes": sum(map(nbytes, specs.values())),
        }
        if logits:
            report["logits"] = _compare_logits(source, written, exact=dtype is None)
        publish(staging, dst)
    except BaseException as error:
        if staging.is_dir():
            shutil.rmtree(staging)
        else:
            staging.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{dst} cannot be written ({error}); nothing is left of it"
            ) from None
        raise
    finally:
        cleanup.close()
    return report | {
        "notes": notes,
        "carried": list(source.carried),
        "seconds": time.perf_counter() - started_s,
    }


def _in_dtype(source: Source, specs: Mapping[str, TensorSpec], dtype: str) -> dict[str, TensorSpec]:
    """Give the parameters in ``specs`` another dtype, as ``convert`` says."""
    goes_on = any(name.startswith("optim.") for name in specs)
    units = source.model_of.table_of(source.shape).units()
    biases = {f"model.{unit}.{row.name}" for unit, rows in units for row in rows if not row.trains}
    changed = {}
    for name, spec in specs.items():
        is_kept = not name.startswith("model.")
        if name in biases and not goes_on:
            is_kept = getattr(torch, spec.dtype).itemsize > getattr(torch, dtype).itemsize
        changed[name] = spec if is_kept else spec._replace(dtype=dtype)
    return changed


def _lost_fields(source: Source) -> list[str]:
    """Return a note for each coefficient of training that config.json cannot hold."""
    shape = source.shape
    return [
        f"left out: model.{entry.name} = {getattr(shape, entry.name)} (config.json cannot hold it)"
        for entry in fields(shape)
        if entry.name in shape.training_fields and getattr(shape, entry.name) != entry.default
    ]


def _require_room(staging: Path, n_bytes: int) -> None:
    """Raise MachineError if the disk of ``staging`` has too little room for all tensors."""
    free = shutil.disk_usage(staging).free
    if n_bytes > free:
        raise MachineError(
            f"{staging} needs {n_bytes:,} bytes, and {free:,} are free there; free some, or give "
            "another DST; of a URL, TMPDIR names the folder"
        )


def _require_absent(dst: Path) -> None:
    require_valid_path(dst)
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst} exists; give a DST that does not exist, or remove it")


def _make_staging(src: Path, dst: Path, *, folder: bool) -> Path:
    """Make the empty folder or file to write, which is renamed to ``dst`` at the end."""
    staging = dst.with_name(dst.name + ".tmp")
    try:
        if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
            raise CheckpointError(f"{dst} lies in {src}; give a DST outside of it")
        if folder:
            staging.mkdir()
        else:
            staging.touch(exist_ok=False)
    except FileExistsError:
        raise CheckpointError(
            f"{staging} exists: another conversion is writing it, or one was interrupted; "
            "if none is running, remove it"
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        parent_is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = f"{dst.parent} is not a folder; make it first" if parent_is_missing else error
        raise CheckpointError(f"{dst} cannot be written ({reason})") from None
    return staging


def _read_tensors(
    source: Source, specs: Mapping[str, TensorSpec], digests: dict[str, str], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Read each tensor once, and yield it with our name and in the dtype of its spec.

    The digest of each yielded tensor is added to ``digests``. A tensor with numbers that are not
    finite adds a note to ``source``, and so do numbers that are too small for the new dtype.

    Raises CheckpointError if a finite number becomes infinite in the new dtype.
    """
    too_small: Counter[str] = Counter()
    for name, spec in specs.items():
        original = source.read(name)
        if count := count_not_finite(original):
            source.notes.append(f"warning: {name} holds {count}; they are copied")
        dtype: torch.dtype = getattr(torch, spec.dtype)
        tensor = original.to(dtype)
        # The number of infinities is compared, and not the maximum: it is NaN if any element is.
        is_narrower = torch.finfo(dtype).max < torch.finfo(original.dtype).max
        if is_narrower and tensor.isinf().sum() > original.isinf().sum():
            raise CheckpointError(
                f"{source.path}: {name} holds numbers beyond the range of {spec.dtype}; "
                "convert to bfloat16 or float32"
            )
        n_lost = int(original.count_nonzero() - tensor.count_nonzero()) if is_narrower else 0
        if n_lost:
            too_small[name] = n_lost
        digests[name] = digest_of(tensor)
        yield name, tensor
        progress.advance(nbytes(spec))
    if too_small:
        ((worst, most),) = too_small.most_common(1)
        source.notes.append(
            f"warning: {too_small.total():,} numbers in {len(too_small)} tensors are too small for "
            f"{specs[worst].dtype}, and are 0 in the copy; {most:,} of them in {worst}"
        )


def _prove_copy(
    source: Source,
    path: Path,
    specs: Mapping[str, TensorSpec],
    digests: Mapping[str, str],
    progress: Progress,
) -> Source:
    """Open the copy at ``path``, compare it with the source, and return it.

    Raises CheckpointError if a name, shape, dtype or digest, or the model's shape, is different.
    """
    written = open_source(path)
    written_specs = written.specs()
    differences = [
        name
        for name in sorted(specs.keys() | written_specs.keys())
        if specs.get(name) != written_specs.get(name)
    ]
    for name, digest in digests.items():
        has_same_spec = name not in differences and name in written_specs
        if has_same_spec and digest_of(written.read(name)) != digest:
            differences.append(name)
        progress.advance(nbytes(specs[name]))

    before, after = (_comparable_shape(side, written.format) for side in (source, written))
    if before != after:
        differences.append(f"the model's shape, {after} instead of {before}")

    if differences:
        raise CheckpointError(
            "the copy differs from the source in "
            f"{', '.join(differences[:_SHOWN_DIFFERENCES])}; check the disk for errors"
        )
    return written


def _comparable_shape(source: Source, written: Format) -> ModelShape:
    """Return the shape of the model, as a checkpoint of the format ``written`` describes it."""
    if written == "hf":
        return source.huggingface.canonical(source.shape)
    # Some formats leave out the width of a head if it is dim / n_heads.
    return replace(source.shape, head_dim=source.shape.head_width)


def _compare_logits(source: Source, written: Source, *, exact: bool) -> dict[str, Any]:
    """Run both models on the same tokens, and compare their logits.

    Raises CheckpointError if the copy's logits are not finite and others than the source's, or if
    they differ and ``exact``.
    """
    before, after = _logits(source), _logits(written)
    bitwise = torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True)
    if bitwise:
        return {"bitwise": True, "relative_error": 0.0}
    if not before.isfinite().all():
        raise CheckpointError(
            "the source's own logits are not finite, so they cannot be compared in another dtype; "
            "leave out --logits, or mend the source"
        )
    error = ((after - before).norm() / before.norm()).item()
    if exact or not after.isfinite().all():
        raise CheckpointError(
            f"the copy's logits differ from the source's: relative error {error:.3g}"
        )
    return {"bitwise": False, "relative_error": error}


@torch.no_grad()
def _logits(source: Source) -> Tensor:
    """Compute the model's logits in float32, for random tokens that are the same in every call."""
    chosen = architecture(source.architecture)
    model = chosen.build(source.shape, dtype=torch.float32, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.copy_(source.read(f"model.{name}"))
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(source.shape.vocab, (1, _LOGITS_TOKENS), generator=generator)
    return model.logits(tokens_BT, SequenceInfo(torch.arange(_LOGITS_TOKENS)[None]))
