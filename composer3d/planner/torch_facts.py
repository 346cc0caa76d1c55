"""What depends on the installed version of torch. It is not imported."""

import re
from functools import cache
from importlib import metadata


@cache
def widens_gradients() -> bool:
    """Return whether FSDP gets gradients in the dtype in which it reduces them.

    torch 2.15 writes the gradient of a gathered parameter in that dtype at once
    (``FSDPParam.unsharded_grad_dtype``). torch 2.13 writes it in the dtype of the computation, and
    converts it when it is summed or reduced. Without torch, the answer is that of 2.13.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:2]) >= (2, 15)
