"""Several processes under torchrun: rank 0 runs the experiment, the others help it with every step.

Rank 0 reads the data, evaluates, records, saves and decides when to stop, with the code that it has alone. The others hold
the same network and optimizer: they are handed every batch, take their rows of it, and step together with rank 0.
"""

import io
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from shf.data.batches import count_rows, select_rows
from shf.distributed import channel as distributed
from shf.distributed.channel import Channel
from shf.errors import RankError
from shf.info import StepInfo
from shf.lab.baselines.registry import METHODS
from shf.lab.baselines.second_order import SHFMethod
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
        assert isinstance(method, SHFMethod)
        _say(self._channel, "build", config=config.to_json())
        _meet(self._channel)
        if (seconds := config.settings.get("rank_timeout")) is not None:  # the others wait as long as rank 0 needs
            self._channel.wait_at_most(seconds)
        training.method = _Leading(method.optimizer, self._channel, self)

    def follow(self) -> None:
        """The other ranks: does what rank 0 says until it says that the run is over."""
        assert self._channel is not None
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides: it finishes its iteration, saves, and tells
            signal.signal(number, signal.SIG_IGN)
        optimizer: SHF | None = None
        while (message := _listen(self._channel))["do"] != "end":
            if message["do"] == "build":
                optimizer = _build(RunConfig.from_json(message["config"]))
                _meet(self._channel)
            else:
                assert optimizer is not None
                _obey(optimizer, message, self._channel)


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
                    _say(channel, "end")
    finally:
        distributed.leave()


class _Leading(SHFMethod):
    """SHF on rank 0: what it does, the others are told to do as well."""

    def __init__(self, optimizer: SHF, channel: Channel, crew: Crew) -> None:
        super().__init__(optimizer)
        self._channel, self._crew = channel, crew
        self._current = False  # whether the others have this network's parameters and this optimizer's state

    def advance(self, inputs: Any, targets: Any) -> StepInfo:
        if not self._current:
            optimizer = self.optimizer
            _say(self._channel, "load", model=optimizer.model.state_dict(), optimizer=optimizer.state_dict())
            self._current = True
        _say(self._channel, "step", inputs=inputs, targets=targets)
        self._crew.listening = False
        info = super().advance(*_own(self._channel, inputs, targets))
        self._crew.listening = True
        return info

    def next_epoch(self) -> None:
        if self._current:
            _say(self._channel, "epoch")
        super().next_epoch()

    def state_dict(self) -> dict[str, Any]:
        if self._current:
            _say(self._channel, "state")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._current = False


def _build(config: RunConfig) -> SHF:
    """Network and optimizer of another rank."""
    torch.set_num_threads(config.threads)
    model = build_model(config.experiment, seed=config.seed, dropout_layers=config.dropout_layers)
    method = METHODS[config.method].build(model, build_loss(config.experiment), config.settings)
    assert isinstance(method, SHFMethod)
    return method.optimizer


def _obey(optimizer: SHF, message: Mapping[str, Any], channel: Channel) -> None:
    match message["do"]:
        case "load":
            optimizer.model.load_state_dict(message["model"])
            optimizer.load_state_dict(message["optimizer"])
        case "step":
            optimizer.step(*_own(channel, message["inputs"], message["targets"]))
        case "epoch":
            optimizer.next_epoch()
        case "state":
            optimizer.state_dict()
        case other:
            raise RuntimeError(f"rank 0 said {other!r}, which rank {channel.rank} does not know")


def _own(channel: Channel, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """This rank's rows of a batch: consecutive ones, in rank order."""
    rows = torch.arange(count_rows(inputs)).tensor_split(channel.size)[channel.rank]
    return select_rows(inputs, rows), select_rows(targets, rows)


def _say(channel: Channel, what: str, **content: Any) -> None:
    buffer = io.BytesIO()
    torch.save({"do": what, **content}, buffer)
    channel.broadcast_bytes(buffer.getvalue())


def _meet(channel: Channel) -> None:
    """Returns when all processes have come to it."""
    channel.gather_integers([0])


def _listen(channel: Channel) -> dict[str, Any]:
    content = channel.broadcast_bytes(None)
    return torch.load(io.BytesIO(content), weights_only=True)  # type: ignore[no-any-return]
