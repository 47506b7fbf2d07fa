"""MIG: NVIDIA's division of a GPU into instances, of which CUDA shows a process one."""

from __future__ import annotations

import subprocess


def describe_mig() -> str:
    """What this machine has of it, and the way out; "" where no GPU is divided, or nvidia-smi is missing."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    if not (count := listed.count("UUID: MIG-")):
        return ""
    return (
        f"MIG divides the GPUs here into {count} instances, of which CUDA shows a process one: start one rank "
        "(nprocs=1); or let a launcher give each rank CUDA_VISIBLE_DEVICES=MIG-..., a name that nvidia-smi -L prints, "
        "as SLURM and Kubernetes do; or switch MIG off (nvidia-smi -mig 0)"
    )
