"""What depends on the installed version of torch. It is not imported."""

import re
from functools import cache
from importlib import metadata


@cache
def is_since_2_15() -> bool:
    """Return whether the installed torch is 2.15 or later. Without torch, the answer is False.

    Three changes of 2.15 move the planner's memory:

    - Autograd adds each gradient to the sum over micro-batches as soon as it is written, in the
      dtype of the sum (``FSDPParamGroup._set_unsharded_grad_dtypes``). Before, FSDP converted and
      added those of a unit when all of them were there.
    - After the last backward of a pipeline, FSDP reduces the last unit first, and drops the
      parameters of a unit before it reduces its gradients (``FSDPState.finalize_backward``).
      Before, all parameters stayed until the end, and the first unit came first.
    - A pipeline stage makes a buffer for a message when it asks for it, and gives it up to the
      computation (``pipelining._recv_buffers``). Before, it kept one for each micro-batch.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:2]) >= (2, 15)
