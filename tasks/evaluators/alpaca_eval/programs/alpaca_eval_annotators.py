"""Loads the judge's annotator configuration and completes it with the judge's endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from alpaca_eval import constants
from alpaca_eval_shared import SHOWN_CHARACTERS
from refusals import Refused

MOST_LOGPROBS = 20  # vLLM's default limit


def load_annotator(judge: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Returns name, configuration and prompt of the judge's annotator."""
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


def complete_annotator(
    name: str, config: dict[str, Any], prompt: str, *, judge: dict[str, Any], output: Path
) -> dict[str, Any]:
    """Returns the configuration completed with this judge, and writes it to `judge/NAME/` for AlpacaEval."""
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
    patterns: list[str] = []
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
