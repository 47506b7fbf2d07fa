"""PyTorch/XLA's modules that are left out: importing one raises an error that says what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_NO_SPMD = "one program for all devices is unisono.Accelerator(strategy='spmd')"
_SHARDED = "use unisono.Accelerator with strategy='fsdp' or 'zero1', which use torch's own engines"
_RUNTIME = "it accesses the original's runtime, which is not used on other devices here"

INSTEAD = {
    "stablehlo": "torch.export writes a model's graph",
    "backends": "torch.set_float32_matmul_precision sets the precision of products",
    "distributed.spmd": _NO_SPMD,
    "distributed.fsdp": _SHARDED,
    "distributed.zero_redundancy_optimizer": _SHARDED,
    "distributed.xla_dist": "unisono run --nnodes, torchrun and SLURM start workers on several machines",
    "distributed.cluster": "unisono run --nnodes, torchrun and SLURM start workers on several machines",
    "experimental": "it has experimental parts of the original, and here only eager_mode",
    "core.xla_builder": _RUNTIME,
    "core.dynamo_bridge": _RUNTIME,
    "core.xla_op_registry": _RUNTIME,
    "core.xla_env_vars": _RUNTIME,
    "_internal": _RUNTIME,
    "_dynamo": _RUNTIME,
    "utils.checkpoint": "torch.utils.checkpoint has the same function",
    "utils.gcsfs": "fsspec reads and writes gs:// addresses; checkpoints accept them as they are",
    "utils.tf_record_reader": "loaders take any iterable of batches, including a reader of TFRecord files",
    "utils.dlpack": "torch.utils.dlpack has the same functions",
    "utils.keyd_queue": "queue.Queue is one",
    "debug.graph_saver": _RUNTIME,
    "debug.metrics_saver": "write debug.metrics.metrics_report() to a file",
    "debug.model_comparator": "unisono.check_replicas compares the replicas' weights",
}
"""What to do instead, by the names of modules; their submodules are left out, too."""


class _Finder:
    """The last finder, for names that no other one has found."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        own = name.removeprefix(f"{self.package}.")
        if own == name:
            return None
        instead = next((INSTEAD[each] for each in INSTEAD if own == each or own.startswith(f"{each}.")), None)
        reason = f"is deliberately not supported: {instead}" if instead else "does not exist"
        raise ModuleNotFoundError(
            f"{name} {reason}; docs/migrating_from_torch_xla.md lists the modules that are there", name=name
        )


def explain_from_now_on(package: str) -> None:
    """Make imports of a module that is left out raise an error that says why. Effective once per process."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder(package))
