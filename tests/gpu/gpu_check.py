"""What can be seen on the GPUs that are here: `make gpu-check`, or `python tests/gpu/gpu_check.py [ITEM ...]`.

Each item runs in an interpreter of its own, says what it has seen, and is `ok`, `FAILED` or `skipped`, with the reason.
What is to be seen, the item asserts.
Without CUDA all are skipped, but for `--backend cpu`, by which the items that need no GPU can be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
from resnet import Images, resnet50
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIMIT_S = 280.0
SOON_S = 15.0  # from a failure to the end of all ranks, the start of two interpreters not counted
FAMILY = os.environ.get("UNISONO_BACKEND", "cuda")
NEEDS_A_GPU: dict[Callable[[], str], int] = {}  # an item, and how many it needs


def item(gpus: int) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """An item of the check, which returns what was seen; 0 GPUs can be tried on the CPU."""

    def add(function: Callable[[], str]) -> Callable[[], str]:
        NEEDS_A_GPU[function] = gpus
        return function

    return add


# Ranks.


@dataclass
class Ended:
    """A rank that has come to its end: `found` is what it printed last, if that is JSON."""

    code: int
    found: Any
    errors: str
    seconds: float


def ranks(name: str, *words: str, size: int = 2, group: str = "gloo", **environment: str) -> list[Ended]:
    """The ends of so many ranks of `gpu_ranks.py`, which share the GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(size)}
    began = time.monotonic()
    environ = {**os.environ, **shared, "UNISONO_BACKEND": FAMILY, "CHECK_GROUP": group, **environment}
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "gpu_ranks.py"), name, *words],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ended = []
    for each in running:
        try:
            out, errors = each.communicate(timeout=max(1.0, LIMIT_S - 60 - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            each.kill()
            out, errors = each.communicate()
            errors += "\nit did not end"
        seconds = time.monotonic() - began
        lines = out.strip().splitlines()
        found = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        ended.append(Ended(each.returncode, found, errors, seconds))
    return ended


def succeeded(ended: list[Ended]) -> list[Any]:
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} ended with {each.code}:\n{each.errors[-2000:]}"
    return [each.found for each in ended]


def cause_of(ended: Ended) -> str:
    """The last line of a rank's traceback."""
    raised = re.findall(r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Interrupt): .*)", ended.errors, re.MULTILINE)
    return (raised or [f"no traceback, code {ended.code}"])[-1][:160]


# Items.


@item(gpus=1)
def tests_that_need_a_gpu() -> str:
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "cuda or any_family", "-k", "cuda"]
    ran = subprocess.run([*pytest, "tests/backends", "tests/contract"], cwd=ROOT, capture_output=True, text=True)
    lines = ran.stdout.strip().splitlines()
    assert ran.returncode == 0, "\n".join(lines[-25:])
    return lines[-1]


@item(gpus=0)
def two_ranks_share_a_device_by_gloo() -> str:
    found = succeeded(ranks("collectives"))
    return f"all collectives, on the device and in main memory; rank 1 waited {found[1]['waited']} s for rank 0"


@item(gpus=0)
def strategies_train_as_on_the_cpu() -> str:
    seen = []
    for strategy in ("ddp", "zero1", "fsdp"):
        own = {"size": 1, "group": ""} if strategy == "fsdp" and FAMILY != "cpu" else {}  # refused where it would crash
        if own and "cannot use a gloo group" not in (said := cause_of(ranks("training", strategy)[0])):
            seen.append(f"fsdp over gloo FAILED: {said}")
        ended = ranks("training", strategy, **own)
        if any(each.code for each in ended):
            seen.append(f"{strategy} FAILED: {cause_of(ended[0])}")
            continue
        cpu = succeeded(ranks("training", strategy, **own, UNISONO_BACKEND="cpu"))[0]
        here = ended[0].found
        for case, (loss, weights) in here.items():
            near = 3e-2 if case in ("bf16", "fp16", "bf16 units") else 1e-3
            is_near = abs(loss - cpu[case][0]) < near and abs(weights - cpu[case][1]) < near * 100
            seen += [] if is_near else [f"{strategy} {case} FAILED: {loss, weights} and on the CPU {cpu[case]}"]
        seen.append(f"{strategy}: {len(here)} cases")
    text = "; ".join(seen)
    assert "FAILED" not in text, text
    return text


@item(gpus=0)
def virtual_ranks_end_with_the_same_bits_on_one_rank_and_on_several() -> str:
    """On ranks that share the device."""
    own = {1: "", 2: "gloo", 3: "gloo"}
    found = {size: succeeded(ranks("virtual", size=size, group=group))[0]["digest"] for size, group in own.items()}
    assert len({*found.values()}) == 1, found
    return f"{found[1][:16]} on {', '.join(map(str, own))} ranks"


@item(gpus=0)
def failures_end_all_ranks_with_the_first_cause() -> str:
    start = max(each.seconds for each in ranks("collectives"))
    return _failures(start, "gloo", ["raise", "kill", *(["assert", "memory"] if FAMILY == "cuda" else [])])


@item(gpus=2)
def nccl_joins_two_gpus() -> str:
    found = succeeded(ranks("collectives", group=""))
    bound = [each["bound"] for each in found]
    assert bound == [each["device"] for each in found], f"the groups are bound to {bound}"
    return f"{bound}; a group of rank 0 alone reduces; rank 1 waited {found[1]['waited']} s for rank 0"


@item(gpus=4)
def groups_of_two_gpus_shard_and_pairs_across_them_reduce() -> str:
    found = succeeded(ranks("replicating", size=4, group=""))[0]
    (loss, weights), (other_loss, other_weights) = found["1"], found["2"]
    assert (abs(loss - other_loss) < 1e-4, abs(weights - other_weights) < 1e-2) == (True, True), f"they differ: {found}"
    return f"FSDP(replicas=2) trains as FSDP() on four GPUs: loss {loss:.4f}"


@item(gpus=2)
def a_peer_s_failure_ends_what_nccl_waits_in() -> str:
    start = max(each.seconds for each in ranks("collectives", group=""))
    return _failures(start, "", ["raise", "assert", "memory"])


def _failures(start_s: float, group: str, hows: list[str]) -> str:
    seen = []
    for how in hows:
        waiting, failed = ranks("failing", how, group=group)
        late = max(waiting.seconds, failed.seconds) - start_s
        seen.append(f"{how}: {cause_of(failed)} | its peer: {cause_of(waiting)} | {late:+.1f} s")
        assert waiting.code != 0 and failed.code != 0, seen[-1]  # noqa: PT018
        assert late < SOON_S, seen[-1]
        assert how != "raise" or "ValueError: as planned" in cause_of(waiting), seen[-1]
    return "\n".join(seen)


@item(gpus=1)
def one_rank_under_torchrun_by_nccl() -> str:
    seen, took = [], []
    for words, is_fine in (["collectives"], True), (["failing", "raise"], False):
        began = time.monotonic()
        ran = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", str(HERE / "gpu_ranks.py"), *words],
            capture_output=True,
            text=True,
        )
        assert (ran.returncode == 0) is is_fine, ran.stderr[-2000:]
        took.append(time.monotonic() - began)
        seen.append(f"{' '.join(words)}: code {ran.returncode} in {took[-1]:.1f} s")
    assert took[1] - took[0] < SOON_S, f"the failed one waits for its end: {seen}"
    return "; ".join(seen)


@item(gpus=1)
def a_worker_is_forked_and_uses_cuda() -> str:
    began = time.monotonic()
    torch.zeros(1, device="cuda")  # the caller's own runtime is up
    assert unisono.spawn(_doubled, (torch.ones(2, device="cuda"),), nprocs=1, backend="cuda", cores=4) == [4.0]
    (result,) = unisono.spawn(_on_gpu, nprocs=1, backend="cuda", cores=4)
    assert result.device.type == "cpu", "a result has come on a device"
    return f"two groups in {time.monotonic() - began:.1f} s; arguments and results in main memory"


def _doubled(index: int, given: torch.Tensor) -> float:
    device = unisono.current_world().device
    assert given.device.type == "cpu"
    return unisono.all_reduce(given.to(device) * 2).sum().item()


def _on_gpu(index: int) -> torch.Tensor:
    return torch.ones(3, device=unisono.current_world().device)


@item(gpus=1)
def steps_wait_for_the_device_only_where_a_number_is_asked_for() -> str:
    return _waits("ddp", 1)


@item(gpus=2)
def ranks_of_nccl_wait_for_their_devices_no_oftener() -> str:
    return "\n".join(_waits(strategy, 2) for strategy in ("ddp", "zero1", "fsdp"))


def _waits(strategy: str, size: int) -> str:
    """What is counted by the calls that `torch.cuda.set_sync_debug_mode` warns of."""
    wrong, counts = [], []
    for found in succeeded(ranks("waiting", strategy, size=size, group="")):
        for case, lines in found.items():
            count, said = sum(lines.values()), gpu_ranks.WAITS[case][0] * gpu_ranks.COUNTED
            counts.append(f"{case} {count}")
            wrong += [] if count == said else [f"{case}: {count}, not {said}: {lines}"]
    assert not wrong, f"{strategy}, in {gpu_ranks.COUNTED} steps: " + "; ".join(wrong)
    return f"{strategy}, in {gpu_ranks.COUNTED} steps: {', '.join(counts)}"


@item(gpus=1)
def an_overflow_of_fp16_leaves_steps_out_until_the_scale_fits() -> str:
    begun = 2.0**40
    accelerator, network, loop = _prepared({"mixed_precision": "fp16", "scaler_options": {"init_scale": begun}})
    loop(50)
    accelerator.scaler.settle()
    scale = accelerator.scaler.get_scale()
    assert scale < 2.0**25, f"the scale is {scale:g} still"
    assert all(each.isfinite().all() for each in network.parameters())
    return f"a scale of {begun:g} has become {scale:g}, and the weights are finite"


@item(gpus=1)
def memory_is_reused_in_the_steps_of_resnet_50() -> str:
    from torch.profiler import ProfilerActivity, profile

    accelerator = unisono.Accelerator(device="cuda:0")
    network: Any = resnet50()
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(Images(128 * 31), 128))
    batches = iter(loader)

    def loop(steps: int) -> None:
        for images, labels in islice(batches, steps):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(network(images), labels))
            optimizer.step()
        torch.cuda.synchronize()

    loop(10)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        loop(20)
    calls = Counter(each.name for each in trace.events() if each.name in ("cudaMalloc", "cudaHostAlloc"))
    assert not calls, f"memory is asked for again and again: {dict(calls)}"
    return "20 steps call neither cudaMalloc nor cudaHostAlloc"


@item(gpus=1)
def ddp_takes_as_much_memory_as_the_plain_loop() -> str:
    (found,) = succeeded(ranks("remembering", size=1, group=""))
    plain, ours = found["plain"], found["ddp"]
    seen = f"ResNet-50, batch 32: MiB at most {ours} under ddp, {plain} in the plain loop"
    # One more copy of the gradients at most, which is 98 MiB: they may live in buckets.
    assert ours <= plain + 128, f"{seen}"
    return seen


def _prepared(options: dict[str, Any], width: int = 256) -> tuple[Any, nn.Module, Callable[[int], None]]:
    """An Accelerator, its model, and steps."""
    accelerator = unisono.Accelerator(device="cuda:0", **options)
    data = TensorDataset(torch.randn(64 * 60, width), torch.randn(64 * 60, 1))
    network: Any = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer: Any = torch.optim.AdamW(network.parameters())
    network, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, 64))

    def run(steps: int) -> None:
        for _, (inputs, targets) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(network(inputs), targets))
            optimizer.step()

    return accelerator, network, run


@item(gpus=1)
def a_seed_gives_the_same_numbers_again() -> str:
    def drawn() -> list[float]:
        torch.manual_seed(0)
        return unisono.spawn(_dropped, nprocs=1, backend="cuda", cores=1)

    assert drawn() == drawn()
    weights = []
    for _ in range(2):
        unisono.Accelerator(seed=0, device="cuda:0")
        weights.append(torch.rand(4, device="cuda").tolist())
    assert weights[0] == weights[1]
    mixed = unisono.DataParallel(nn.Dropout(), ["cuda:0", "cpu:0"])
    sums = [mixed(lambda model, *_: float(model(torch.ones(64, device=unisono.current_world().device)).sum()), [])]
    return f"dropout in workers and under Accelerator(seed=0) comes again; GPU and CPU replicas together: {sums[0]}"


def _dropped(index: int) -> float:
    return F.dropout(torch.ones(1000, device=unisono.current_world().device), 0.5).sum().item()


@item(gpus=1)
def models_are_compiled() -> str:
    seen = []
    for compile in (True, {"mode": "reduce-overhead"}):
        _prepared({"compile": compile})[2](12)
        seen.append(f"compile={compile}")
    return ", ".join(seen)


@item(gpus=1)
def an_interrupt_during_kernels_ends_a_worker() -> str:
    script = "import torch, unisono\n" + (
        "def work(index):\n"
        "    weight = torch.rand(8192, 8192, device=unisono.current_world().device)\n"
        "    print('begun', flush=True)\n"
        "    while True:\n"
        "        weight @ weight\n"
        "unisono.spawn(work, nprocs=1, backend='cuda', cores=1)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout is not None
    assert "begun" in running.stdout.readline()
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    code, late = running.wait(60), time.monotonic() - began
    assert code != 0
    assert late < SOON_S
    return f"code {code} after {late:.1f} s"


# The check.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.__name__ for each in NEEDS_A_GPU]
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"all of them unless named: {', '.join(names)}")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda", help="cpu tries what needs no GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.items) - set(names):
        parser.error(f"there is no item {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = {each: gpus for each, gpus in NEEDS_A_GPU.items() if not asked.items or each.__name__ in asked.items}
    if asked.here:
        print(next(iter(chosen))())
        return 0
    verdicts = [_verdict(each.__name__, gpus, asked.backend) for each, gpus in chosen.items()]
    print(f"{', '.join(f'{count} {verdict}' for verdict, count in Counter(verdicts).items())}")
    return int("FAILED" in verdicts)


def _verdict(name: str, gpus: int, backend: str) -> str:
    """Run an item, and print what it has seen."""
    reason = _missing(gpus, backend)
    seconds, text, verdict = 0.0, f"skipped: {reason}", "skipped"
    if not reason:
        began = time.monotonic()
        code, text = _run(name, backend)
        seconds = time.monotonic() - began
        verdict = "FAILED" if code else "skipped" if text.startswith("skipped: ") else "ok"
    print(f"{name.replace('_', ' ')}: {verdict}", f"({seconds:.0f} s)" * bool(seconds))
    print("\n".join(f"    {line}" for line in text.removeprefix("skipped: ").splitlines()), flush=True)
    return verdict


def _missing(gpus: int, backend: str) -> str:
    if backend == "cpu":
        return "it needs a GPU" if gpus else ""
    count = torch.cuda.device_count()
    if count == 0:
        return "there is no CUDA device here"
    return f"it needs {gpus} GPUs, and there is {count}" if gpus > count else ""


def _run(name: str, backend: str) -> tuple[int, str]:
    try:
        ran = subprocess.run(
            [sys.executable, __file__, "--here", name],
            env={**os.environ, "UNISONO_BACKEND": backend},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, f"it did not end within {LIMIT_S:g} s"
    return ran.returncode, ran.stdout.strip() if ran.returncode == 0 else ran.stderr.strip()[-3000:]


if __name__ == "__main__":
    sys.exit(main())
