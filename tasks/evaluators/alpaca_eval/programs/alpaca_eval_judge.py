"""The judge: probed first, then compares outputs through AlpacaEval's own `evaluate` with a client of ours.

Its annotator configuration is completed with its endpoint.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import openai
import pandas as pd
import tqdm
import valid_answers
import yaml
from alpaca_eval import constants
from alpaca_eval import evaluate as judge_outputs
from alpaca_eval import utils as alpaca_utils
from alpaca_eval.decoders import openai as openai_decoder
from alpaca_eval.metrics import get_winrate, glm_winrate
from huggingface_hub import hf_hub_download
from refusals import Refused

DATA_SET = "tatsu-lab/alpaca_eval"
RETRIES = 2  # three attempts in all, as lm-eval makes
CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 200
NO_ANSWER = (openai.OpenAIError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of a failed request, or of a reply that is no answer."""


MOST_LOGPROBS = 20  # vLLM's default limit


def _load_annotator(judge: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    annotator = judge["annotator"]
    for parent in (*map(Path, judge["annotator_folders"]), Path(constants.EVALUATORS_CONFIG_DIR)):
        path = parent / annotator / "configs.yaml"
        if not path.is_file():
            continue
        try:
            [(name, config)] = yaml.safe_load(path.read_text()).items()
            prompt = (parent / config["prompt_template"]).read_text()
            return name, config, prompt
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise Refused(
                expected=f"a single configuration with a prompt_template in {path}",
                found=f"{type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}",
                remedy="Correct it; prompt_template is relative to the folder above",
            ) from error
    raise Refused(
        expected="a configuration of a judge that comes with AlpacaEval or Assay, or a folder in benchmarks_path",
        found=repr(annotator),
        remedy="Correct evaluator.judge.annotator",
    )


def _complete_annotator(
    name: str, config: dict[str, Any], prompt: str, *, judge: dict[str, Any], output: Path
) -> dict[str, Any]:
    if config.get("fn_completions", "openai_completions") != "openai_completions" or config.get("batch_size", 1) != 1:
        raise Refused(
            expected="a configuration that asks an OpenAI-compatible endpoint for a single verdict per request",
            found=f"{name}, which uses {config.get('fn_completions')} with batches of {config.get('batch_size', 1)}",
            remedy="Choose another evaluator.judge.annotator",
        )
    in_chat = "<|im_start|>" in prompt
    options = {
        **(config.get("completions_kwargs") or {}),
        "model_name": judge["model"],
        "num_procs": max(2, judge["capacity"]),
        "price_per_token": 0,
        "requires_chatml": in_chat,
        "is_chat": in_chat,
    }
    if judge["constrained"]:
        body = {**options.get("extra_body", {}), "structured_outputs": {"choice": verdicts(name, config)}}
        options["extra_body"] = body
        if options.get("logprobs"):
            options["top_logprobs"] = MOST_LOGPROBS
    completed = {**config, "prompt_template": f"{name}/prompt.txt", "completions_kwargs": options}
    folder = output / "judge" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompt.txt").write_text(prompt)
    (folder / "configs.yaml").write_text(yaml.safe_dump({name: completed}))
    return completed


def verdicts(name: str, config: dict[str, Any]) -> list[str]:
    """Returns the texts that a configuration accepts as verdicts; refuses free-text verdicts."""
    given = config.get("completion_parser_kwargs") or {}
    patterns: list[Any] = []
    match config.get("fn_completion_parser"):
        case "logprob_parser":
            patterns = [given.get("numerator_token"), *given.get("denominator_tokens", [])]
        case "regex_parser" | None:
            patterns = list((given.get("outputs_to_match") or {}).values())
    plain = [text.replace(r"\b", "") for text in patterns if isinstance(text, str)]
    texts = [text for text in dict.fromkeys(plain) if text.isalnum()]
    if len(texts) < 2:
        raise Refused(
            expected="a configuration with fixed verdicts, since evaluator.judge.constrained is set",
            found=f"{name}: its verdicts are free text",
            remedy="Set constrained to false, or choose another evaluator.judge.annotator",
        )
    return texts


LENGTH_CONTROL = "df_gamed.csv"
PROBE_SECONDS = 60.0
"""For an external judge; a pool may have to load its model first, and holds the request meanwhile."""
LOST_IN_A_ROW = 20
"""Consecutive failed verdicts after which the judge counts as gone: 805 would each wait for their retries."""
OWN_COMPLETION = openai_decoder._openai_completion_helper


class JudgeGoneError(Exception):
    """The judge failed to answer many times in a row."""


class Judge:
    """The judge that compares outputs."""

    def __init__(self, job: dict[str, Any], output: Path, unanswered: valid_answers.Unanswered) -> None:
        self._job, self._judge, self._output = job, job["judge"], output
        self._name, config, prompt = _load_annotator(self._judge)
        self._config = _complete_annotator(self._name, config, prompt, judge=self._judge, output=output)
        self._prompt = prompt
        self._unanswered = unanswered
        self._lost = valid_answers.LostInARow()
        self._client = openai.OpenAI(
            base_url=self._judge["base_url"],
            api_key=os.environ[self._judge["key_variable"]],
            max_retries=RETRIES,
            timeout=openai.Timeout(self._judge["timeout"], connect=CONNECT_SECONDS),
            http_client=openai.DefaultHttpxClient(event_hooks=valid_answers.hooks()),
        )
        self.described = {"judge": self._judge["model"], "annotator": self._name}

    def probe(self) -> None:
        """Requests a verdict, so that an unusable judge is refused at once."""
        options = dict(self._config["completions_kwargs"])
        chat = {name: options.pop(name, None) for name in ("requires_chatml", "is_chat", "num_procs", "batch_size")}
        fields = {**options, "model": options.pop("model_name")}
        for name in ("price_per_token", "n_retries", "sleep_time", "model_name"):
            fields.pop(name, None)
        patience = PROBE_SECONDS if self._judge["elsewhere"] else self._judge["timeout"]
        client = self._client.with_options(timeout=openai.Timeout(patience, connect=CONNECT_SECONDS), max_retries=1)
        text = self._prompt
        for name, value in (("instruction", "1+1="), ("output_1", "2"), ("output_2", "3")):
            text = text.replace("{" + name + "}", value)
        try:
            if chat["requires_chatml"]:
                answer = client.chat.completions.create(messages=alpaca_utils.prompt_to_chatml(text), **fields)
            else:
                answer = client.completions.create(prompt=text, **fields)
            choice = answer.choices[0]
        except NO_ANSWER as error:
            self._unusable(f"it gave no answer: {type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}")
        if fields.get("logprobs") and choice.logprobs is None:
            self._unusable(f"its answers have no log-probabilities, which {self._name} needs")

    def _unusable(self, problem: str) -> NoReturn:
        raise Refused(
            expected=f"{self._judge['model']} at {self._judge['base_url']} to judge as {self._name} asks",
            found=problem,
            remedy="Correct evaluator.judge, or start the judge; its key is read from ASSAY_JUDGE_API_KEY",
            kind="EndpointUnusable",
        )

    def compare(self, instruction_set: dict[str, Any]) -> dict[str, float | None]:
        """Judges the outputs of a set; writes annotations.json and leaderboard.csv into its folder."""
        folder, key = Path(instruction_set["folder"]), instruction_set["key"]
        outputs = [
            {name: row[name] for name in ("instruction", "output", "dataset", "generator")}
            for row in instruction_set["rows"]
        ]
        path = self._output / "judge" / self._name / "configs.yaml"
        # Our client keeps connections, and makes a failed verdict a missing verdict instead of the end.
        alpaca_utils.get_all_clients = lambda *_, **__: [self._client]  # else a client per verdict, keys from a file
        openai_decoder._openai_completion_helper = self._verdict
        labelled = {"desc": f"{key}, verdicts"}
        openai_decoder.tqdm = SimpleNamespace(tqdm=lambda *given, **options: tqdm.tqdm(*given, **options | labelled))
        try:
            judged: Any = judge_outputs(
                model_outputs=pd.DataFrame(outputs),
                reference_outputs=pd.DataFrame(instruction_set["references"]),
                annotators_config=str(path),
                name=self._job["model"]["model"],
                output_path=str(folder),
                precomputed_leaderboard=None,
                fn_metric=win_rate,
                sort_by="win_rate",
                is_return_instead_of_print=True,
                is_cache_leaderboard=False,
                annotation_kwargs={"chunksize": None, "is_ordered": True},
                caching_path=str(folder / "judgments.json"),  # AlpacaEval's default is shared between models
            )
        except JudgeGoneError as error:
            self._unusable(f"it stopped answering: {error}")
        board, annotations = judged
        scores = {name: number(board.iloc[0].get(name)) for name in ("win_rate", "standard_error", "discrete_win_rate")}
        controlled = self._length_controlled(key, instruction_set, annotations)
        for name, value in controlled.items():
            board[name] = value
        board.to_csv(folder / "leaderboard.csv")
        lengths = [len(row["output"]) for row in outputs]
        return {
            "win_rate": share(scores["win_rate"]),
            "win_rate_stderr": share(scores["standard_error"]),
            "discrete_win_rate": share(scores["discrete_win_rate"]),
            "length_controlled_winrate": share(controlled.get("length_controlled_winrate")),
            "length_controlled_winrate_stderr": share(controlled.get("lc_standard_error")),
            "avg_length": sum(lengths) / len(lengths),
        }

    def _verdict(self, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        mark = self._lost.begin()
        try:
            completions = OWN_COMPLETION(*arguments, **options)
        except NO_ANSWER as error:  # a missing verdict, which is counted
            problem = valid_answers.described(error)
            logging.warning("no verdict: %s", problem)
            self._unanswered.note(error)
            lost = self._lost.lose()
            if lost >= LOST_IN_A_ROW:
                raise JudgeGoneError(f"{lost} requests failed in a row, the last with {problem}") from error
            return [{"text": "", "total_tokens": 0}]
        self._lost.answered(mark)
        return completions

    def _length_controlled(
        self, key: str, instruction_set: dict[str, Any], annotations: list[dict[str, Any]]
    ) -> dict[str, float]:
        given = self._job["length_control"]
        note = f"length_controlled_winrate of {key}"
        if given is None and instruction_set["path"] is not None:
            self.described[note] = "not reported: it is defined for the official instructions"
            return {}
        try:
            path = given or hf_hub_download(DATA_SET, LENGTH_CONTROL, repo_type="dataset")
            glm_winrate.hf_hub_download = lambda **_: path
            frame = pd.DataFrame(annotations)
            frame["preference"] = frame["preference"].astype(float)
            metrics = glm_winrate.get_length_controlled_winrate(frame, save_weights_dir=None)
            return {name: float(metrics[name]) for name in ("length_controlled_winrate", "lc_standard_error")}
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            OSError,
            TypeError,
            ValueError,
        ) as error:  # no hub, unknown instructions, too few of them: the plain win rate remains
            problem = valid_answers.described(error)
            logging.warning("no length-controlled win rate: %s", problem)
            self.described[note] = f"not reported: {problem}"
            return {}


def win_rate(annotations: list[dict[str, Any]]) -> dict[str, float]:
    """Returns AlpacaEval's win rate over the judged outputs: its own function fails on a missing verdict."""
    judged = [row for row in annotations if number(row["preference"]) is not None]
    return get_winrate(judged) if judged else {"win_rate": math.nan, "standard_error": math.nan, "n_total": 0}


def number(value: Any) -> float | None:
    """Returns a finite number, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def share(percent: float | None) -> float | None:
    """Converts AlpacaEval's percent to a share."""
    return None if percent is None else percent / 100
