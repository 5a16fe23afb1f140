"""A profile that is stopped, however rudely, goes on where it was, to the same bits."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from cli_runner import TIMEOUT_SECONDS, finish, start, succeed

from allocmoe.artifacts import Sensitivity
from allocmoe.cli.common import resume_hint

# seconds of work, of which the first row is less than half
LONG = ("--sequences", "48", "--length", "256", "--batch-size", "8")
POLL_SECONDS = 0.02

# its two processes meet through a port of their own choice
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="session")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Sensitivity:
    file = tmp_path_factory.mktemp("uninterrupted") / "sensitivity.json"
    succeed("profile", model, *LONG, "-o", file)
    return Sensitivity.load(file)


def test_the_hint_tells_what_is_there(tmp_path: Path) -> None:
    rows, profile = tmp_path / "s.json.partial", tmp_path / "s.json"
    assert resume_hint(rows, [profile]) == "no row was finished yet"
    profile.touch()
    assert resume_hint(rows, [profile]) == f"run it again: {profile} will be used"
    rows.touch()
    assert "--resume" in resume_hint(rows, [profile])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_goes_on_after_a_signal(
    model: Path, uninterrupted: Sensitivity, tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "sensitivity.json"
    partial = Path(f"{file}.partial")
    process = start("profile", model, *LONG, "-o", file)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    process.send_signal(number)
    ran = finish(process)
    assert not file.exists(), f"it was over before the signal came: {ran.err}"

    if number is signal.SIGKILL:
        assert ran.code == -signal.SIGKILL
    else:
        line = f"interrupted; finished rows are in {partial}, go on with --resume"
        assert ran.error == line
        assert ran.out == ""
    kept = json.loads(partial.read_text())["rows"]
    assert 1 <= len(kept) < len(uninterrupted.perplexity)
    assert [tuple(row) for row in kept] == list(uninterrupted.perplexity[: len(kept)])

    succeed("profile", model, *LONG, "-o", file, "--resume")
    resumed = Sensitivity.load(file)
    assert resumed.perplexity == uninterrupted.perplexity
    assert resumed.base_perplexity == uninterrupted.base_perplexity
    assert [left.name for left in tmp_path.iterdir() if not left.name.startswith(".")] == [
        file.name
    ]


def test_two_processes_measure_the_same_bits(model: Path, tmp_path: Path) -> None:
    text = ["--sequences", "5", "--length", "32", "--batch-size", "2"]
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    succeed("profile", model, *text, "-o", alone)
    ran = finish(start("profile", model, *text, "-o", together, "--json", launcher=TORCHRUN))
    assert ran.code == 0, ran.err
    assert ran.json == json.loads(together.read_text())
    one, two = Sensitivity.load(alone), Sensitivity.load(together)
    assert two.perplexity == one.perplexity
    assert two.base_perplexity == one.base_perplexity
    assert (two.model, two.text) == (one.model, one.text)
    assert not Path(f"{together}.partial").exists()
