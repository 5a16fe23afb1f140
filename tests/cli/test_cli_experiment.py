"""`allocmoe experiment`: cells, stops and bad input, as a user meets them."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runner import TIMEOUT_SECONDS, fail, finish, start, succeed

from tiny_experiment import write_experiment

POLL_SECONDS = 0.02


@pytest.fixture
def command(tmp_path: Path) -> list[Any]:
    sample = Path(__file__).parents[2] / "experiments" / "sample"
    file = write_experiment(tmp_path)
    return ["experiment", file, "--model", "one", "--data", sample, "--device", "cpu"]


def tables(folder: Path) -> Any:
    found = json.loads((folder / "results.json").read_text())
    assert found["finished"] == found["cells"]
    return found["tables"], found["claims"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stop_loses_at_most_one_cell(
    number: signal.Signals, command: list[Any], tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    succeed(*command, "-o", whole)
    process = start(*command, "-o", stopped)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    cells = stopped / "cells"
    while (
        len([*cells.glob("[!.]*")]) < 3 and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(POLL_SECONDS)
    process.send_signal(number)
    ran = finish(process)
    assert not (stopped / "results.json").exists(), f"it was over before the signal: {ran.err}"
    if number is signal.SIGTERM:
        assert ran.error == (
            f"interrupted; finished cells are in {stopped}, the same command goes on from there"
        )
    kept = {path.name: path.read_bytes() for path in cells.glob("[!.]*")}
    assert len(kept) >= 3
    succeed(*command, "-o", stopped)
    assert {name: (cells / name).read_bytes() for name in kept} == kept
    assert tables(stopped) == tables(whole)


def test_status_runs_nothing(command: list[Any], tmp_path: Path) -> None:
    ran = succeed(*command, "-o", tmp_path / "out", "--status", "--json")
    assert ran.json["finished"] == 0
    assert ran.json["cells"] > 10
    assert not (tmp_path / "out").exists()


def test_status_forgets_nothing(command: list[Any], tmp_path: Path) -> None:
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_text("too short")
    command += ["-o", out, "--kinds", "profile", "--text", f"one={short}"]
    assert "profile-t0-s0" in succeed(*command, "--json").json["left_out"]
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "profile-t0-s0" in succeed(*command, "--status", "--retry", "--json").json["left_out"]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept


def test_only_some_kinds(command: list[Any], tmp_path: Path) -> None:
    ran = succeed(*command, "-o", tmp_path / "out", "--kinds", "profile", "--json")
    assert ran.json["finished"] == ran.json["cells"] == 3
    names = sorted(path.name for path in (tmp_path / "out" / "cells").iterdir())
    assert names == ["profile-t0-s0-c1.json", "profile-t0-s0.json", "profile-t1-s0.json"]
    for name, context in zip(names, ("single", "paper", "paper"), strict=True):
        cell = json.loads((tmp_path / "out" / "cells" / name).read_text())
        assert cell["result"]["context"]["name"] == context


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--model", "two"], "the experiment has no model 'two'; it has one"),
        (["--kinds", "task,talk"], "--kinds: no kind 'talk'"),
        (["--data", "nowhere"], "nowhere: no such folder of task files"),
        (["--text", "three=x.txt"], "--text takes NAME=SOURCE with a NAME of one, other, two"),
        (["--workers", "0"], "expected a whole number from 1 on"),
    ],
)
def test_bad_input(options: list[str], line: str, command: list[Any], tmp_path: Path) -> None:
    assert line in fail(*command, *options, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_calibrated_on_is_not_measured_on(
    command: list[Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ran = succeed(*command, "-o", out, "--text", "other=builtin", "--kinds", "text", "--json")
    assert "measure on other text" in ran.json["left_out"]["text-24-t0-s0"]
