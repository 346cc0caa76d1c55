"""The objects that the names of a recipe lead to."""

from pathlib import Path

import pytest

from composer3d.facts.errors import ModelError
from composer3d.models import registry


def test_an_error_in_the_users_module_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not look as if the module lacked the name."""
    (tmp_path / "with_a_fault.py").write_text("import math\nmath.no_such_function()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError) as caught:
        registry.import_architecture("with_a_fault:ARCHITECTURE")
    (line,) = caught.value.lines
    assert line.startswith(
        "\"with_a_fault:ARCHITECTURE\" cannot be imported: AttributeError: module 'math' has "
    )
