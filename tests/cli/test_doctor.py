"""The doctor sees what ails a machine, says what to do, and comes to an end whatever a check does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import warm_scripts

from unisono.cli.checks import check_endpoint, check_environment, check_workers
from unisono.cli.doctor import Finding, examine

DOCTOR = [sys.executable, "-m", "unisono", "doctor"]


def ask(*arguments: str, before: list[str] | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor, under the commands `before`."""
    environ = {**os.environ, **environ}
    if before is None:
        found = warm_scripts.launch(Path(os.environ["TMPDIR"]), "doctor", *arguments, environ=environ)
        return subprocess.CompletedProcess(arguments, *found)
    return subprocess.run([*before, *DOCTOR, *arguments], env=environ, capture_output=True, text=True, timeout=100)


def findings(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str, str]]:
    """What was printed: state, name, text, and the advice of the next line."""
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2] == "", "the totals stand apart"
    advice = [after.removeprefix(f"{'':23} -> ") if after.startswith(" ") else "" for after in lines[1:]]
    facts = zip(lines[:-2], advice, strict=False)
    return [(line[:8].strip(), line[9:23].strip(), line[24:], after) for line, after in facts if line[0] != " "]


@pytest.mark.slow
def test_two_real_workers_meet_and_a_machine_without_a_problem_is_fine():
    done = ask("--all")
    found = {name: text for _, name, text, _ in findings(done)}
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("problems: 0, ")
    assert "first barrier after" in found["workers"]
    assert "GB/s" in found["collectives"]


def test_short_output_shows_one_line_for_a_good_area_else_only_problems() -> None:
    wanted = {"python", "packages", "absent", "launcher", "environment"}
    short, full = (
        [each for each in findings(ask("--quick", *more, GLOO_SOCKET_IFNAME="no-such-if")) if each[1] in wanted]
        for more in ([], ["--all"])
    )
    assert [each[:2] for each in short] == [("ok", "packages"), ("warning", "environment")]
    assert short[1] == full[-1]
    assert {each[1] for each in full} == wanted


def test_other_programs_get_all_facts_as_json() -> None:
    done = ask("--quick", "--json", GLOO_SOCKET_IFNAME="no-such-if")
    found = json.loads(done.stdout)
    assert [list(each) for each in found] == len(found) * [["area", "name", "state", "text", "advice"]]
    states = [each["state"] for each in found]
    assert {("packages", "packages", "ok"), ("launcher", "environment", "warning")} <= {
        (each["area"], each["name"], each["state"]) for each in found
    }
    assert done.returncode == ("problem" in states)


def test_versions_are_reported_even_if_a_package_cannot_be_imported():
    code = "import sys; sys.modules['psutil'] = None\nfrom unisono.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--quick", "--all"], capture_output=True, text=True, timeout=60
    )
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line]
    assert [each[:2] for each in lines[:3]] == [["ok", "python"], ["ok", "packages"], ["problem", "import"]]
    assert "psutil" in lines[2][2]
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_a_machines_problem_is_one_line_and_its_advice_the_next():
    poor = ["bash", "-c", 'ulimit -n 512; exec "$@"', "bash"]
    done = ask("--quick", "--endpoint", "no.such.host.invalid:29400", before=poor)
    found = {(state, name): advice for state, name, _, advice in findings(done)}
    assert done.returncode == 1
    assert "ulimit -n" in found["warning", "limits"]
    assert found["problem", "endpoint"] == "name a host that is known"
    assert done.stdout.splitlines()[-1].startswith("problems: 1, ")
    assert "workers" not in {name for _, name in found}


@pytest.mark.slow
def test_a_shared_memory_of_the_size_that_docker_gives_is_a_warning():
    mounted = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"'
    before = ["unshare", "--mount", "bash", "-ec", mounted, "bash"]
    if shutil.which("unshare") is None or subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make name spaces")
    (found,) = [each for each in findings(ask("--quick", before=before)) if each[1] == "shared memory"]
    assert found[0] == "warning"
    assert "64 MiB" in found[2]
    assert "--shm-size" in found[3]


def test_a_check_that_fails_or_does_not_come_back_is_a_finding_in_time():
    [found] = examine("arithmetic", lambda: [1 / 0])
    assert (found.name, found.state) == ("arithmetic", "problem")
    assert "ZeroDivisionError: division by zero" in found.text
    leave = threading.Event()
    found = examine("patience", lambda: [leave.wait()], 0.2, "be patient")
    leave.set()
    assert found == [Finding("patience", "problem", "no answer within 0.2 s", "be patient")]


def test_an_endpoint_is_free_or_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        [found] = check_endpoint(endpoint)
        assert found.state == "ok"
        assert "answers" in found.text
    [found] = check_endpoint(endpoint)
    assert (found.state, found.text) == ("ok", f"{endpoint} is on this machine, and free")


@pytest.mark.parametrize("text", ["host", "host:port", "host:65536"])
def test_what_is_no_endpoint_is_a_problem_that_names_it(text: str):
    [found] = examine("endpoint", lambda: check_endpoint(text))
    assert found.state == "problem"
    assert f"'{text}' is not an endpoint; pass host:port" in found.text


def test_no_worker_is_started_where_a_launcher_has_started_this_process(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    [found] = check_workers()
    assert (found.name, found.state) == ("workers", "warning")
    assert found.text.startswith("not started")


@pytest.mark.parametrize(("name", "states"), [("lo", ["ok"]), ("no-such-if", ["ok", "warning"])])
def test_an_interface_that_does_not_exist_is_a_warning(monkeypatch, name, states):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert [each.state for each in check_environment()] == states
