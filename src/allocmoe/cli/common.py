"""What the verbs share: options, loading, progress bars, output."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from allocmoe.errors import AllocMoEError
from allocmoe.progress import Bar, Progress

if TYPE_CHECKING:
    from torch import nn

    from allocmoe.artifacts import ModelInfo, Plan
    from allocmoe.models import MoEModel
    from allocmoe.runtime.vllm.engine import VllmEngine
    from allocmoe.text import Text

# human text goes to stderr, so that stdout holds the JSON document alone; paths and names in it may
# hold brackets and colons, which are not markup
console = Console(stderr=True, highlight=False, markup=False, emoji=False)

# bad input and an interrupted run alike: nothing is lost, and the line says how to go on
FAILED = 2


def stop_at_once() -> None:
    """Ctrl-C and SIGTERM end the process in place: libraries that are just being imported turn
    an exception into a crash."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        os.write(2, b"allocmoe: error: interrupted; nothing was changed\n")
        os._exit(FAILED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def stop_orderly() -> None:
    """From here on Ctrl-C and SIGTERM raise KeyboardInterrupt, so that the work can be closed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def check_launch(verb: str) -> None:
    """Only the profile shares its work among several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if verb != "profile":
        raise AllocMoEError(f"torchrun is for `allocmoe profile`; run `{verb}` in one process")
    if "RANK" not in os.environ:
        raise AllocMoEError("WORLD_SIZE is set but RANK is not: start several ranks with torchrun")


_MODEL = "a hub id, a folder, or `reference` for the small model that comes with allocmoe"


def add_model_arguments(
    parser: argparse.ArgumentParser, *, positional: bool = True, required: bool = True
) -> None:
    if positional:
        parser.add_argument("model", metavar="MODEL", nargs=None if required else "?", help=_MODEL)
    else:
        parser.add_argument("--model", metavar="MODEL", help=_MODEL)
    add_loading_arguments(parser)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded, whichever it is."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", default="auto", help="auto (as stored), float32, bfloat16 or float16"
    )
    group.add_argument(
        "--device",
        default="auto",
        help="auto (a GPU if there is one), cpu, cuda:N, or spread (over all devices)",
    )
    group.add_argument(
        "--experts",
        choices=("allocmoe", "stock"),
        default="allocmoe",
        help="what runs the experts on a GPU where a plan leaves the choice: our fused kernel, or "
        "transformers (default allocmoe)",
    )
    group.add_argument("--revision", help="of the hub id: a branch, tag or commit")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def add_text_arguments(
    parser: argparse.ArgumentParser, *, default: str = "builtin", sequences: int = 32
) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--text",
        default=default,
        help="a txt or jsonl file, wikitext2, c4, pile (NAME:SPLIT picks a split), builtin or "
        f"builtin:heldout (default {default})",
    )
    group.add_argument(
        "--sequences", type=int, default=sequences, help=f"how many (default {sequences})"
    )
    group.add_argument("--length", type=int, default=512, help="tokens in each (default 512)")
    group.add_argument(
        "--batch-size", type=int, default=4, help="sequences in a forward (default 4)"
    )


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("token rule")
    group.add_argument(
        "--scope",
        choices=("batch", "sequence", "threshold"),
        help="what Alloc-T pools over; threshold decides each token alone (default: as the "
        "sensitivity was measured, or batch)",
    )
    group.add_argument(
        "--k-base",
        type=int,
        help="experts every token keeps (default: as the sensitivity was measured, or 1)",
    )


def number_list(text: str) -> list[float]:
    try:
        numbers = [float(item) for item in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4,8, not {text!r}")
    return numbers


def count_list(text: str) -> list[int]:
    numbers = number_list(text)
    if not all(number.is_integer() and 1 <= number < 1 << 31 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1 on, not {text!r}")
    return [int(number) for number in numbers]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, not {text!r}")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, not {text!r}")
    return int(text)


def word_list(text: str) -> list[str]:
    words = [item.strip() for item in text.split(",") if item.strip()]
    if not words:
        raise argparse.ArgumentTypeError("expected words with commas between them")
    return words


def begin_work() -> None:
    """After the heavy imports, before the first model."""
    from transformers.utils import logging

    stop_orderly()
    logging.set_verbosity_error()
    if not console.is_terminal:
        logging.disable_progress_bar()


def add_shape_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help="instead of MODEL random weights in the shape of deepseek-v2-lite, qwen1.5-moe, "
        "olmoe, qwen3-30b-a3b, gpt-oss-20b or mixtral-8x7b",
    )


def check_model_or_shape(args: argparse.Namespace) -> None:
    if (args.model is None) == (args.shape is None):
        raise AllocMoEError("give a MODEL or a --shape")


def load_skeleton(args: argparse.Namespace) -> MoEModel:
    """The model without its weights; what cannot be supported is refused here, at no cost."""
    from allocmoe.models import inspect_model, load
    from allocmoe.models.shapes import build_shape

    begin_work()
    if getattr(args, "shape", None) is not None:
        layers = getattr(args, "layers", None)
        return inspect_model(build_shape(args.shape, layers=layers, device="meta"))
    return inspect_model(
        load.load_skeleton(
            args.model, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
    )


def load_model(args: argparse.Namespace, *, kernel: bool = True) -> nn.Module:
    """The model, its experts in our fused kernel where that can run and nobody objects."""
    from allocmoe.models import load
    from allocmoe.runtime.hf import use_kernel

    model = load.load_model(
        args.model,
        dtype=args.dtype,
        device=args.device,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    if kernel and args.experts == "allocmoe":
        use_kernel(model)
    return model


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine",
        choices=("transformers", "vllm"),
        default="transformers",
        help="what runs the model; vllm for models that outgrow a GPU or a machine",
    )
    group.add_argument(
        "--tensor-parallel-size", type=positive, metavar="N", help="GPUs that share the tensors"
    )
    group.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vLLM's LLM, such as distributed_executor_backend=ray or "
        "gpu_memory_utilization=0.8; give the option again for more",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """For vLLM; values are JSON where they can be."""
    options: dict[str, Any] = {}
    for word in args.engine_option:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise AllocMoEError(f"--engine-option takes NAME=VALUE, not {word!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    if args.tensor_parallel_size is not None:
        options["tensor_parallel_size"] = args.tensor_parallel_size
    if args.engine != "vllm" and options:
        raise AllocMoEError("--tensor-parallel-size and --engine-option go with --engine vllm")
    return options


def load_engine(
    args: argparse.Namespace, max_length: int, *, tokenizes: bool = False
) -> VllmEngine:
    from allocmoe.runtime.vllm.engine import VllmEngine

    return VllmEngine(
        args.model,
        max_length=max_length,
        dtype=args.dtype,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        tokenizes=tokenizes,
        options=engine_options(args),
    )


def load_tokenizer(args: argparse.Namespace) -> Any:
    from allocmoe.models import load

    return load.load_tokenizer(
        args.model, revision=args.revision, trust_remote_code=args.trust_remote_code
    )


def plan_names(files: list[str]) -> dict[str, str]:
    """A short name for each file: its own, with as many folders before it as tell them apart."""
    paths = [Path(file).with_suffix("").parts for file in files]
    if len({*paths}) < len(paths):
        raise AllocMoEError("the same plan is given twice")
    names: list[str] = []
    for depth in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len({*names}) == len(names):
            break
    return dict(zip(names, files, strict=True))


def load_text(args: argparse.Namespace, tokenizer: Any) -> Text:
    return load_named_text(args.text, tokenizer, args.sequences, args.length)


def load_text_pair(args: argparse.Namespace, tokenizer: Any) -> tuple[Text, Text]:
    """Text to calibrate on and text to measure on, which never overlap."""
    from allocmoe.text import same_source

    text = load_text(args, tokenizer)
    source, skip = args.eval_text, 0
    if source is None and args.text == "builtin":
        source = "builtin:heldout"
    elif source is None or same_source(source, args.text):
        source, skip = args.text, args.sequences
    return text, load_named_text(source, tokenizer, args.eval_sequences, args.length, skip)


def load_named_text(
    source: str, tokenizer: Any, sequences: int, length: int, skip: int = 0
) -> Text:
    from allocmoe.text import load_text as load

    text = load(source, tokenizer, sequences=sequences, length=length, skip=skip)
    found = text.info.num_sequences
    if found < sequences:
        line = f"note: {source} has {found} such sequences, not {sequences}"
        console.print(line, style="yellow", soft_wrap=True)
    return text


def add_eval_text_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text to measure on")
    group.add_argument(
        "--eval-text",
        help="never the text profiled on; by default its next sequences, or builtin:heldout",
    )
    group.add_argument("--eval-sequences", type=int, default=16, help="how many (default 16)")


def note_other_weights(plans: Mapping[str, Plan], info: ModelInfo) -> None:
    for name, plan in plans.items():
        if info.fingerprint is not None and plan.model.fingerprint not in (None, info.fingerprint):
            console.print(
                f"note: {name} was made for other weights of this architecture", style="yellow"
            )


def resume_hint(partial: str | Path, profiles: Iterable[Path] = ()) -> str:
    """How to go on after an interruption: with a profile's rows, or with finished `profiles`."""
    if Path(partial).exists():
        return f"finished rows are in {partial}, go on with --resume"
    finished = sorted(str(file) for file in profiles if file.exists())
    if finished:
        return f"run it again: {', '.join(finished)} will be used"
    return "no row was finished yet"


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    print()


def make_progress() -> Progress:
    return Drawn() if console.is_terminal else Logged()


class Drawn(Progress):
    """Bars on a terminal."""

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=console, transient=True) as drawing:
            task = drawing.add_task(label, total=total, note="", speed="")
            yield _DrawnBar(drawing, task)

    def note(self, line: str) -> None:
        console.print(line, style="dim", soft_wrap=True)


class _DrawnBar:
    def __init__(self, drawing: RichProgress, task: Any) -> None:
        self._drawing, self._task = drawing, task
        self._began = time.monotonic()
        self._steps = 0

    def advance(self, work: float, note: str = "") -> None:
        self._steps += 1
        pace = self._steps / max(time.monotonic() - self._began, 1e-9)
        speed = f"{pace:.1f} runs/s" if pace >= 1 else f"{1 / pace:.1f} s/run"
        self._drawing.update(self._task, advance=work, note=note, speed=speed)


class Logged(Progress):
    """A line now and then, for logs."""

    EVERY_SECONDS = 10.0

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        yield _LoggedBar(label, total, self.EVERY_SECONDS)

    def note(self, line: str) -> None:
        console.print(line, soft_wrap=True)


class _LoggedBar:
    def __init__(self, label: str, total: float, every: float) -> None:
        self._label, self._total, self._every = label, total, every
        self._done = 0.0
        self._began = self._told = time.monotonic()

    def advance(self, work: float, note: str = "") -> None:
        self._done += work
        now = time.monotonic()
        if now - self._told < self._every:
            return
        self._told = now
        left = (now - self._began) * (self._total / self._done - 1)
        console.print(
            f"{self._label}: {self._done / self._total:.0%}, {note}, about {left:.0f} s left",
            soft_wrap=True,
        )
