"""Write a run for TensorBoard: its curves with descriptions, a dashboard, its recipe and layout.

TensorBoard names a run by the folder of its event files, which is the run's folder. Its charts have
one horizontal axis, the step. So the losses by tokens are curves of their own, in the run
``NAME/by_tokens``, whose step is the number of tokens. They need a folder of their own: a resume
tells TensorBoard to forget all points of a folder from some step on. They need tags of their own
too: one chart cannot show steps and tokens.
"""

import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Imported only on the rank that writes: it takes a second.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard import summary as summaries

from composer3d.spec.tags import COUNTED_TOKENS, Tag, tag_of

TOKENS_FOLDER = "by_tokens"

_RGB = 3  # a code of TensorBoard

# Metrics that have a curve by tokens.
_BY_TOKENS = {
    "loss": Tag("loss_by_tokens/train", f"loss/train over tokens. {COUNTED_TOKENS}"),
    "validation_loss": Tag(
        "loss_by_tokens/validation", f"loss/validation over tokens. {COUNTED_TOKENS}"
    ),
}

# The dashboard "Custom scalars": category, title of a chart, and its tags as regular expressions.
_DASHBOARD = {
    "What matters": {
        "loss": ["Multiline", ["^loss/train$", "^loss/validation$"]],
        "tokens/s of all ranks": ["Multiline", ["^speed/tokens_per_s$"]],
        "gradient norm": ["Multiline", ["^optim/grad_norm$"]],
        "peak memory, GiB": ["Multiline", ["^memory/peak_gib$", "^memory/peak_reserved_gib$"]],
        "learning rate": ["Multiline", ["^optim/lr$"]],
        "gradient norm by part": ["Multiline", ["^grad_norm/"]],
        "loss by tokens": ["Multiline", ["^loss_by_tokens/"]],
    },
    "Time": {
        "seconds of a step": ["Multiline", ["^time/step_s$", "^time/data_s$"]],
        "seconds beside steps": ["Multiline", ["^time/validation_s$", "^time/checkpoint_s$"]],
    },
}
_DASHBOARD_OF_EXPERTS = {
    "Experts": {
        "load of the busiest expert": ["Multiline", ["^experts/load$", "^expert_load/"]],
        "router entropy": ["Multiline", ["^experts/router_entropy$", "^router_entropy/"]],
    },
}


class _Curves:
    """An event file in a folder."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        self._file = FileWriter(
            str(folder),
            flush_secs=10,
            # A random name, so that nobody can place a link there beforehand.
            filename_suffix=f".{uuid.uuid4().hex}",
        )
        self._described: set[str] = set()
        # From this step on, TensorBoard forgets what earlier processes wrote to this folder.
        self._file.add_event(Event(step=purge_step, file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._file.add_event(Event(step=purge_step, session_log=start))

    def add(self, tag: str, value: float, step: int, description: str) -> None:
        metadata = None
        if description and tag not in self._described:
            # TensorBoard reads the description at the first point of a tag. Its data server ignores
            # one without a data class.
            metadata = create_summary_metadata(display_name="", description=description)
            metadata.data_class = DATA_CLASS_SCALAR
            self._described.add(tag)
        point = Summary.Value(tag=tag, simple_value=value, metadata=metadata)
        self._file.add_summary(Summary(value=[point]), step)

    def add_summary(self, summary: Any, step: int = 0) -> None:
        self._file.add_summary(summary, step)

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """The event files of a run. Every method raises OSError if a file cannot be written.

    Args:
        run_dir: the run's folder.
        start_step: the number of steps done before this process. Points beyond it are dropped; 0
            drops all.
        tokens_per_step: tokens in a step, over all ranks.
    """

    def __init__(self, run_dir: Path, *, start_step: int, tokens_per_step: int) -> None:
        self._run_dir = run_dir
        self._start_step = start_step
        self._tokens_per_step = tokens_per_step
        self._curves = _Curves(run_dir, start_step + 1 if start_step else 0)
        self._by_tokens: _Curves | None = None

    def add_scalar(self, metric: str, value: float, step: int) -> None:
        """Add a point to the curve of a metric, and to its curve by tokens if it has one."""
        tag = tag_of(metric)
        self._curves.add(tag.name, value, step, tag.description)

        by_tokens = _BY_TOKENS.get(metric)
        if by_tokens is None:
            return
        if self._by_tokens is None:
            first_tokens = self._start_step * self._tokens_per_step + 1 if self._start_step else 0
            self._by_tokens = _Curves(self._run_dir / TOKENS_FOLDER, first_tokens)
        tokens = step * self._tokens_per_step
        self._by_tokens.add(by_tokens.name, value, tokens, by_tokens.description)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text in Markdown."""
        self._curves.add_summary(summaries.text(tag, text), step)

    def describe(
        self,
        texts: Mapping[str, str],
        images: Mapping[str, bytes],
        hparams: Mapping[str, Any],
        *,
        has_experts: bool,
    ) -> None:
        """Write what is the same for all steps: the dashboard, texts, images and hyperparameters.

        Args:
            texts: plain texts by tag, shown in a font of fixed width.
            images: PNG files by tag.
            hparams: numbers, bools and texts by key.
            has_experts: whether the dashboard has the charts of experts.
        """
        dashboard = {**_DASHBOARD, **(_DASHBOARD_OF_EXPERTS if has_experts else {})}
        self._curves.add_summary(summaries.custom_scalars(dashboard))
        for tag, text in texts.items():
            # Indented lines are code in Markdown, whatever they contain.
            code = "\n".join(f"    {line}" for line in text.splitlines())
            self.add_text(tag, code, self._start_step)
        for tag, png in images.items():
            # The first chunk of a PNG file has its size.
            width, height = struct.unpack(">II", png[16:24])
            image = Summary.Image(
                encoded_image_string=png, width=width, height=height, colorspace=_RGB
            )
            value = Summary.Value(tag=tag, image=image)
            self._curves.add_summary(Summary(value=[value]), self._start_step)
        metrics = {"loss/train": 0.0, "loss/validation": 0.0}
        for part in summaries.hparams(dict(hparams), metrics):
            self._curves.add_summary(part)

    def close(self) -> None:
        """Write everything to the disk, and close the files."""
        self._curves.close()
        if self._by_tokens is not None:
            self._by_tokens.close()
