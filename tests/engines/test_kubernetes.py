"""The job files of docs/several_machines.md: their fields are those of Kubeflow's API; their pods train together."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from agents import agent, free_port

PAGE = Path(__file__).parents[2] / "docs" / "several_machines.md"
JOBS = {job["kind"]: job for job in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL))}
SCRIPT = "import unisono\nprint(unisono.current_world().node_rank, sorted(unisono.all_gather_object(unisono.rank())))\n"


def unknown_train_job_fields(job: dict[str, Any]) -> list[str]:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    made = models.TrainerV1alpha1TrainJob.from_dict(job)
    return missing(job, made.to_dict())


def missing(given: Any, kept: Any, path: str = "") -> list[str]:
    """The fields that a round through the API's classes has lost or changed."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [each for name in given for each in missing(given[name], kept.get(name), f"{path}.{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [each for one, other in zip(given, kept, strict=True) for each in missing(one, other, path)]
    return [] if given == kept or str(given) == kept else [path]


def unknown_pytorch_job_fields(job: dict[str, Any]) -> list[str]:
    client = pytest.importorskip("kubeflow.training").ApiClient()
    given = {**job, "spec": {"runPolicy": {}, **job["spec"]}}  # which the client wants, and the server fills in
    made = client.deserialize(SimpleNamespace(data=json.dumps(given)), "KubeflowOrgV1PyTorchJob")
    return missing(job, client.sanitize_for_serialization(made))


CHECKS: dict[str, Any] = {"TrainJob": unknown_train_job_fields, "PyTorchJob": unknown_pytorch_job_fields}


def test_the_page_has_a_file_for_each_api() -> None:
    assert JOBS.keys() == CHECKS.keys()


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("TrainJob", ("runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "jobs")),
        ("PyTorchJob", ("pytorchReplicaSpecs", "Worker", "template", "spec", "shm")),
    ],
)
def test_every_field_of_the_file_is_one_of_the_api_and_no_other_is(kind: str, path: tuple[Any, ...]) -> None:
    assert CHECKS[kind](JOBS[kind]) == []
    job = yaml.safe_load(yaml.safe_dump(JOBS[kind]))
    place = job["spec"]
    for each in path[:-1]:
        place = place[each]
    place[path[-1]] = 1
    assert [found.endswith(f".{path[-1]}") for found in CHECKS[kind](job)] == [True]


def train_job_variables(spec: dict[str, Any], number: int, port: int) -> dict[str, str]:
    """What Kubeflow Trainer's torch plugin sets in a pod."""
    return {
        "PET_NNODES": str(spec["trainer"]["numNodes"]),
        "PET_NPROC_PER_NODE": str(spec["trainer"]["numProcPerNode"]),
        "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }


def pytorch_job_variables(spec: dict[str, Any], number: int, port: int) -> dict[str, str]:
    """What the training operator sets in a pod of a job with an elastic policy, which has no number of its own."""
    policy = spec["elasticPolicy"]
    return {
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKS)
def test_two_pods_of_the_file_are_one_world(kind: str, tmp_path: Path) -> None:
    spec, port = JOBS[kind]["spec"], free_port()
    if kind == "TrainJob":
        container, variables = spec["trainer"], train_job_variables
    else:
        container = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
        variables = pytorch_job_variables
    command = container["command"]
    secret = {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] * 16 for each in container["env"]}
    ranks = list(range(2 * int(variables(spec, 0, port)["PET_NPROC_PER_NODE"])))
    arguments = [*command[1:-1], "--backend", "cpu", "--no-prefix", command[-1]]
    with ExitStack() as stack:
        pods = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / command[-1]).write_text(SCRIPT)
            pods.append(agent(tmp_path / str(number), *arguments, **variables(spec, number, port), **secret))
            stack.enter_context(pods[-1])
        nodes = set()
        for pod in pods:
            code, output, errors = pod.end()
            assert code == 0, errors
            lines = output.splitlines()
            assert len(lines) == len(ranks) // 2
            nodes.add(lines[0].partition(" ")[0])
            assert {line.partition(" ")[2] for line in lines} == {str(ranks)}
    assert nodes == {"0", "1"}
    assert not (tmp_path / ".unisono-secret").exists()  # they have one
