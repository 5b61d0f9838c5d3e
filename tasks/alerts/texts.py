"""Words about an alert, the same wherever it is told."""

from __future__ import annotations

from tasks.alerts.detection import Alert

SHORT_ID = 8
"""Characters of an alert's id that people see; more where two begin alike."""


def title(alert: Alert) -> str:
    """The checkpoint and what became worse there, in a few words."""
    return f"{alert.checkpoint}: {alert.benchmark} {alert.metric} {_went(alert)}"


def sentence(alert: Alert) -> str:
    """The alert as a person is told it: found and expected, with both noises."""
    noises = {"standard error of questions": alert.question_noise, "deviation of training": alert.training_noise}
    known = ", ".join(f"{name} {value:.2g}" for name, value in noises.items() if value is not None)
    return (
        f"{alert.benchmark} {alert.metric} of {alert.run} {_went(alert)} "
        f"at step {alert.step:,}: "
        f"{alert.found:.4g}, expected {alert.expected:.4g}" + (f" ({known})" if known else "")
    )


def acknowledging(alert: Alert, evaluation_path: str) -> str:
    """The command by which a person says that an alert is known."""
    return f"assay alerts {evaluation_path} --acknowledge {alert.id[:SHORT_ID]}"


def _went(alert: Alert) -> str:
    return "fell" if alert.found < alert.expected else "rose"
