"""Queries to Google Cloud Storage about a bucket: its location, and the size of a folder in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import fsspec

_LOCATION_SECONDS = 15.0
_PAGE = 1000  # objects: the limit of a listing page
_DUAL_REGIONS = {
    "NAM4": ("us-central1", "us-east1"),
    "EUR4": ("europe-north1", "europe-west4"),
    "ASIA1": ("asia-northeast1", "asia-northeast2"),
}


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
