"""How a fault takes the place of a function of the package."""

from collections.abc import Callable
from typing import Any


def instead_of(owner: Any, right: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Let the decorated function stand in the place of ``right``, which it gets first.

    Args:
        owner: the module or class that the program looks ``right`` up in.
        right: an attribute of it, under exactly one name.

    Raises:
        ValueError: ``right`` is no attribute of ``owner``. A fault must not lose its effect
            unnoticed when a function moves.
    """
    (name,) = [name for name, value in vars(owner).items() if value is right]

    def plant(wrong: Callable[..., Any]) -> None:
        def planted(*arguments: Any, **options: Any) -> Any:
            return wrong(right, *arguments, **options)

        setattr(owner, name, planted)

    return plant
