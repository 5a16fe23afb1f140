"""`allocmoe serve` on loopback, and two tensor-parallel workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import allocmoe
from allocmoe.cli.main import make_parser
from allocmoe.errors import AllocMoEError
from allocmoe.models.load import load_model

STARTS_WITHIN_SECONDS = 240


@pytest.fixture(scope="module")
def plan(trained: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    allocmoe.make_plan("alloc-t", "50%", model=load_model(trained)).save(file)
    return file


def command(model: str, *options: str) -> list[str]:
    fixed = ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
    return [sys.executable, "-m", "allocmoe", "serve", model, *options, *fixed]


@contextmanager
def server(log: Path, model: str, *options: str) -> Iterator[str]:
    """The address of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    # each process of a server its own, unlike the engines of the other tests
    environment = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    with log.open("w") as out:
        running = subprocess.Popen(
            command(model, *options, "--host", "127.0.0.1", "--port", str(port)),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + STARTS_WITHIN_SECONDS
        while not _healthy(address):
            assert running.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def answer(address: str) -> str:
    name = ask(address, "/v1/models")["data"][0]["id"]
    body: dict[str, Any] = {
        "model": name,
        "prompt": "The for statement",
        "max_tokens": 8,
        "temperature": 0,
    }
    body["ignore_eos"] = True
    return str(ask(address, "/v1/completions", body)["choices"][0]["text"])


def test_a_served_plan_shows_itself(trained: str, plan: Path, tmp_path: Path) -> None:
    """On one worker, and on two that share the tensors."""
    answers = []
    for workers in (1, 2):
        log = tmp_path / f"log{workers}"
        options = ["--plan", str(plan), "--tensor-parallel-size", str(workers)]
        with server(log, trained, *options) as address:
            assert ask(address, "/allocmoe")["plan"] == json.loads(plan.read_text())
            answers.append(answer(address))
            status = ask(address, "/allocmoe")
        assert status["tokens"] > 8
        assert status["realised_per_layer"] == pytest.approx([3.0] * 8, abs=0.2)
        assert "alloc-t/batch, 24 of 48 activations a token" in log.read_text()
    assert answers[0] == answers[1]
    assert len(set(answers[0].split())) > 1


def test_options_reach_vllm_as_it_reads_them(
    trained: str, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With underscores too; what would take the plan out again is refused."""
    given: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda file, words: given.append(words))
    monkeypatch.setenv("VLLM_PLUGINS", "mine")

    def serve(*options: str) -> None:
        args = make_parser().parse_args(["serve", trained, "--plan", str(plan), *options])
        args.run(args)

    serve("--additional_config", '{"other": 1}', "--max_model_len=64")
    at = given[0].index("--additional-config")
    assert json.loads(given[0][at + 1]) == {
        "other": 1,
        "allocmoe": {"plan": json.loads(plan.read_text())},
    }
    assert given[0].count("--additional-config") == 1
    assert given[0][-1] == "--max-model-len=64"
    assert os.environ["VLLM_PLUGINS"] == "mine,allocmoe"
    for option in (["--additional-config.other", "1"], ["--worker_extension_cls", "a.B"]):
        with pytest.raises(AllocMoEError, match=r"--additional-config|--worker-extension-cls"):
            serve(*option)
    assert len(given) == 1


def test_what_vllm_opens_only_by_name_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from allocmoe.cli import serve

    points = {
        "vllm.general_plugins": ["allocmoe", "lora_hf_hub_resolver", "ours", "both"],
        "vllm.endpoint_plugins": ["allocmoe", "both"],
    }
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(
        serve,
        "entry_points",
        lambda group: [SimpleNamespace(name=name) for name in points.get(group, [])],
    )
    assert serve._plugins() == "ours,allocmoe"


def test_a_foreign_plan_stops_before_vllm_starts(trained: str, plan: Path, tmp_path: Path) -> None:
    data = json.loads(plan.read_text())
    data["model"]["k_orig"] = [5] * 8
    data["model"]["num_experts"] = [10] * 8
    (tmp_path / "plan.json").write_text(json.dumps(data))
    done = subprocess.run(
        command(trained, "--plan", str(tmp_path / "plan.json")), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "does not fit" in done.stderr.splitlines()[-1]
