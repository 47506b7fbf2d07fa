"""Objects as bytes: what went in comes out, and wrong bytes are told so."""

from __future__ import annotations

import collections
import math
import os
import pickle
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from unisono.checkpoint.serialization import deserialize, serialize
from unisono.errors import DamagedCheckpointError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.float8_e4m3fn),
]


class Pair(NamedTuple):
    first: Any
    second: Any


def check_equal(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert found.requires_grad == value.requires_grad
        torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
    elif isinstance(value, dict | list | tuple):
        assert not isinstance(value, dict) or list(found) == list(value)
        pairs = zip(*(each.values() if isinstance(each, dict) else each for each in (found, value)), strict=True)
        for own, expected in pairs:
            check_equal(own, expected)
    else:
        assert found == value or found != found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_type_and_shape_comes_back(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (2, 3)):
        tensor = (torch.rand(shape) * 3).to(dtype)
        check_equal(deserialize(serialize(tensor)), tensor)


def test_containers_keep_their_types_order_and_sharing() -> None:
    shared = torch.randn(3, requires_grad=True)
    value = {
        "b": [1, -(2**80), 2.5, math.inf, math.nan, True, None, "ü\n", b"\0\xff", 1 - 2j],
        "a": ((shared,), (shared, nn.Parameter(torch.ones(2), requires_grad=False))),
        3: collections.OrderedDict([(("k", 1), {1, 2}), (None, {"x"})]),
        "torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu")],
        "strided": torch.arange(12.0).reshape(3, 4).T[::2],
    }
    found = deserialize(serialize(value))
    check_equal(found, value)
    assert found["a"][0][0] is found["a"][1][0]
    assert found["a"][1][0].is_leaf


def test_a_module_is_its_state() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    torch.testing.assert_close(deserialize(serialize({"model": model}))["model"], dict(model.state_dict()))


def test_tensors_are_made_on_the_device_that_is_asked_for() -> None:
    data = serialize(torch.ones(2))
    assert deserialize(data).device.type == "cpu"
    assert deserialize(data, device="meta").device.type == "meta"
    assert deserialize(data, device=None).device.type == "cpu"
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|97"):
        deserialize(data, device="cuda:97")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": len}}, r"the object\['a'\]\['b'\] is a builtins.builtin"),
        ((Pair(1, 2),), r"the object\[0\] is a .*Pair.*convert it to plain data"),
    ],
)
def test_what_cannot_be_serialized_is_named_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        serialize(value)


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = serialize({"a": torch.arange(5), "b": [1.5]})
    for place in range(len(data) * 8):
        wrong = bytearray(data)
        wrong[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedCheckpointError):
            deserialize(wrong)
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpointError):
            deserialize(data[:length])
    with pytest.raises(DamagedCheckpointError, match="checksum differs"):
        deserialize(data + b"\0")


def test_bytes_of_something_else_are_refused() -> None:
    for wrong in (b"", bytes(4), b"something else that is long enough", bytes(100)):
        with pytest.raises(DamagedCheckpointError, match=f"did not return these {len(wrong)} bytes"):
            deserialize(wrong)
    with pytest.raises(TypeError, match="is of type str; pass the bytes"):
        deserialize("text")


class Executed:
    """What an unpickler that trusts its input would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_forged_bytes_with_the_right_checksum_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Executed(), tmp_path / "saved")
    for data in ((tmp_path / "saved").read_bytes(), pickle.dumps(Executed(), 2)):
        with pytest.raises(pickle.UnpicklingError):
            deserialize(data + zlib.crc32(data).to_bytes(4))
    assert not Path("executed").exists()
