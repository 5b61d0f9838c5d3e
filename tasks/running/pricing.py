"""Price of cells: hourly rate of the replica, cost so far, and reasons for unknown costs."""

from __future__ import annotations

from pools.config import is_address
from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.addresses import is_loopback
from resources.regions.regions import Tariff, tariff_of
from tasks.records.cost import Cost, Predicted, Spent
from tasks.running.cells import access_of
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import JudgedOptions, JudgeEndpoint


def resources_of_replica(config: EvaluationConfig) -> ResourceConfig | None:
    """Returns the resources of a single replica of an evaluation; None without a pool configuration."""
    known = config.native or config.pool_config is not None
    return config.resources.model_copy(update={"replicas": 1}) if known else None


def tariff_of_cell(config: EvaluationConfig) -> Tariff:
    """Returns the tariff of the replica that a locally started evaluation would get; `config` is from `as_served`."""
    resources = resources_of_replica(config)
    if resources is None:
        return Tariff(why_unknown="an endpoint of another owner answers, which has no price here")
    try:
        if config.native or config.pool_name is None:
            client = current_client()
            return tariff_of(resources, backend=None if client.is_local else client.url)
        if not resources.regions and not is_address(config.pool_name):
            host = access_of(config.pool_name, config.pool_key_block).address.host
            if is_loopback(host):
                return tariff_of(resources, backend=None)
        return tariff_of(resources, backend=config.pool_name)
    except AssayError as error:
        return Tariff(why_unknown=error.found.splitlines()[0])


def cost_of(
    config: EvaluationConfig,
    replica_seconds: float | None,
    *,
    judged: bool,
    predicted: Predicted | None,
    earlier: Spent | None = None,
) -> Cost:
    """Returns the cost of a cell at current prices.

    Args:
        replica_seconds: seconds of a replica spent on the cell; None if they were not counted.
        judged: True if a judge received requests, or may have.
        earlier: cost of earlier attempts that left no record.
    """
    tariff = tariff_of_cell(config)
    usd, why = None, tariff.why_unknown
    if tariff.usd_per_hour is not None and replica_seconds is not None:
        usd = round(tariff.usd_per_hour * replica_seconds / 3600, 8)
    elif why is None:
        why = "the seconds of its replica were not counted"
    known = None
    if judged and usd is not None and (judge := judge_elsewhere(config)) is not None:
        usd, known, why = None, usd, f"the share of the judge, {judge}, is not known"
    place = tariff.model_dump(exclude={"why_unknown"})
    return Cost(
        usd=usd,
        known_usd=known,
        replica_seconds=replica_seconds,
        why_unknown=why,
        predicted=predicted,
        earlier=earlier or Spent(),
        **place,
    )


def judge_elsewhere(config: EvaluationConfig) -> str | None:
    """Returns the judge as display text; None without a judge or if the checkpoint is its own judge."""
    if not isinstance(config.evaluator, JudgedOptions):
        return None
    judge: JudgeEndpoint | None = config.evaluator.judge
    if judge is None or (judge.pool_name is None and judge.base_url is None and judge.model is None):
        return None
    place = judge.base_url or (f"pool {judge.pool_name}" if judge.pool_name else "the same pool")
    return f"{judge.model or 'a model'} at {place}"
