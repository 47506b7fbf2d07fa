"""`unisono checkpoint`: what a directory of checkpoints contains, and a model from it as one file for plain torch."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

_EXAMPLES = """
examples:
  unisono checkpoint show runs                              each checkpoint: its step, and whether it is intact
  unisono checkpoint export runs model.pt                   the latest one's model, for torch.load
  unisono checkpoint export runs/best model.safetensors --format safetensors
  unisono checkpoint export runs/checkpoints/checkpoint_200 ema.pt --object registered_0

exit codes: 0 success; 1 a checkpoint is damaged, or cannot be read or written; 2 wrong usage.
"""


def add_parser(subparsers: Any) -> None:
    text = "look at checkpoints, and export a model for plain torch"
    format_class = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "checkpoint", help=text, description=text, epilog=_EXAMPLES, formatter_class=format_class
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, what, run in (
        ("show", "list checkpoints, and verify each", show),
        ("export", "write the state of a model, or of another object, as one file", export),
    ):
        action = actions.add_parser(name, help=what)
        action.add_argument("path", help="a checkpoint, a directory of numbered ones, or a project_dir; or a URL")
        action.set_defaults(run=run)
    action.add_argument("out", type=Path, help="the output file; an existing one is replaced")
    action.add_argument("--object", metavar="NAME", help="its name, as `show` prints it; by default the only model")
    action.add_argument("--format", choices=["torch", "safetensors"], default="torch")


def show(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint; return 1 if one is damaged, or there is none."""
    from unisono.checkpoint.directory import home_of, is_unfinished, numbered_in, verify
    from unisono.checkpoint.folders import MANIFEST, folder_at

    folder = home_of(folder_at(arguments.path))
    numbered = sorted(numbered_in(folder), key=lambda pair: pair[0])
    if not numbered and MANIFEST not in folder.entries() and not is_unfinished(folder):
        return _refuse(NoCheckpointError(f"there is no checkpoint at {arguments.path}"))
    damaged = False
    for path in [each for _, each in numbered] or [folder]:
        if is_unfinished(path):
            print(f"{path}  unfinished: its save was interrupted")
            continue
        try:
            with ExitStack() as copies:
                _, manifest = verify(path, copies)
        except DamagedCheckpointError as error:
            print(f"{path}  damaged: {error}")
            damaged = True
            continue
        except CheckpointError as error:
            return _refuse(error)
        when = datetime.fromtimestamp(manifest.created).isoformat(" ", "seconds")
        score = "" if manifest.score is None else f", score {manifest.score:g}"
        size = sum(size for size, _ in manifest.files.values())
        print(f"{path}  step {manifest.step}{score}, by {manifest.world_size} ranks, {when}, {size:,} bytes")
        for name, (kind, of) in manifest.objects.items():
            print(f"    {name:<16} {kind} ({of})")
    return int(damaged)


def export(arguments: argparse.Namespace) -> int:
    """Write the file, and print what it contains."""
    from unisono.checkpoint.contents import export as write
    from unisono.checkpoint.folders import folder_at

    try:
        path, name = write(folder_at(arguments.path), arguments.out, arguments.object, arguments.format)
    except (CheckpointError, OSError, ImportError) as error:
        return _refuse(error)
    print(f"{arguments.out}: {name} of {path}")
    return 0


def _refuse(error: Exception) -> int:
    print(f"unisono checkpoint: {error}", file=sys.stderr)
    return 1
