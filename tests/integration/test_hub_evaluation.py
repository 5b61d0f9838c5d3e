"""A model on the hub evaluated as a user types it: by the real command, client, harness and engine, from a fake hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakes.hub import running_hub
from fakes.models import write_nano_llama
from fakes.tokenizers import write_byte_tokenizer
from resources.settings import process_environment, settings
from tasks.records.record import find_records

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(600)]

NAME = "timinar/baby-llama-58m"


def test_model_on_the_hub_is_evaluated_as_it_is_typed_and_the_token_stays_out_of_what_is_written(tmp_path: Path):
    folder = write_byte_tokenizer(write_nano_llama(tmp_path / "model", hidden=64))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    cache, place = tmp_path / "cache", tmp_path / "work"
    place.mkdir()
    cache.mkdir()
    (cache / "environments").symlink_to(settings().environments_dir)
    with running_hub({f"models/{NAME}": files}) as hub:
        hub.gated.add(f"models/{NAME}")
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "ASSAY_CACHE_DIR": str(cache)}

        def assay(*arguments: str, token: str) -> subprocess.CompletedProcess[str]:
            command = [str(Path(sys.executable).with_name("assay")), *arguments]
            environment = process_environment({**variables, "HF_TOKEN": token})
            return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

        refused = assay("evaluate", "--model", NAME, "--eval", "demo_facts", "--limit", "5", token="")
        assert refused.returncode == 3 and f"accept the terms at {hub.url}/{NAME}" in refused.stderr
        done = assay("evaluate", "--model", NAME, "--eval", "demo_facts", "--limit", "5", token=hub.token)
        assert done.returncode == 0, done.stderr
    [entry] = find_records(str(place / "evaluations"))
    assert (entry.record.checkpoint.uri, entry.record.checkpoint.name) == (f"hf://{NAME}", "baby-llama-58m")
    assert entry.record.status == "succeeded" and not hub.leaked
    written = [path for path in (*place.rglob("*"), *cache.rglob("*")) if path.is_file() and not path.is_symlink()]
    assert not [path for path in written if hub.token.encode() in path.read_bytes()]
    assert hub.token not in done.stdout + done.stderr
