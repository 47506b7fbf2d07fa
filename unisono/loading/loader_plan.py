"""What a loader was given, checked, and what follows from it for each of its passes: source, rule and lengths.

*Threads:* the loop's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from unisono.arguments import check_integer, check_type
from unisono.comm.operations import LOOP
from unisono.devices import resolve_devices
from unisono.loading.balance import Balance
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.indexed import IndexedSource
from unisono.loading.loader_options import Dealt, LoaderOptions, check_num_workers, make_rule
from unisono.loading.registry import check_order, source_of
from unisono.loading.sharding import Rule
from unisono.loading.stream_parts import loader_behind
from unisono.loading.streams import StreamSource
from unisono.loading.tuning import Tuner
from unisono.world import World


class LoaderPlan:
    """The same for all passes of a loader. TypeError and ValueError as for `ParallelLoader`.

    Attributes:
        read: the loader that is read; held here, since its source does not.
        in_turn: the batches of a round, for each device.
        balance: None unless ranks carry as many virtual ranks as they are fast. A source other than an `IndexedSource`
            could not begin in the middle of an epoch without reading what comes before.
        maker: the thread that made the loader.
    """

    def __init__(
        self, loader: Iterable[Any], devices: Sequence[str | int | torch.device], world: World, options: LoaderOptions
    ) -> None:
        _check_loader(loader)
        self.prefetch = check_integer(options.get("prefetch", 8), "prefetch", 0)
        self.batch_dim = options.get("batch_dim", 0)
        check_type(self.batch_dim, "batch_dim", "pass a dimension, 0 for the first", int)
        self.devices = resolve_devices(devices)
        self.world, self.loader, self.read = world, loader, loader_behind(loader)
        if len(self.devices) > 1 and world.world_size > 1:
            raise ValueError(
                f"devices={[str(device) for _, device in self.devices]} in a world of {world.world_size} ranks: "
                "each rank has one device; pass [current_world().device]"
            )
        self.maker = threading.current_thread()
        self.rule = make_rule(world, len(self.devices), self.read, options)
        if self.rule.is_compared:
            check_order(loader, world)
        virtual = self.rule.virtual
        self.in_turn = 1 if virtual is None else virtual.each
        sources, seed = options.get("sources"), options.get("seed")
        if seed is not None:
            check_type(seed, "seed", "pass an integer, or None for the loader's own", Integral)
            seed = int(seed)  # so that a state can be written to any file format
        find_source = source_of if sources is None else sources.of
        self.source = find_source(self.read, world, self.batch_dim, seed)
        if not self.prefetch and (len(self.devices) > 1 or self.source.is_uneven):
            raise ValueError(
                "prefetch=0 makes the loop itself read, which several devices, or ranks with parts of one stream, "
                "cannot do; pass a size of at least 1"
            )
        self.tuner = self._tuner_of(options.get("num_workers"))
        balances = virtual is not None and virtual.balances and isinstance(self.source, IndexedSource)
        self.balance = Balance(world) if balances else None

    def _tuner_of(self, given: Any) -> Tuner | None:
        check_num_workers(given)
        if given is None or not isinstance(self.source, IndexedSource):
            return None
        if len(self.devices) > 1:
            raise ValueError(f"num_workers='auto' is for a loop over one device, and there are {len(self.devices)}")
        tuner = self.source.tune(self.loader)  # type: ignore[arg-type]
        self.world.timeline.tuned[id(tuner)] = tuner.describe
        return tuner

    def rule_of_next_pass(self) -> Rule:
        """The rule, with virtual ranks as the next pass carries them, and with the number of its first round: one more
        in each epoch where the length is unknown, so that rounds with witnesses are no less frequent."""
        rule = self.rule
        if rule.virtual is not None:
            lengths, skipped = self.lengths(), self.num_skipped() // self.in_turn
            rounds = 1 if lengths is None else lengths[1] // self.in_turn
            rule = replace(rule, first=self.source.next_position()[0] * rounds + skipped)
        if self.balance is not None:
            self.balance.restart()
            if self.balance.virtual is not None and torch.is_grad_enabled():  # the loop seems to train
                rule = rule.carried_as(self.balance.virtual)
        return rule

    def meet_others(self) -> str:
        """Announce this rank's next loop; or return the words, if its first round is to be announced with it. Before
        their first loop, ranks that read one stream compare their datasets."""
        size = self.source.length if not self.source.is_uneven and hasattr(self.loader, "dataset") else None
        name = type(self.loader).__name__ + (f" of {size} samples" if size is not None else "")
        words = f"{LOOP} a {name}, epoch {self.source.next_position()[0]}"
        if self.rule.is_compared and not isinstance(self.source, StreamSource):
            return words
        self.world.comm.announce(words)
        if self.rule.is_compared and isinstance(self.source, StreamSource):
            self.source.compare(self.world)
        return ""

    def lengths(self) -> tuple[int, int] | None:
        """The numbers of batches of an epoch: from the given loader, and for each device; None without a length."""
        try:
            return self.source.num_rounds(Rule()), self.source.num_rounds(self.rule) * self.in_turn
        except TypeError:
            return None

    def num_skipped(self) -> int:
        """The number of batches before the position at which the next pass begins; 0 if it is unknown."""
        return self.batches_before(self.source.next_position()[1])

    def batches_before(self, position: Mapping[str, Any]) -> int:
        """The number of batches for each device before a position; 0 if it is unknown."""
        sampler = getattr(self.loader, "batch_sampler", None)  # has it, if the DataLoader was made with one
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        taken = position["offset"] // self.rule.shards // size if size else 0
        return self.rule.rounds_of(position.get("batches", taken)) * self.in_turn


def _check_loader(loader: Any) -> None:
    if isinstance(loader, Dealt | DeviceIterator):
        raise TypeError(
            f"loader={loader!r} is of type {type(loader).__name__}, which is sharded already; pass its DataLoader"
        )
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping | torch.Tensor):
        raise TypeError(
            f"loader={loader!r:.200} is of type {type(loader).__name__}; pass a DataLoader, or an iterable of "
            "batches: a list of them, DataLoader(TensorDataset(tensor)) for a tensor, loader.values() for a dict"
        )
