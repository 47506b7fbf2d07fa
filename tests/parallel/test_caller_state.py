"""What a thread has switched on, for another one that works on its behalf."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
import torch

from unisono.parallel.caller_state import CallerState

variable: ContextVar[str] = ContextVar("variable", default="unset")


def seen() -> tuple[object, ...]:
    layer, inputs = torch.nn.Linear(2, 2), torch.ones(1, 2)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
        layer(inputs).dtype,
        layer(inputs).requires_grad,
        variable.get(),
    )


def elsewhere() -> tuple[object, ...]:
    state = CallerState.of_this_thread(["cpu"])
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(seen).result()
        found = pool.submit(state.run, seen).result()
        assert pool.submit(seen).result() == before, "it leaves the thread as it was"
    return found


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", cache_enabled=False),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.set_grad_enabled(False),
    ],
)
def test_the_other_thread_sees_what_this_one_has_switched_on(mode):
    with mode():
        assert elsewhere() == seen()


def test_modes_nest():
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert elsewhere() == seen()
    with torch.no_grad(), torch.enable_grad():
        assert elsewhere() == seen()
    with torch.inference_mode(), torch.inference_mode(False):
        assert elsewhere() == seen()


def test_what_the_body_raises_passes_and_the_thread_is_left_as_it_was():
    with torch.no_grad():
        state = CallerState.of_this_thread([])
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.submit(state.run, lambda: 1 // 0).result()
        assert pool.submit(torch.is_grad_enabled).result() is True
