"""Refuses jobs that would read their data across regions, which is slow and billed by the GB.

`gs://` paths are found at any position of a configuration. Without access to a bucket, the check only logs a warning.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_UP, Decimal
from functools import cache
from pathlib import PurePath
from typing import Any

import fsspec
from pydantic import BaseModel

from resources.config import ResourceConfig
from resources.errors import BadInput, WrongRegion
from resources.regions.region_table import Regions
from resources.regions.regions import METADATA, known_regions, vm_zone
from resources.settings import MAX_EGRESS_VARIABLE, data_prefix, settings

_SIZES_SECONDS = 5.0  # for all sizes together; without sizes, the error contains the price per GB
_GB = 10**9
_LOCATION_SECONDS = 15.0
_PAGE = 1000  # objects: the limit of a listing page
_DUAL_REGIONS = {
    "NAM4": ("us-central1", "us-east1"),
    "EUR4": ("europe-north1", "europe-west4"),
    "ASIA1": ("asia-northeast1", "asia-northeast2"),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GcsPath:
    """A path in an object store, and its position in a configuration, such as `data.sources[0].url`."""

    place: str
    uri: str

    @property
    def bucket(self) -> str:
        return self.uri.removeprefix("gs://").partition("/")[0]


@dataclass(frozen=True)
class Elsewhere:
    """A path outside of the region that uses it."""

    path: GcsPath
    location: str
    price: Decimal
    """USD per GB (10^9 bytes) for reading from there."""


PathChecker = Callable[[GcsPath, str], Elsewhere | None]
"""Checks a path for a region that uses it; returns the mismatch, or None."""


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
    """Checks that all `gs://` paths of a configuration are in the region that uses them, or cheap to read from it.

    Returns the region of all paths: the first allowed region that fits, or else the region with the fewest paths
    outside; None if unknown.

    Args:
        obj: a configuration: mappings, sequences, sets, dataclasses, pydantic models and paths, in any nesting.
        local_ok: accepts an unknown region with a warning, in place of an error.
        skip_if_prefix_contains: ignores paths with any of these in their position.
        region_getter: detects the region if `region` is None; `region_of_this_machine` when None.
        resources: `regions` of these, best first, override the machine's region; `obj.resources` when None.
        max_egress_usd: limit for reading all data of other regions once; when None, any such read is an error.
    """
    paths = [path for path in find_gcs_paths(obj) if not any(part in path.place for part in skip_if_prefix_contains)]
    if not paths:
        return region
    resource_config = resources or getattr(obj, "resources", None)
    if region is not None:
        allowed: tuple[str, ...] = (region,)
    elif isinstance(resource_config, ResourceConfig) and resource_config.regions:
        allowed = resource_config.regions
    else:
        own_region = (region_getter or region_of_this_machine)()
        allowed = (own_region,) if own_region else ()
    if not allowed:
        return _unknown_region(paths, local_ok=local_ok)
    checker = path_checker or check_path
    by_region: dict[str, list[Elsewhere]] = {}
    for name in allowed:
        by_region[name] = [mismatch for path in paths if (mismatch := checker(path, name)) is not None]
        if not by_region[name]:
            return name
    best = min(by_region, key=lambda name: len(by_region[name]))
    reads = _reads(by_region[best])
    usd = sum((read.usd for read in reads), Decimal(0)) if all(read.is_whole for read in reads) else None
    if max_egress_usd is not None and usd is not None and usd <= max_egress_usd:
        return best
    shown = "USD" if usd is None else usd.quantize(Decimal("0.01"), ROUND_UP)
    way = "" if max_egress_usd is None else f" Or allow it: {MAX_EGRESS_VARIABLE}={shown}."
    raise _wrong(reads, region=best, allowed=allowed, way_to_allow=way)


def check_reads(uris: Sequence[str], resources: ResourceConfig, *, backend: str | None) -> None:
    """Checks that the reads of a pool or job stay in its region, or cost no more than `ASSAY_MAX_EGRESS_USD`.

    The region is from `resources`, else of the backend (as in `Client.url`; None is this machine).
    """

    def region_of_backend() -> str | None:
        if backend is None:
            return region_of_this_machine()
        region = known_regions().of_backend(backend)
        return region.name if region else None

    check_gcs_paths_same_region(
        {"reads": list(dict.fromkeys(uris))},
        local_ok=True,
        region_getter=region_of_backend,
        resources=resources,
        max_egress_usd=Decimal(str(settings().max_egress_usd)),
    )


def find_gcs_paths(obj: Any, place: str = "") -> list[GcsPath]:
    """Returns every `gs://` path inside a value, with its position; a value that contains itself is visited once."""
    return list(_found(obj, place, set()))


def check_path(path: GcsPath, region: str, regions: Regions | None = None) -> Elsewhere | None:
    """Returns the mismatch, if any, of the using region and a bucket's region (regions file, else the bucket)."""
    known = regions or known_regions()
    using = known.find(region)
    names = (using.name, *using.aliases) if using else (region,)
    locations = _locations(path, known)
    if not locations or any(_covers(location, name) for location in locations for name in names):
        return None
    return Elsewhere(path, " and ".join(locations), known.egress_price(locations[0], names[0]))


def region_of_this_machine(metadata_address: str = METADATA) -> str | None:
    """Returns the region of this machine: from the settings, else the VM's metadata, else the data prefix; or None."""
    if settings().region:
        return settings().region
    if zone := vm_zone(metadata_address):
        return zone.rpartition("-")[0]
    return region_of_prefix(data_prefix(), known_regions())


def region_of_prefix(prefix: str | None, regions: Regions) -> str | None:
    """Returns the region of a prefix such as gs://marin-us-central2: of its bucket, else the end of its name."""
    if not prefix or not prefix.startswith("gs://"):
        return None
    bucket = GcsPath("", prefix).bucket
    if region := regions.of_bucket(bucket):
        return region.name
    names = {alias: region.name for region in regions.regions for alias in (region.name, *region.aliases)}
    return next((names[name] for name in names if bucket.endswith(f"-{name}")), None)


def region_of_data(uri: str, regions: Regions | None = None) -> str | None:
    """Returns the region or multi-region of a location: of its bucket, or of this machine for a local path; or None."""
    if not uri.startswith("gs://"):
        return None if "://" in uri and not uri.startswith("file://") else region_of_this_machine()
    return next(iter(_locations(GcsPath("the command line", uri), regions or known_regions())), None)


def _locations(path: GcsPath, known: Regions) -> tuple[str, ...]:
    if described := known.of_bucket(path.bucket):
        return (described.name,)
    try:
        return bucket_location(path.bucket)
    except (PermissionError, FileNotFoundError) as error:
        _log.warning("The region of gs://%s, used at %s, cannot be looked up: %s", path.bucket, path.place, error)
        return ()


def _found(obj: Any, place: str, above: set[int]) -> Iterator[GcsPath]:
    match obj:
        case str() if obj.startswith("gs://"):
            yield GcsPath(place or "(the value itself)", obj)
            return
        case str() | bytes() | None | int() | float():
            return
        case PurePath():  # pathlib merges two slashes
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
    mismatch: Elsewhere
    size_bytes: int
    # True if all its bytes were counted
    is_whole: bool

    @property
    def usd(self) -> Decimal:
        return self.mismatch.price * self.size_bytes / _GB

    def __str__(self) -> str:
        path, price = self.mismatch.path, self.mismatch.price
        where = f"  {path.place}: {path.uri} is in {self.mismatch.location}; "
        if not self.size_bytes:
            return f"{where}reading it costs {price} USD per GB"
        least = "" if self.is_whole else "more than "
        size = f"{least}{self.size_bytes / _GB:,.3g} GB"
        return f"{where}reading {size} once costs {least}{self.usd:,.2g} USD, {price} per GB"


def _reads(elsewhere: list[Elsewhere]) -> list[_Read]:
    until = time.monotonic() + _SIZES_SECONDS
    reads = []
    for mismatch in elsewhere:
        left = until - time.monotonic()
        size, whole = size_of(mismatch.path.uri, left) if left > 0 else (0, False)
        reads.append(_Read(mismatch, size, whole and size > 0))
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


def _wrong(reads: list[_Read], *, region: str, allowed: Sequence[str], way_to_allow: str) -> WrongRegion:
    among = f", the best of {', '.join(allowed)}" if len(allowed) > 1 else ""
    return WrongRegion(
        expected=f"all gs:// paths of the configuration in the region {region}{among}",
        found="\n".join([f"{len(reads)} that are not in the same region", *map(str, reads)]),
        remedy="Copy the data to a bucket of the region, use a copy there, or run the job where the data is."
        + way_to_allow,
    )


@cache
def bucket_location(bucket: str) -> tuple[str, ...]:
    """Returns the regions of a bucket, in lower case; a multi-region is `us`, `eu` or `asia`.

    Raises:
        PermissionError: access to the bucket is denied, or the query failed.
        FileNotFoundError: the bucket does not exist.
    """
    metadata = _asked(f"b/{bucket}", _LOCATION_SECONDS)
    location = str(metadata.get("location", "")).upper()
    custom = (metadata.get("customPlacementConfig") or {}).get("dataLocations") or []
    places = tuple(str(place).lower() for place in custom) or _DUAL_REGIONS.get(location, (location.lower(),))
    if not any(places):
        raise PermissionError("the bucket does not say where it is")
    return places


def size_of(uri: str, timeout_seconds: float) -> tuple[int, bool]:
    """Returns the bytes on the first listing page below a path, and True if that is all; (0, False) if it fails."""
    bucket, _, prefix = uri.removeprefix("gs://").partition("/")
    try:
        fields = "items/size,nextPageToken"
        page = _asked(f"b/{bucket}/o", timeout_seconds, prefix=prefix, maxResults=_PAGE, fields=fields)
    except OSError:
        return 0, False
    return sum(int(item.get("size", 0)) for item in page.get("items") or ()), "nextPageToken" not in page


def _asked(path: str, timeout_seconds: float, **parameters: Any) -> dict[str, Any]:
    try:
        # gcsfs tries six times: 40 s if the name is not resolved.
        return fsspec.filesystem("gs").call("GET", path, json_out=True, timeout=timeout_seconds, **parameters)
    except FileNotFoundError:
        raise
    except Exception as error:  # gcsfs, google-auth and aiohttp have error classes of their own
        raise PermissionError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
