"""Clients of a pool: numbered requests, a limited number at a time, and the answer to each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import aiohttp

from faults.scenarios.questions import KINDS, Kind, Payload, Question, is_broken_off, payload_in

BROKEN_STREAM = "a stream that ends with an error event"
"""The problem of a cut stream: no other replica can continue a stream that its client has begun to receive."""
_COMES_BACK_SECONDS = 60.0
_COMES_BACK_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Endpoint:
    """Address of an endpoint, ending in `/v1`, with its key and model."""

    base_url: str
    key: str
    model: str


@dataclass(frozen=True)
class LoadPlan:
    """The requests to make; `mark` tells them apart from those of other plans."""

    mark: str
    requests: int = 2000
    concurrency: int = 64
    kinds: tuple[Kind, ...] = KINDS
    prompts: int = 16
    """Different prompts of each kind."""
    max_tokens: int = 8
    timeout_seconds: float = 300.0
    """Time-out of an answer."""
    retries: int = 0
    """Retries of a client after its connection broke; it also waits while nothing listens at the address."""

    def question(self, number: int, model: str) -> Question:
        kind = self.kinds[number % len(self.kinds)]
        prompt = number // len(self.kinds) % self.prompts
        return Question(kind, prompt, f"{self.mark}-{number}", model, self.max_tokens)


@dataclass(frozen=True)
class Answer:
    """A request as its client saw it: no status after a broken connection, `payload` only of a right 200."""

    number: int
    question: Question
    status: int | None
    payload: Payload | None
    problem: str | None
    attempts: int
    seconds: float


@dataclass(frozen=True)
class LoadReport:
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def errors(self) -> Counter[str]:
        """Counts requests without a whole, valid answer by problem, except broken streams."""
        return Counter(answer.problem for answer in self.answers if answer.problem not in (None, BROKEN_STREAM))

    @property
    def broken_streams(self) -> int:
        """Streams that ended with an error event."""
        return sum(answer.problem == BROKEN_STREAM for answer in self.answers)

    @property
    def retried(self) -> int:
        """Requests that were sent more than once."""
        return sum(answer.attempts > 1 for answer in self.answers)

    def wrong(self, reference: Mapping[tuple[Kind, int], Payload]) -> list[Answer]:
        """Returns answers that differ from the same request's answer in `reference`."""
        return [
            answer
            for answer in self.answers
            if answer.payload is not None
            and answer.question.is_repeatable
            and (right := reference.get((answer.question.kind, answer.question.prompt))) is not None
            and not answer.payload.agrees_with(right)
        ]


class Load:
    """Running clients that end with the block; `on_answer` is called with each answer."""

    def __init__(
        self, endpoint: Endpoint, plan: LoadPlan, *, on_answer: Callable[[Answer], None] | None = None
    ) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._on_answer = on_answer
        self._answers: list[Answer] = []
        self._numbers = iter(range(plan.requests))
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._began = 0.0

    async def __aenter__(self) -> Load:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=self._plan.timeout_seconds)
        headers = {"Authorization": f"Bearer {self._endpoint.key}", "Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        self._began = time.monotonic()
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(self._plan.concurrency)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def reached(self, answers: int) -> None:
        """Returns once so many requests have an answer or an error."""
        while len(self._answers) < min(answers, self._plan.requests):
            self._news.clear()
            await self._news.wait()

    async def report(self) -> LoadReport:
        await asyncio.gather(*self._tasks)
        return LoadReport(
            tuple(sorted(self._answers, key=lambda answer: answer.number)), time.monotonic() - self._began
        )

    async def _ask_on(self) -> None:
        for number in self._numbers:
            answer = await self._ask(number)
            self._answers.append(answer)
            if self._on_answer is not None:
                self._on_answer(answer)
            self._news.set()

    async def _ask(self, number: int) -> Answer:
        question = self._plan.question(number, self._endpoint.model)
        began = time.monotonic()
        status: int | None = None
        payload: Payload | None = None
        problem: str | None = None
        attempts = 0
        while attempts <= self._plan.retries:
            attempts += 1
            try:
                status, payload, problem = await self._ask_once(question)
                break
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                status, payload, problem = None, None, type(error).__name__
                nothing_sent = isinstance(error, aiohttp.ClientConnectorError)
                if self._plan.retries and await self._until_back() and nothing_sent:
                    attempts -= 1
        return Answer(number, question, status, payload, problem, attempts, time.monotonic() - began)

    async def _ask_once(self, question: Question) -> tuple[int, Payload | None, str | None]:
        async with self._session.post(
            self._endpoint.base_url.removesuffix("/v1") + question.path, data=question.body
        ) as response:
            body = await response.read()
            if response.status != 200:
                return response.status, None, f"status {response.status}"
            payload = payload_in(question, response.headers.get("Content-Type", ""), body)
            if payload is not None:
                return 200, payload, None
            cut = is_broken_off(question, body)
            return 200, None, BROKEN_STREAM if cut else "an answer that is not whole or not valid"

    async def _until_back(self) -> bool:
        # waits until the address accepts connections again; returns False after the time-out
        url = urlsplit(self._endpoint.base_url)
        deadline = time.monotonic() + _COMES_BACK_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(_COMES_BACK_POLL_SECONDS)
            try:
                _, writer = await asyncio.open_connection(url.hostname, url.port)
            except OSError:
                continue
            writer.close()
            return True
        return False


async def ask_all(endpoint: Endpoint, plan: LoadPlan) -> LoadReport:
    async with Load(endpoint, plan) as load:
        return await load.report()


async def reference_answers(endpoint: Endpoint, plan: LoadPlan) -> dict[tuple[Kind, int], Payload]:
    """Returns right answers to each kind of request and prompt of a plan; ValueError if the pool gives none."""
    every = LoadPlan(
        mark=f"{plan.mark}-reference",
        requests=len(plan.kinds) * plan.prompts,
        concurrency=len(plan.kinds),
        kinds=plan.kinds,
        prompts=plan.prompts,
        max_tokens=plan.max_tokens,
    )
    report = await ask_all(endpoint, every)
    if report.errors:
        raise ValueError(f"the pool does not answer before the fault: {_listed(report.errors)}")
    return dict(_repeatable(report))


def _repeatable(report: LoadReport) -> Iterator[tuple[tuple[Kind, int], Payload]]:
    for answer in report.answers:
        if answer.payload is not None and answer.question.is_repeatable:
            yield (answer.question.kind, answer.question.prompt), answer.payload


def _listed(errors: Counter[str]) -> str:
    return ", ".join(f"{count} of {problem}" for problem, count in errors.most_common())
