"""Check that all ranks of a job run the same recipe with the same software."""

import os
from importlib import import_module

import torch

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import as_toml, entries_of_recipe, value_of
from composer3d.runtime.process_group import check_same_table

# Nodes may have mounted the same files elsewhere. What these files hold is compared on its own.
# The digest of a blend has the weights of data.sources.
_PATHS = frozenset(
    {
        "run.out_dir",
        "data.path",
        "data.sources",
        "data.cache_dir",
        "validation.path",
        "parallel.schedule_csv",
    }
)

# Ranks with different values of these may wait for each other, or compute different bits.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "TORCH_GLOO_LAZY_INIT",
)


def versions() -> dict[str, str]:
    """Return the versions that all ranks of a job must share, by the name of the software."""
    # An import statement would import upward: the package names the modules above this one.
    version = import_module("composer3d").__version__
    found = {"composer3d": version, "torch": torch.__version__}
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def check_agreement(recipe: Recipe) -> None:
    """Check that the recipe, the versions and the settings of NCCL are the same on all ranks.

    Collective over all ranks: one all-reduce of four integers.

    Raises:
        MeshError: on every rank. Each line has a key that differs, and the ranks of each value.
    """
    keys = sorted(set(entries_of_recipe(recipe)) - _PATHS)
    values = {key: value_of(recipe, key) for key in keys}
    table = {key: "absent" if value is None else as_toml(value) for key, value in values.items()}
    table |= {f"the version of {name}": version for name, version in versions().items()}
    table |= {name: os.environ.get(name, "absent") for name in _VARIABLES}
    check_same_table("the recipe and the environment", table)
