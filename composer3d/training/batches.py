"""Open the recipe's data, make this rank's loader, and move its batches to the device."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.data import Batch, Blend, Corpus, Loader, open_corpus
from composer3d.data.order import Order
from composer3d.data.staging import NodeCache
from composer3d.data.tokens import MOST_MAPS
from composer3d.facts.errors import DataError
from composer3d.models.contract import IGNORE_INDEX
from composer3d.parallel import Stages
from composer3d.parallel.context.ownership import owned_ranges
from composer3d.recipe.schema import DataTable, Recipe
from composer3d.runtime import environment
from composer3d.runtime.mesh import Mesh


def open_data(recipe: Recipe) -> tuple[Corpus | Blend, Corpus | None]:
    """Open the training data, and the validation data if the recipe validates.

    Returns:
        The training data and the validation data. The latter is None without validation.

    Raises:
        DataError: either cannot be used.
    """
    data, validation = recipe.data, recipe.validation
    cache = _make_cache(data)
    open_split = partial(open_corpus, data.source, field=data.field, cache=cache)
    held_out = None
    if validation.every:
        held_out = open_split(None, split="validation", held_out_path=validation.path)
    training: Corpus | Blend
    if data.sources is None:
        training = open_split(data.path, split="train")
    else:
        most_maps = max(1, MOST_MAPS // len(data.sources))
        corpora = [
            open_split(source.path, split="train", most_maps=most_maps) for source in data.sources
        ]
        training = Blend(tuple(corpora), tuple(source.weight for source in data.sources))
    if cache is not None:
        cache.start()
    return training, held_out


def _make_cache(data: DataTable) -> NodeCache | None:
    """Return the copies of token files on this node; None if the recipe names no folder for them.

    One rank of each node makes them.
    """
    if data.cache_dir is None:
        return None
    makes_copies = environment.local_rank() == 0
    bound = int(data.cache_gib * 2**30)
    return NodeCache(Path(data.cache_dir), bound, makes_copies=makes_copies)


def make_loader(
    recipe: Recipe,
    mesh: Mesh,
    corpus: Corpus | Blend,
    *,
    seed: int,
    order: Order = "feistel",
    is_training: bool = True,
) -> Loader:
    """Make the loader of this rank: its rows of each global batch, and its tokens of each row.

    Only batches for training have what multi-token prediction reads.
    """
    return Loader(
        corpus,
        seq_len=recipe.data.seq_len,
        global_batch=recipe.data.global_batch,
        seed=seed,
        batch_rank=mesh.batch_rank,
        batch_ranks=mesh.batch_ranks,
        packing=recipe.data.packing,
        owned_ranges=owned_ranges_of(recipe, mesh),
        order=order,
        mtp_layers=recipe.model.mtp_layers if is_training else 0,
    )


def make_common_loader(recipe: Recipe, mesh: Mesh, corpus: Corpus | Blend) -> Loader:
    """Make a loader of rows that are the same on all data-parallel ranks.

    A batch is one micro-batch; with a pipeline it is as many as a step has, which its schedule asks
    for.
    """
    micro_batches = recipe.micro_batches if recipe.mesh.pp > 1 else 1
    return Loader(
        corpus,
        seq_len=recipe.data.seq_len,
        global_batch=recipe.data.micro_batch * micro_batches,
        seed=recipe.data.seed,
        batch_rank=0,
        batch_ranks=1,
        packing=recipe.data.packing,
        owned_ranges=owned_ranges_of(recipe, mesh),
        mtp_layers=recipe.model.mtp_layers,
    )


def owned_ranges_of(recipe: Recipe, mesh: Mesh) -> list[tuple[int, int]]:
    """Return the tokens of each row that this rank of cp holds."""
    owned = owned_ranges(
        mesh.coords["cp"],
        recipe.mesh.cp,
        recipe.data.seq_len // recipe.mesh.cp,
        balanced=recipe.parallel.is_balanced,
    )
    return [(tokens.position, tokens.length) for tokens in owned]


class DeviceBatch(NamedTuple):
    """A rank's batch on its device. ``documents_BT`` stays on the CPU, where attention reads it."""

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None
    ahead_B2KT: Tensor | None
    # This rank's shares, of the next token and of each depth of multi-token prediction: (1 + K).
    # Summed over all ranks, each valid label counts once.
    valid_tokens: Tensor


def require_step(stages: Stages, batch: Batch) -> None:
    """Refuse a batch of another size than the step, where another size would change the loss.

    Ranks of cp that have whole rows would take them for parts of longer ones, in which tokens see
    the same tokens of other ranks. Losses of routers are divided by the tokens of the step.

    Raises:
        DataError: this rank's tokens are not its share of the step.
    """
    mesh, step_tokens = stages.mesh, stages.modules[0].step_tokens
    if step_tokens is None or (mesh.sizes.cp == 1 and stages.balance is None):
        return
    batch_ranks = mesh.sizes.dp_replicate * mesh.sizes.dp_shard
    expected = step_tokens // (batch_ranks * mesh.sizes.cp)
    if batch.tokens_BT.numel() != expected:
        rows, length = batch.tokens_BT.shape
        raise DataError(
            f"the batch of rank {mesh.rank} has {rows} x {length} tokens, but a rank's share of "
            f"the step is {expected:,} tokens: data.global_batch x data.seq_len / "
            f"({batch_ranks} x mesh.cp = {mesh.sizes.cp}); cut rows with Stages.own_tokens"
        )


def move_to_device(stages: Stages, batch: Batch) -> DeviceBatch:
    """Move a batch to this rank's device and count its valid labels. No collective."""
    device = stages.mesh.device
    tokens_BT = batch.tokens_BT.to(device, non_blocking=True)
    labels_BT = batch.labels_BT.to(device, non_blocking=True)
    positions_BT = batch.positions_BT.to(device, non_blocking=True)
    ahead_B2KT = batch.ahead_B2KT
    counts = [(labels_BT != IGNORE_INDEX).sum()]
    if ahead_B2KT is not None:
        ahead_B2KT = ahead_B2KT.to(device, non_blocking=True)
        counts += (ahead_B2KT[:, 1] != IGNORE_INDEX).sum((0, 2)).unbind()
    valid_tokens = torch.stack(counts)
    if not stages.counts_loss:
        valid_tokens = torch.zeros_like(valid_tokens)
    return DeviceBatch(
        tokens_BT, labels_BT, positions_BT, batch.documents_BT, ahead_B2KT, valid_tokens
    )
