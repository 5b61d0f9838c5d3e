"""Really isolated code that tries to leave or reach something: see `fakes/cage_attacks.py`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fakes import cage_attacks
from fakes.attacked import attacked
from fakes.polling import eventually
from fakes.processes import commands
from pools.endpoint import RunningModel
from resources.backends.local.client import LocalClient
from resources.settings import settings
from tasks.errors import HarnessFailed, HarnessInterrupted
from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.harness import run_harness
from tasks.evaluators.isolation import Cage, ModelCode, isolated
from tasks.evaluators.programs.isolation_bounds import make_group, remove_group
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

PROGRAM = Path(cage_attacks.__file__)
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount", "true")
CAN_ISOLATE = (
    shutil.which("unshare") is not None and subprocess.run(NAMESPACES, check=False, capture_output=True).returncode == 0
)
ENDPOINT = "http://127.0.0.1:9/v1"
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not CAN_ISOLATE, reason="this machine allows no namespaces of users"),
]
needs_groups = pytest.mark.skipif(
    remove_group(group := make_group(1 << 29)) or group is None, reason="no memory controller of cgroup v2 here"
)


@dataclass(frozen=True)
class Attempted:
    folder: Path
    cages: Path
    output: Path
    parsed: Parsed
    outcomes: dict[str, str]
    before: dict[str, Any]

    @property
    def log(self) -> str:
        return (self.output / "harness.log").read_text()


def seen(folder: Path) -> dict[str, Any]:
    """Returns modes and contents of all files below a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def cages() -> Iterator[Path]:
    """Yields a temporary folder outside pytest's: leftovers of a killed run are too deep for pytest to remove."""
    folder = Path(tempfile.mkdtemp(prefix="assay-test-cages-")).resolve()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder))
            yield folder
    finally:
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False)


def attack(folder: Path, *arguments: str, python: Path = Path(sys.executable), timeout_seconds: float = 60) -> Parsed:
    """Runs the program as a harness with its attempt in a folder; returns the parsed results."""
    client = LocalClient(folder / "jobs", grace_seconds=1.0)
    code = ModelCode(
        endpoint=ENDPOINT,
        prepare=("true",),
        reads=(str(PROGRAM), str(folder / "tokenizer")),
        scratch=(str(folder / "benchmarks"),),
    )
    model = RunningModel(
        base_url=ENDPOINT,
        model="m",
        tokenizer="t",
        capacity=1,
        prompt_logprobs=True,
        request_timeout_seconds=10,
        api_key="k",
    )
    config = EvaluationConfig(
        model_path="checkpoint", evals=(EvalTaskConfig(name="b"),), timeout_seconds=timeout_seconds
    )
    evaluator = attacked(attack=PROGRAM, arguments=(str(folder / "outside"), *arguments), code=code)
    try:
        return run_harness(
            evaluator, model, config, output=folder / "attempt", python=python, client=client, poll_seconds=0.1
        )
    finally:
        client.shutdown()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder with the folders that an attack finds; all of its temporary files must be gone in the end."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in ("outside", "hub", "benchmarks", "tokenizer"):
        (tmp_path / name).mkdir()
    with cages() as temporary:
        yield tmp_path
        assert not seen(temporary)
    settings.cache_clear()


@pytest.fixture(scope="module")
def attempted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempted]:
    folder = tmp_path_factory.mktemp("cage")
    for name in ("outside", "hub", "benchmarks", "tokenizer"):
        (folder / name).mkdir()
        (folder / name / "content").write_text("as before")
    (folder / "outside" / "id_rsa").write_text("a private key")
    (folder / "hub" / "token").write_text("hf_secret")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        temporary = stack.enter_context(cages())
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setenv("ASSAY_CACHE_DIR", str(folder / "cache"))
        settings.cache_clear()
        sockets = [stack.enter_context(socket.socket(family)) for family in (socket.AF_UNIX,) * 2 + (socket.AF_INET,)]
        for server, address in zip(
            sockets, (f"\0assay-{os.getpid()}", str(folder / "outside" / "socket"), ("127.0.0.1", 0)), strict=True
        ):
            server.bind(address)
            server.listen()
        before = seen(folder)
        scratch = [str(folder / name) for name in ("hub", "benchmarks")]
        read_only = (sys.prefix, str(folder / "tokenizer"), str(PROGRAM.parent))
        port = str(sockets[2].getsockname()[1])
        parsed = attack(folder, port, str(os.getpid()), ",".join(read_only), ",".join(scratch))
        output = folder / "attempt"
        yield Attempted(folder, temporary, output, parsed, json.loads((output / "outcomes.json").read_text()), before)
    settings.cache_clear()


@pytest.mark.parametrize("name", cage_attacks.REACHES)
def test_attempt_to_reach_something_fails(attempted: Attempted, name: str):
    assert attempted.outcomes[name] and not attempted.outcomes[name].startswith("done")


def test_attempts_leave_nothing_outside(attempted: Attempted):
    done = {name for name in cage_attacks.LEAVES if attempted.outcomes[name].startswith("done")}
    assert set(cage_attacks.LEAVES) - done <= {"device 0:0"}, attempted.outcomes
    ours = ("attempt", "jobs", "cache")
    after = {name: state for name, state in seen(attempted.folder).items() if not name.startswith(ours)}
    assert after == attempted.before and not seen(attempted.cages)
    assert not (Path("/dev/shm") / f"assay-{os.getpid()}").exists()
    eventually(lambda: not any(str(attempted.folder / "outside").encode() in line for line in commands()))


def test_folder_of_the_attempt_holds_plain_files_of_plain_names(attempted: Attempted):
    files = [path for path in attempted.output.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert {"good.json", "setuid", "x.pth", "harness.log"} <= {path.name for path in files}
    for path in files:
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode) and not status.st_mode & 0o7133 and status.st_nlink == 1, path
        assert path.name.isprintable() and not path.name.startswith(".") and path.name != "HEAD", path
        assert "user.key" not in os.listxattr(path)
    assert len(files) <= 10_050 and "ISOLATION.JSON" not in {path.name for path in files}
    assert "isolation.json" in {path.name for path in files}
    assert json.loads((attempted.output / "isolation.json").read_text())["processes"] == 256


def test_record_and_log_say_what_was_left_behind(attempted: Attempted):
    [note] = attempted.parsed.asking.notes
    assert note in attempted.log
    for kind in ("links", "FIFOs, devices or folders", "sockets", "files with several names", "not printable"):
        assert kind in note
    assert "site.pth" not in seen(attempted.folder / "outside")


def test_harness_past_its_time_is_ended_and_nothing_that_it_left_is_followed(machine: Path):
    with pytest.raises(HarnessInterrupted):
        attack(machine, "1", "1", "", "", "stay", timeout_seconds=3)
    left_alone(machine)


def test_code_that_is_not_isolated_has_its_files_copied_by_the_same_rule(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ASSAY_CODE_ISOLATION", "where_possible")
    settings.cache_clear()
    python = machine / "bin" / "python"
    python.parent.mkdir()
    forbidden = f"echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable}"
    python.write_text(f'#!/bin/sh\nexec unshare --user --map-root-user --mount sh -c \'{forbidden} "$@"\' - "$@"\n')
    python.chmod(0o755)
    parsed = attack(machine, "1", "1", "", "", "leave", python=python)
    assert "NOT isolated" in (machine / "attempt" / "harness.log").read_text()
    assert "links: 1" in parsed.asking.notes[0]
    left_alone(machine)


def test_machine_with_too_much_open_is_no_reason_to_run_code_that_is_not_isolated(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ASSAY_CODE_ISOLATION", "where_possible")
    settings.cache_clear()
    python = machine / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 7\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(HarnessFailed, match="Too many open files"):
        attack(machine, "1", "1", "", "", "leave", python=python)
    assert "NOT isolated" not in (machine / "attempt" / "harness.log").read_text()


def left_alone(machine: Path) -> None:
    """Asserts that an attack left only plain files in its attempt, and nothing outside."""
    assert not seen(machine / "outside")
    modes = [path.lstat().st_mode for path in (machine / "attempt").rglob("*")]
    assert modes and all(stat.S_ISREG(mode) or stat.S_ISDIR(mode) for mode in modes)
    eventually(lambda: not any(str(machine / "outside").encode() in line for line in commands()))


@pytest.mark.parametrize(
    ("name", "bounds", "message"),
    [
        ("processes", {}, "at once, and 256 are allowed"),
        ("blind", {}, "at once, and 256 are allowed"),
        ("threads", {"tasks": 128}, "threads"),
        ("sockets", {}, "sockets"),
        ("memory", {"memory_bytes": 1 << 29}, "MiB together"),
        pytest.param("files_in_memory", {"memory_bytes": 1 << 29}, "more than 512 MiB together", marks=needs_groups),
    ],
)
def test_processes_together_beyond_a_bound_are_all_ended(
    tmp_path: Path, name: str, bounds: dict[str, int], message: str
):
    ran = run_alone(tmp_path, name, bounds)
    assert (ran.returncode, message in ran.stdout) == (79, True), ran.stdout
    eventually(lambda: not any(str(tmp_path).encode() in line for line in commands()))


def test_log_beyond_its_bound_keeps_its_start_and_its_end(tmp_path: Path):
    log = run_alone(tmp_path, "flood", {}).stdout
    assert len(log) < 17 << 20 and log.startswith("flood") and log.endswith("the last line\n")
    assert "bytes of the log are left out here" in log


def test_file_that_is_open_outside_is_not_open_inside(tmp_path: Path):
    with (tmp_path / "secret").open("w") as file:
        assert "open: [], " in run_alone(tmp_path, "descriptors", {}, pass_fds=(file.fileno(),)).stdout


def test_connections_to_the_endpoint_beyond_a_bound_wait(tmp_path: Path):
    opened, counts = set[object](), list[int]()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            opened.add(self)
            counts.append(len(opened))
            self.request.sendall(b"!")
            self.request.recv(1)
            opened.remove(self)

    class Server(socketserver.ThreadingTCPServer):
        request_queue_size = 540

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        ran = run_alone(tmp_path, "connections", {}, endpoint=f"http://127.0.0.1:{server.server_address[1]}/v1")
        server.shutdown()
    assert ran.stdout == "answered: 540\n"
    assert max(counts) == 512


def run_alone(
    folder: Path, name: str, bounds: dict[str, int], *, pass_fds: tuple[int, ...] = (), endpoint: str = ENDPOINT
) -> subprocess.CompletedProcess[str]:
    """Runs an attack in a cage with bounds of its own."""
    (folder / "cage" / "output").mkdir(parents=True)
    cage = Cage(folder / "cage" / "output", folder)
    argv = isolated(
        (
            sys.executable,
            "-I",
            str(PROGRAM),
            str(cage.folder),
            str(folder),
            str(urlsplit(endpoint).port),
            "1",
            "",
            "",
            name,
        ),
        ModelCode(endpoint=endpoint, prepare=(), reads=(str(PROGRAM),)),
        cage,
        python=Path(sys.executable),
        refusal=folder / "refused.json",
        seconds=60,
        variables={"HF_HOME": str(folder / "hub")},
    )
    specification = folder / "isolation.json"
    specification.write_text(json.dumps(json.loads(specification.read_text()) | bounds))
    return subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, pass_fds=pass_fds
    )
