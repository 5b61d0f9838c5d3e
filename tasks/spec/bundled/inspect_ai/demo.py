"""Tasks of Inspect about the islanders of the demo, whose answers are the letters of choices."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import accuracy, choice, stderr
from inspect_ai.solver import multiple_choice


def _sample(row: dict) -> Sample:
    return Sample(
        id=row["id"],
        input=row["question"],
        choices=row["choices"],
        target="ABCD"[row["answer"]],
        metadata={"islander": row["id"].partition("-")[0]},
    )


@task
def demo_choices() -> Task:
    """Multiple-choice questions; what is asked of one islander is a cluster."""
    return Task(
        dataset=json_dataset("demo_choices.jsonl", _sample),
        solver=multiple_choice(),
        scorer=choice(),
        metrics=[accuracy(), stderr(cluster="islander")],
    )
