"""Alerts: recipients and times of notifications, acknowledgements, and the list of the command."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from fakes.alerts import DROP, STEADY, publish_drop, run_of
from fakes.broken_servers import broken_server
from fakes.command import run_command
from fakes.conditional_store import conditional_store
from fakes.records import FIRST, publish
from resources.errors import BadInput
from resources.storage import storage
from tasks.errors import PrefectUnavailable
from tasks.policies.policy import read_overrides
from tasks.prefect_server.progress import RaisedAlert, Update, listening
from tasks.records.index import indexed_records
from tasks.records.record import find_records, now
from tasks.running.claims.files import claims_folder, read_claims
from tasks.running.conclude import raise_alerts
from tasks.verdicts import alert_events as events
from tasks.verdicts.alert_events import News, event_of, find_news, tell_server
from tasks.verdicts.alert_files import KnownAlert, acknowledge, chosen, list_alerts, read_alerts, write_first
from tasks.verdicts.alerts import Alert, alerts_in

LONG_AGO, BEFORE = FIRST + timedelta(days=30), FIRST - timedelta(days=1)


@pytest.fixture
def alert() -> Alert:
    [drop] = alerts_in(run_of([*STEADY, DROP]))
    return drop


def look(folder: Path, *, since: datetime = BEFORE) -> list[News]:
    return find_news(str(folder / "run-a"), since=since)


def test_alert_at_a_checkpoint_of_this_pass_is_news_once_with_the_questions_that_were_lost(tmp_path: Path):
    publish_drop(tmp_path)
    [news] = look(tmp_path)
    assert (news.known.alert.step, news.known.alert.found) == (100 * (len(STEADY) + 1), DROP)
    assert news.lost_questions == 5 and news.known.announced
    assert look(tmp_path) == []
    assert list(read_alerts(str(tmp_path / "run-a"))) == [news.known.alert.id]


def test_alerts_of_a_run_evaluated_long_ago_are_kept_without_notice(tmp_path: Path):
    publish_drop(tmp_path)
    assert look(tmp_path, since=LONG_AGO) == []
    [kept] = read_alerts(str(tmp_path / "run-a")).values()
    assert not kept.announced
    assert look(tmp_path) == [], "alerts that were kept are no news later"


def test_record_written_shortly_before_a_pass_died_is_news_next_time(tmp_path: Path):
    publish_drop(tmp_path, created=now() - timedelta(minutes=5))
    assert len(look(tmp_path, since=now())) == 1


def test_many_alerts_of_a_curve_in_a_pass_announce_the_latest(tmp_path: Path):
    values = [*STEADY, *[DROP] * 20, 0.05 - DROP]
    for record in run_of(values):
        publish(tmp_path, record)
    every = alerts_in(run_of(values))
    assert len(every) > 1
    assert [news.known.alert.step for news in look(tmp_path)] == [max(each.step for each in every)]
    assert read_alerts(str(tmp_path / "run-a")).keys() == {each.id for each in every}


@pytest.mark.parametrize("exclusive", [True, False])
def test_alert_found_by_several_at_once_belongs_to_a_single_finder(alert: Alert, exclusive: bool):
    known = [KnownAlert(alert=alert, found_at=1.0, announced=True) for _ in range(4)]
    written, folder = Barrier(len(known)), f"cond://out/run-{exclusive}"

    def find(own: KnownAlert) -> bool:
        settled: list[int] = []
        has = write_first(folder, own, sleep=lambda _: settled.append(written.wait()))
        if not settled:
            written.wait()
        return has

    with conditional_store(exclusive=exclusive), ThreadPoolExecutor(len(known)) as threads:
        has = list(threads.map(find, known))
        assert has.count(True) == 1
        assert read_alerts(folder) == {alert.id: known[has.index(True)]}
        late = KnownAlert(alert=alert, found_at=2.0, announced=True)
        assert not write_first(folder, late, sleep=lambda _: None)


def test_overwritten_finder_on_a_permissive_store_has_not_found_the_alert(alert: Alert):
    mine, other = (KnownAlert(alert=alert, found_at=1.0, announced=True) for _ in range(2))
    uri = f"cond://out/run-c/alerts/{alert.id}.json"
    with conditional_store(exclusive=False):
        assert not write_first(
            "cond://out/run-c", mine, sleep=lambda _: storage.write_bytes(uri, other.model_dump_json().encode())
        )


def test_first_acknowledgement_of_an_alert_is_kept(alert: Alert, tmp_path: Path):
    folder = str(tmp_path / "run-a")
    assert write_first(folder, KnownAlert(alert=alert, found_at=1.0, announced=True))
    assert read_alerts(folder)[alert.id].acknowledged is None
    known = acknowledge(folder, alert, note="a bad batch")
    again = acknowledge(folder, alert, note="another word")
    assert known == again and known.announced and known.acknowledged is not None
    assert known.acknowledged.note == "a bad batch" and known.acknowledged.by
    assert read_alerts(folder)[alert.id].acknowledged == known.acknowledged


def test_alert_acknowledged_before_the_first_look_is_no_news(tmp_path: Path, alert: Alert):
    publish_drop(tmp_path)
    acknowledge(str(tmp_path / "run-a"), alert, note=None)
    assert look(tmp_path) == []


def test_files_about_alerts_are_taken_for_nothing_else(tmp_path: Path):
    publish_drop(tmp_path)
    folder = str(tmp_path / "run-a")
    before = find_records(str(tmp_path)), indexed_records(folder)
    look(tmp_path)
    assert (find_records(str(tmp_path)), indexed_records(folder)) == before
    assert read_claims(claims_folder(str(tmp_path), "run-a")) == [] and read_overrides(folder).by_cell == {}
    (tmp_path / "run-a" / "alerts" / "damaged.json").write_text("{")
    assert len(read_alerts(folder)) == 1


def test_event_says_what_happened_to_which_run_where_the_report_is_and_how_to_acknowledge_it(tmp_path: Path):
    publish_drop(tmp_path, tags=("nightly", "policy=watched"))
    [news] = look(tmp_path)
    event = event_of(news, run_folder=str(tmp_path / "run-a"), report="https://reports.test/run-a")
    assert (event.event, event.resource.id) == ("alert.raised", f"assay.run.{tmp_path}/run-a")
    assert {related.role: related.name for related in event.related} == {
        "checkpoint": "run-a-2100",
        "benchmark": "demo_facts",
        "policy": "watched",
    }
    payload = event.payload
    assert (payload["found"], payload["lost_questions"], payload["report"]) == (DROP, 5, "https://reports.test/run-a")
    assert payload["expected"] == pytest.approx(0.6, abs=0.05)
    assert payload["message"].startswith("demo_facts acc of run-a fell at step 2,100: 0.1, expected 0.")
    assert payload["acknowledge"] == f"assay alerts {tmp_path} --acknowledge {payload['id'][:8]}"
    json.dumps(payload)


def test_alert_that_the_server_could_not_be_told_is_news_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "_SENT_WITHIN_SECONDS", 0.0)
    publish_drop(tmp_path)
    [news] = look(tmp_path)
    tell_server([news], run_folder=str(tmp_path / "run-a"), report="")  # no server: no event is sent
    assert look(tmp_path) == []
    with (
        broken_server("refusing") as address,
        temporary_settings({PREFECT_API_URL: f"{address}/api", PREFECT_CLIENT_MAX_RETRIES: 0}),
        pytest.raises(PrefectUnavailable),
    ):
        tell_server([news], run_folder=str(tmp_path / "run-a"), report="")
    assert [again.known.alert for again in look(tmp_path, since=now())] == [news.known.alert], "however late"
    assert look(tmp_path, since=now()) == []


def test_alert_with_damaged_samples_is_news_without_its_questions(tmp_path: Path):
    publish_drop(tmp_path)
    for file in tmp_path.rglob("samples.jsonl.gz"):
        file.write_bytes(b"damaged")
    [news] = look(tmp_path)
    assert news.lost_questions is None and news.known.announced


def test_look_that_cannot_be_finished_fails_nothing_and_is_reported(tmp_path: Path):
    publish_drop(tmp_path)
    (tmp_path / "run-a" / "alerts").write_text("a file where a folder should be")
    config = SimpleNamespace(evaluation_path=str(tmp_path))
    cell: Any = SimpleNamespace(config=config, reference=SimpleNamespace(run="run-a"), done=False)
    heard: list[Update] = []
    with listening(heard.append):
        raise_alerts([cell], since=BEFORE)
        assert len(heard) == 1 and "alerts of run-a could not be searched" in str(heard[0])
        (tmp_path / "run-a" / "alerts").unlink()
        raise_alerts([cell], since=BEFORE)
    assert len(heard) == 2 and isinstance(heard[1], RaisedAlert)
    assert heard[1].text.startswith("Alert: demo_facts acc of run-a fell at step 2,100")


def test_alert_that_records_do_not_show_any_more_is_listed_as_gone(tmp_path: Path):
    publish_drop(tmp_path)
    look(tmp_path)
    [listed] = list_alerts([str(tmp_path)])
    assert (listed.state, listed.shown) == ("open", True)
    storage.delete(storage.join(find_records(str(tmp_path))[-1].cell_uri, "record.json"))
    assert [each.state for each in list_alerts([str(tmp_path / "run-a")])] == ["gone"]


def test_texts_mean_a_single_alert_or_are_refused(tmp_path: Path):
    publish_drop(tmp_path)
    [listed] = list_alerts([str(tmp_path)])
    twin = replace(listed, alert=replace(listed.alert, id=listed.alert.id[:-1] + "x"))
    assert chosen([listed, twin], [listed.alert.id, listed.alert.id]) == [listed]
    assert chosen([listed], [listed.alert.id[:2]]) == [listed]
    for texts in (["nothing"], [listed.alert.id[:4]], [""]):
        with pytest.raises(BadInput, match="assay alerts"):
            chosen([listed, twin], texts)


def test_command_lists_open_alerts_first_and_acknowledges_them(tmp_path: Path):
    records, policy = tmp_path / "out", tmp_path / "policy.yaml"
    for record in [*run_of([*STEADY, DROP]), *run_of([*STEADY, DROP], run="run-b")]:
        publish(records, record)
    (tmp_path / "run-a" / "step-1").mkdir(parents=True)
    policy.write_text(
        f"name: watched\nruns: {tmp_path}/run-a\nsuites: [key_evals]\nevaluation_path: {records}\n"
        "base_url: http://127.0.0.1:1/v1\n"
    )
    first, second = (json.loads(run_command("alerts", records, "--json").stdout)[number]["id"] for number in (0, 1))
    done = run_command("alerts", records, "--acknowledge", first[:8], "--note", "a bad batch", "--json")
    assert done.returncode == 0, done.stderr
    assert [(each["id"], each["state"]) for each in json.loads(done.stdout)] == [
        (second, "open"),
        (first, "acknowledged"),
    ]
    assert json.loads(done.stdout)[1]["acknowledged"]["note"] == "a bad batch"
    assert "bad batch" in run_command("alerts", records).stdout

    ofpolicy = json.loads(run_command("alerts", policy, "--json").stdout)
    assert [each["run"] for each in ofpolicy] == ["run-a"]
    assert run_command("alerts", policy, "--all").returncode == 0
    assert "open" not in run_command("alerts", policy).stdout

    unknown = run_command("alerts", records, "--acknowledge", "0badc0de0badc0de")
    assert unknown.returncode == BadInput.exit_code and "assay alerts" in unknown.stderr
    assert run_command("alerts", records, "--note", "x").returncode == BadInput.exit_code
    assert run_command("alerts", tmp_path / "nowhere").returncode == BadInput.exit_code
