"""The store of several machines: where it listens, and what is not printed when its server is gone."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from agents import free_port
from faults import Script

from unisono.launch.hosts.endpoint import address_towards, listening_address, serve_store

OTHER = "192.0.2.7"  # nobody has it
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("host", "addresses", "is_alone", "expected"),
    [
        ("node1", ["127.0.0.1"], True, "127.0.0.1"),
        ("node1", ["::1", "127.0.0.1"], True, "::1"),
        ("node1", ["127.0.0.1"], False, ""),  # a machine's own idea of its name
        ("node1", [OTHER], False, ""),  # of a service before this machine, say
        ("node1", [], True, ""),
        ("::1", ["::1"], False, "::1"),  # a literal address, if it is here
        (OTHER, [OTHER], False, ""),
    ],
)
def test_a_store_listens_where_the_others_come_as_far_as_that_is_known(host, addresses, is_alone, expected):
    assert listening_address(host, addresses, is_alone) == expected


def reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 1):
            return True
    except OSError:
        return False


def test_a_store_is_not_reached_from_other_networks_of_its_machine():
    outward = address_towards(OTHER, 1)
    if outward is None:
        pytest.skip("this machine has one network only")
    port = free_port()
    local = serve_store("127.0.0.1", port, SECOND, is_alone=True)
    local.set("key", "value")
    assert reaches("127.0.0.1", port)
    assert not reaches(outward, port)
    for host, other in [(outward, "127.0.0.1"), ("127.0.0.1", outward)]:
        port = free_port()
        store = serve_store(host, port, SECOND)
        assert not store.check(["key"])
        assert reaches(host, port)
        assert not reaches(other, port)


JOINING = """
import os, unisono
world = unisono.join_world(backend="cpu")
unisono.barrier()
if world.rank == 0:
    os.kill(os.getpid(), 9)
unisono.barrier()
"""


@pytest.mark.slow
def test_the_first_cause_is_not_drowned_in_stacks_of_native_code(tmp_path):
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with (
        Script(JOINING, tmp_path / "0", RANK="0", GROUP_RANK="0", **shared) as first,
        Script(JOINING, tmp_path / "1", RANK="1", GROUP_RANK="1", **shared) as second,
    ):
        assert first.end()[0] == -9
        code, _, errors = second.end()
        assert code == 1
        assert "BrokenWorldError: rank 1 cannot complete barrier(): rank 0 did not arrive: rank 0 has ended" in errors
        assert "Exception raised from" not in errors
        assert "frame #" not in errors
