"""``docs/reference.md`` is what the schema says."""

from composer3d.recipe.values import FIELDS
from tools import schema_page


def test_the_page_is_up_to_date() -> None:
    assert schema_page.PAGE.read_text() == schema_page.text(), "run `python -m tools.schema_page`"


def test_every_key_has_a_line_with_its_meaning() -> None:
    lines = schema_page.text().splitlines()
    names = {key.partition(".")[2] for key in FIELDS if "." in key}
    assert len(names) > 60
    for name in names:
        found = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert found, name
        assert all(len(line.split(" | ")) >= 4 for line in found), name
