"""Optimizers that call a closure: its gradients and its loss are those of the global batch."""

from __future__ import annotations

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_3, each_of, scaling
from torch.nn import functional as F
from twin import Plain, assert_all_are, compare, loader_of, mean_loss, model

from unisono import Accelerator, DeviceLoader, backward, optimizer_step

mode = each_of(scaling(SOLO, THREADS_3, PROCESSES_2))


def lbfgs(network):
    return torch.optim.LBFGS(network.parameters(), lr=0.2, max_iter=4, line_search_fn="strong_wolfe")


def closing(learn):
    """A loop that gives a closure to each step, with these lines and the loss that they return."""

    def lines(accelerator, loader):
        network = model()
        network, optimizer, loader = accelerator.prepare(network, lbfgs(network), loader)
        for batch in loader:

            def closure(batch=batch):
                optimizer.zero_grad()
                return learn(accelerator, network, batch)

            optimizer.step(closure)
        return network.state_dict()

    return lines


def with_plain_backward(accelerator, network, batch):
    loss = mean_loss(network, batch)
    loss.backward()
    return loss


def with_our_backward_and_tokens(accelerator, network, batch):
    loss = mean_loss(network, batch, tokens=True)
    accelerator.backward(loss, weight=batch[2].sum())
    return loss


def with_clipping_inside(accelerator, network, batch):
    loss = mean_loss(network, batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(network.parameters(), 0.2)
    return loss


def test_a_closure_sees_the_global_batch(mode):
    compare(mode, {each.__name__: closing(each) for each in (with_plain_backward, with_clipping_inside)}, 23, 4)
    compare(mode, closing(with_our_backward_and_tokens), 24, 4)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_bare_step_takes_a_closure(mode, is_weighted):
    def body():
        network = model()
        optimizer = lbfgs(network)
        for batch in DeviceLoader(loader_of(24 if is_weighted else 23, 4)):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = mean_loss(network, batch, tokens=is_weighted)
                backward(loss, weight=batch[2].sum()) if is_weighted else loss.backward()
                return loss

            optimizer_step(optimizer, optimizer_args={"closure": closure})
        return network.state_dict()

    lines, samples = (with_our_backward_and_tokens, 24) if is_weighted else (with_plain_backward, 23)
    assert_all_are(mode.run(body), closing(lines)(Plain(), loader_of(samples, 4 * mode.ranks)))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"), ({"mixed_precision": "fp16"}, "fp16")],
)
def test_what_does_not_go_with_a_closure_is_an_error(options, words):
    accelerator = Accelerator(**options)
    network = model().float()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    inputs = torch.ones(1, 5)
    for _ in range(2):
        loss = F.mse_loss(network(inputs), torch.ones(1, 2))
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            with pytest.raises(RuntimeError, match=words):
                optimizer.step(lambda: None)
        else:
            optimizer.step()
