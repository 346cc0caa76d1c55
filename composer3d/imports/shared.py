"""What several programs say alike, with other words, and how it becomes keys of a recipe."""

from collections.abc import Mapping

from composer3d.imports.translation import Translation
from composer3d.imports.words import DTYPES


def read_dtype(made: Translation, word: str) -> str | None:
    """Return our name of the dtype that a word gives, the text itself if it is none, or None."""
    text = made.text(word)
    if text is None:
        return None
    return DTYPES.get(text.lower().removeprefix("torch.").replace("_", "-"), text)


def set_dtype(made: Translation, dtypes: Mapping[str, str | None]) -> None:
    """Set the dtype of forward and backward, if a word says float16 or bfloat16.

    Args:
        made: gets a problem if it is float16, unless ``--set`` chooses another one.
        dtypes: what each word says. With both, it is bfloat16.
    """
    half, narrow = (
        tuple(word for word, dtype in dtypes.items() if dtype == wanted)
        for wanted in ("float16", "bfloat16")
    )
    if half and narrow:
        line = f"{made.words(*half, *narrow)}: both at once; bfloat16 is used"
        made.contradict(line, narrow[0])
    elif half and "precision.compute" in made.overridden:
        made.lose("no loss scaling: --set chooses the dtype", *half)
    elif half:
        made.problems.append(
            f"{made.file}: {made.words(*half)}: composer3d has no float16, which needs loss "
            'scaling; use bfloat16: --set precision.compute="bfloat16"'
        )
    if narrow:
        made.take("precision.compute", "bfloat16", *narrow)


def note_parameters(made: Translation, word: str) -> None:
    """Note that parameters are float32, if a word gives them another dtype."""
    dtype = read_dtype(made, word)
    if dtype == "bfloat16":
        made.lose("parameters and optimizer are float32, compute is bfloat16", word)
    elif dtype not in (None, "auto", "float32"):
        made.ask("parameters and optimizer are float32", word)
    made.ignore(word)


def take_betas(made: Translation, words: tuple[str, str], defaults: tuple[float, float]) -> None:
    """Set the decay rates of AdamW's moments if the file has one of the two words."""
    beta1, beta2 = (made.real(word) for word in words)
    if beta1 is not None or beta2 is not None:
        betas = (
            defaults[0] if beta1 is None else beta1,
            defaults[1] if beta2 is None else beta2,
        )
        made.take("optim.betas", betas, *words)


def padded(size: int, unit: int) -> int:
    """Return the rows of a vocabulary of ``size`` tokens, in multiples of ``unit``."""
    return -(-max(1, size) // unit) * unit
