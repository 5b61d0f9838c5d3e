"""`assay doctor`: the engines that this machine can run, and what it lacks."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Literal

from rich.text import Text

from flows.console.console import OUT, Json, print_json, table_of
from resources.environments.environments import ENVIRONMENTS, is_built
from resources.errors import AssayError, BadInput
from resources.regions.regions import STALE_DAYS, known_regions, regions_file, where_to_write
from resources.settings import deployment_data, pip_find_links, settings
from tasks.evaluators.evaluator import harness_environments
from tasks.prefect_server.client import server_address
from tasks.records.provenance import git_output, git_state, versions

_ENGINE_DISK_BYTES = 6 * 1024**3
_COMMIT, _VERSION = re.compile(r"[0-9a-f]{7,40}"), re.compile(r"v?\d+\.\d+(\.\d+)?")
_IN_IMAGES = ("flows", "tasks", "pools", "resources", "deployments", "pyproject.toml")
_REBUILD = "rebuild it, as docs/how-to/build-the-images.md says, and name the new image"
_ENGINE_MEMORY_BYTES = 4 * 1024**3
_MARKS = {"ok": Text("✓", "green"), "note": Text("·"), "missing": Text("✗", "red")}


@dataclass(frozen=True)
class Finding:
    """A check with its level, its result, and the remedy if it is not ok."""

    subject: str
    level: Literal["ok", "note", "missing"]
    seen: str
    remedy: str = ""


def doctor(*, as_json: Json = False) -> None:
    """Show what this machine can run and what is missing."""
    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(_MARKS[finding.level], finding.subject, finding.seen, finding.remedy) for finding in findings]
        OUT.print(table_of("", "Subject", "Seen", "To do", rows=rows))
    if any(finding.level == "missing" for finding in findings):
        raise SystemExit(AssayError.exit_code)


def examine() -> list[Finding]:
    """Examines the machine without changing it."""
    commit, changed = git_state()
    text = f", commit {commit[:12]}{' with uncommitted changes' if changed else ''}" if commit else ""
    links = pip_find_links()
    return [
        Finding("Assay", "ok", versions()["assay"] + text),
        _checked("Python", sys.version_info >= (3, 11), platform.python_version(), "install 3.11+"),
        _cpu_engine(),
        _accelerators("GPU", " NVIDIA", ("/proc/driver/nvidia/gpus", "*")),
        _accelerators("TPU", " chips", ("/dev", "accel*"), ("/dev/vfio", "[0-9]*")),
        _memory(),
        _disk(),
        *(
            _checked(f"Environment {name}", built, "built" if built else "not built yet", "built on first use", "note")
            for name, spec in (ENVIRONMENTS | harness_environments()).items()
            for built in [is_built(spec)]
        ),
        _prefect(),
        Finding("Deployments", "ok", str(deployment_data("prefect.yaml")), "prefect deploy --all --prefect-file …"),
        *_regions(),
        *_images(),
        _checked("Local wheels", bool(links), ", ".join(links) or "none; torch comes from its own index", "", "note"),
    ]


def _checked(
    subject: str, fine: bool, seen: str, remedy: str, level: Literal["note", "missing"] = "missing"
) -> Finding:
    return Finding(subject, "ok" if fine else level, seen, "" if fine else remedy)


def _cpu_engine() -> Finding:
    machine = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform != "linux":
        return Finding("vLLM on CPU", "missing", sys.platform, "runs on Linux; evaluate an endpoint with --base-url")
    flags = cpuinfo.read_text().split() if cpuinfo.is_file() else []
    if machine == "x86_64" and "avx2" not in flags:
        return Finding("vLLM on CPU", "missing", "a CPU without AVX2", "evaluate an endpoint with --base-url")
    wide = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else machine
    return Finding("vLLM on CPU", "ok", f"{wide}")


def _accelerators(subject: str, unit: str, *places: tuple[str, str]) -> Finding:
    count = next(filter(None, (len(list(Path(folder).glob(pattern))) for folder, pattern in places)), 0)
    remedy = f"pools with {subject.capitalize()}Config need another machine"
    return _checked(subject, bool(count), f"{count}{unit}" if count else "none", remedy, "note")


def _memory() -> Finding:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return Finding("Memory", "note", "unknown")
    kibibytes = int(next(line for line in meminfo.read_text().splitlines() if "MemAvailable" in line).split()[1])
    fine = kibibytes * 1024 >= _ENGINE_MEMORY_BYTES
    return _checked("Memory", fine, f"{kibibytes / 1024**2:.1f} GiB free", "an engine wants about 4 GiB")


def _disk() -> Finding:
    folder = settings().cache_dir
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    remedy = "environments take about 4 GiB: free some, or set ASSAY_CACHE_DIR"
    return _checked("Disk", free >= _ENGINE_DISK_BYTES, f"{free / 1024**3:.0f} GiB free at {existing}", remedy)


def _prefect() -> Finding:
    try:
        url = server_address()
    except BadInput as error:
        return Finding("Prefect server", "missing", error.found, error.remedy)
    return Finding("Prefect server", "ok", url or "embedded, started with each run")


def _regions() -> list[Finding]:
    if not (settings().regions or settings().region or settings().prefix):
        return []  # Assay's own file is a template
    try:
        known = known_regions()
    except BadInput as error:
        return [Finding("Regions", "missing", error.found, error.remedy)]
    regions, kind = known.regions, "" if settings().regions else ", a template"
    findings = [Finding("Regions", "ok", f"{regions_file()}{kind}"), price_list_finding(known.prices.as_of)]
    for name in sorted({name for region in regions for name in region.unwritten()}):
        lacking = [region for region in regions if name in region.unwritten()]
        remedy = where_to_write(lacking[0].name, lacking[0].unwritten()[name])
        findings.append(Finding("Regions", "note", f"no {name} for {', '.join(each.name for each in lacking)}", remedy))
    return findings


def price_list_finding(as_of: date, today: date | None = None) -> Finding:
    """Returns the finding on the price list: a note if it is so old that prices may have changed."""
    days = ((today or datetime.now(UTC).date()) - as_of).days
    seen = f"of {as_of}, {days:,} days old"
    if days <= STALE_DAYS:
        return Finding("Prices", "ok", seen)
    remedy = f"look them up again, and write them with as_of and source into {settings().regions or 'a file of yours'}"
    return Finding("Prices", "note", f"{seen}, more than {STALE_DAYS}", remedy)


def _images() -> list[Finding]:
    try:
        named = [image for region in known_regions().regions for image in region.named_images]
    except BadInput:  # reported by `_regions`
        named = []
    commit, changed = git_state()
    every = dict.fromkeys([*filter(None, [settings().job_image]), *named])
    return [image_finding(image, commit, changed=bool(changed), since=commits_since) for image in every]


def image_finding(image: str, commit: str | None, *, changed: bool, since: Callable[[str], int | None]) -> Finding:
    """Returns the finding on an image: a note if its tag is older than this code's commit or version."""
    tag, version = image.rpartition("/")[2].partition(":")[2].partition("@")[0], versions()["assay"]

    def finding(fresh: bool, seen: str, remedy: str = _REBUILD) -> Finding:
        return _checked(f"Image {image}", fresh, seen, remedy, "note")

    if _VERSION.fullmatch(tag):
        same = tag.removeprefix("v") == version
        return finding(same, f"{'this' if same else 'another version than this'} code's, {version}")
    if not _COMMIT.fullmatch(tag):
        return finding(False, "its tag does not say how old it is", "tag it with the commit that it is built from")
    newer = 0 if (commit or "").startswith(tag) else since(tag)
    if newer is None:
        return finding(False, f"of another commit than this code's ({(commit or 'not known')[:12]})")
    if newer:
        return finding(False, f"{newer} {'commit' if newer == 1 else 'commits'} older than this code")
    return finding(not changed, "lacks changes that are not committed" if changed else "no older than this code")


def commits_since(commit: str) -> int | None:
    """Returns how many later commits have changed the content of images; None without a clone that has the commit."""
    count = git_output(Path(__file__).parents[2], "rev-list", "--count", f"{commit}..HEAD", "--", *_IN_IMAGES)
    return None if count is None else int(count)
