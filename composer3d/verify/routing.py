"""What the routers of a step have seen, on one process and in the composed job.

These numbers go to the metrics, and balance the experts. A router that counts its tokens twice
changes no gradient, so nothing else in a proof would show it.
"""

from collections.abc import Mapping

from torch import nn

from composer3d.models.layers.moe import Router
from composer3d.parallel.expert.balance import RouterLoad, routers_of

# The largest error, relative to the number. No token may go to another expert: a proof is of no
# use where rounding decides that (``judge.ReferenceStats.closest_scores``).
_LARGEST_ERROR = {"float64": 1e-9, "float32": 1e-4}


class SeenOnOneProcess:
    """Writes down what the routers of a plain model see.

    Args:
        model: trains on one process. Between two calls of ``take``, it computes one step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers: dict[str, Router] = routers_of(model)

    def take(self) -> dict[str, list[float]]:
        """Return what each router has seen since the last call, by name.

        The numbers are the tokens of each expert, the balance loss, the z-loss and the entropy.
        """
        seen = {}
        for name, router in self._routers.items():
            sums = router.statistics.sums
            seen[name] = [] if sums is None else sums.tolist()
            router.statistics.reset()
        return seen


def find_wrong_load(
    loads: Mapping[str, RouterLoad],
    expected: Mapping[str, list[float]],
    tokens: int,
    dtype: str,
) -> str | None:
    """Describe the first number of a router that differs from that of one process, if any.

    Args:
        loads: of a step of the composed job.
        expected: of the same step on one process, from ``SeenOnOneProcess``.
        tokens: of the step.
        dtype: the dtype of the proof, "float64" or "float32".
    """
    for name in sorted({*loads, *expected}):
        if name not in loads or not expected.get(name):
            return f"{name}: only one of the job and one process has seen tokens"
        load = loads[name]
        found = [*load.tokens_E.tolist(), load.balance_loss, load.z_loss, load.entropy]
        kinds = [f"tokens of expert {expert}" for expert in range(len(load.tokens_E))]
        kinds += ["balance loss", "z-loss", "entropy, the sum over tokens,"]
        for kind, own, other in zip(kinds, found, expected[name], strict=True):
            # The entropy of a sure choice is 0 but for rounding, so it has a scale: a nat a token.
            scale = max(abs(other), tokens) if kind.startswith("entropy") else abs(other)
            # With ``not <=``, a number that is NaN is wrong.
            if not abs(own - other) <= _LARGEST_ERROR[dtype] * scale:
                return f"{kind} of {name} is {own:.6g}, not {other:.6g}"
    return None
