"""Print the milliseconds of torchtitan's step on the first rank of a fake world.

This runs in torchtitan's environment, in the folder of ``bench.sh``, as a program:
python titan_host.py STEPS ROWS SEQ_LEN DIM ARGUMENTS. ROWS are those of a micro-batch, and the
arguments are those of torchtitan. Batches are made before the first step, so that no time of data
is measured.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import titan_cpu  # type: ignore[import-not-found]  # it is beside bench.sh
import torch
from torchtitan.distributed import pipeline_parallel  # type: ignore[import-not-found]
from torchtitan.trainer import Trainer  # type: ignore[import-not-found]


def main() -> None:
    """Train, and print the median of the steps after the first third."""
    steps, rows, seq_len, dim = (int(sys.argv.pop(1)) for _ in range(4))
    sys.argv[1:1] = ["--training.steps", str(steps)]
    torch.set_num_threads(1)
    declare_shapes(rows, seq_len, dim)
    train_step = Trainer.train_step
    seconds: list[float] = []
    batches: list[Any] = []

    def timed(trainer: Any, data_iterator: Iterator[Any]) -> None:
        if not batches:
            wanted = trainer.gradient_accumulation_steps
            batches.extend(
                islice(data_iterator, wanted * trainer.num_pipeline_parallel_microbatches)
            )
        trainer.metrics_processor.data_loading_times.append(0.0)
        # A step changes the dictionary of a batch.
        again = ((dict(inputs), labels) for inputs, labels in cycle(batches))
        begin_s = time.process_time()
        train_step(trainer, again)
        seconds.append(time.process_time() - begin_s)

    Trainer.train_step = timed
    titan_cpu.tt.main()
    print("HOST_STEP_MS", 1000 * statistics.median(seconds[steps // 3 :]))


def declare_shapes(rows: int, seq_len: int, dim: int) -> None:
    """Give the first pipeline stage its shapes. It would ask its peers, who are not there."""
    stage_class = pipeline_parallel.PipelineStage

    def make_stage(*args: Any, **kwargs: Any) -> Any:
        tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
        hidden = torch.empty(rows, seq_len, dim, device="meta", requires_grad=True)
        return stage_class(*args, **kwargs, input_args=tokens, output_args=hidden)

    pipeline_parallel.PipelineStage = make_stage


if __name__ == "__main__":
    main()
