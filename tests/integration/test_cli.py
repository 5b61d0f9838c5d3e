"""The `assay` command: output, exit codes and errors; two tests start it as a separate process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import httpx
import pytest
import yaml
from prefect.client.orchestration import get_client

from fakes.cli import invoke
from fakes.command import run_command
from fakes.models import write_checkpoint, write_run
from fakes.polling import eventually, is_alive
from fakes.records import make_metric, make_record
from faults.scenarios.processes import descendants, listens_on
from resources.settings import deployment_data, process_environment, settings
from tasks.records.record import Record, write_record

SERVED_ELSEWHERE = ("--base-url", "http://127.0.0.1:9/v1")


def assay_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("assay")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=process_environment())


def assert_refused(done: subprocess.CompletedProcess[str], *hints: str) -> None:
    """Asserts exit code 3 and a text with expectation, finding and remedy, without a traceback."""
    assert done.returncode == 3, done.stderr
    labels = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert {"Expected", "Found", "To do"} <= set(labels)
    assert "Traceback" not in done.stderr
    assert not [hint for hint in hints if hint not in done.stderr], done.stderr


def publish(folder: Path, *records: Record) -> Path:
    for record in records:
        checkpoint = record.checkpoint
        write_record(str(folder / checkpoint.run / f"step-{checkpoint.step}" / record.evaluator / record.cell), record)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run-a", [100, 200])


@pytest.fixture
def half_written(run: Path) -> Path:
    """The run with a third checkpoint, with the last 100 bytes of its weights missing."""
    weights = write_checkpoint(run / "hf" / "step-300") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return run


def test_checkpoints_with_a_half_written_folder_shows_it_with_the_reason(half_written: Path):
    shown = invoke(["checkpoints", str(half_written)])
    rows = [line for line in shown.stdout.splitlines() if "run-a-" in line]
    assert shown.exit_code == 0
    assert [row.split()[5] for row in rows] == ["complete", "complete", "incomplete"]
    assert "model.safetensors" in shown.stdout
    assert f"3 checkpoints of run-a: 2 can be evaluated\nNext: assay evaluate --model {half_written} " in shown.stdout


def test_checkpoints_of_another_folder_says_what_it_looks_like(tmp_path: Path) -> None:
    (tmp_path / "train-00000.parquet").touch()
    done = assay_process("checkpoints", tmp_path)
    assert_refused(done, "1 file, none of a checkpoint (1 .parquet); it looks like a data set")


def test_checkpoints_as_json_tells_complete_from_not(half_written: Path):
    shown = invoke(["checkpoints", str(half_written), "--json"])
    checkpoints = json.loads(shown.stdout)
    assert [
        (checkpoint["step"], checkpoint["complete"], bool(checkpoint["problems"])) for checkpoint in checkpoints
    ] == [(100, True, False), (200, True, False), (300, False, True)]
    assert checkpoints[0]["name"] == "run-a-100"
    assert checkpoints[0]["uri"] == str(half_written / "hf" / "step-100")


def test_checkpoints_of_a_folder_that_is_not_there_are_refused(tmp_path: Path):
    assert_refused(assay_process("checkpoints", tmp_path / "nowhere"), "nowhere is not there")


def test_records_show_the_newest_of_each_checkpoint_and_as_json_all_of_them(tmp_path: Path):
    older = make_record(step=100, cell="facts-old", metrics=(make_metric(value=0.25),))
    later = older.created.replace(year=2027)
    newer = make_record(step=100, cell="facts-new", metrics=(make_metric(value=0.75),), created=later)
    folder = publish(tmp_path, older, newer)
    table = invoke(["records", str(folder)]).stdout
    assert "0.75" in table and "0.25" not in table
    every = json.loads(invoke(["records", str(folder), "--json"]).stdout)
    assert [Record.model_validate(record) for record in every] == [older, newer]


def test_records_of_a_folder_without_any_are_refused(tmp_path: Path):
    assert_refused(run_command("records", tmp_path), "records below")


def test_report_on_a_folder_of_records_is_a_single_page(tmp_path: Path):
    folder = publish(tmp_path / "evaluations", make_record(step=100), make_record(step=200, status="withheld"))
    page = tmp_path / "page.html"
    done = invoke(["report", str(folder), "--output", str(page), "--title", "A tiny report"])
    assert done.exit_code == 0
    assert str(page) in done.stdout.replace("\n", "")
    text = page.read_text()
    assert "A tiny report" in text and "<svg" in text
    assert "withheld" in text


def test_prefect_server_of_an_evaluation_is_started_again_if_it_dies_and_ends_with_the_evaluation(
    tmp_path: Path, run: Path
):
    command = [str(Path(sys.executable).with_name("assay")), "evaluate", "--model", str(run), "--eval", "demo_facts"]
    own = {"PREFECT_HOME": str(tmp_path / "prefect")}
    variables = {name: value for name, value in process_environment(own).items() if name != "PREFECT_API_URL"}
    with subprocess.Popen(
        [*command, *SERVED_ELSEWHERE], env=variables, cwd=tmp_path, stdout=PIPE, stderr=PIPE
    ) as assay:
        [server] = eventually(lambda: prefect_servers_of(assay.pid))
        os.kill(server, signal.SIGKILL)
        [again] = eventually(lambda: [pid for pid in prefect_servers_of(assay.pid) if pid != server])
        eventually(lambda: listens_on(again))
        assay.kill()
    eventually(lambda: not is_alive(again))


def prefect_servers_of(pid: int) -> list[int]:
    servers = []
    for child in descendants(pid):
        with suppress(OSError):
            if b"prefect.server.api.server:create_app" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                servers.append(child)
    return servers


def test_doctor_as_json_names_a_remedy_for_everything_missing():
    done = invoke(["doctor", "--json"])
    findings = json.loads(done.stdout)
    assert all(set(finding) == {"subject", "level", "seen", "remedy"} for finding in findings)
    assert {"Python", "vLLM on CPU", "Disk", "Prefect server"} <= {finding["subject"] for finding in findings}
    missing = [finding for finding in findings if finding["level"] == "missing"]
    assert all(finding["remedy"] for finding in missing)
    assert done.exit_code == (2 if missing else 0)


def test_lines_that_doctor_says_a_regions_file_lacks_are_all_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def notes() -> list[dict[str, str]]:
        findings = json.loads(invoke(["doctor", "--json"]).stdout)
        return [each for each in findings if each["subject"] == "Regions" and each["level"] != "ok"]

    assert notes() == [], "Assay's own file is a template, and no region is used"
    own = tmp_path / "regions.yaml"
    shutil.copy(deployment_data("regions.yaml"), own)
    monkeypatch.setenv("ASSAY_REGIONS", str(own))
    settings.cache_clear()
    assert [note["seen"].partition(" for ")[0] for note in notes()] == ["no images", "no project", "no ray_address"]
    table = yaml.safe_load(own.read_text())
    for region in table["regions"]:
        for note in notes():
            place, line = note["remedy"].removeprefix(f"write into {own} at ").split(": ", 1)
            assert place == region["name"]
            region.update(yaml.safe_load(line))
        own = tmp_path / f"{region['name']}.yaml"  # a new name each time: files are read once
        own.write_text(yaml.safe_dump(table))
        monkeypatch.setenv("ASSAY_REGIONS", str(own))
        settings.cache_clear()
    assert notes() == []

    own.write_text("regions: []")
    monkeypatch.setenv("ASSAY_REGIONS", str(own.rename(tmp_path / "wrong.yaml")))
    settings.cache_clear()
    [wrong] = notes()
    assert wrong["level"] == "missing" and "prices" in wrong["seen"]
    settings.cache_clear()


def test_doctor_on_a_machine_without_disk_space_ends_as_infrastructure_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE_DIR", "/proc/assay")  # a file system without free space
    settings.cache_clear()
    done = invoke(["doctor", "--json"])
    assert "Disk" in {finding["subject"] for finding in json.loads(done.stdout) if finding["level"] == "missing"}
    assert done.exit_code == 2


def test_evaluate_without_a_model_or_a_benchmark_is_refused():
    assert_refused(run_command("evaluate"), "--model", "--eval")


def test_evaluate_two_benchmarks_with_the_same_metric_key_is_refused(run: Path):
    given = ("--model", run, "--eval", "demo_facts", "--eval", "demo_facts")
    assert_refused(run_command("evaluate", *given), "demo_facts", "task_alias")


def test_evaluate_with_traceback_shows_it_and_the_same_exit_code(run: Path):
    done = assay_process("evaluate", "--traceback", "--model", run, "--eval", "demo_facts:many")
    assert done.returncode == 3
    assert "Traceback" in done.stderr and "To do:" in done.stderr


def test_evaluate_unknown_key_in_a_file_asks_whether_another_was_meant(tmp_path: Path, run: Path):
    file = tmp_path / "evaluation.yaml"
    file.write_text(
        f"model_path: {run}\nevals: [{{name: demo_facts}}]\n"
        "pool_config: {model: {name: tiny, engine_kwarg: {dtype: float32}}}\n"
    )
    assert_refused(
        run_command("evaluate", "--config", file), "pool_config.model.engine_kwarg", "did you mean engine_kwargs?"
    )


@pytest.mark.usefixtures("prefect_api")
def test_evaluate_a_path_that_is_a_file_is_refused(tmp_path: Path):
    file = tmp_path / "weights.bin"
    file.touch()
    given = ("--model", file, "--eval", "demo_facts", *SERVED_ELSEWHERE, "--output", tmp_path / "evaluations")
    assert_refused(run_command("evaluate", *given), f"{file} is a file")


@pytest.mark.usefixtures("prefect_api")
def test_evaluate_an_empty_run_is_refused(tmp_path: Path):
    (tmp_path / "run" / "hf").mkdir(parents=True)
    given = ("--model", tmp_path / "run", "--eval", "demo_facts", *SERVED_ELSEWHERE, "--output", tmp_path / "out")
    assert_refused(run_command("evaluate", *given), "an empty folder")


@pytest.mark.usefixtures("prefect_api")
def test_evaluate_into_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, run: Path):
    in_the_way = tmp_path / "evaluations"
    in_the_way.touch()
    given = ("--model", run, "--eval", "demo_facts", *SERVED_ELSEWHERE, "--output", in_the_way / "here")
    assert_refused(run_command("evaluate", *given), str(in_the_way))


@pytest.mark.harness
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect_api")
def test_evaluate_with_a_tracking_server_that_does_not_answer_asks_no_model_anything(tmp_path: Path, run: Path):
    given = ("--model", run, "--eval", "demo_facts", *SERVED_ELSEWHERE, "--output", tmp_path / "evaluations")
    done = run_command("evaluate", *given, "--mlflow-uri", "http://127.0.0.1:9")
    assert done.returncode == 2 and "http://127.0.0.1:9" in done.stderr and "tracking" in done.stderr
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.harness
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect_api")
def test_evaluate_an_unknown_benchmark_suggests_a_name_and_parses_as_json(tmp_path: Path, run: Path):
    given = ("--model", run, "--eval", "demo_fact", *SERVED_ELSEWHERE, "--output", tmp_path / "evaluations")
    assert_refused(run_command("evaluate", *given, "--json"), "demo_fact", "did you mean demo_facts")


def test_publish_copies_what_a_sink_has_not_and_the_second_time_nothing(tmp_path: Path):
    folder = publish(tmp_path / "evaluations", make_record(step=100))
    sink = tmp_path / "sink.yaml"
    sink.write_text(yaml.safe_dump({"kind": "object_store", "url": str(tmp_path / "copy")}))
    sent = invoke(["publish", str(folder), "--sink", str(sink), "--json"])
    assert sent.exit_code == 0, sent.output
    assert {outcome["status"] for outcome in json.loads(sent.stdout)} == {"published"}
    assert [path.name for path in (tmp_path / "copy").rglob("record.json")] == ["record.json"]
    again = invoke(["publish", str(folder), "--sink", str(sink)])
    assert "Nothing to publish" in again.stdout


def test_publish_without_a_file_of_sinks_is_refused(tmp_path: Path):
    assert_refused(run_command("publish", tmp_path, "--sink", tmp_path / "none.yaml"), "none.yaml")


def test_demo_train_without_a_checkpoint_to_evaluate_is_refused(tmp_path: Path):
    done = run_command("demo", "--train", "--folder", tmp_path / "demo", "--exports", "0")
    assert done.returncode == 3
    assert "--exports" in done.stderr and not (tmp_path / "demo").exists()


def test_work_pools_are_listed_and_a_pool_with_a_worker_is_chosen(tmp_path: Path, prefect_api: str):
    table = yaml.safe_load(deployment_data("regions.yaml").read_text())
    region = next(entry for entry in table["regions"] if entry.get("work_pool"))
    regions = tmp_path / "regions.yaml"
    regions.write_text(yaml.safe_dump({**table, "regions": [region | {"work_pool_type": "process"}]}))
    asked = ("--regions", str(regions), "--json")
    assert invoke(["work-pools", "apply", *asked]).exit_code == 0
    without_worker = invoke(["work-pools", "list", *asked])
    assert {pool["work_pool"]: pool["ready"] for pool in json.loads(without_worker.stdout)}[
        region["work_pool"]
    ] is False
    worker = f"{prefect_api}/work_pools/{region['work_pool']}/workers/heartbeat"
    httpx.post(worker, json={"name": "idle"}).raise_for_status()
    listed = invoke(["work-pools", "list", *asked])
    assert {pool["work_pool"]: pool["ready"] for pool in json.loads(listed.stdout)}[region["work_pool"]] is True
    chosen = invoke(["work-pools", "list", "--cpu", "2", *asked])
    assert chosen.exit_code == 0, (chosen.output, chosen.exception)
    assert (json.loads(chosen.stdout)["work_pool"], json.loads(chosen.stdout)["region"]) == (
        region["work_pool"],
        region["name"],
    )


@pytest.mark.usefixtures("prefect_api")
def test_flows_of_the_local_list_are_deployed_to_a_region_and_the_second_time_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    listed = yaml.safe_load(deployment_data("prefect.yaml").read_text())["deployments"]
    listed = [each for each in listed if each["entrypoint"].endswith((".run_helm", ".stage_data", ".evaluate_suite"))]
    deployments = tmp_path / "prefect.yaml"
    deployments.write_text(yaml.safe_dump({"deployments": listed}))
    monkeypatch.setattr("flows.deploy.work_pools.DEPLOYMENTS", deployments)
    table = yaml.safe_load(deployment_data("regions.yaml").read_text())
    region = next(entry for entry in table["regions"] if entry.get("work_pool"))
    regions = tmp_path / "regions.yaml"
    regions.write_text(yaml.safe_dump({**table, "regions": [region | {"name": "us-far", "work_pool": "far"}]}))
    asked = ("work-pools", "apply", "--deploy", "--regions", str(regions), "--json")
    flows = {"run-helm/us-far", "stage-data/us-far", "evaluate-suite/us-far"}
    assert deployed_to("far", *asked, "--dry-run") == deployed_to("far", *asked) == flows
    assert deployed_to("far", *asked) == set()
    with get_client(sync_client=True) as client:
        made = [client.read_deployment_by_name(name) for name in sorted(flows)]
        helm = client.read_deployment_by_name("run-helm/us-far")
    assert all((each.work_pool_name, each.pull_steps, each.schedules) == ("far", [], []) for each in made)
    assert (helm.entrypoint, helm.parameters) == ("flows.suites.run_helm", {"suite": "helm"})


def deployed_to(work_pool: str, *arguments: str) -> set[str]:
    changes = json.loads(invoke(list(arguments)).stdout)
    return {name for change in changes if change["work_pool"] == work_pool for name in change["deployments"]}
