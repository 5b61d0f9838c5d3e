"""Texts about an alert, shared by all outputs."""

from __future__ import annotations

from tasks.alerts.detection import Alert

SHORT_ID = 8
"""Characters of an alert's id in outputs; more where two ids begin alike."""


def title(alert: Alert) -> str:
    """Returns the checkpoint, the metric and its direction in a few words."""
    return f"{alert.checkpoint}: {alert.benchmark} {alert.metric} {_went(alert)}"


def sentence(alert: Alert) -> str:
    """Returns the alert as a sentence, with measured and expected value and both noises."""
    noises = {"standard error of questions": alert.question_noise, "deviation of training": alert.training_noise}
    known = ", ".join(f"{name} {value:.2g}" for name, value in noises.items() if value is not None)
    return (
        f"{alert.benchmark} {alert.metric} of {alert.run} {_went(alert)} "
        f"at step {alert.step:,}: "
        f"{alert.found:.4g}, expected {alert.expected:.4g}" + (f" ({known})" if known else "")
    )


def acknowledging(alert: Alert, evaluation_path: str) -> str:
    """Returns the command that acknowledges an alert."""
    return f"assay alerts {evaluation_path} --acknowledge {alert.id[:SHORT_ID]}"


def _went(alert: Alert) -> str:
    return "fell" if alert.found < alert.expected else "rose"
