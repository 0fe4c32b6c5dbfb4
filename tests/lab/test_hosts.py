"""Two hosts, as network namespaces with addresses of their own, and torchrun over them: faults of the network included."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs_helpers import assert_same_run

from shf.lab.records import read_run

MAIN = Path(__file__).with_name("torchrun_main.py")
PORT = 29417
EPOCHS = "60"
FORGOTTEN_SECONDS = 25.0
"""torchrun counts on a host until three heartbeats of five seconds are missing; one that joins before then waits for it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Host:
    """A namespace, its end of the link between the two, and its address."""

    name: str
    link: str
    address: str

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True)

    def crash(self) -> None:
        """Kills whatever runs on this host: the agent and its rank, which is in a session of its own."""
        found = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def torchrun(self, directory: Path, log: Path) -> subprocess.Popen[bytes]:
        """An agent with one rank that restarts it as often as it takes, in a process group of its own."""
        launcher = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-id", "hosts"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.1:{PORT}", "--local-addr", self.address]
        # said outright: torchrun would look for the endpoint's address among those of its host's name
        meeting += ["--rdzv-conf", f"is_host={int(self.address.endswith('.1'))}"]
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run", *launcher, *meeting]
        run = ["run", "tiny", "--epochs", EPOCHS, "--threads", "1", "--checkpoint-seconds", "0.2", "--quiet"]
        options = ["--set", "rank_timeout=4", "--out", str(directory)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.link, "OMP_NUM_THREADS": "1", "STEP_SECONDS": "0.1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a host that joins later never finds the master
        with log.open("ab") as out:
            return subprocess.Popen(
                [*command, str(MAIN), *run, *options], env=environment, stdout=out, stderr=out, start_new_session=True
            )


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    tag = os.getpid() % 10_000
    pair = tuple(Host(f"shf{tag}h{n}", f"shf{tag}v{n}", f"10.77.0.{n}") for n in (1, 2))
    with ExitStack() as stack:
        try:
            for host in pair:
                subprocess.run(["ip", "netns", "add", host.name], check=True, capture_output=True, text=True)
                stack.callback(subprocess.run, ["ip", "netns", "del", host.name], check=False)
                stack.callback(host.crash)
            link = ["ip", "link", "add", pair[0].link, "netns", pair[0].name, "type", "veth"]
            subprocess.run(
                [*link, "peer", "name", pair[1].link, "netns", pair[1].name], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        for host in pair:
            host.ip("addr", "add", f"{host.address}/24", "dev", host.link)
            host.ip("link", "set", host.link, "up")
            host.ip("link", "set", "lo", "up")
        yield pair  # type: ignore[misc]


@contextmanager
def agents(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait(until: Callable[[], bool], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds} s; the log ends:\n{log.read_text()[-3000:]}"
        time.sleep(0.1)


def run_undisturbed(hosts: tuple[Host, Host], directory: Path, log: Path) -> None:
    running = [host.torchrun(directory, log) for host in hosts]
    with agents(*running):
        wait(lambda: all(process.poll() is not None for process in running), 400, log)
    assert [process.returncode for process in running] == [0, 0], log.read_text()[-3000:]
    assert read_run(directory).run["status"] == "finished"


def recover(first: subprocess.Popen[bytes], hosts: tuple[Host, Host], directory: Path, log: Path) -> None:
    """A new agent on the second host; the first one's is still there and takes the run up with it."""
    time.sleep(FORGOTTEN_SECONDS)
    second = hosts[1].torchrun(directory, log)
    with agents(first, second):
        wait(lambda: first.poll() is not None, 400, log)
        assert first.returncode == 0, log.read_text()[-3000:]
    assert read_run(directory).run["status"] == "finished"


def test_a_crashed_host_is_replaced_and_nothing_is_lost(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    run_undisturbed(hosts, tmp_path / "whole", tmp_path / "whole.log")
    directory, log = tmp_path / "run", tmp_path / "run.log"
    first, second = (host.torchrun(directory, log) for host in hosts)
    with agents(first, second):
        wait(lambda: rows(directory) > 60, 120, log)
        hosts[1].crash()
        wait(lambda: "rank 1 gave no sign within 4 s" in log.read_text(), 60, log)
        recover(first, hosts, directory, log)
    assert_same_run(directory, tmp_path / "whole")


def test_a_cut_link_is_noticed_on_both_sides_and_nothing_is_lost(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    run_undisturbed(hosts, tmp_path / "whole", tmp_path / "whole.log")
    directory, logs = tmp_path / "run", [tmp_path / "first.log", tmp_path / "second.log"]
    first, second = (host.torchrun(directory, log) for host, log in zip(hosts, logs, strict=True))
    with agents(first, second):
        wait(lambda: rows(directory) > 60, 120, logs[0])
        hosts[1].ip("link", "set", hosts[1].link, "down")
        wait(lambda: "rank 1 gave no sign within 4 s" in logs[0].read_text(), 60, logs[0])
        wait(lambda: "does not answer: its host or the link to it is gone" in logs[1].read_text(), 60, logs[1])
        reached = rows(directory)
        hosts[1].crash()
        hosts[1].ip("link", "set", hosts[1].link, "up")
        recover(first, hosts, directory, logs[0])
    assert rows(directory) > reached
    assert_same_run(directory, tmp_path / "whole")
