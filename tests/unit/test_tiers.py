"""The parts of the tests that `make test` runs: the table, and the changes that bring further modules back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fakes.clients import CLIENTS
from tiers import REST, ROOT, brought_back, changed_since, entry_of


@pytest.mark.parametrize("entry", REST)
def test_entry_names_a_module_or_a_backend_and_existing_paths(entry: str):
    folder, _, parameter = entry.partition("[")
    assert (ROOT / "tests" / folder).is_dir() if parameter else (ROOT / "tests" / entry).is_file()
    assert not parameter or parameter.rstrip("]") in CLIENTS
    assert REST[entry] and all(list(ROOT.glob(f"{beginning}*")) for beginning in REST[entry])


@pytest.mark.parametrize(
    ("nodeid", "entry"),
    [
        ("tests/integration/test_slurm_jobs.py::test_a", "integration/test_slurm_jobs.py"),
        ("tests/integration/test_slurm_jobs.py", "integration/test_slurm_jobs.py"),
        ("tests/contract/test_actors.py::test_a[iris-two]", "contract[iris]"),
        ("tests/contract/test_actors.py::test_a[slurm]", "contract[slurm]"),
        ("tests/contract/test_actors.py::test_a[ray-slurm]", None),
        ("tests/contract/test_actors.py", None),
        ("tests/unit/pools/test_agent.py::test_a[iris]", None),
        ("tests/integration/test_of_tomorrow.py::test_a", None),
    ],
)
def test_test_belongs_to_the_entry_of_its_module_or_parameter(nodeid: str, entry: str | None):
    assert entry_of(nodeid) == entry


def test_change_brings_back_the_modules_of_its_folder():
    backend, module = "resources/backends/slurm/client.py", "tests/integration/test_view_page.py"
    back = brought_back([module, backend, "README.md", "flows/evaluation.py"])
    assert back == {
        "contract[slurm]": backend,
        "integration/test_levanter_jobs.py": backend,
        "integration/test_slurm_accounting.py": backend,
        "integration/test_slurm_jobs.py": backend,
        "integration/test_view_page.py": module,
    }


@pytest.mark.parametrize("folder", sorted(path for path in (ROOT / "resources" / "backends").glob("[a-z]*/")))
def test_change_to_a_backend_brings_back_its_own_cluster_unless_always_run(folder: Path):
    assert folder.name == "local" or brought_back([f"{folder.relative_to(ROOT)}/client.py"])


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone with commits `first` (pushed), `second` and `third`, each with a file."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main", "origin")
    for place, name in ((tmp_path / "origin", "first"), (tmp_path / "clone", "second"), (tmp_path / "clone", "third")):
        if not place.exists():
            git(tmp_path, "clone", "--quiet", "origin", "clone")
        (place / name).touch()
        git(place, "add", name)
        git(place, "commit", "--quiet", "--message", name)
    return tmp_path / "clone"


def test_changes_are_those_since_the_upstream_branch_and_uncommitted(checkout: Path):
    (checkout / "untracked").touch()
    (checkout / "first").unlink()
    assert changed_since(None, checkout) == ["first", "second", "third", "untracked"]
    assert changed_since("HEAD~1", checkout) == ["first", "third", "untracked"]


def test_changes_after_a_push_are_those_of_the_last_commit(checkout: Path):
    git(checkout, "push", "--quiet", "origin", "HEAD:pushed")
    git(checkout, "branch", "--quiet", "--set-upstream-to=origin/pushed")
    assert changed_since(None, checkout) == ["third"]


def test_changes_since_an_unknown_commit_are_refused_and_without_git_there_are_none(checkout: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="make test SINCE="):
        changed_since("no-such-commit", checkout)
    assert changed_since(None, tmp_path) == changed_since(None, checkout.parent / "origin")[:0]
