"""Asks commands for their answers in JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from composer3d import cli

# Runs a command with ``--json``: returns its exit status, and the last line that it prints.
Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        status = cli.main([*words, "--json"])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run
