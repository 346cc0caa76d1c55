"""What several programs say alike, with other words, and how it becomes keys of a recipe."""

from composer3d.imports.translation import Translation


def set_dtype(made: Translation, *, half: tuple[str, ...], narrow: tuple[str, ...]) -> None:
    """Set the dtype of forward and backward.

    Args:
        made: gets a problem if it is float16, unless ``--set`` chooses another one.
        half, narrow: the words that say float16, and bfloat16. With both, it is bfloat16.
    """
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


def note_adamw(made: Translation, word: str, *names: str) -> None:
    """Ask about an optimizer that is not AdamW, which has one of ``names``, in any case."""
    name = made.text(word)
    if name is not None and name.lower() not in names:
        made.ask("the optimizer of the recipe is AdamW", word)
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


def note_linear_decay(made: Translation, style: str | None, word: str) -> None:
    """Ask about a decay at the end of the schedule wsd that is not linear."""
    if style not in (None, "linear"):
        made.ask("the decay of wsd is linear", word)


def note_whole_experts(made: Translation, word: str) -> None:
    """Note that experts are never cut by tp, if a file cuts them."""
    if word not in made.settings:
        return
    if made.number(word) == 1:
        made.harmless.append(made.words(word))
    else:
        made.ask("experts are never cut by tp: mesh.ep puts whole ones on the ranks of tp", word)
