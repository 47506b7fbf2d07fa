"""The machines of a run with a secret load nothing that is not signed with it, whoever reaches their port."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch.distributed as dist
from agents import agent, free_port, two_ranks
from faults import Script, until
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from unisono import spawn
from unisono.comm import sealing
from unisono.comm.operations import HOST
from unisono.launch.hosts.agent_round import MachineReport
from unisono.launch.hosts.other_machines import OtherMachines
from unisono.launch.hosts.rendezvous_state import SealedBackend
from unisono.launch.hosts.secret import secret_of_run
from unisono.torch_private import OBJECT_TO_TENSOR, TENSOR_TO_OBJECT

TRAIN = """
import sys, time
from pathlib import Path
import torch.distributed as dist, unisono
shared = Path(sys.argv[1])
dist.all_gather_object(found := [None, None], "x" * unisono.rank(), group=dist.new_group(backend="gloo"))
assert found == ["", "x"]
while True:
    ranks = unisono.all_gather_object((unisono.rank(), (shared / "stop").exists()))
    (shared / f"meets-{unisono.rank()}").touch()
    if ranks[0][1]:
        break
    assert unisono.current_world().comm.broadcast_object({"of": unisono.rank()}, 1) == {"of": 1}
print([rank for rank, _ in ranks])
"""
INTRUDER = """
import base64, os, pickle
from datetime import timedelta
import torch.distributed as dist
from faults import until

class Code:
    def __reduce__(self):
        return os.system, ("touch {owned}",)

store = dist.TCPStore("10.77.0.1", {port}, None, False, timedelta(seconds=20), wait_for_workers=False)
code = pickle.dumps(Code())
for key in store.list_keys():
    if "machines/" in key:
        store.set(key, code)
        print("machines")
for key in store.list_keys():
    if key.rpartition("/")[2].startswith("torch.rendezvous"):
        for value in base64.b64encode(code).decode(), code, "a":  # as torch keeps a state; bare; and no base64
            store.set(key, value)
            until(lambda: store.get(key).startswith(b"unisono signed "))  # an agent has read it, and restored the state
        print("rendezvous")
"""


@pytest.fixture
def no_secret() -> Iterator[None]:
    yield
    sealing.use_secret("")


def test_what_is_sealed_is_opened_by_the_secret_alone_and_in_its_place(no_secret: None) -> None:
    assert sealing.unseal(sealing.seal(b"plain", "here"), "there") == b"plain"
    sealing.use_secret("one" * 10)
    sealed = sealing.seal(b"data", "here")
    assert sealing.unseal(sealed, "here") == b"data"
    for other in (b"data", sealed[:-1], sealed[:-1] + b"b", pickle.dumps("data"), b""):
        with pytest.raises(sealing.UnsignedError, match="not signed with the secret of this run"):
            sealing.unseal(other, "here")
    for place in ("there", "here\0", ""):
        with pytest.raises(sealing.UnsignedError, match="not signed with the secret of this run"):
            sealing.unseal(sealed, place)
    sealing.use_secret("two" * 10)
    with pytest.raises(sealing.UnsignedError, match="not signed"):
        sealing.unseal(sealed, "here")
    sealing.use_secret("")
    with pytest.raises(sealing.UnsignedError, match="this process has none; leave out --rdzv-insecure"):
        sealing.unseal(sealed, "here")


def test_a_store_believes_no_value_that_is_not_signed_for_its_key(no_secret: None) -> None:
    plain = dist.HashStore()
    assert sealing.sealed_store(plain) is plain
    sealing.use_secret("one" * 10)
    store = sealing.sealed_store(plain)
    group = dist.PrefixStore("group", store)  # as torch's groups use it, from C++
    group.set("address", b"10.0.0.1")
    assert group.get("address") == b"10.0.0.1"
    assert plain.get("group/address") != b"10.0.0.1"
    assert store.compare_set("reason", "", "first") == b"first"
    assert store.compare_set("reason", "", "second") == b"first"
    assert store.compare_set("reason", "first", "third") == b"third"
    assert [group.add("count", 2), group.add("count", 3)] == [2, 5]
    assert group.check(["address"])
    assert not group.check(["nothing"])
    group.wait(["address"], timedelta(seconds=1))
    assert group.delete_key("count")
    for value in (b"10.0.0.2", plain.get("reason")):
        plain.set("group/address", value)
        with pytest.raises(sealing.UnsignedError, match=r"\(group/address\) is not signed .* somebody else writes"):
            group.get("address")


def rendezvous() -> tuple[SealedBackend, dist.HashStore, str]:
    """The state of a run's rendezvous, in a store of this process, and its key."""
    store, key = dist.HashStore(), "torch.rendezvous.run"
    store.compare_set(key, "", "Y2FuaW1hZGFt")  # as torch does
    return SealedBackend(store, "run"), store, key


def test_an_agent_that_has_left_writes_no_state_that_is_not_signed(
    no_secret: None, caplog: pytest.LogCaptureFixture
) -> None:
    sealing.use_secret("one" * 10)
    sealed, store, key = rendezvous()
    assert sealed.get_state() is None
    assert sealed.set_state(b"first") == (b"first", signed := store.get(key), True)
    sealed.close()
    sealing.use_secret("")
    for act in (sealed.get_state, lambda: sealed.set_state(b"second")):  # as torch's thread does
        with pytest.raises(RendezvousClosedError):
            act()
    assert store.get(key) == signed
    assert not caplog.records


@pytest.mark.parametrize("junk", [b"a", b"\xffQUJD", b"Y2FuaW1hZGFt", b"\x00", b"unisono signed " + bytes(40)])
def test_whatever_is_written_over_the_state_of_a_rendezvous_is_restored(
    no_secret: None, caplog: pytest.LogCaptureFixture, junk: bytes
) -> None:
    sealing.use_secret("one" * 10)
    sealed, store, key = rendezvous()
    _, token, _ = sealed.set_state(b"first") or (b"", b"", False)
    store.set(key, junk)  # type: ignore[arg-type]
    assert sealed.get_state() == (b"first", store.get(key))
    store.set(key, junk)  # type: ignore[arg-type]
    assert sealed.set_state(b"second", token) == (b"first", store.get(key), False)
    assert sealed.set_state(b"second", store.get(key)) == (b"second", store.get(key), True)
    assert len(caplog.records) == 1


def test_a_state_that_is_overwritten_without_end_ends_the_run_and_says_why(
    no_secret: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Attacked(dist.HashStore):
        """Somebody is always faster."""

        def compare_set(self, key: str, *values: Any) -> Any:
            return super().compare_set(key, *values) if len(taken) < 2 else b"mine"

        def get(self, key: str) -> Any:
            taken.append(key)
            return super().get(key)

    taken: list[str] = []
    sealing.use_secret("one" * 10)
    store = Attacked()
    store.compare_set("torch.rendezvous.run", "", "Y2FuaW1hZGFt")
    sealed = SealedBackend(store, "run")
    sealed.set_state(b"first")
    monkeypatch.setattr("unisono.launch.hosts.rendezvous_state._OVERWRITTEN_S", 0.05)
    taken += ["", ""]
    with pytest.raises(sealing.UnsignedError, match="the state of the rendezvous has been overwritten for 0 s: "):
        sealed.set_state(b"second", b"")


def test_a_store_that_is_cloned_for_a_group_that_is_split_is_sealed(no_secret: None, tmp_path: Path) -> None:
    sealing.use_secret("one" * 10)
    plain = dist.FileStore(str(tmp_path / "store"), 1)
    store = sealing.sealed_store(plain)
    store.set("group/address", "10.0.0.1")
    split = dist.PrefixStore("group", store).clone()  # as torch's groups do, from C++
    gc.collect()
    assert split.get("address") == b"10.0.0.1"
    plain.set("group/other", b"unsigned")
    with pytest.raises(sealing.UnsignedError):
        split.get("other")


def test_processes_that_agree_hear_one_another_and_no_earlier_run(no_secret: None) -> None:
    sealing.use_secret("one" * 10)
    runs: list[tuple[Any, set[str]]] = []
    for _ in range(2):
        plain = dist.HashStore()
        with ThreadPoolExecutor(3) as pool:
            call = partial(sealing.agree, sealing.sealed_store(plain), count=3)
            found = [*pool.map(lambda number, call=call: call(number, text=f"of {number}"), range(3))]  # type: ignore[misc]
        assert [texts for texts, _ in found] == [["of 0", "of 1", "of 2"]] * 3
        runs.append((plain, {name for _, name in found}))
    (earlier, names), (_, others) = runs
    assert (len(names), len(others), len(names | others)) == (1, 1, 2)

    class Replayed(dist.HashStore):
        """Whatever is read was written in the first run."""

        def get(self, key: str) -> bytes:
            return bytes(earlier.get(key))

    assert {sealing.agree(sealing.sealed_store(Replayed()), number, 3)[1] for number in range(3)} & names == set()
    same = [sealing.agree(sealing.sealed_store(dist.HashStore()), 0, 1, seen=seen)[1] for seen in ("a", "a")]
    assert len({*same}) == 2


def test_two_that_have_seen_something_different_do_not_agree(no_secret: None) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda number: sealing.agree(store, number, 2, "", f"10.0.0.{number}")[1], range(2))]
    assert len({*found}) == 2


def test_an_object_is_loaded_once_and_in_its_group(no_secret: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = dist.distributed_c10d
    for name in (OBJECT_TO_TENSOR, TENSOR_TO_OBJECT):
        monkeypatch.setattr(torchs, name, getattr(torchs, name))
    sealing.use_secret("one" * 10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sealing.seal_objects("w")
        encode, decode = getattr(torchs, OBJECT_TO_TENSOR), getattr(torchs, TENSOR_TO_OBJECT)
        group = dist.new_group(backend="gloo")
        first, second = [encode(each, HOST, group) for each in ({"a": 1}, [2])]
        assert decode(*second, group) == [2]  # later ones may come first
        assert decode(*first, group) == {"a": 1}
        for data, size in (first, second):
            with pytest.raises(sealing.UnsignedError, match=r"objects of group \S+ in world w\) has come before"):
                decode(data, size, group)
        for other in (None, dist.new_group(backend="gloo")):
            with pytest.raises(sealing.UnsignedError, match="is not signed with the secret"):
                decode(*encode(3, HOST, group), other)
        found: list[Any] = [None]
        for value in ("x", "y"):
            dist.all_gather_object(found, value, group=group)
            assert found == [value]
    finally:
        dist.destroy_process_group()


@hypothesis.given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), max_size=60))
def test_no_number_is_taken_twice_and_late_ones_within_a_window(numbers: list[int]) -> None:
    taken, before = sealing._Taken(), set()
    for number in numbers:
        is_new = number not in before and number > max(before, default=0) - sealing._LATE
        assert taken.take(number) == is_new
        before.add(number)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_file_that_keeps_no_secret_is_refused(home: Path) -> None:
    file = home / ".unisono-secret"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        secret_of_run(str(file), "run", "127.0.0.1:29400", 1)
    for text, mode, words in [
        ("long" * 8, 0o640, "may be read by others: chmod 600"),
        ("long" * 8, 0o604, "may be read by others: chmod 600"),
        ("short\n", 0o600, "has 5 characters, and needs 16; make one by: head"),
    ]:
        file.write_text(text)
        file.chmod(mode)
        for given in (None, str(file)):
            with pytest.raises(ValueError, match=words):
                secret_of_run(given, "run", "127.0.0.1:29400", 2)


def test_agents_started_together_on_a_machine_share_a_private_secret_file(home: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(lambda _: secret_of_run(None, "run", "127.0.0.1:29400", 2), range(64))]
    assert len({*found}) == 1
    assert [path.name for path in home.iterdir()] == [".unisono-secret"]
    assert (home / ".unisono-secret").stat().st_mode & 0o777 == 0o600
    assert secret_of_run(None, "run", "10.0.0.1:29400", 2) == found[0]
    assert secret_of_run(None, "another", "10.0.0.1:29400", 2) != found[0]  # each run has its own
    alone = {secret_of_run(None, "run", "127.0.0.1:29400", 1) for _ in range(2)}
    assert len(alone | {found[0]}) == 3


ENDPOINT = {"--nnodes": "2", "--rdzv-endpoint": "10.77.0.1:29400"}
POD = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "10.77.0.1", "PET_NPROC_PER_NODE": "1"}


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        (ENDPOINT, {}),
        ({"--nnodes": "1:2", "--master-addr": "10.77.0.1"}, {"UNISONO_RDZV_SECRET": ""}),
        ({}, POD),
        (ENDPOINT, {"SLURM_JOB_ID": "7", "HOME": "/proc"}),  # where no file can be made
    ],
)
def test_without_a_secret_several_machines_are_refused_at_the_door(
    options: dict[str, str], environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    words = [word for each in options.items() for word in each]
    with agent(tmp_path / "1", "run", *words, str(tmp_path / "train.py"), **environ) as script:
        code, output, errors = script.end()
    assert (code, output) == (2, "")
    assert "needs a secret" in errors
    assert all(way in errors for way in ("~/.unisono-secret", "--rdzv-secret-file", "UNISONO_RDZV_SECRET"))
    assert "--rdzv-insecure, if nobody else can reach their network" in errors
    assert ("there can be no ~/.unisono-secret: " in errors) == ("HOME" in environ)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "variable", "SLURM", "insecure"])
def test_each_way_out_is_one(way: str, networks: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, unisono\nprint(unisono.all_gather_object(len(os.environ['UNISONO_RDZV_SECRET'])))"
    )
    (secret := tmp_path / "secret").write_text("s" * 16)
    secret.chmod(0o600)
    options = {"file": ["--rdzv-secret-file", str(secret)], "insecure": ["--rdzv-insecure"]}.get(way, [])
    variables = {"variable": {"UNISONO_RDZV_SECRET": "s" * 16}, "SLURM": {"SLURM_JOB_ID": "7"}}.get(way, {})
    command = ["run", "-n", "1", "--backend", "cpu", *(word for each in ENDPOINT.items() for word in each), *options]
    with (
        agent(tmp_path / "1", *command, str(tmp_path / "train.py"), network=networks[0], **variables) as one,
        agent(tmp_path / "2", *command, str(tmp_path / "train.py"), network=networks[1], **variables) as two,
    ):
        ends = [each.end() for each in (one, two)]
    size = 0 if way == "insecure" else 64
    assert sorted(each[:2] for each in ends) == [(0, f"[rank {rank}] [{size}, {size}]\n") for rank in range(2)]
    told = "without a secret, anyone who reaches 10.77.0.1:29400, or a port of a rank, can run code in the ranks; "
    told += "without --rdzv-insecure they sign what they send\n"
    assert sorted(each[2] for each in ends) == ["", told if way == "insecure" else ""]
    assert (tmp_path / ".unisono-secret").exists() == (way == "SLURM")


@pytest.mark.slow
def test_a_run_goes_on_while_a_stranger_reaches_its_port(networks: tuple[str, str], tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "train.py").write_text(TRAIN)
    for name in (".unisono-secret", "other"):
        (tmp_path / name).write_text(name * 10)
        (tmp_path / name).chmod(0o600)
    arguments = ["run", "--nnodes", "2", "-n", "1", "--backend", "cpu", "--rdzv-endpoint", f"10.77.0.1:{port}"]
    script = [str(tmp_path / "train.py"), str(tmp_path)]
    with (
        agent(tmp_path / "1", *arguments, *script, network=networks[0]) as first,
        agent(tmp_path / "2", *arguments, *script, network=networks[1]) as second,
    ):
        until(lambda: len([*tmp_path.glob("meets-?")]) == 2)
        for number, wrong in enumerate((["--rdzv-insecure"], ["--rdzv-secret-file", str(tmp_path / "other")]), 3):
            with agent(tmp_path / str(number), *arguments, *wrong, *script, network=networks[1]) as stranger:
                code, _, errors = stranger.end()
            assert code == 1
            assert ("this process has none" if number == 3 else "not signed with the secret of this run") in errors
        (tmp_path / "5").mkdir()
        intruder = INTRUDER.format(port=port, owned=tmp_path / "owned")
        with Script(intruder, tmp_path / "5", network=networks[1]) as script_of_intruder:
            code, output, errors = script_of_intruder.end()
        assert (code, {*output.split()}) == (0, {"machines", "rendezvous"}), errors
        for rank in range(2):  # each reads what was written, and goes on
            (tmp_path / f"meets-{rank}").unlink()
        until(lambda: len([*tmp_path.glob("meets-?")]) == 2)
        (tmp_path / "stop").touch()
        ends = [each.end() for each in (first, second)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "".join(output for _, output, _ in ends).count("[0, 1]") == 2
    assert "not signed with the secret of this run" in "".join(errors for _, _, errors in ends)
    assert not (tmp_path / "owned").exists()


def secret_here(index: int = 0) -> bytes:
    return sealing._secret


SAYING = "from unisono.comm import sealing\nprint(sealing._secret)\n"


@pytest.mark.slow
def test_each_spawn_and_each_run_of_one_machine_makes_a_secret_of_its_own(tmp_path: Path) -> None:
    found = [spawn(secret_here, nprocs=2, backend="cpu") for _ in range(2)]
    (tmp_path / "say.py").write_text(SAYING)
    for number in range(2):
        command = ["run", "-n", "2", "--backend", "cpu", "--no-prefix", str(tmp_path / "say.py")]
        with agent(tmp_path / str(number), *command) as run:
            code, output, errors = run.end()
        assert code == 0, errors
        found.append([eval(line) for line in output.splitlines()])
    assert [len({*each}) for each in found] == [1] * 4  # the ranks know the same
    assert len({each[0] for each in found}) == 4
    assert all(len(each[0]) == 64 for each in found)


STAYING = """
import torch, unisono
from pathlib import Path
from faults import until
unisono.join_world(backend="cpu", process_group="gloo")
Path(f"../joined-{unisono.rank()}").touch()

def fail(index):
    if index == 0:
        until(Path("../junk").exists)
        raise LookupError("no such digit")
    unisono.all_reduce(torch.ones(1))

try:
    unisono.spawn(fail, backend="cpu", process_group="gloo")
except Exception as error:
    print(type(error).__name__, error)
    Path(f"../ended-{unisono.rank()}").touch()
    until(Path("../ended-1").exists)  # the end of a process would wake its peers, too
"""


@pytest.mark.slow
def test_a_stranger_overwriting_the_reason_leaves_no_rank_waiting(tmp_path: Path) -> None:
    port = free_port()
    shared = {"MASTER_PORT": str(port), "UNISONO_RDZV_SECRET": "secret" * 10}
    with two_ranks(STAYING, tmp_path, **shared) as scripts:
        until(lambda: len([*tmp_path.glob("joined-?")]) == 2)
        stranger = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        stranger.set("unisono/unisono/failure", b"junk")  # type: ignore[arg-type]
        (tmp_path / "junk").touch()
        ends = [each.end() for each in scripts]
    assert ends[0][1].startswith("LookupError no such digit"), ends
    assert "rank 1 cannot complete all_reduce" in ends[1][1], ends
    assert "rank 0 failed with LookupError: no such digit" in ends[1][1], ends


def test_reports_that_somebody_keeps_overwriting_are_one_line(
    no_secret: None, caplog: pytest.LogCaptureFixture
) -> None:
    sealing.use_secret("one" * 10)
    heard: list[MachineReport | str] = []
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    others = OtherMachines(f"127.0.0.1:{server.port}", 60, heard.append, lambda *_: None, heard.append, 0.01)
    with others.attended(is_host=False):
        others.begin_round("round", 0, 2)
        for value in (b"somebody's", b"somebody else's"):
            server.set("unisono/machines/round/1", value)
            seen = others.round.own.beats + 5
            until(lambda seen=seen: others.round.own.beats > seen)  # type: ignore[misc]
    until(lambda: not any(thread.is_alive() for thread in others._threads))
    [line] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert line.startswith("the report of machine 1: what came by the network (unisono/machines/round/1) is not signed")
    assert not heard
    caplog.clear()  # the errors in its records hold the store
