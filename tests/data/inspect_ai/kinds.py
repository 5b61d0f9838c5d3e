"""Tasks of Inspect: judged answers, a call of a tool, epochs, several values of one score, chance, and a sandbox."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, accuracy, choice, includes, mean, model_graded_qa, scorer, stderr
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import bash, tool


@task
def judged(questions: int = 8) -> Task:
    """Answers that a model judges."""
    samples = [Sample(id=f"q{number}", input=f"Name {number}.", target=str(number)) for number in range(questions)]
    return Task(dataset=samples, solver=[system_message("Be brief."), generate()], scorer=model_graded_qa())


@tool
def add():
    """Adds."""

    async def execute(x: int, y: int) -> str:
        """Adds two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return str(x + y)

    return execute


@task
def sums() -> Task:
    """Sums, for which there is a tool."""
    samples = [Sample(id=f"s{x}", input=f"What is {x} + 1?", target=str(x + 1)) for x in range(3)]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())


@scorer(metrics={"long": [mean(), stderr()], "vowels": [mean()]})
def letters():
    """Values of an answer."""

    async def score(state, target):
        text = state.output.completion
        return Score(value={"long": float(len(text)), "vowels": float(sum(letter in "aeiou" for letter in text))})

    return score


@task
def repeated() -> Task:
    """Questions in two epochs, with two values for each answer, and an empty stop string."""
    samples = [Sample(id=name, input=name) for name in ("one", "two", "three")]
    return Task(dataset=samples, scorer=letters(), epochs=2, config=GenerateConfig(stop_seqs=["", "!"]))


@task
def shell() -> Task:
    """A command in a sandbox."""
    sample = Sample(id="sum", input="Use the shell to compute 6 * 7.", target="42")
    return Task(dataset=[sample], solver=[use_tools(bash()), generate()], scorer=includes(), sandbox="local")


@task
def shuffled() -> Task:
    """Questions and their choices in orders that are chance."""
    samples = [Sample(id=f"q{n}", input=f"{n}?", choices=[f"{n}{x}" for x in "abcd"], target="A") for n in range(24)]
    dataset = MemoryDataset(samples)
    dataset.shuffle_choices()
    dataset.shuffle()
    return Task(dataset=dataset, solver=multiple_choice(shuffle=True), scorer=choice())


@task
def broken() -> Task:
    """No task at all."""
    raise OSError("no questions here")


@task
def empty_handed() -> Task:
    """A scorer that fails at one sample."""
    samples = [Sample(id=str(number), input=f"Name {number}.", target="a") for number in range(3)]
    return Task(dataset=samples, scorer=fails_once())


@scorer(metrics=[accuracy(), stderr()])
def fails_once():
    """Fails at the second sample."""

    async def score(state, target):
        if state.sample_id == "1":
            raise ValueError("no score for this")
        return Score(value="C")

    return score
