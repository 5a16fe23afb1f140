"""Runs `allocmoe` as a user does, inside this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ERROR = "allocmoe: error: "
# text that takes no time
SMALL = ("--sequences", "4", "--length", "32")
SMALL_PAIR = (*SMALL, "--eval-sequences", "3")
# one thread, so that a process of its own rounds as this one does
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document that the whole of stdout is."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that says what was wrong; that there is one, and only one, is checked."""
        assert self.code == 2, f"exit code {self.code}: {self.err}"
        lines = [line for line in self.err.splitlines() if line.startswith(ERROR)]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix(ERROR)


def run(*arguments: str | Path) -> Ran:
    """`allocmoe ARGUMENTS` in this process."""
    from allocmoe.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
    }
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(code, int)
    return Ran(code, out.getvalue(), err.getvalue())


def succeed(*arguments: str | Path) -> Ran:
    ran = run(*arguments)
    assert ran.code == 0, ran.err
    return ran


def fail(*arguments: str | Path) -> str:
    """The error line of a run that must fail; with --json it is on stdout too."""
    plain = run(*arguments)
    assert plain.out == ""
    as_json = run(*arguments, "--json")
    assert as_json.json == {"error": as_json.error}
    assert as_json.error == plain.error
    return plain.error


def start(*arguments: str | Path, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`allocmoe ARGUMENTS` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "allocmoe", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
        # a test run in the background ignores Ctrl-C, and its children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> Ran:
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    return Ran(process.returncode, out, err)
