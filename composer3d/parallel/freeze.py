"""Train a part of a model: the other parameters stay as they are."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from composer3d.facts.errors import PlanError

_SHOWN = 6  # names of parameters in a message


def freeze_others(model: nn.Module, train: Sequence[str]) -> None:
    """Let only those parameters of the whole model require a gradient that a glob matches.

    To be called before ``compose``, which keeps what each parameter requires. A frozen parameter
    has no gradient, no part in the norm, no weight decay and no state of the optimizer. A
    checkpoint has its value.

    Args:
        model: the whole model. What requires no gradient already, such as the bias of a router,
            stays so.
        train: globs of parameter names, as ``fnmatch`` has them; ``*`` also matches dots.

    Raises:
        PlanError: a glob matches no parameter that can be trained.
    """
    require_matches(model, train, key="optim.train")
    for name, parameter in _trainable(model).items():
        parameter.requires_grad_(any(fnmatchcase(name, glob) for glob in train))


def require_matches(model: nn.Module, globs: Sequence[str], *, key: str) -> None:
    """Raise PlanError if one of ``globs`` matches no parameter that can be trained.

    Args:
        model: the whole model.
        globs: as in ``freeze_others``.
        key: the key of the recipe that has them.
    """
    names = list(_trainable(model))
    unmatched = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]
    if unmatched:
        shown = ", ".join([*names[:_SHOWN], "..."] if len(names) > _SHOWN else names)
        raise PlanError(
            [
                f"{key}: {glob!r} matches no parameter of {type(model).__name__}; its "
                f"parameters are {shown}"
                for glob in unmatched
            ]
        )


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
