"""Alerts of a Prefect server with the automations of `deployments/alerts`, sent to a webhook and to Slack's block."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from pydantic import SecretStr

from fakes.alerts import publish_drop
from fakes.polling import eventually
from fakes.receiver import receiver
from tasks.records.record import now
from tasks.running.conclude import raise_alerts
from tasks.verdicts.alert_files import read_alerts

pytestmark = pytest.mark.usefixtures("prefect_api")
AUTOMATIONS = Path(__file__).parents[2] / "deployments" / "alerts"


def automation(file: str, block: UUID) -> AutomationCore:
    """Reads an automation and puts the block's id in place of the file's placeholder."""
    text = (AUTOMATIONS / file).read_text().replace("00000000-0000-0000-0000-000000000000", str(block))
    return AutomationCore.model_validate(yaml.safe_load(text))


def test_alert_of_a_flow_run_reaches_a_webhook_and_slack_once_with_what_a_person_needs(tmp_path: Path):
    # Imported locally: the import takes a second in every process that collects these tests.
    from prefect.blocks.notifications import SlackWebhook
    from prefect.blocks.webhook import Webhook

    publish_drop(tmp_path, created=now(), tags=("policy=watched",))
    config = SimpleNamespace(evaluation_path=str(tmp_path))
    cell: Any = SimpleNamespace(config=config, reference=SimpleNamespace(run="run-a"), done=False)

    @flow(name="evaluate", persist_result=False)
    def evaluate() -> None:
        for _ in range(2):
            raise_alerts([cell], since=now())

    with receiver() as people, get_client(sync_client=True) as client:
        webhook = Webhook(url=SecretStr(f"http://127.0.0.1:{people.port}/hook"))
        # Apprise recognizes Slack by its address; with this address it writes to the test's own server.
        slack = SlackWebhook(url=SecretStr(f"json://127.0.0.1:{people.port}/slack"))
        made = []
        for file, block in {"webhook.yaml": webhook, "slack.yaml": slack}.items():
            saved = block.save("alerts", overwrite=True, _sync=True)  # pyright: ignore[reportCallIssue]
            made.append(client.create_automation(automation(file, saved)))
        try:
            evaluate()
            [called], [message] = (eventually(partial(people.got, path, 1)) for path in ("/hook", "/slack"))
        finally:
            for identifier in made:
                client.delete_automation(identifier)
    [known] = read_alerts(str(tmp_path / "run-a")).values()
    alert = called["alert"]
    assert called["text"] == alert["message"] and alert["id"] == known.alert.id
    assert (alert["step"], alert["lost_questions"]) == (2100, 5)
    assert alert["report"] == (tmp_path / "run-a" / "report.html").as_uri()
    assert message["title"] == alert["title"] and alert["message"] in message["message"]
    assert "5 questions were lost" in message["message"] and alert["acknowledge"] in message["message"]
