"""``docs/checkpoints.md``: the models that it says are not read are refused, and exist."""

import re

import pytest

from composer3d.facts.errors import CheckpointError
from composer3d.models.llama import huggingface
from composer3d.models.registry import huggingface_model_types
from tools.prove.paths import ROOT


def model_types() -> list[str]:
    """The values of model_type in the second column of the table."""
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    section = text.partition("### Models that are not read\n")[2]
    rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])]


def test_the_table_names_types_that_transformers_has() -> None:
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto")
    assert len(model_types()) > 20
    assert set(model_types()) <= set(mapping.CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", model_types())
def test_what_is_said_to_be_refused_is_refused(model_type: str) -> None:
    read = huggingface_model_types()
    assert model_type not in read
    with pytest.raises(CheckpointError) as caught:
        huggingface.parse_config({"model_type": model_type})
    assert f'model_type = "{model_type}" is not supported; ' in str(caught.value)
    assert all(name in str(caught.value) for name in read)
