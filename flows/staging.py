"""The flow that stages data for workers without a network, and downloads it from the hub only once per region."""

from __future__ import annotations

from typing import Any

from prefect.logging import get_run_logger
from pydantic import model_validator

from flows.hooks import pipeline
from resources.config import Config
from tasks.offline.stage import fill_from, share_staged, stage
from tasks.offline.wanted import wanted_by
from tasks.spec.names import in_few_words
from tasks.spec.suites import SuiteName, load_suite


class StagingRequest(Config):
    """A request to stage data: which data, source and target."""

    suites: tuple[SuiteName, ...] = ()
    """Suites by name, or YAML files."""
    tokenizers: tuple[str, ...] = ()
    """Tokenizers on the hub, as owner/name or owner/name@revision."""
    revisions: dict[str, str] = {}
    """Revisions as in a suite; the suites' own, or the newest, when unset."""
    benchmarks_path: str | None = None
    """Local folder with your own benchmarks."""
    texts_from: str | None = None
    """Folder or address with the text files, in place of their source."""
    fill_from: str | None = None
    """A shared copy to fill this machine's cache from, in place of the hub."""
    target: str | None = None
    """A shared copy to update afterwards; local, gs:// or s3://."""
    refresh: bool = False
    """Fetch the newest revision of everything."""
    prove: bool = True
    """Load everything again without a network."""

    @model_validator(mode="after")
    def _check_combination(self) -> StagingRequest:
        if self.fill_from is None and not (self.suites or self.tokenizers):
            raise ValueError("name a suite or a tokenizer, or a shared copy to fill the cache from")
        if self.fill_from is not None and (self.target is not None or self.refresh):
            raise ValueError("fill_from reads a shared copy, so target and refresh mean nothing: leave them out")
        return self

    @property
    def place(self) -> str:
        """The suites and tokenizers, abbreviated, for the name of the flow run."""
        return in_few_words([*self.suites, *self.tokenizers]) or f"from {self.fill_from}"


@pipeline("stage-data", run_name="stage {request.place}")
def stage_data(request: StagingRequest) -> dict[str, Any]:
    """Stages the data that suites need on this machine; returns all staged data with revisions and sizes.

    Args:
        request: The data, their source, and a shared copy to update.
    """
    return staged_by(request, on_event=get_run_logger().info)


def staged_by(request: StagingRequest, *, on_event: Any) -> dict[str, Any]:
    """Stages the data of a request without Prefect, for the command line."""
    required = wanted_by([load_suite(name) for name in request.suites], tokenizers=request.tokenizers)
    if request.fill_from is not None:
        everything = not (request.suites or request.tokenizers)
        staged, number = fill_from(request.fill_from, None if everything else required, on_event=on_event)
        on_event(f"{number} bytes copied from {request.fill_from}")
        return staged
    pinned = {path: commit for name in request.suites for path, commit in load_suite(name).revisions.items()}
    try:
        staged = stage(
            required,
            benchmarks_path=request.benchmarks_path,
            revisions={**pinned, **request.revisions},
            texts_from=request.texts_from,
            refresh=request.refresh,
            prove=request.prove,
            on_event=on_event,
        )
    finally:  # partial data are useful to other machines
        if request.target is not None:
            number = share_staged(request.target, on_event=on_event)
            on_event(f"{number} bytes sent to {request.target}")
    return staged
