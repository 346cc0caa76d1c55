"""Write pictures to files."""

from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line
from composer3d.runtime.files import OWN_MARK, replace_own


def write_picture(path: str, picture: str) -> None:
    """Write an SVG file, whole or not at all. It replaces an earlier picture.

    Raises:
        UserError: the name does not end in .svg, is that of another file, or cannot be written.
    """
    if not path.endswith(".svg"):
        raise UserError(f"-o {one_line(path)}: the picture is an SVG file; use a name in .svg")
    try:
        replace_own(path, f"{OWN_MARK}\n{picture}")
    except OSError as error:
        raise UserError(f"-o {one_line(path)}: cannot be written ({error.strerror})") from None
