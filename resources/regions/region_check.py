"""Refuses jobs that would read their data across regions, which is slow and is billed by the GB.

`gs://` paths are found wherever they stand in a configuration. Google's access control decides what can be looked up:
where it says no, a warning is all there is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_UP, Decimal
from functools import cache
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from resources.config import ResourceConfig
from resources.errors import BadInput, WrongRegion
from resources.regions.buckets import bucket_location, size_of
from resources.regions.region_table import Regions
from resources.regions.regions import known_regions
from resources.settings import MAX_EGRESS_VARIABLE, data_prefix, settings

_METADATA = "http://169.254.169.254"  # of a VM at Google; by number, since looking the name up can hang elsewhere
_METADATA_SECONDS = 1.0
_SIZES_SECONDS = 5.0  # for all sizes together; without them the error names the price per GB
_GB = 10**9

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GcsPath:
    """A path in an object store, and where in a configuration it stands, such as `data.sources[0].url`."""

    place: str
    uri: str

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.uri.removeprefix("gs://").partition("/")[0]


@dataclass(frozen=True)
class Elsewhere:
    """A path that is not in the region it is used from."""

    path: GcsPath
    location: str
    """The bucket's region, or multi-region."""
    price: Decimal
    """USD for a GB, 10^9 bytes, that is read from there."""


PathChecker = Callable[[GcsPath, str], Elsewhere | None]
"""Says what is wrong with a path used from a region, if anything."""


def check_gcs_paths_same_region(
    obj: Any,
    *,
    local_ok: bool,
    region: str | None = None,
    skip_if_prefix_contains: Sequence[str] = ("train_urls", "validation_urls"),
    region_getter: Callable[[], str | None] | None = None,
    path_checker: PathChecker | None = None,
    resources: ResourceConfig | None = None,
    max_egress_usd: Decimal | None = None,
) -> str | None:
    """Checks that every `gs://` path of a configuration lies in the region that uses it, or costs little to read there.

    Args:
        obj: a configuration: mappings, sequences, sets, dataclasses, pydantic models and paths, in any nesting.
        local_ok: whether it is no error if nobody knows which region this is.
        region: the region; found out when None.
        skip_if_prefix_contains: a path is left out if its place holds one of these.
        region_getter: finds the region out; `region_of_this_machine` when None.
        path_checker: looks at one path; `check_path` when None.
        resources: whose `regions`, best first, override the machine's; `obj.resources` when None.
        max_egress_usd: what reading all that lies elsewhere once may cost; nothing, whatever is allowed, when None.

    Returns:
        The region in which all paths lie, the first of those allowed, or in which the fewest lie elsewhere; None where
        that is not known.
    """
    paths = [path for path in find_gcs_paths(obj) if not any(part in path.place for part in skip_if_prefix_contains)]
    if not paths:
        return region
    wanted = resources or getattr(obj, "resources", None)
    if region is not None:
        allowed: tuple[str, ...] = (region,)
    elif isinstance(wanted, ResourceConfig) and wanted.regions:
        allowed = wanted.regions
    else:
        here = (region_getter or region_of_this_machine)()
        allowed = (here,) if here else ()
    if not allowed:
        return _unknown_region(paths, local_ok=local_ok)
    checker = path_checker or check_path
    by_region: dict[str, list[Elsewhere]] = {}
    for name in allowed:
        by_region[name] = [found for path in paths if (found := checker(path, name)) is not None]
        if not by_region[name]:
            return name
    best = min(by_region, key=lambda name: len(by_region[name]))
    reads = _reads(by_region[best])
    usd = sum((read.usd for read in reads), Decimal(0)) if all(read.is_whole for read in reads) else None
    if max_egress_usd is not None and usd is not None and usd <= max_egress_usd:
        return best
    way = "" if max_egress_usd is None else f" Or allow it: {MAX_EGRESS_VARIABLE}={_cents(usd) or 'USD'}."
    raise _wrong(reads, region=best, allowed=allowed, way_to_allow=way)


def check_reads(uris: Sequence[str], resources: ResourceConfig, *, backend: str | None) -> None:
    """Checks that what a pool or a job is to read lies in its region, or costs no more than `ASSAY_MAX_EGRESS_USD`.

    Args:
        uris: what it is to read.
        resources: of the pool or job, which may name its regions.
        backend: where it runs if they do not, as in `Client.url`; None is this machine.
    """

    def region_of_backend() -> str | None:
        if backend is None:
            return region_of_this_machine()
        return next((region.name for region in known_regions().regions if region.backend_url == backend), None)

    check_gcs_paths_same_region(
        {"reads": list(dict.fromkeys(uris))},
        local_ok=True,
        region_getter=region_of_backend,
        resources=resources,
        max_egress_usd=Decimal(str(settings().max_egress_usd)),
    )


def find_gcs_paths(obj: Any, place: str = "") -> list[GcsPath]:
    """Every `gs://` path inside a value, each with its place; values that hold themselves are followed once."""
    return list(_found(obj, place, set()))


def check_path(path: GcsPath, region: str, regions: Regions | None = None) -> Elsewhere | None:
    """Compares a bucket's region, as the regions file or the bucket itself says, with the one that uses it.

    Args:
        path: what is used.
        region: from where.
        regions: what is known of regions and buckets; `known_regions()` when None.
    """
    known = regions or known_regions()
    described = known.of_bucket(path.bucket)
    all_names = ({entry.name, *entry.aliases} for entry in known.regions)
    aliases = next((names for names in all_names if region in names), {region})
    if described is not None:
        locations: tuple[str, ...] = (described.name,)
    else:
        try:
            locations = bucket_location(path.bucket)
        except (PermissionError, FileNotFoundError) as error:
            _log.warning("The region of gs://%s, used at %s, cannot be looked up: %s", path.bucket, path.place, error)
            return None
    if any(_covers(location, name) for location in locations for name in aliases):
        return None
    here = known.named(region).name if len(aliases) > 1 else region
    return Elsewhere(path, " and ".join(locations), known.egress_price(locations[0], here))


def region_of_this_machine(metadata_address: str = _METADATA) -> str | None:
    """The region this machine is in: as the settings say, a VM's metadata, or else the data prefix; or None."""
    zone = settings().region or vm_metadata("zone", metadata_address)
    if zone is not None:
        return settings().region or zone.rpartition("/")[2].rpartition("-")[0]  # projects/1/zones/us-east1-d
    return region_of_prefix(data_prefix(), known_regions())


@cache  # a machine that is no VM at Google takes a second to say so
def vm_metadata(name: str, metadata_address: str = _METADATA) -> str | None:
    """Returns what the metadata of this VM at Google says of its instance; None where it is none, or says nothing."""
    request = urllib.request.Request(
        f"{metadata_address}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # link-local: never through a proxy
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as answer:
            if answer.headers.get("Metadata-Flavor") == "Google":
                return answer.read().decode().strip()
    except OSError:
        pass  # not a VM at Google, or one that does not say
    return None


def region_of_prefix(prefix: str | None, regions: Regions) -> str | None:
    """The region of a prefix such as gs://marin-us-central2: of its bucket, or the one its name ends in."""
    if not prefix or not prefix.startswith("gs://"):
        return None
    bucket = GcsPath("", prefix).bucket
    if region := regions.of_bucket(bucket):
        return region.name
    names = {alias: region.name for region in regions.regions for alias in (region.name, *region.aliases)}
    return next((names[name] for name in names if bucket.endswith(f"-{name}")), None)


def region_of_data(uri: str, regions: Regions | None = None) -> str | None:
    """The region, or multi-region, that a location lies in: its bucket's, or this machine's for a path; or None.

    Args:
        uri: the location.
        regions: what is known of regions and buckets; `known_regions()` when None.
    """
    if not uri.startswith("gs://"):
        return None if "://" in uri and not uri.startswith("file://") else region_of_this_machine()
    bucket = GcsPath("", uri).bucket
    if described := (regions or known_regions()).of_bucket(bucket):
        return described.name
    try:
        return bucket_location(bucket)[0]
    except (PermissionError, FileNotFoundError) as error:
        _log.warning("The region of gs://%s cannot be looked up: %s", bucket, error)
        return None


def _found(obj: Any, place: str, above: set[int]) -> Iterator[GcsPath]:
    match obj:
        case str() if obj.startswith("gs://"):
            yield GcsPath(place or "(the value itself)", obj)
            return
        case str() | bytes() | None | int() | float():
            return
        case PurePath():  # pathlib makes one slash of two
            text = obj.as_posix()
            yield from _found(f"gs://{text[4:]}" if text.startswith("gs:/") else text, place, above)
            return
        case os.PathLike():
            yield from _found(os.fspath(obj), place, above)
            return
    if id(obj) in above:
        return
    inside = {*above, id(obj)}
    for key, value in _members(obj):
        if isinstance(key, str):
            yield from _found(value, f"{place}.{key}" if place else key, inside)
        else:
            yield from _found(value, f"{place}[{key}]", inside)


def _members(obj: Any) -> list[tuple[Any, Any]]:
    match obj:
        case BaseModel():
            return list(obj)
        case Mapping():
            return list(obj.items())
        case list() | tuple():
            return list(enumerate(obj))
        case set() | frozenset():
            return list(enumerate(sorted(obj, key=repr)))
        case _ if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            return [(field.name, getattr(obj, field.name, None)) for field in dataclasses.fields(obj)]
        case _:
            return []


def _covers(location: str, region: str) -> bool:
    location, region = location.lower(), region.lower()
    around = {"us": "us-", "eu": "europe-", "asia": "asia-"}.get(location)
    return location == region or (around is not None and region.startswith(around))


@dataclass(frozen=True)
class _Read:
    """One read from elsewhere; `is_whole` says that all of its bytes could be counted."""

    found: Elsewhere
    size_bytes: int
    is_whole: bool

    @property
    def usd(self) -> Decimal:
        return self.found.price * self.size_bytes / _GB

    def __str__(self) -> str:
        path, price = self.found.path, self.found.price
        where = f"  {path.place}: {path.uri} is in {self.found.location}; "
        if not self.size_bytes:
            return f"{where}reading it costs {price} USD per GB"
        least = "" if self.is_whole else "more than "
        size = f"{least}{self.size_bytes / _GB:,.3g} GB"
        return f"{where}reading {size} once costs {least}{self.usd:,.2g} USD, {price} per GB"


def _reads(elsewhere: list[Elsewhere]) -> list[_Read]:
    until = time.monotonic() + _SIZES_SECONDS
    reads = []
    for found in elsewhere:
        left = until - time.monotonic()
        size, whole = size_of(found.path.uri, left) if left > 0 else (0, False)
        reads.append(_Read(found, size, whole and size > 0))
    return reads


def _unknown_region(paths: list[GcsPath], *, local_ok: bool) -> None:
    if local_ok:
        _log.warning("Nothing says which region this is; %d gs:// paths were not checked.", len(paths))
        return
    raise BadInput(
        expected="to know which region this is, since the configuration names buckets",
        found=f"no metadata of a VM, no prefix, and {len(paths)} paths such as {paths[0].uri} at {paths[0].place}",
        remedy="Set ASSAY_PREFIX to a bucket of the region, or name it in resources.regions.",
    )


def _cents(usd: Decimal | None) -> Decimal | None:
    return None if usd is None else usd.quantize(Decimal("0.01"), ROUND_UP)


def _wrong(reads: list[_Read], *, region: str, allowed: Sequence[str], way_to_allow: str) -> WrongRegion:
    among = f", the best of {', '.join(allowed)}" if len(allowed) > 1 else ""
    return WrongRegion(
        expected=f"all gs:// paths of the configuration in the region {region}{among}",
        found="\n".join([f"{len(reads)} that are not in the same region", *map(str, reads)]),
        remedy="Copy the data to a bucket of the region, use one there, or run the job where the data is."
        + way_to_allow,
    )
