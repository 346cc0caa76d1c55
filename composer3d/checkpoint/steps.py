"""Find the complete checkpoints in a folder. No torch here."""

from composer3d.checkpoint import manifest as manifests
from composer3d.facts.remote import Place
from composer3d.facts.step_folders import list_steps


def published(place: Place) -> list[Place]:
    """List the step folders in ``place`` that have a manifest, lowest first. Raises OSError."""
    return [path for path in list_steps(place) if (path / manifests.FILE).exists()]
