"""Which parameters of a model an optimizer of matrices works on as a whole. No torch here."""

from fnmatch import fnmatchcase

from composer3d.models.registry import Architecture
from composer3d.models.shape import DecoderShape
from composer3d.recipe.schema import OptimTable


def matrices_of(chosen: Architecture, shape: DecoderShape, optim: OptimTable) -> frozenset[str]:
    """Return the global names of the parameters that an optimizer of matrices works on as a whole.

    Those are the matrices within blocks: the products of attention, of feed-forward layers and of
    experts. Embedding, head, norms, biases and routers are none. ``optim.matrices`` gives globs
    instead, which are compared with the names of parameters of two dims or more. None if the
    optimizer treats matrices as all other parameters.

    Args:
        chosen: the architecture of the model.
        shape: its sizes.
        optim: the recipe's ``[optim]``.
    """
    if not optim.optimizer.has_matrices:
        return frozenset()
    table = chosen.table_of(shape)
    if optim.matrices is None:
        return table.hidden_matrices()
    return frozenset(
        name
        for name, row in table.parameters()
        if row.is_matrix and any(fnmatchcase(name, glob) for glob in optim.matrices)
    )
