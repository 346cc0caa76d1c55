"""Tokens per second of ``composer3d generate`` beside ``generate`` of transformers."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer3d.generate.generator import Generator
from composer3d.generate.load import load_model, open_checkpoint
from tools.bench.tables import print_head, print_row, with_range


class Case(NamedTuple):
    """A random model and the prompts that it goes on with.

    Attributes:
        family: of transformers.
        settings: keys of its config.json.
        prompts: the number of prompts, which go on together.
        new_tokens: the tokens after each prompt.
    """

    family: str
    settings: dict[str, Any]
    prompts: int
    new_tokens: int


# The sizes of bench.toml, and some in which the matrices are larger than the caches.
_BENCH = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_EXPERTS = {**_BENCH, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 384}
CASES = {
    "bench": Case("Llama", _BENCH, 1, 128),
    "bench, 8 prompts": Case("Llama", _BENCH, 8, 128),
    "bench, window 128": Case("Mistral", {**_BENCH, "sliding_window": 128}, 1, 256),
    "8 experts": Case("Mixtral", _EXPERTS, 1, 64),
    "200M": Case("Llama", _WIDE, 1, 24),
    "200M, 8 prompts": Case("Llama", _WIDE, 8, 12),
}
PROMPT_TOKENS = 64


def generate(args: argparse.Namespace) -> int:
    """Print a row for each case. Both programs take turns, in one process with one thread.

    A second is one of processor time. Prompts have equal lengths: transformers pads nothing.

    Returns:
        0 if both programs generate the same tokens, else 1.
    """
    import transformers

    torch.set_num_threads(1)
    rows = []
    print_head("model", "transformers, tokens/s", "composer3d, tokens/s", "ratio", "tokens")
    for name in args.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"name": name, **_compare(CASES[name], Path(folder), args.repeats)})
        row = rows[-1]
        speeds = [with_range(row[side], ".1f") for side in ("transformers", "composer3d")]
        same = "the same" if row["same"] else "DIFFERENT"
        print_row(name, *speeds, with_range(row["ratio"]), same)
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps({"cores": os.cpu_count(), **versions, "rows": rows}))
    return 0 if all(row["same"] for row in rows) else 1


def _compare(case: Case, folder: Path, repeats: int) -> dict[str, Any]:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{case.family}Config")(
        **case.settings,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    checkpoint, device = open_checkpoint(folder), torch.device("cpu")
    ours = Generator(
        load_model(checkpoint, dtype=torch.float32, device=device), checkpoint.plan, device=device
    )
    prompts_BT = torch.randint(1, config.vocab_size, (case.prompts, PROMPT_TOKENS))

    def run_theirs() -> list[list[int]]:
        out_BT = theirs.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            max_new_tokens=case.new_tokens,
            do_sample=False,
        )
        return out_BT[:, PROMPT_TOKENS:].tolist()

    def run_ours() -> list[list[int]]:
        found = ours.generate(prompts_BT.tolist(), max_tokens=case.new_tokens, batch=case.prompts)
        return [completion.tokens for completion in found]

    same = run_theirs() == run_ours()  # which also warms up
    seconds: list[tuple[float, float]] = [
        (_seconds(run_theirs), _seconds(run_ours)) for _ in range(repeats)
    ]
    tokens = case.prompts * case.new_tokens
    return {
        "transformers": [tokens / their_s for their_s, _ in seconds],
        "composer3d": [tokens / our_s for _, our_s in seconds],
        "ratio": [their_s / our_s for their_s, our_s in seconds],
        "same": same,
    }


def _seconds(function: Callable[[], object]) -> float:
    """The processor time of a call, which one thread takes: other programs disturb it least."""
    began_s = time.process_time()
    function()
    return time.process_time() - began_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=5, help="runs of each side")
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=CASES, help=f"of {'; '.join(CASES)}"
    )
