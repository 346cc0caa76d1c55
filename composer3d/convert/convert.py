"""``composer3d convert``: one checkpoint in another form, a tensor at a time, and the proof that it is the same one."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.convert.formats import (
    Kind,
    Source,
    digest_of,
    name_of,
    nbytes,
    open_source,
    require_name,
)
from composer3d.convert.targets import write
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama.model import Llama
from composer3d.runtime.files import publish, sync
from composer3d.spec.errors import CheckpointError

SHARD = 5 * 10**9  # bytes of one file of safetensors, Hugging Face's own limit
_TOKENS = 32


def convert(
    src: Path,
    dst: Path,
    to: str,
    *,
    dtype: str | None = None,
    weights_only: bool = False,
    logits: bool = False,
    shard: int = SHARD,
) -> dict[str, Any]:
    """Write the checkpoint ``src`` anew at ``dst``, as ``to``: hf, meta, torch or dcp.

    No more than a few times the largest tensor is in memory. What is written is opened again, and names, shapes, dtypes
    and digests of all tensors are held against what was read; only then ``dst`` is there. It needs no process group.
    Returns what was done, as plain values. Raises CheckpointError where one of the two cannot be used.

    Args:
        dtype: of the parameters; the optimizer's state keeps its own.
        weights_only: leave the optimizer's state behind, which torch and dcp can hold.
        logits: run the model of both sides in float32 as well, which takes memory for the model.
        shard: largest size of a file of safetensors, in bytes.
    """
    began = time.perf_counter()
    _require_free(dst)
    source = open_source(src)
    staging = _claim(source.path, dst, folder=to != "torch")
    try:
        kinds, notes = source.kinds(), source.notes
        if any(name.startswith("optim.") for name in kinds) and (
            weights_only or to in ("hf", "meta")
        ):
            why = "--weights-only" if weights_only else f"{to} has no place for it"
            notes.append(
                f"left behind: the optimizer's state, the step and the position in the data ({why})"
            )
            kinds = {name: kind for name, kind in kinds.items() if name.startswith("model.")}
            source.manifest = Manifest(step=0, model={})
        if dtype:
            wanted = getattr(torch, dtype)
            kinds |= {
                name: (shape, wanted)
                for name, (shape, _) in kinds.items()
                if name.startswith("model.")
            }
        params = name_of(kinds["model.first.embed.weight"][1])
        source.manifest = replace(source.manifest, model=model_of(source.shape, params))
        digests: dict[str, str] = {}
        left = write(to, staging, source, kinds, _read(source, kinds, digests), shard)
        if left or source.reads != Counter(source.names[name] for name in kinds):
            raise CheckpointError(
                f"{dst} is not complete: {left} not written, read {source.reads}; a fault of composer3d"
            )
        with ThreadPoolExecutor(1) as disk:  # which is slow, while what is in memory is read back
            synced = disk.map(sync, (*staging.rglob("*"), staging))
            written = _prove(source, staging, kinds, digests)
            list(synced)  # raises what went wrong there
        checked = (
            {"logits": _compare_logits(source, written, exact=dtype is None)} if logits else {}
        )
        publish(staging, dst)
    except BaseException as error:
        shutil.rmtree(staging) if staging.is_dir() else staging.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{dst} cannot be written ({error}); nothing is left of it"
            ) from None
        raise
    sizes = {"tensors": len(kinds), "bytes": sum(map(nbytes, kinds.values()))}
    report = {
        "source": str(source.path),
        "from": source.kind,
        "target": str(dst),
        "to": to,
        **sizes,
        **checked,
    }
    return report | {
        "notes": notes,
        "carried": [*source.carried],
        "seconds": time.perf_counter() - began,
    }


def _require_free(dst: Path) -> None:
    require_name(dst)
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst} exists; give a DST that does not, or remove it")


def _claim(src: Path, dst: Path, *, folder: bool) -> Path:
    """Make what to write into: beside ``dst``, whose name it gets in the end."""
    staging = dst.with_name(dst.name + ".tmp")
    try:
        if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
            raise CheckpointError(f"{dst} lies in {src}; give a DST elsewhere")
        staging.mkdir() if folder else staging.touch(exist_ok=False)
    except FileExistsError:
        way = "another conversion writes it, or one was cut off; then remove it"
        raise CheckpointError(f"{staging} exists: {way}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links that go round
        folder_is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = f"{dst.parent} is no folder; make it first" if folder_is_missing else error
        raise CheckpointError(f"{dst} cannot be written ({why})") from None
    return staging


def _read(
    source: Source, kinds: dict[str, Kind], digests: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, in the dtype that is asked for; what was read is kept as ``digests``, by our names."""
    for name, (_, dtype) in kinds.items():
        tensor = source.read(name)
        made = tensor.to(dtype)
        narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        if (
            narrower and made.isinf().sum() > tensor.isinf().sum()
        ):  # and not by its extremes: these can be nan
            way = "convert to bfloat16 or float32"
            raise CheckpointError(
                f"{source.path}: {name} holds numbers that {name_of(dtype)} does not; {way}"
            )
        digests[name] = digest_of(made)
        yield name, made


def _prove(source: Source, path: Path, kinds: dict[str, Kind], digests: dict[str, str]) -> Source:
    """Open what was written anew, and hold it against what was read."""
    written = open_source(path)
    found = written.kinds()
    wrong = [
        name for name in sorted(kinds.keys() | found.keys()) if kinds.get(name) != found.get(name)
    ]
    wrong += [
        name
        for name, digest in digests.items()
        if name in found and digest_of(written.read(name)) != digest
    ]
    before, after = (
        replace(side.shape, head_dim=side.shape.head_width) for side in (source, written)
    )
    if before != after:
        wrong.append(f"the model's shape, {after} instead of {before}")
    if wrong:
        raise CheckpointError(
            f"what was written is not what was read: {', '.join(wrong[:8])}; is the disk sound?"
        )
    return written


def _compare_logits(source: Source, written: Source, *, exact: bool) -> dict[str, Any]:
    before, after = (_logits(side) for side in (source, written))
    same, error = torch.equal(before, after), ((after - before).norm() / before.norm()).item()
    if (exact and not same) or not after.isfinite().all():
        raise CheckpointError(f"the copy's logits are not the source's: relative error {error:.3g}")
    return {"bitwise": same, "relative_error": error}


@torch.no_grad()
def _logits(side: Source) -> Tensor:
    """Of random tokens, in float32."""
    model = Llama(side.shape, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.copy_(side.read(f"model.{name}"))
    tokens_BT = torch.randint(
        side.shape.vocab, (1, _TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return model.logits(tokens_BT, SequenceInfo(torch.arange(_TOKENS)[None]))
