"""Access to a pool: the rights of each key, and places where its prompts, keys and tokens must not appear."""

from __future__ import annotations

import ast
import inspect
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import pools.proxy.server
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.pools import InferencePool
from fakes.proxy import ADMIN_KEY, CLIENT_KEY, JOIN_TOKEN, PoolState, RunningProxy, running_proxy
from faults.scenarios.processes import command_line, descendants, engine_key, listens_on
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import keep_up, take_down
from resources.backends.local.client import LocalClient
from resources.settings import settings

CANARY = "canary-7f3a91c2-the-prompt-nobody-may-see"
MODEL = "run-1"
CLIENT_PATHS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("POST", "/cells/cell/attempt/v1/completions"),
    ("POST", "/cells/cell/attempt/v1/chat/completions"),
    ("GET", "/cells/cell/attempt/v1/models"),
]
ADMIN_PATHS = [("PUT", "/admin/state")]
USER_PATHS = [
    ("GET", "/pool"),
    ("GET", "/admin/status"),
    ("PUT", "/admin/leases/lease"),
    ("DELETE", "/admin/leases/lease"),
    ("PUT", "/admin/cells/cell/attempt"),
    ("GET", "/admin/cells/cell/attempt"),
    ("DELETE", "/admin/cells/cell/attempt"),
]
ENGINE_PATHS = ("/v1/completions", "/collective_rpc", "/pause", "/reset_prefix_cache", "/health")
REPLICA_PATHS = [("POST", "/replicas/replica-0")]
EVERY_KEY = {"client": CLIENT_KEY, "admin": ADMIN_KEY, "join": JOIN_TOKEN}
OPENED_BY = (
    (CLIENT_PATHS, ("client",)),
    (ADMIN_PATHS, ("admin",)),
    (USER_PATHS, ("client", "admin")),
    (REPLICA_PATHS, ("join",)),
)
CASES = [(method, path, keys) for paths, keys in OPENED_BY for method, path in paths]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path_factory.mktemp("proxy"), max_body_bytes=1000) as running:
        running.tell(PoolState(models={MODEL: "d"}))
        yield running


def _refusals(keys: tuple[str, ...]) -> list[dict[str, str]]:
    # headers that must be refused on a path of these keys
    right = EVERY_KEY[keys[0]]
    others = [value for name, value in EVERY_KEY.items() if name not in keys]
    wrong = [*others, "wrong", right[:-1], f"{right}x", right.upper(), "None"]
    headers = [{"Authorization": f"Bearer {value}"} for value in wrong]
    return [
        {},
        *headers,
        {"Authorization": "Bearer"},
        {"Authorization": right},
        {"Authorization": f"Basic {right}"},
        {"Authorization": f"Bearer{right}"},
        {"X-Api-Key": right},
        {"Cookie": f"Authorization=Bearer {right}"},
    ]


@pytest.mark.parametrize(("method", "path", "keys"), CASES)
def test_path_without_its_own_key_is_answered_401(
    proxy: RunningProxy, method: str, path: str, keys: tuple[str, ...]
) -> None:
    with httpx.Client(base_url=proxy.url) as client:
        for headers in _refusals(keys):
            answer = client.request(method, path, headers=headers, content=b"{}")
            assert answer.status_code == 401, headers
            assert not any(EVERY_KEY[key] in answer.text for key in keys)
        for key in keys:
            opened = {"Authorization": f"Bearer {EVERY_KEY[key]}"}
            assert client.request(method, path, headers=opened, content=b"{}").status_code != 401


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1/../admin/status", "/ADMIN/status", "/"])
def test_way_around_a_path_finds_nothing(proxy: RunningProxy, path: str) -> None:
    target = f"{proxy.url}{path}"
    assert httpx.get(target).status_code in (401, 404)


def test_health_is_open_and_says_nothing_secret(proxy: RunningProxy) -> None:
    answer = httpx.get(f"{proxy.url}/health")
    assert set(answer.json()) == {"status", "replicas", "held"}
    assert not [value for value in (*EVERY_KEY.values(), MODEL) if value in answer.text]


def test_keys_are_compared_in_constant_time() -> None:
    # a single function compares keys, by `hmac.compare_digest` and never by an operator
    tree = ast.parse(inspect.getsource(pools.proxy.server))
    carries = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_carries")
    calls = [ast.unparse(node) for node in ast.walk(carries) if isinstance(node, ast.Call)]
    compared = [ast.unparse(node) for node in ast.walk(carries) if isinstance(node, ast.Compare)]
    assert any(call.startswith("hmac.compare_digest(") and "key" in call for call in calls)
    assert not [node for node in compared if "key" in node or "given" in node]


def test_too_large_head_or_body_has_its_own_status(proxy: RunningProxy) -> None:
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    large = httpx.post(f"{proxy.url}/v1/completions", headers=headers, content=b"x" * 1001)
    assert large.status_code == 413
    assert httpx.get(f"{proxy.url}/v1/models", headers={**headers, "X-Much": "x" * 100_000}).status_code == 431
    many = {**headers, **{f"X-{number}": "x" * 50 for number in range(2000)}}
    assert httpx.get(f"{proxy.url}/v1/models", headers=many).status_code == 431


@dataclass(frozen=True)
class _Used:
    # a pool used with the canary as its prompt, seen from outside
    folder: Path
    evaluation: Path
    secrets: tuple[str, ...]
    command_lines: tuple[str, ...]
    listening: tuple[tuple[str, int], ...]
    metrics: str
    shown: str
    specifications: int
    engine_keys: tuple[str, ...]
    engines_without_their_key: tuple[int, ...]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Used]:
    folder = tmp_path_factory.mktemp("secrets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_CACHE_DIR", str(folder / "cache"))
        settings.cache_clear()
        yield _use_a_pool(folder)
    settings.cache_clear()


def _use_a_pool(folder: Path) -> _Used:
    checkpoint = Servable.from_uri(MODEL, str(write_checkpoint(folder / "step-1", seed=1)))
    evaluation = folder / "evaluations"
    events: list[str] = []
    client = LocalClient()
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, "resource_config": {"replicas": 2}})
    others = set(descendants(os.getpid()))  # clusters and servers of other tests
    with InferencePool(
        config, [checkpoint], client=client, launcher=FakeLauncher(folder), on_event=events.append
    ) as pool:
        opened = pool.session.open(MODEL, cell="cell", attempt="first", mirror=str(evaluation))
        _ask_for_the_canary(opened.running.base_url, pool.key)

        def started() -> list[int]:
            theirs = others | {pid for other in others for pid in descendants(other)}  # a cluster starts workers, too
            return [pid for pid in descendants(os.getpid()) if pid not in theirs]

        def places() -> tuple[tuple[str, int], ...]:
            return tuple(place for pid in started() for place in listens_on(pid))

        # A proxy and 2 engines: the second may begin to listen after the first has answered.
        listening = eventually(lambda: ports if len(ports := places()) >= 3 else ())
        running = started()
        command_lines = tuple(" ".join(command_line(pid)) for pid in running)
        headers = {"Authorization": f"Bearer {pool.key}"}
        root = pool.base_url.removesuffix("/v1")
        metrics = httpx.get(f"{root}/metrics", headers=headers).text
        urls = pool.engine_urls()
        engine_keys = tuple(engine_key(int(url.rpartition(":")[2])) for url in urls)
        without = tuple(
            httpx.post(f"{url}{path}", headers=given).status_code
            for url in urls
            for path in ENGINE_PATHS
            for given in ({}, headers)
        )
        keys = [pool.access.key, pool.access.admin_key, pool._keys.join]
        shown = f"{events}{pool.access!r}{opened!r}{pool.proxy_status().model_dump_json()}"
        pool.session.close_cell(opened, finished=False)
    specifications = len(list(settings().jobs_dir.glob("*/specification.json")))
    secrets = (CANARY, *(key.get_secret_value() for key in keys), *engine_keys)
    client.shutdown()
    return _Used(
        folder, evaluation, secrets, command_lines, listening, metrics, shown, specifications, engine_keys, without
    )


def _ask_for_the_canary(base_url: str, key: str) -> None:
    # every kind of answer: success, a refusal of the proxy or the engine, and a broken connection
    bodies: Sequence[Any] = [
        {"model": MODEL, "prompt": CANARY, "max_tokens": 4, "temperature": 0, "echo": True},
        {"model": MODEL, "prompt": CANARY, "max_tokens": 4, "temperature": 0.7},
        {"model": MODEL, "prompt": CANARY, "max_tokens": 4, "temperature": 0, "stream": True},
        {"model": MODEL, "prompt": CANARY, "max_tokens": 10**6},
        {"model": MODEL, "prompt": [CANARY, 1]},
        {"model": CANARY, "prompt": CANARY},
        [CANARY],
    ]
    headers = {"Authorization": f"Bearer {key}"}
    statuses = []
    for body in bodies:
        statuses.append(httpx.post(f"{base_url}/completions", json=body, headers=headers, timeout=30).status_code)
    messages = {"model": MODEL, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 4, "temperature": 0}
    statuses.append(httpx.post(f"{base_url}/chat/completions", json=messages, headers=headers).status_code)
    broken = f'{{"model": "{MODEL}", "prompt": "{CANARY}"'.encode()
    statuses.append(httpx.post(f"{base_url}/completions", content=broken, headers=headers).status_code)
    statuses.append(httpx.post(f"{base_url}/{CANARY}?prompt={CANARY}", headers=headers).status_code)
    assert statuses == [200, 200, 200, 400, 400, 404, 400, 200, 400, 404]


def test_pool_listens_on_loopback_only(used: _Used) -> None:
    assert len(used.listening) >= 3
    assert {address for address, _ in used.listening} == {"127.0.0.1"}


def test_engines_ask_for_a_key_of_their_own_on_every_path(used: _Used) -> None:
    assert len(set(used.engine_keys)) == 2 and all(len(key) >= 32 for key in used.engine_keys)
    assert set(used.engines_without_their_key) == {401}


def test_command_lines_show_neither_keys_nor_prompts(used: _Used) -> None:
    assert any("pools.proxy" in line for line in used.command_lines)
    assert not [line for line in used.command_lines for secret in used.secrets if secret in line]


def test_metrics_and_what_is_printed_show_neither_keys_nor_prompts(used: _Used) -> None:
    assert 'assay_proxy_requests_total{status="200"}' in used.metrics
    assert not [secret for secret in used.secrets if secret in used.metrics + used.shown]


def test_nothing_that_is_written_holds_keys_and_only_an_answer_that_echoes_it_a_prompt(used: _Used) -> None:
    # logs, specifications of jobs, pickled calls, the journal, its mirror, and all other files
    files = [path for path in used.folder.rglob("*") if path.is_file()]
    kinds = {path.name for path in files}
    assert {"specification.json", "replica-0.log", "call.pickle", "journal.sqlite", "launches.txt"} <= kinds
    assert list(used.evaluation.rglob("*.*")), "the cell was mirrored"
    prompt, *keys = used.secrets
    assert not [path for path in files for key in keys if _holds(path, key)]
    [holder] = [path for path in files if _holds(path, prompt)]
    assert (holder.name, holder.stat().st_mode & 0o777) == ("journal.sqlite", 0o600)
    with closing(sqlite3.connect(holder)) as journal:
        query = "SELECT count(*), count(request), sum(instr(body, CAST(? AS BLOB)) > 0) FROM answers"
        assert journal.execute(query, (prompt,)).fetchone() == (4, 0, 1)


def _holds(path: Path, secret: str) -> bool:
    content = path.read_bytes()
    return any(
        spelt in content for spelt in (secret.encode(), secret.encode("utf-16-le"), secret.encode().hex().encode())
    )


def test_what_is_written_about_a_pool_is_for_its_owner_only(used: _Used) -> None:
    for name in ("jobs/*", "journal/journal.sqlite"):
        for path in (used.folder / "cache").glob(name):
            assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


def test_file_of_a_kept_pool_is_its_owners_and_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    checkpoint = Servable.from_uri(MODEL, str(write_checkpoint(tmp_path / "step-1", seed=1)))
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    pool = keep_up("guarded", config, [checkpoint], idle_seconds=60, launcher=FakeLauncher(tmp_path))
    try:
        file = settings().pools_dir / "guarded.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        keys = [key.get_secret_value() for key in (pool.access.key, pool.access.admin_key) if key is not None]
        assert all(key in file.read_text() for key in keys)
        assert not [key for key in keys if key in repr(pool)]
        elsewhere = [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
        assert not [path for path in elsewhere for key in keys if key.encode() in path.read_bytes()]
    finally:
        take_down("guarded")
    assert not file.exists()
