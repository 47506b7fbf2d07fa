"""Where ranks meet, standard output keeps all that is printed but gloo's own line."""

from __future__ import annotations

import os

import pytest

from unisono.launch import gloo_output
from unisono.launch.gloo_output import suppress_greetings

GREETING = b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"


@pytest.fixture(autouse=True)
def _a_torch_that_greets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_output, "_GREETS", True)


def test_only_greetings_are_left_out_of_what_is_printed_meanwhile(capfd):
    os.write(1, b"before\n")
    with suppress_greetings():
        os.write(1, b"one\n" + GREETING)
        os.write(1, GREETING + b"[Gloo] Rank 1 is NOT connected to: [2]\n")
        os.write(1, b"no end of line")
    os.write(1, b"\nafter\n")
    assert capfd.readouterr().out == "before\none\n[Gloo] Rank 1 is NOT connected to: [2]\nno end of line\nafter\n"


def test_what_was_printed_comes_out_where_meeting_fails(capfd):
    with pytest.raises(RuntimeError, match="nobody came"), suppress_greetings():
        os.write(1, b"waiting\n" + GREETING)
        raise RuntimeError("nobody came")
    assert capfd.readouterr().out == "waiting\n"


def test_a_process_without_standard_output_meets_all_the_same():
    kept = os.dup(1)
    os.close(1)
    try:
        with suppress_greetings():
            pass
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_a_reader_that_has_gone_is_no_error():
    kept = os.dup(1)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    try:
        with suppress_greetings():
            os.write(1, b"for nobody\n")
            os.close(reader)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(writer)
