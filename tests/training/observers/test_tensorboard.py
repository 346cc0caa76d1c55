"""What TensorBoard shows of a run: described curves by steps and by tokens, a dashboard."""

import struct
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.training.observers.tensorboard import TOKENS_FOLDER, TensorBoard

TOKENS = 1000

# The beginning of a PNG file of 3 x 2 pixels.
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 3, 2)


def write(run_dir: Path, steps: range, *, start_step: int = 0, not_before_s: float = 0.0) -> None:
    board = TensorBoard(
        run_dir,
        start_step=start_step,
        tokens_per_step=TOKENS,
        not_before_s=not_before_s,
        tell=pytest.fail,
    )
    texts = {"run/recipe": "[run]\n# <b>&"}
    hparams = {"optim.lr": 0.1, "parallel.schedule": "1F1B"}
    board.describe(texts, {"run/layout": PNG}, hparams, has_experts=True)
    for step in steps:
        board.add_scalar("loss", 10.0 / step, step)
        board.add_scalar("grad_norm/head", 1.0, step)
        board.add_scalar("tokens_per_s", 1.0, step)
        if step % 2 == 0:
            board.add_scalar("validation_loss", 5.0, step)
    board.flush()


@pytest.fixture(params=[0, -5 * 3600], ids=["", "on a machine whose clock is slow"])
def shown(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> EventMultiplexer:
    write(tmp_path / "run", range(1, 9))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + request.param)
    write(tmp_path / "run", range(5, 11), start_step=4, not_before_s=now_s)
    found = EventMultiplexer()
    found.AddRunsFromDirectory(str(tmp_path))
    found.Reload()
    return found


def test_losses_have_one_curve_by_steps_and_one_by_tokens(shown: EventMultiplexer) -> None:
    by_tokens = f"run/{TOKENS_FOLDER}"
    assert set(shown.Runs()) == {"run", by_tokens}
    steps = [event.step for event in shown.Scalars("run", "loss/train")]
    assert steps == list(range(1, 11))
    points = shown.Scalars(by_tokens, "loss_by_tokens/train")
    assert [event.step for event in points] == [step * TOKENS for step in range(1, 11)]
    times_s = [event.wall_time for event in points]
    assert times_s == sorted(times_s)
    assert [event.value for event in points] == pytest.approx([10 / n for n in range(1, 11)])
    assert len(shown.Scalars(by_tokens, "loss_by_tokens/validation")) == 5


def test_tags_have_descriptions(shown: EventMultiplexer) -> None:
    def description(run: str, tag: str) -> str:
        metadata = shown.SummaryMetadata(run, tag)
        # Without these two, the data server of TensorBoard drops the description.
        assert metadata.plugin_data.plugin_name == "scalars"
        assert metadata.data_class == DATA_CLASS_SCALAR
        return str(metadata.summary_description)

    assert "nats per valid token" in description("run", "loss/train")
    assert "this part of the model" in description("run", "grad_norm/head")
    assert COUNTED_TOKENS in description(f"run/{TOKENS_FOLDER}", "loss_by_tokens/train")
    assert COUNTED_TOKENS in description("run", "speed/tokens_per_s")


def test_the_dashboard_begins_with_what_matters(shown: EventMultiplexer) -> None:
    (event, *_) = shown.Tensors("run", "custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["What matters", "Time", "Experts"]
    first = layout.category[0].chart[0]
    assert list(first.multiline.tag) == ["^loss/train$", "^loss/validation$"]


def test_drawings_are_images_with_their_size(shown: EventMultiplexer) -> None:
    image = shown.Images("run", "run/layout")[0]
    assert (image.encoded_image_string, image.width, image.height) == (PNG, 3, 2)


def test_recipe_and_hyperparameters_are_there(shown: EventMultiplexer) -> None:
    (event, *_) = shown.Tensors("run", "run/recipe/text_summary")
    assert event.tensor_proto.string_val[0].decode() == "    [run]\n    # <b>&"
    content = shown.SummaryMetadata("run", "_hparams_/session_start_info").plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert info.hparams["optim.lr"].number_value == 0.1
    assert info.hparams["parallel.schedule"].string_value == "1F1B"
