"""Several processes under torchrun: rank 0 runs the experiment, the others help it with every step.

Rank 0 reads the data, evaluates, records, saves and decides when to stop, with the code that it has alone. The others hold
the same network and optimizer: they are handed every batch, take their rows of it, and step together with rank 0.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from shf.algorithm import StepInfo
from shf.data.batches import count_rows, select_rows
from shf.distributed import channel as distributed
from shf.distributed.channel import Channel
from shf.errors import RankError
from shf.lab.baselines.registry import METHODS
from shf.lab.experiments import ExperimentError
from shf.lab.problem import build_loss, build_model
from shf.lab.runconfig import RunConfig
from shf.lab.training import Training
from shf.optimizer import SHF


class Crew:
    """The processes of a run; without a channel, this one alone.

    Attributes:
        restarted: whether torchrun has started them anew after a failure.
        listening: on rank 0, whether the others wait for what it says; in a step, and after one that failed, they do not.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel
        self.listening = True
        self.restarted = channel is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    @property
    def size(self) -> int:
        return 1 if self._channel is None else self._channel.size

    @property
    def follows(self) -> bool:
        """Whether this process is to `follow`, and does nothing else."""
        return self._channel is not None and self._channel.rank > 0

    def lead(self, training: Training) -> None:
        """Rank 0: from now on the others take part in the steps of this training."""
        if self._channel is None:
            return
        config, method = training.config, training.method
        if config.method != "shf":
            raise ExperimentError(
                f"{config.method} works on one process; under torchrun only shf does its steps on {self.size}"
            )
        _say(self._channel, {"do": "build", "config": config.to_json()})
        _meet(self._channel)
        if (seconds := config.settings.get("rank_timeout")) is not None:  # the others wait as long as rank 0 needs
            self._channel.wait_at_most(seconds)
        method.optimizer = _Leading(method.optimizer, self._channel, self)  # type: ignore[attr-defined]

    def follow(self) -> None:
        """The other ranks: does what rank 0 says until it says that the run is over."""
        assert self._channel is not None
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides: it finishes its iteration, saves, and tells
            signal.signal(number, signal.SIG_IGN)
        follower: _Follower | None = None
        while (message := _listen(self._channel))["do"] != "end":
            if message["do"] == "build":
                follower = _Follower(RunConfig.from_json(message["config"]), self._channel)
                _meet(self._channel)
            else:
                assert follower is not None
                follower.obey(message)


@contextmanager
def joined() -> Iterator[Crew]:
    """The processes that torchrun started, for as long as the block lasts; this one alone where it did not."""
    channel = distributed.join()
    if channel is None:
        yield Crew()
        return
    crew = Crew(channel)
    try:
        try:
            yield crew
        finally:
            if channel.rank == 0 and crew.listening:  # also where rank 0 failed; who is gone already cannot be told
                with suppress(RankError):
                    _say(channel, {"do": "end"})
    finally:
        distributed.leave()


class _Leading:
    """The optimizer of rank 0: what it is told to do, the others are told as well."""

    def __init__(self, optimizer: SHF, channel: Channel, crew: Crew) -> None:
        self._optimizer = optimizer
        self._channel = channel
        self._crew = crew
        self._current = False  # whether the others have this network's parameters and this optimizer's state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, inputs: Any, targets: Any) -> StepInfo:
        if not self._current:
            self._say("load", model=self._optimizer.model.state_dict(), optimizer=self._optimizer.state_dict())
            self._current = True
        self._say("step", inputs=inputs, targets=targets)
        self._crew.listening = False
        info = self._optimizer.step(*_own(self._channel, inputs, targets))
        self._crew.listening = True
        return info

    def next_epoch(self) -> None:
        if self._current:
            self._say("epoch")
        self._optimizer.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        if self._current:
            self._say("state")
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
        self._current = False

    def _say(self, what: str, **content: Any) -> None:
        _say(self._channel, {"do": what, **content})


class _Follower:
    """Network and optimizer of another rank."""

    def __init__(self, config: RunConfig, channel: Channel) -> None:
        torch.set_num_threads(config.threads)
        model = build_model(config.experiment, seed=config.seed, dropout_layers=config.dropout_layers)
        method: Any = METHODS[config.method].build(model, build_loss(config.experiment), config.settings)
        self._model = model
        self._optimizer: SHF = method.optimizer
        self._channel = channel

    def obey(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "load":
                self._model.load_state_dict(message["model"])
                self._optimizer.load_state_dict(message["optimizer"])
            case "step":
                self._optimizer.step(*_own(self._channel, message["inputs"], message["targets"]))
            case "epoch":
                self._optimizer.next_epoch()
            case "state":
                self._optimizer.state_dict()
            case other:
                raise RuntimeError(f"rank 0 said {other!r}, which rank {self._channel.rank} does not know")


def _own(channel: Channel, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """This rank's rows of a batch: consecutive ones, in rank order."""
    rows = torch.arange(count_rows(inputs)).tensor_split(channel.size)[channel.rank]
    return select_rows(inputs, rows), select_rows(targets, rows)


def _say(channel: Channel, message: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(dict(message), buffer)
    channel.broadcast_bytes(buffer.getvalue())


def _meet(channel: Channel) -> None:
    """Returns when all processes have come to it."""
    channel.gather_integers([0])


def _listen(channel: Channel) -> dict[str, Any]:
    content = channel.broadcast_bytes(None)
    return torch.load(io.BytesIO(content), weights_only=True)  # type: ignore[no-any-return]
