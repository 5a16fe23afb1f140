"""allocmoe tune: block sizes of the GPU kernel for one model on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "tune"
HELP = "find the GPU kernel's block sizes for a model on this machine, and keep them"
EXAMPLE = "allocmoe tune --shape olmoe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser, required=False)
    common.add_shape_argument(parser)
    parser.add_argument(
        "--tokens",
        type=common.count_list,
        metavar="N,...",
        help="tokens of a forward to tune for (default 1,8,32,128,512,2048,8192)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to keep them (default: the file that $ALLOCMOE_BLOCKS names, else blocks.json "
        "in the user's cache folder); what it holds of other models stays",
    )


def run(args: argparse.Namespace) -> None:
    import torch

    from allocmoe.bench.tune import TOKENS, tune_model
    from allocmoe.codec import check_writable, encode
    from allocmoe.models.load import to_device, to_dtype
    from allocmoe.runtime.blocks import TunedBlocks, blocks_path

    common.check_model_or_shape(args)
    path = Path(args.output) if args.output else blocks_path()
    check_writable(path)
    if path.is_file():
        TunedBlocks.load(path)  # what is no such file stays what it is
    device = to_device(args.device)
    if device is None:
        raise AllocMoEError("tuning takes one device: cuda or cuda:N")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tuned = tune_model(
        common.load_skeleton(args),
        device,
        torch.bfloat16 if args.dtype == "auto" else to_dtype(args.dtype),
        tokens=args.tokens or TOKENS,
        progress=common.make_progress(),
    )
    # read only now: others may have tuned meanwhile
    kept = TunedBlocks.load(path) if path.is_file() else TunedBlocks()
    kept.with_shape(tuned).save(path)
    common.console.print(
        f"block sizes of {len(tuned.entries)} sizes saved in {path}", soft_wrap=True
    )
    if args.json:
        common.print_json(encode(tuned))
