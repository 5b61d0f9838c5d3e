"""The dashboard in deployments/grafana: valid for Grafana's own models, and all of its queries match real metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from fakes.engine import FakeEngine
from fakes.proxy import HEADERS, JOIN_TOKEN, RunningProxy, replica_of, running_proxy, state_of
from pools.protocol import LoadReport

FOLDER = Path(__file__).parents[2] / "deployments" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "pool.json").read_text())
SCRAPED: list[dict[str, Any]] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
VLLM_PAGE = (Path(__file__).parents[1] / "data" / "vllm" / "metrics.txt").read_text()
"""Recorded metrics of the pinned vLLM on a CPU."""
SERIES = tuple[str, dict[str, str]]


def expressions() -> list[str]:
    """Returns every query of the dashboard, with Grafana's values in place of its variables."""
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    asked += [
        variable["query"].removeprefix("label_values(").rpartition(",")[0]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    return [text.replace("$__rate_interval", "1m").replace("$__range", "1h") for text in asked]


def parts_of(expression: str) -> list[Any]:
    """Returns the nodes of an expression; raises for an expression that Prometheus could not read."""
    nodes: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), nodes.append, None)
    return nodes


def selectors_of(expression: str) -> Iterator[promql_parser.VectorSelector]:
    for node in parts_of(expression):
        if isinstance(node, promql_parser.MatrixSelector):
            yield node.vector_selector
        elif isinstance(node, promql_parser.VectorSelector):
            yield node


async def page_of(proxy: RunningProxy, path: str) -> str:
    async with aiohttp.ClientSession(headers=HEADERS) as http, http.get(proxy.url + path) as reply:
        assert (reply.status, reply.content_type) == (200, "text/plain")
        return await reply.text()


def families_of(page: str) -> list[Metric]:
    return list(text_string_to_metric_families(page))


def series_of(page: str, *, target: dict[str, str]) -> list[SERIES]:
    return [(s.name, {**s.labels, **target}) for family in families_of(page) for s in family.samples]


def test_dashboard_is_wholly_known_to_grafanas_own_models() -> None:
    plugins.register_default_plugins()

    def check(ours: Any, theirs: Any, where: str) -> None:
        match ours:
            case dict():
                for key, value in ours.items():
                    assert key in theirs, f"{where}/{key} is nothing that Grafana knows"
                    check(value, theirs[key], f"{where}/{key}")
            case list():
                for number, (value, theirs_too) in enumerate(zip(ours, theirs, strict=True)):
                    check(value, theirs_too, f"{where}/{number}")
            case _:
                assert ours == theirs, where

    check(DASHBOARD, json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder)), "")


def test_panels_are_adjacent_and_say_what_they_show() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & places and max(x for x, _ in own) < 24
        places |= own
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


async def test_every_query_finds_its_metrics_and_labels_in_what_a_pool_gives(tmp_path: Path) -> None:
    load = LoadReport(number=1, model="m", digest="d", how="reload", seconds=0.2, phases={"reload": 0.125})
    async with FakeEngine(metrics=VLLM_PAGE) as engine:
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            replica = replica_of(engine)
            announcement = replica.announcement.model_copy(update={"loads": (load,)})
            proxy.client.set_state(state_of("m", engine).desired)
            proxy.client.announce(replica.name, announcement, join_token=JOIN_TOKEN)
            body = {"model": "m", "prompt": "Once", "max_tokens": 4, "temperature": 0}
            async with (
                aiohttp.ClientSession(headers=HEADERS) as http,
                http.post(f"{proxy.url}/v1/completions", json=body) as reply,
            ):
                assert reply.status == 200
            series = [
                each
                for job in SCRAPED
                for labels in [job["static_configs"][0]["labels"]]
                for each in series_of(await page_of(proxy, job["metrics_path"]), target=labels)
            ]
    assert len(expressions()) > 20
    for expression in expressions():
        for selector in selectors_of(expression):
            missing = unmatched(selector, series)
            assert not missing, f"{expression}: {missing}"
    for expression in expressions():
        named = {selector.name for selector in selectors_of(expression)}
        labels = {label for name, own in series if name in named for label in own}
        grouped = {
            label
            for node in parts_of(expression)
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier
            for label in node.modifier.labels
        }
        assert grouped <= labels, expression


def unmatched(selector: promql_parser.VectorSelector, series: Sequence[SERIES]) -> str:
    """Returns the reason if a selector matches nothing, else an empty text. A Grafana variable matches everything."""
    label_sets = [labels for name, labels in series if name == selector.name]
    if not label_sets:
        return f"there is no {selector.name}"
    for matcher in selector.matchers.matchers:
        values = {labels[matcher.name] for labels in label_sets if matcher.name in labels}
        exact = matcher.op == promql_parser.MatchOp.Equal and not matcher.value.startswith("$")
        if not values or (exact and matcher.value not in values):
            return f"{selector.name} has no {matcher.name}={matcher.value}"
    return ""


async def test_page_of_engines_has_each_family_once_with_the_samples_of_every_replica(tmp_path: Path) -> None:
    async with FakeEngine(metrics=VLLM_PAGE) as first, FakeEngine(metrics=VLLM_PAGE) as second:
        with running_proxy(tmp_path) as proxy:
            proxy.tell(state_of("m", first, second))
            page = await page_of(proxy, "/metrics/engines")
    alone, both = families_of(VLLM_PAGE), families_of(page)
    assert [(f.name, f.type, f.documentation) for f in both] == [(f.name, f.type, f.documentation) for f in alone]
    for replica in (f"r{first.port}", f"r{second.port}"):
        own = [
            (s.name, {k: v for k, v in s.labels.items() if k != "replica"}, s.value)
            for family in both
            for s in family.samples
            if s.labels["replica"] == replica
        ]
        assert own == [(s.name, dict(s.labels), s.value) for family in alone for s in family.samples]


@pytest.mark.parametrize("page", ["no metrics\nx{\n# HELP\n", "x 1\n" * 3 + 'y{a="b"} 2 17\n# EOF'])
async def test_page_of_engines_leaves_out_other_lines_and_silent_engines(tmp_path: Path, page: str) -> None:
    async with FakeEngine(metrics=page) as engine, FakeEngine() as gone:
        with running_proxy(tmp_path) as proxy:
            proxy.tell(state_of("m", engine, gone))
            await gone.__aexit__(None, None, None)
            shown = await page_of(proxy, "/metrics/engines")
    own = f'replica="r{engine.port}"'
    kept = [f"x{{{own}}} 1"] * 3 + [f'y{{{own},a="b"}} 2 17'] if page.startswith("x") else []
    assert shown.splitlines() == kept
