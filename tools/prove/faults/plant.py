"""How a fault takes the place of a function of the package."""

from collections.abc import Callable
from functools import wraps
from typing import Any

# Of a fault: it changes what this process runs from then on.
Plant = Callable[[], None]
_Decorator = Callable[[Callable[..., Any]], Plant]


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


def fault_by(plant: Callable[[Callable[..., Any]], object]) -> _Decorator:
    """Make a fault of the decorated function: it is planted by calling ``plant`` with it."""

    def decorate(wrong: Callable[..., Any]) -> Plant:
        @wraps(wrong)
        def fault() -> None:
            plant(wrong)

        return fault

    return decorate


def fault_of(owner: Any, right: Callable[..., Any]) -> _Decorator:
    """Make a fault of the decorated function, which is planted as by ``instead_of``."""
    return fault_by(instead_of(owner, right))
