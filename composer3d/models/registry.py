"""The architectures that a recipe can name: ours, and those of a user's own package. No torch here.

An architecture is one object that names everything the commands need of it. Ours are registered in
the same way as a user's: ``[model] architecture = "my_package.my_model:ARCHITECTURE"``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from composer3d.facts.errors import ModelError
from composer3d.models import counts, locations
from composer3d.models.locations import Location
from composer3d.models.shape import DecoderShape
from composer3d.models.table import ParameterTable

# A function, class or module: the object itself, or its name as "module:name" or "module". A name
# is imported when it is needed, so that a shape can be read without torch.
Reference = Any

DEFAULT = "llama"

# composer3d's own, by name.
OURS: Mapping[str, str] = {
    "llama": "composer3d.models.llama.architecture:ARCHITECTURE",
    "moe": "composer3d.models.moe.architecture:ARCHITECTURE",
    "olmo2": "composer3d.models.olmo2.architecture:ARCHITECTURE",
    "granite": "composer3d.models.granite.architecture:ARCHITECTURE",
    "gpt_oss": "composer3d.models.gpt_oss.architecture:ARCHITECTURE",
    "deepseek": "composer3d.models.deepseek.architecture:ARCHITECTURE",
    "glm": "composer3d.models.glm.architecture:ARCHITECTURE",
    "phi3": "composer3d.models.phi3.architecture:ARCHITECTURE",
    "gemma3": "composer3d.models.gemma3.architecture:ARCHITECTURE",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that train, verify, check and convert need to know about an architecture.

    Attributes:
        shape: a frozen dataclass derived from ``DecoderShape``. Its fields are keys of ``[model]``.
        model: ``model(shape, *, dtype, device) -> Decoder``, with uninitialised parameters.
        plan: ``plan(shape) -> ShardingPlan``.
        table: ``table(shape) -> ParameterTable``, the parameters of the model, without torch.
            None: it is read from the model and its plan.
        parameters: ``parameters(shape) -> int``, the number of parameters of the whole model.
            None: the table counts them.
        flops_per_token: ``flops_per_token(shape, seq_len) -> float``, the FLOPs of forward and
            backward for one training token. None: the table counts them.
        presets: shapes by name, for ``[model] preset``.
        huggingface: the module that reads and writes Hugging Face's config.json, or None. It needs
            no torch. It has ``MODEL_TYPES``, ``read_shape``, ``parse_config``, ``make_shape``,
            ``canonical`` and ``make_config``, as ``models.llama.huggingface`` documents them.
        names: the module that finds parameters in files of Hugging Face, such as
            ``models.moe.names``. None: they have the names in the table.
    """

    shape: type[DecoderShape]
    model: Reference
    plan: Callable[[Any], Any] | str
    table: Reference = None
    parameters: Reference = None
    flops_per_token: Reference = None
    presets: Mapping[str, DecoderShape] = field(default_factory=dict)
    huggingface: Reference = None
    names: Reference = None

    def build(self, shape: DecoderShape, **options: Any) -> Any:
        """Build the model. ``options`` are the keywords of ``model``: ``dtype`` and ``device``."""
        return resolve(self.model)(shape, **options)

    def table_of(self, shape: DecoderShape) -> ParameterTable:
        """Return the table of the parameters of a model with this shape.

        Without ``table``, the model is built on the meta device, which needs torch.

        Raises:
            PlanError: the plan does not fit the model that is built.
        """
        if self.table is None:
            return _read_table(self.model, self.plan, shape)
        return _table(self.table, shape)

    def hf_locations(
        self, shape: DecoderShape, in_files: Collection[str] = ()
    ) -> dict[str, Location]:
        """Return the place of each parameter in the files of Hugging Face, by our name.

        Args:
            shape: the shape of a model that ``huggingface.make_config`` accepts.
            in_files: the names of tensors in the files, if they are there already.

        Raises:
            CheckpointError: the names do not fit the shape at all.
        """
        if self.names is None:
            return locations.hf_locations(self.table_of(shape))
        found: dict[str, Location] = resolve(self.names).hf_locations(shape, in_files)
        return found

    def left_out(self, shape: DecoderShape, in_files: Collection[str]) -> frozenset[str]:
        """Return the tensors in the files of Hugging Face that are no part of the model.

        They are those of the function ``left_out`` of ``names``, if it has one.
        """
        function = getattr(resolve(self.names), "left_out", None)
        return frozenset() if function is None else function(shape, in_files)

    def copies(self, shape: DecoderShape) -> dict[str, str]:
        """Return the tensors in files of Hugging Face that repeat another one.

        They are those of the function ``copies`` of ``names``, if it has one.

        Returns:
            Our name of the parameter that each of them repeats.
        """
        function = getattr(resolve(self.names), "copies", None)
        return {} if function is None else function(shape)

    def count_parameters(self, shape: DecoderShape) -> int:
        """Count the parameters of the whole model."""
        if self.parameters is not None:
            return int(resolve(self.parameters)(shape))
        return counts.parameters(self.table_of(shape))

    def count_active_parameters(self, shape: DecoderShape) -> int | None:
        """Count the parameters that compute a token. None: all of them do."""
        if self.table is None or not shape.experts:
            return None
        return counts.active_parameters(self.table_of(shape), shape)

    def count_flops(self, shape: DecoderShape, seq_len: int) -> float:
        """Count the FLOPs of one training token, forward and backward, of causal attention."""
        if self.flops_per_token is not None:
            return float(resolve(self.flops_per_token)(shape, seq_len))
        return counts.flops_per_token(self.table_of(shape), shape, seq_len)


@cache
def _table(reference: Reference, shape: DecoderShape) -> ParameterTable:
    table: ParameterTable = resolve(reference)(shape)
    return table


@cache
def _read_table(model: Reference, plan: Reference, shape: DecoderShape) -> ParameterTable:
    read_table = resolve("composer3d.models.module_table:read_table")
    table: ParameterTable = read_table(model, plan, shape)
    return table


# Architectures of the user that this process has imported, by name.
_imported: dict[str, Architecture] = {}


def architecture(name: str) -> Architecture:
    """Return the architecture with this name: one of ours, or one that is imported already.

    Nothing of the user is imported here, so a name in a stranger's file does no harm.

    Raises:
        ModelError: there is no such architecture, or ``import_architecture`` has not imported it.
    """
    if name in _imported:
        return _imported[name]
    if name in OURS:
        found: Architecture = resolve(OURS[name])
        return found
    _require_module(name)
    raise ModelError(
        f'the architecture "{name}" is not one of composer3d\'s own; its module is imported only '
        "for a recipe that is given by name to a command that needs its model"
    )


def _require_module(name: str) -> None:
    if ":" not in name:
        known = ", ".join(OURS)
        raise ModelError(
            f'there is no architecture "{name}"; use {known}, or "package.module:NAME" for one of '
            "your own"
        )


def import_architecture(name: str) -> Architecture:
    """Return the architecture with this name, and import the module of the user that defines it.

    Importing a module runs its code. So the name must come from a recipe that the user gave by
    name, never from a file in a checkpoint or in the folder of a run.

    Raises:
        ModelError: there is no such architecture, it cannot be imported, or it is not an
            ``Architecture`` with a shape derived from ``DecoderShape``.
    """
    if name in OURS or name in _imported:
        return architecture(name)
    _require_module(name)
    try:
        found = resolve(name)
    except ModelError:
        raise
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f'"{name}" cannot be imported: {type(error).__name__}: {error}; install the package, '
            "or put its folder into PYTHONPATH"
        ) from None
    if not isinstance(found, Architecture):
        raise ModelError(
            f'"{name}" is a {type(found).__name__}, not a composer3d.models.registry.Architecture'
        )
    if not (isinstance(found.shape, type) and issubclass(found.shape, DecoderShape)):
        raise ModelError(
            f'"{name}" has a shape that is not derived from composer3d.models.shape.DecoderShape'
        )
    _imported[name] = found
    return found


def is_ours(name: object) -> bool:
    """Return whether ``name``, which an untrusted file may have given, is one of ours."""
    return isinstance(name, str) and name in OURS


def huggingface_model_types() -> dict[str, str]:
    """Map each ``model_type`` of a config.json that we support to our architecture for it."""
    return {
        model_type: name
        for name in OURS
        for model_type in resolve(architecture(name).huggingface).MODEL_TYPES
    }


@cache
def resolve(reference: Reference) -> Any:
    """Return the object that a reference names, or the reference itself if it is not a string.

    The reference must be one of an ``Architecture``, whose code runs in any case: its module is
    imported. Raises ModelError if the module does not have the name.
    """
    if not isinstance(reference, str):
        return reference
    module, colon, name = reference.partition(":")
    if not colon:
        return import_module(module)
    imported = import_module(module)  # an AttributeError in the module's own code passes
    try:
        return getattr(imported, name)
    except AttributeError:
        raise ModelError(f'module "{module}" has no "{name}"') from None
