"""The zygote that is started before anybody asks for it: by default in notebooks and by `unisono run`, else not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from zygotes import zygote_pid

from unisono.launch.starting import zygote_client
from unisono.launch.starting.warm_at_import import warm_early

LOOK = """
import sys, types
{before}
import unisono
started = sys.modules.get("unisono.launch.starting.zygote_client")
print(started is not None and bool(started.clients), "torch" in sys.modules)
"""
NOTEBOOK = "sys.modules['ipykernel'] = types.ModuleType('ipykernel')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "environ", "is_started"),
    [
        ("", {}, False),
        (NOTEBOOK, {}, True),
        (NOTEBOOK, {"RANK": "0", "WORLD_SIZE": "2"}, False),
        (NOTEBOOK, {"UNISONO_RENDEZVOUS": "/nowhere"}, False),
    ],
)
def test_an_import_starts_it_where_that_was_asked_for(before, environ, is_started):
    source = LOOK.format(before=before)
    done = subprocess.run([sys.executable, "-c", source], env=os.environ | environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{is_started} False\n", "")


def test_one_that_cannot_be_started_is_left_to_the_first_spawn(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more processes")

    zygote_client.close_all()
    monkeypatch.setattr(zygote_client, "Popen", refuse)
    warm_early()
    assert zygote_pid() is None
