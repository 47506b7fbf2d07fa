"""Another user, on the machine of a run or on another one, who reaches its ports and does not know its secret: whatever
he does, nothing that he sends is believed, no code of his runs, and no file is touched."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import warm_scripts
from agents import agent, free_port
from faults import Script, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")]

# Rank 1 is late for a second group: meanwhile the stranger meets rank 0, or writes what rank 1 will read; in the second
# life, if there is a first one, whose addresses he writes again.
TRAIN = """
import sys
from pathlib import Path
import torch, torch.distributed as dist, unisono
from faults import until
shared, how = Path(sys.argv[1]), sys.argv[2]
if how == "repeats" and unisono.current_world().restart_count == 0:
    dist.new_group(backend="gloo")
    raise OSError("the end of the first life")
(shared / f"began-{unisono.rank()}").touch()
if unisono.rank() == 1:
    until((shared / "done").exists)
if how == "connects to a world":
    dist.init_process_group("gloo")
else:
    dist.new_group(backend=None if how == "maps" else "gloo")
found = [None, None]
dist.all_gather_object(found, "x" * unisono.rank())
print("found", found)
"""
OUTSIDER = """
import os, pickle, re, sys
from datetime import timedelta
import torch, torch.distributed as dist
from faults import until
os.setgroups([])
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
"""
STRANGER = (
    OUTSIDER
    + """
for file in "{secret}", "/proc/{pid}/environ":
    try:
        open(file)
        raise AssertionError(file)
    except PermissionError:
        pass
how = "{how}"

class Code:
    def __reduce__(self):
        return os.system, ("touch {owned}",)

class Stolen(dist.Store):  # what his gloo takes for the store of the group
    def get(self, key):
        return own if key.endswith("/1") else store.get(address)[-size:]  # without the signature

    def set(self, key, value):
        global own, size
        own, size = value, len(value)
        if how == "listens":
            store.set(address, value)
            tell()

    def wait(self, keys, *timeout):
        if how == "listens":
            sys.exit()

    def check(self, keys):
        return True

def tell():
    print("done", flush=True)

def keys_of(ending):
    return [key for key in store.list_keys() if "unisono/ranks/" in key and key.endswith(ending)]

os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
store = dist.TCPStore("10.77.0.1", {port}, None, False, timedelta(seconds=20), wait_for_workers=False)
ending = {{"maps": "/place", "connects to a world": "group/1/0//cpu//0/0"}}.get(how, "/0//1//cpu//0/0")
until(lambda: len(keys_of(ending)) == {{"maps": 3, "repeats": 2}}.get(how, 1))
if how == "maps":
    for key in keys_of(ending):
        store.set(key, "1 ../../../../../..{file} " + "00" * 16 + " " + os.readlink("/proc/self/ns/net"))
    tell()
elif how == "repeats":
    one, other = keys_of(ending)
    values = store.get(one), store.get(other)
    store.set(one, values[1])
    store.set(other, values[0])
    tell()
elif how == "overwrites":
    import pickle
    for key in store.list_keys():
        store.set(key, pickle.dumps(Code()))
    tell()
else:
    address, = keys_of(ending)
    rank = 0 if how == "listens" else 1
    dist.init_process_group("gloo", store=Stolen(), rank=rank, world_size=2, timeout=timedelta(seconds=20))
    tell()
    try:
        while True:
            dist.all_gather_object([None, None], Code())
    except RuntimeError:  # rank 0 has ended
        pass
"""
)
REFUSED = {
    "listens": r"what came by the network \(\S+/0//1//cpu//0/0\) is not signed with the secret of this run",
    "connects to a world": r"what came by the network \(objects of group \S+ in world \w+\) is not signed with the",
    "repeats": r"what came by the network \(\S+/0//1//cpu//0/0\) is not signed with the secret of this run",
    "overwrites": r"what came by the network \(\S+\) is not signed with the secret of this run",
}


def hear(stranger: Script, word: str) -> None:
    """Wait until he says it."""
    output = stranger.process.stdout
    assert isinstance(output, warm_scripts._Reader)
    until(lambda: word.encode() in output.data or stranger.process.poll() is not None)
    assert word.encode() in output.data, stranger.end()


@pytest.mark.parametrize("how", [*REFUSED, "maps"])
def test_nothing_that_another_user_sends_is_believed(how: str, networks: tuple[str, str], tmp_path: Path) -> None:
    for name, text in [("train.py", TRAIN), (".unisono-secret", "secret" * 10), ("file", before := "\0" * 4096)]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "3").mkdir()
    port = free_port()
    arguments = ["run", "--nnodes", "2", "-n", "1", "--backend", "cpu", "--rdzv-endpoint", f"10.77.0.1:{port}"]
    is_signed = how != "maps"  # without a secret he could run code; no file is his to choose in any case
    arguments += [] if is_signed else ["--rdzv-insecure"]
    arguments += ["--max-restarts", str(int(how == "repeats")), "--hang-timeout", "30"]
    arguments += [str(tmp_path / "train.py"), str(tmp_path), how]
    with (
        agent(tmp_path / "1", *arguments, network=networks[0]) as first,
        agent(tmp_path / "2", *arguments, network=networks[1]) as second,
    ):
        until(lambda: len([*tmp_path.glob("began-?")]) == 2)
        # Where he connects, rank 0 does, too, unless its address is the greater one.
        network = networks[how.startswith("connects")]
        names = {"secret": tmp_path / ".unisono-secret", "pid": first.process.pid, "owned": tmp_path / "owned"}
        source = STRANGER.format(how=how, port=port, file=tmp_path / "file", **names)
        with Script(source, tmp_path / "3", network=network) as stranger:
            hear(stranger, "done\n")
            (tmp_path / "done").touch()
            ends = [each.end() for each in (first, second)]
    for code, output, errors in ends:
        assert (code, "found" in output) == ((1, False) if is_signed else (0, True)), errors
        if is_signed and how != "overwrites":  # with what one machine tells the other of its end
            assert re.search(REFUSED[how], errors), errors
    assert not is_signed or re.search(REFUSED[how], ends[0][2] + ends[1][2]), ends
    assert not (tmp_path / "owned").exists()
    assert (tmp_path / "file").read_text() == before


# Of each group, one of two ranks waits for the other to connect, which has the greater address. So there are many.
GROUPS = """
import os, sys
from pathlib import Path
import torch.distributed as dist, unisono
from faults import until
shared, found = Path(sys.argv[1]), [None, None]
(shared / f"rank-{unisono.rank()}-{os.getpid()}").touch()
until(lambda: len([*shared.glob("rank-*")]) == 2)
for number in range(16):
    if unisono.rank() == 1:
        until((shared / f"done-{number}").exists)
    dist.all_gather_object(found, "x" * unisono.rank(), group=dist.new_group(backend="gloo"))
print("found", found)
"""
STRANGER_HERE = """
import os, pickle, struct, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from unisono.torch_private import GLOO_DEVICES, GLOO_TIMEOUT, GlooOptions
os.setgroups([])
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)

class Code:
    def __reduce__(self):
        return os.system, ("touch {owned}",)

class Guessed(dist.Store):
    def __init__(self, port):
        super().__init__()
        self.port = port

    def set(self, key, value):
        self.own = value

    def get(self, key):  # the address of rank 0 is like his own, but for two numbers
        at = self.own.index(bytes([127, 0, 0, 2]))
        theirs = self.own[: at - 2] + struct.pack(">H4B", self.port, 127, 0, 0, 1) + self.own[at + 4 :]
        return self.own if key.endswith("/1") else theirs

    def wait(self, keys, *timeout):
        pass

    def check(self, keys):
        return True

def listening():
    lines = [line.split() for line in open("/proc/net/tcp")][1:]
    here = [each[1].split(":") for each in lines if each[3] == "0A" and each[7] == "0"]
    return {{int(port, 16) for address, port in here if address == "0100007F"}}

def attack(port):
    options, data = GlooOptions(), torch.frombuffer(bytearray(pickle.dumps(Code())), dtype=torch.uint8)
    setattr(options, GLOO_TIMEOUT, timedelta(seconds=60))
    setattr(options, GLOO_DEVICES, [dist.ProcessGroupGloo.create_device(hostname="127.0.0.2")])
    try:
        group = dist.ProcessGroupGloo(Guessed(port), 1, 2, options)
        open(f"reached-{{port}}", "w").close()
        while True:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            group.allgather([sizes], [torch.tensor([len(data)])]).wait()
            padded = torch.nn.functional.pad(data, (0, int(max(sizes)) - len(data)))
            group.allgather([[torch.empty_like(padded) for _ in range(2)]], [padded]).wait()
    except RuntimeError:  # nobody waits for him there
        pass

known = listening()
print("looks", flush=True)
while True:
    time.sleep(0.01)
    for port in listening() - known:
        known.add(port)
        threading.Thread(target=attack, args=(port,), daemon=True).start()
"""


def test_nobody_becomes_a_rank_on_the_loopback(tmp_path: Path) -> None:
    (train := tmp_path / "train.py").write_text(GROUPS)
    owned = tmp_path / "owned"
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    (tmp_path / "1").chmod(0o777)

    def reached(pid: int) -> int:
        """The ports of a process that the stranger has reached."""
        ports = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp")}
        return sum((tmp_path / "1" / f"reached-{port}").exists() for port in ports)

    with Script(STRANGER_HERE.format(owned=owned), tmp_path / "1") as stranger:
        hear(stranger, "looks\n")
        arguments = ["run", "-n", "2", "--backend", "cpu", str(train), str(tmp_path)]
        with agent(tmp_path / "2", *arguments) as run:
            until(lambda: len([*tmp_path.glob("rank-*")]) == 2)
            first = int(next(tmp_path.glob("rank-0-*")).name.removeprefix("rank-0-"))
            with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended, as it has to
                for number in range(16):
                    until(lambda number=number: owned.exists() or reached(first) > number)  # type: ignore[misc]
                    assert not owned.exists()
                    (tmp_path / f"done-{number}").touch()
            code, output, errors = run.end()
    assert (code, "found" in output) == (1, False), errors
    assert re.search(REFUSED["connects to a world"], errors), errors
    assert not owned.exists()


RECOVERING = """
import os, sys
from pathlib import Path
import torch.distributed as dist, unisono
from faults import stand_still
shared, how, found = Path(sys.argv[1]), sys.argv[2], [None, None]
dist.all_gather_object(found, "x" * unisono.rank(), group=dist.new_group(backend="gloo"))
if unisono.current_world().restart_count == 0:
    (shared / f"stands-{unisono.rank()}-{os.getppid()}-{os.getpid()}").touch()
    stand_still()
print("found", found)
"""
MEDDLER = (
    OUTSIDER
    + """
class Code:
    def __reduce__(self):
        return os.system, ("touch {owned}",)

store = dist.TCPStore("10.77.0.1", {port}, None, False, timedelta(seconds=20), wait_for_workers=False)
known = {{}}  # by their keys, without the names of rounds

def place_of(key):
    return re.sub("[0-9a-f]{{32}}", "", key)

for key in store.list_keys():
    known[place_of(key)] = key, store.get(key) if store.check([key]) else b""
print("knows", flush=True)
try:
    while True:
        for key in store.list_keys():
            first, value = known.get(place_of(key), ("", b""))
            if "{how}" == "deletes" and first != key and "unisono/ranks/" in key:
                store.delete_key(key)
            elif "{how}" == "replays" and first and (first != key or "machines" in key or "torch.rendezvous" in key):
                store.set(key, value)
            elif not first:
                store.set(key, pickle.dumps(Code()))
except dist.DistError:  # the run has ended
    pass
"""
)


@pytest.mark.parametrize(("dies", "how"), [("rank", "replays"), ("zygote", "deletes"), ("agent", "replays")])
def test_a_recovery_is_no_way_in(dies: str, how: str, networks: tuple[str, str], tmp_path: Path) -> None:
    for name, text in [("train.py", RECOVERING), (".unisono-secret", "secret" * 10)]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "3").mkdir()
    port = free_port()
    arguments = ["run", "--nnodes", "2", "-n", "1", "--backend", "cpu", "--rdzv-endpoint", f"10.77.0.1:{port}"]
    arguments += ["--max-restarts", "1", "--lost-after", "8", "--timeout", "8", "--rdzv-conf", "join_timeout=8"]
    arguments += [str(tmp_path / "train.py"), str(tmp_path), how]
    with (
        agent(tmp_path / "1", *arguments, network=networks[0]) as first,
        agent(tmp_path / "2", *arguments, network=networks[1]) as second,
    ):
        until(lambda: len([*tmp_path.glob("stands-*")]) == 2)
        source = MEDDLER.format(how=how, port=port, owned=tmp_path / "owned")
        with Script(source, tmp_path / "3", network=networks[1]) as stranger:
            hear(stranger, "knows\n")
            _, _, zygote, rank = next(tmp_path.glob("stands-1-*")).name.split("-")
            victims = {"rank": int(rank), "zygote": int(zygote), "agent": second.process.pid}
            os.kill(victims[dies], signal.SIGKILL)
            ends = [each.end() for each in (first, second)]  # within a bound
        assert [each.survivors() for each in (first, second)] == [[], []]
    assert (ends[1][0] == -signal.SIGKILL) == (dies == "agent"), ends[1]
    for code, output, errors in ends[: 1 if dies == "agent" else 2]:
        assert (code in (1, 137) and errors) or (code == 0 and "found" in output), (code, output, errors)
    assert not (tmp_path / "owned").exists()


RECORDER = (
    "import contextlib, encodings.idna, socket"
    + OUTSIDER
    + """
has_begun = False
store = dist.TCPStore("10.77.0.1", {port}, None, False, timedelta(seconds=20), wait_for_workers=False)
known = {{key: store.get(key) for key in store.list_keys() if "unisono/" in key and store.check([key])}}
earlier = {{name for key in known for name in re.findall("ranks/([0-9a-f]{{32}})/", key)}}
assert len(earlier) == 1, known.keys()
print("knows", flush=True)
def is_served():
    with contextlib.suppress(OSError), socket.create_connection(("10.77.0.1", {port}), 1):
        return True

until(lambda: not is_served())
until(is_served)  # by the next run
store = dist.TCPStore("10.77.0.1", {port}, None, False, timedelta(seconds=20), wait_for_workers=False)
try:
    while True:
        for key, value in known.items():
            if earlier & {{*key.split("/")}} and store.check([key]) and store.get(key) != value:
                print("believed", key, flush=True)
            store.set(key, value)
        if not has_begun:
            has_begun = print("replays", flush=True) is None
except dist.DistError:
    print("over", flush=True)
"""
)


def test_no_run_believes_what_was_signed_in_an_earlier_one(networks: tuple[str, str], tmp_path: Path) -> None:
    for name, text in [("train.py", TRAIN), (".unisono-secret", "secret" * 10)]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "3").mkdir()
    port = free_port()
    arguments = ["run", "--nnodes", "2", "-n", "1", "--backend", "cpu", "--rdzv-endpoint", f"10.77.0.1:{port}"]
    arguments += ["--timeout", "6", str(tmp_path / "train.py"), str(tmp_path), "records"]

    def begin(name: str) -> Script:
        return stack.enter_context(agent(tmp_path / name, *arguments, network=networks[int(name) - 1]))

    with contextlib.ExitStack() as stack:
        first = begin("1"), begin("2")
        until(lambda: len([*tmp_path.glob("began-?")]) == 2)
        stranger = stack.enter_context(Script(RECORDER.format(port=port), tmp_path / "3", network=networks[1]))
        hear(stranger, "knows\n")
        (tmp_path / "done").touch()
        assert [each.end()[0] for each in first] == [0, 0]
        host = begin("1")
        hear(stranger, "replays\n")
        second = [each.end() for each in (host, begin("2"))]
        assert stranger.end()[1] == "knows\nreplays\nover\n"  # and nothing was believed
    for code, output, errors in second:  # where he is late, it goes on
        assert (code == 1 and errors) or (code == 0 and "found" in output), second
