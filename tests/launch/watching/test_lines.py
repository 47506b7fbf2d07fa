"""Splitting and mixing lines: nothing lost, nothing mixed, however the bytes arrive."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launch.watching.output import LineMixer, LineSplitter

LIMIT = 8

texts = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\xff", b"0123456789"]), max_size=40).map(b"".join)


def split(chunks: list[bytes], limit: int = LIMIT) -> tuple[list[bytes], bytes]:
    """The lines that the chunks complete, and what is held."""
    splitter = LineSplitter(limit)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines, splitter.held


@pytest.mark.parametrize(
    ("text", "lines", "held"),
    [
        (b"one\ntwo\n", [b"one\n", b"two\n"], b""),
        (b"one\ntw", [b"one\n"], b"tw"),
        (b"one\r\ntwo", [b"one\r\n"], b"two"),
        (b"1%\r2%\r3%", [b"1%\r", b"2%\r"], b"3%"),
        (b"1%\r", [], b"1%\r"),
        (b"\n\r\r\n\n", [b"\n", b"\r", b"\r\n", b"\n"], b""),
        (b"01234567", [b"01234567"], b""),
        (b"012345678\n", [b"01234567", b"8\n"], b""),
    ],
)
def test_a_line_ends_with_its_ending_or_at_the_limit(text, lines, held):
    assert split([text]) == (lines, held)


@given(texts, st.lists(st.integers(0, 400), max_size=20))
def test_lines_do_not_depend_on_how_their_bytes_arrive(text, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:stop] for start, stop in itertools.pairwise(places)]
    lines, held = split(chunks)
    assert (lines, held) == split([text])
    assert b"".join(lines) + held == text
    assert all(re.fullmatch(rb"[^\r\n]{0,7}(\n|\r\n|\r)|[^\r\n]{8}", line) for line in lines)
    assert len(held) <= LIMIT


pieces = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([b"one\n", b"go", b"ing", b" on\n", b"5%\r", b"\n", b"\r", b"  \r"])),
    max_size=30,
)


@given(pieces)
def test_mixed_lines_are_one_rank_s_each_and_keep_its_bytes(given_pieces):
    mixer = LineMixer()
    shown = b"".join(mixer.add(rank, b"[%d]" % rank, piece) for rank, piece in given_pieces) + mixer.end_line()
    assert shown in (b"", b"\n") or shown.endswith((b"\n", b" \r")), "a line is over, or is erased"
    kept = dict.fromkeys(range(3), b"")
    for line in re.findall(rb"[^\r\n]*[\r\n]", shown):
        if marked := re.fullmatch(rb"\[(\d)\]([^\[]*)", line):
            kept[int(marked[1])] += marked[2]
            assert not re.fullmatch(rb" *\r", marked[2]), "a mark with nothing behind it"
        else:
            assert not line.strip()  # ends what continues, erases a bar, or was added
    for rank, text in kept.items():
        written = b"".join(piece for source, piece in given_pieces if source == rank)
        assert re.sub(rb"[\r\n ]", b"", text) == re.sub(rb"[\r\n ]", b"", written)


MIXED = {
    "continued": (
        [(0, b"10"), (0, b"0"), (1, b"hello\n"), (0, b" %\n")],
        [b"[0]10", b"0", b"\n[1]hello\n", b"[0] %\n"],
    ),
    "bars share a line": ([(0, b"10%\r"), (1, b"20%\r"), (0, b"hello\n")], [b"[0]10%\r", b"[1]20%\r", b"\n[0]hello\n"]),
    "erased by its own worker only": (
        [(0, b"5%\r"), (1, b"  \r"), (0, b"  \r"), (1, b"one\n"), (1, b"\r"), (0, b"go"), (0, b"  \r"), (1, b"two\n")],
        [b"[0]5%\r", b"", b"     \r", b"[1]one\n", b"", b"[0]go", b"  \r", b"\n[1]two\n"],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_lines_that_meet_are_shown_apart(name):
    pieces, shown = MIXED[name]
    mixer = LineMixer()
    assert [mixer.add(rank, b"[%d]" % rank, piece) for rank, piece in pieces] == shown
