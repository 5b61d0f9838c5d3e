"""Tasks of Inspect about the islanders of the demo: letters of choices, or words."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import accuracy, choice, includes, stderr
from inspect_ai.solver import generate, multiple_choice

QUESTIONS = "demo_choices.jsonl"
METRICS = [accuracy(), stderr(cluster="islander")]
"""Questions about one islander are a cluster."""
GREEDY = GenerateConfig(temperature=0)


def _asked(row: dict) -> Sample:
    islander = row["id"].partition("-")[0]
    return Sample(
        id=row["id"], input=row["question"], target=row["choices"][row["answer"]], metadata={"islander": islander}
    )


def _with_choices(row: dict) -> Sample:
    sample = _asked(row)
    sample.choices, sample.target = row["choices"], "ABCD"[row["answer"]]
    return sample


@task
def demo_choices() -> Task:
    """Multiple-choice questions, answered by a letter."""
    asked = json_dataset(QUESTIONS, _with_choices)
    return Task(asked, solver=multiple_choice(), scorer=choice(), metrics=METRICS, config=GREEDY)


@task
def demo_answers() -> Task:
    """Questions, answered by a text with the right word in it."""
    asked = json_dataset(QUESTIONS, _asked)
    return Task(asked, solver=generate(), scorer=includes(), metrics=METRICS, config=GREEDY)
