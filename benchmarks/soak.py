"""A soak: training that is killed, starved of disk and fed bad batches, again and again, must end as if undisturbed.

python benchmarks/soak.py run --minutes 60     # writes benchmarks/results/soak.json
python benchmarks/soak.py report               # writes the figures into docs/reliability.md

Each round trains a small CURVES autoencoder twice from the same seed: undisturbed, and under random faults until it is
done. The disturbed one must then have the same metrics (but for the clock) and bitwise the same parameters, δ and λ.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import reliability
from shf.lab import machine, runner
from shf.lab.baselines import registry
from shf.lab.baselines.protocol import MethodSpec
from shf.lab.checkpoint import CheckpointError, CheckpointStore
from shf.lab.configure import Request, configure
from shf.lab.experiments import Experiment, Task
from shf.lab.lock import RunLockedError, locked
from shf.lab.observer import Observer
from shf.lab.records import RecordError, read_run
from shf.lab.runconfig import RunConfig
from soak_faults import Fault, FileSizeLimit, FullDisk, ReadOnly, Vanished, become_nobody, damage_newest

RESULTS = Path(__file__).parent / "results" / "soak.json"
NOBODY = 65534
DISK_MEGABYTES = 24
OFTEN = runner.RunOptions(checkpoint_seconds=0.05)
DONE, NOT_SAVED, NO_DISK, FAILED = 0, 3, 4, 1
"""How a child ends: done and recorded; done but not recorded; the disk failed before training began; anything else."""
PASSED_OVER = {"rejections", "elapsed", "metrics"}
"""What may differ: the count of steps in a row that did not move, and what is about the clock."""


def experiment(epochs: int) -> Experiment:
    return Experiment(
        name="soak",
        summary="a small autoencoder of curves",
        task=Task.AUTOENCODER,
        data="curves",
        data_options={"train": 1000, "test": 100},
        sizes=(784, 60, 12),
        epochs=epochs,
        gradient_batch=100,
        metric="train_squared_error",
        figure="none",
        minutes=1,
        paper={},
        settings={"damping": 1.0, "cg_iterations": 8, "curvature_batch": 50, "nonfinite": "skip"},
    )


def config_of(seed: int, epochs: int) -> RunConfig:
    return configure(Request("soak", epochs=epochs, seed=seed, untuned=True, threads=1), experiment(epochs))


class Fed:
    """A method that is given a bad batch before some of the good ones; each must be skipped."""

    def __init__(self, method: Any, say: Any) -> None:
        self._method, self._say = method, say
        self._draw = random.Random(os.urandom(8))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        if self._draw.random() < 0.1:
            spoiled = inputs.clone()
            row, column = self._draw.randrange(len(inputs)), self._draw.randrange(inputs.shape[1])
            spoiled[row, column] = self._draw.choice([float("nan"), float("inf"), float("-inf")])
            assert self._method.step(spoiled, targets).get("skipped") == 1.0, "a bad batch was not skipped"
            self._say("bad batch skipped")
        return self._method.step(inputs, targets)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


class Listener(Observer):
    """Writes down what the run says."""

    def __init__(self, say: Any) -> None:
        self._say = say

    def warn(self, text: str) -> None:
        known = ("could not be written", "can be written again", "passed over", "is installed")
        self._say("warned: " + next((words for words in known if words in text), text))


def child(config: RunConfig, home: Path, log: Path, *, resumed: bool) -> int:
    """Starts or resumes the run in a new process, with bad batches among the good; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(log.with_name("stderr"), os.O_WRONLY | os.O_APPEND), 2)
        become_nobody(NOBODY)

        def say(text: str) -> None:
            os.write(handle, (text + "\n").encode())

        genuine = registry.METHODS["shf"]
        fed = MethodSpec("shf", genuine.summary, lambda *a: Fed(genuine.build(*a), say), genuine.defaults)
        registry.METHODS = {"shf": fed}  # type: ignore[assignment]
        act = runner.resume if resumed else runner.start
        result = act(*([home] if resumed else [config, home]), observer=Listener(say), options=OFTEN)  # type: ignore[operator]
        code = DONE if result.saved and result.status.value == "finished" else NOT_SAVED
    except (OSError, RecordError, CheckpointError):
        code = NO_DISK
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def owner_of(home: Path) -> int | None:
    """The process that has noted itself as the owner of a run directory; a dead one's note may still be there."""
    try:
        return int(json.loads((home / "owner.json").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


def second_is_refused(home: Path) -> bool:
    """Whether a process that wants the same directory is turned away by its lock."""
    try:
        with locked(home):
            return False
    except RunLockedError:
        return True


def ended_within(pid: int, seconds: float) -> int | None:
    """The status of a process that is about to end, having given its lock back; None if it is still there after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    return None


def disturbed(
    config: RunConfig, home: Path, log: Path, faults: list[Fault], draw: random.Random, counts: collections.Counter[str]
) -> None:
    """Runs the configuration in `home` to its end, whatever comes between."""
    while True:
        pid, active, faulty = child(config, home, log, resumed=(home / "run.json").exists()), None, False
        started = time.monotonic()
        life = draw.expovariate(1 / 2.5)
        status = None
        while status is None and time.monotonic() - started < life:
            time.sleep(draw.uniform(0.0, 0.3))
            found, code = os.waitpid(pid, os.WNOHANG)
            if found:
                status = code
                break
            if active is not None and draw.random() < 0.6:
                active.end(home, pid)
                active = None
            elif active is None and draw.random() < 0.4 and (home / "checkpoints").is_dir():
                active, faulty = draw.choice(faults), True
                active.begin(home, pid)
                counts[active.name] += 1
            elif active is None and draw.random() < 0.05 and owner_of(home) == pid:
                refused = second_is_refused(home)
                status = None if refused else ended_within(pid, 10.0)
                assert refused or status is not None, "a second process was let into the run directory"
                counts["second process refused"] += refused
        if status is None:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        if active is not None:
            active.end(home, pid)
        if os.WIFSIGNALED(status):
            counts["killed (SIGKILL)"] += 1
            counts["killed inside a write"] += any(home.rglob(".*.partial"))
            if draw.random() < 0.2 and damage_newest(home, draw):
                counts["newest checkpoint damaged"] += 1
            continue
        ended = os.WEXITSTATUS(status)
        if ended == DONE:
            return
        if ended == FAILED or not faulty:
            raise RuntimeError("a child failed:\n" + log.with_name("stderr").read_text()[-4000:])
        counts["ended on a failing disk, and repeated"] += 1


def same(a: Any, b: Any) -> bool:
    """Equal structures, tensors bitwise."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in PASSED_OVER)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_same_end(whole: Path, home: Path) -> None:
    ends = [CheckpointStore(d / "checkpoints").load_latest() for d in (whole, home)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert same(ends[0].state, ends[1].state), f"{home}: other parameters or state than undisturbed"
    records = [read_run(d) for d in (whole, home)]
    assert records[1].problems == (), records[1].problems
    for kind in ("epochs", "iterations"):
        rows = [
            [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in getattr(r, kind)] for r in records
        ]
        assert rows[0] == rows[1], f"{home}: other metrics than undisturbed"


def small_disk(directory: Path) -> bool:
    """Puts a file system of a few megabytes there, if this process may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m,mode=777", "tmpfs", str(directory)]
    return os.getuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0


def warm_up(base: Path) -> None:
    """Does everything once, so that a child without rights to the interpreter's files finds all modules imported."""
    runner.start(config_of(0, 1), base)
    runner.resume(base, epochs=2)
    shutil.rmtree(base)


def soak(minutes: float, epochs: int, seed: int, results: Path) -> None:
    torch.set_num_threads(1)
    draw, counts = random.Random(seed), collections.Counter[str]()
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    base.chmod(0o755)
    os.environ["SHF_CACHE"] = str(base / "cache")
    disk = base / "disk"
    disk.mkdir(mode=0o777)
    disk.chmod(0o777)
    own_disk = small_disk(disk)
    faults: list[Fault] = [FullDisk() if own_disk else FileSizeLimit(), ReadOnly(), Vanished()]
    log = base / "said"
    for file in (log, log.with_name("stderr")):
        file.touch(mode=0o666)
        file.chmod(0o666)
    warm_up(base / "whole")
    started, began, rounds = time.monotonic(), datetime.datetime.now(datetime.UTC), 0
    try:
        while time.monotonic() - started < 60 * minutes:
            config = config_of(rounds, epochs)
            whole, home = base / "whole", disk / "run"
            undisturbed = runner.start(config, whole)
            home.mkdir()
            os.chown(home, NOBODY, NOBODY) if os.getuid() == 0 else None
            disturbed(config, home, log, faults, draw, counts)
            check_same_end(whole, home)
            rounds += 1
            print(f"round {rounds}: the same end; {dict(counts)}", flush=True)
            for directory in (whole, home):
                shutil.rmtree(directory)
            said = collections.Counter(log.read_text().splitlines())
            record = {
                "command": f"python benchmarks/soak.py run --minutes {minutes:g} --epochs {epochs} --seed {seed}",
                "began": began.isoformat(timespec="seconds"),
                "minutes": round((time.monotonic() - started) / 60, 1),
                "rounds": rounds,
                "rounds with the same end": rounds,
                "iterations per round": undisturbed.summary["iterations"],
                "faults": dict(sorted(counts.items())),
                "the runs' own words": dict(sorted(said.items())),
                "versions": machine.versions(),
                "machine": machine.description(),
            }
            results.parent.mkdir(exist_ok=True)
            results.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        if own_disk:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    words = parser.parse_args()
    if words.action == "run":
        soak(words.minutes, words.epochs, words.seed, words.results)
    else:
        reliability.report(words.results.parent)


if __name__ == "__main__":
    main()
