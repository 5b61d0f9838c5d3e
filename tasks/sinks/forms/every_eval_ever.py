"""Records in the format of Every Eval Ever (schema 0.3.0): a file per record, and a file with its samples.

Schema: https://github.com/evaleval/every_eval_ever. Only scored and unchanged records are exported; fields that a
record cannot fill are omitted, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resources.errors import BadInput, StorageError
from resources.storage import storage
from tasks.records.record import FoundRecord, Metric, Record
from tasks.records.samples import Questions, Sample, kept_samples, samples_of
from tasks.records.search import RecordFilter
from tasks.records.verification import verified_with
from tasks.sinks.forms.settings import answers_of, data_of, library_of, settings_of
from tasks.verdicts.statistics.composition import composed, composition_of
from tasks.verdicts.statistics.intervals import CONFIDENCE, normal_interval

SCHEMA_VERSION = "0.3.0"
# Ranges of metrics that have a range by definition, by name without filter.
_BOUNDS: Mapping[tuple[float, float | str], tuple[str, ...]] = {
    (0.0, 1.0): ("acc", "acc_norm", "choice_prob_norm", "exact_match", "f1", "win_rate"),
    (0.0, "Infinity"): ("bits_per_byte", "bpb", "byte_perplexity", "perplexity", "word_perplexity"),
}
_NOT_PORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f]|[. ]$')
# Metrics in which a question is right if its score is 1.
_RIGHT_OR_WRONG = re.compile(
    r"acc(_norm|_mutual_info)?|(.+_)?accuracy|\w+_(strict|loose)_acc|em|exact|(\w+_)?exact_match(@\d+)?|pass@1"
)
_CORRECT_UNKNOWN = "not known: no answer is known to be right or wrong by this metric"
_TURNS_UNKNOWN = "not known: a solver of Inspect can take several turns and call tools, which no sample says"


class Publisher(NamedTuple):
    """The organization that evaluated, and the developer of the models."""

    organization: str
    developer: str

    def check(self) -> None:
        """Raises BadInput for names that are not valid as folders."""
        for option, name in zip(("--organization", "--developer"), self, strict=True):
            if not name.strip() or name.lower() in ("unknown", "data") or _NOT_PORTABLE.search(name):
                raise BadInput(
                    expected=f"{option} to be the name of an organization, as on the Hugging Face hub",
                    found=name or "nothing",
                    remedy=f"for example {option} my-lab",
                )


class ExportCounts(NamedTuple):
    """Numbers of written items, and of omitted records by reason."""

    records: int
    results: int
    rows: int
    left_out: Counter[str]


def write_every_eval_ever(
    found_records: Sequence[FoundRecord],
    folder: str,
    *,
    publisher: Publisher,
    filters: RecordFilter,
    with_samples: bool = True,
) -> ExportCounts:
    """Writes records below `<folder>/data/<evaluator>/<developer>/<checkpoint>/`; a record always yields the same file.
    `folder` may be in an object store, `filters` selects metrics, `with_samples` adds prompts and outputs."""
    publisher.check()
    left_out: Counter[str] = Counter()
    records = results = rows = 0
    with tempfile.TemporaryDirectory(prefix="assay-export-") as aside:
        for item in found_records:
            try:
                kept = kept_samples(item) if item.record.succeeded else None
            except StorageError:
                left_out["with samples that cannot be read"] += 1
                continue
            if not item.record.succeeded:
                left_out[item.record.status] += 1
            elif verified_with(item, kept).integrity == "changed":
                left_out["changed since it was written"] += 1
            else:
                log = evaluation_log(item.record, kept.questions if kept else {}, publisher=publisher, filters=filters)
                if not log["evaluation_results"]:
                    left_out["without a metric that is wanted"] += 1
                    continue
                if kept and with_samples:
                    rows += _write_samples(item, log, Path(aside))
                path = Path(aside) / _path(log, item.record, ".json")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(log, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
                records, results = records + 1, results + len(log["evaluation_results"])
        storage.copy_from_local(Path(aside), folder)
    return ExportCounts(records, results, rows, left_out)


def evaluation_log(
    record: Record, questions: Questions, *, publisher: Publisher, filters: RecordFilter
) -> dict[str, Any]:
    """Returns a succeeded record as an evaluation of the schema, without samples. The method of its intervals is
    derived from `questions`, its samples by benchmark; `filters` selects metrics."""
    model_id = f"{publisher.developer}/{_NOT_PORTABLE.sub('_', record.checkpoint.name)}"
    created = str(int(record.created.timestamp()))
    library, version = library_of(record)
    first_party = publisher.organization == publisher.developer
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{record.cell}/{model_id}/{created}",
        "evaluation_timestamp": created,
        "retrieved_timestamp": created,
        "source_metadata": {
            "source_name": "Assay",
            "source_type": "evaluation_run",
            "source_organization_name": publisher.organization,
            "evaluator_relationship": "first_party" if first_party else "third_party",
            "additional_details": _texts(
                {
                    "assay_version": record.versions.get("assay"),
                    "assay_method": record.versions.get("method"),
                    "git_commit": record.git_commit,
                    "git_dirty": record.git_dirty,
                    "evaluation_hash": record.evaluation_hash,
                    "record_sha256": record.digests.record,
                    "record_is_signed": record.digests.signature is not None,
                }
            ),
        },
        "eval_library": {
            "name": library,
            "version": version or "unknown",
            "additional_details": _texts({name: text for name, text in record.versions.items() if name != library}),
        },
        "model_info": _model_info(record, model_id, publisher),
        "evaluation_results": [
            _result(metric, record, questions, created)
            for metric in record.metrics
            if filters.takes(metric.benchmark, metric.name, smooth=metric.smooth) and math.isfinite(metric.value)
        ],
    }


def _model_info(record: Record, model_id: str, publisher: Publisher) -> dict[str, Any]:
    checkpoint, engine = record.checkpoint, record.served.get("engine") or {}
    served_by_others = record.served.get("by") == "endpoint"
    info: dict[str, Any] = {"name": checkpoint.name, "id": model_id, "developer": publisher.developer}
    if engine.get("name"):
        info["inference_engine"] = _texts({"name": engine["name"], "version": engine.get("version")})
    details = {
        "deployment_type": "unknown" if served_by_others else "self_deployed",
        "model_availability": "unknown",
        "training_run": checkpoint.run,
        "training_step": checkpoint.step if checkpoint.label is None else None,
        "checkpoint_label": checkpoint.label,
        "digest": checkpoint.digest,
        "weights_digest": checkpoint.weights_digest,
        "merged_from": str(checkpoint.merge) if checkpoint.merge else None,
        "merged_weights": [merged.weight for merged in checkpoint.merge.inputs] if checkpoint.merge else None,
        "merged_digests": [merged.digest for merged in checkpoint.merge.inputs] if checkpoint.merge else None,
        "engine_packages": engine.get("packages"),
        "device": record.hardware.get("device"),
    }
    return {**info, "additional_details": _texts(details)}


def _result(metric: Metric, record: Record, questions: Questions, created: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "evaluation_result_id": f"{metric.benchmark}/{metric.name}",
        "evaluation_name": metric.benchmark,
        "source_data": _source_data(metric, record),
        "evaluation_timestamp": created,
        "metric_config": _metric_config(metric, library_of(record)[0]),
        "score_details": _score_details(metric, record, questions),
    }
    answers = answers_of(record, metric.benchmark)
    settings = _texts(settings_of(record, metric.benchmark))
    return {**result, "generation_config": {"generation_args": answers, "additional_details": settings}}


def _source_data(metric: Metric, record: Record) -> dict[str, Any]:
    data = data_of(record, metric.benchmark)
    details = record.noticed(metric.benchmark)
    known = _texts({"revision": data.revision if data else None, "prompts": details.prompts if details else None})
    if data is None or data.repository is None:
        return {"dataset_name": metric.benchmark, "source_type": "other", "additional_details": known}
    whole = record.evaluation.get("max_eval_instances") is None and not (record.counts and record.counts.skipped)
    return {
        "dataset_name": metric.benchmark,
        "source_type": "hf_dataset",
        "hf_repo": data.repository,
        **({"samples_number": metric.n} if whole else {}),
        "additional_details": known,
    }


def _metric_config(metric: Metric, library: str) -> dict[str, Any]:
    name, _, answers_filter = metric.name.partition(",")
    details = {
        "filter": answers_filter or None,
        "polarity": "unknown" if metric.higher_is_better is None else None,
        "smooth": metric.smooth or None,
        "parts": metric.parts or None,
    }
    config: dict[str, Any] = {
        "metric_id": f"{library}.{metric.name}",
        "metric_name": metric.name,
        "lower_is_better": metric.higher_is_better is False,
    }
    low, high = next((bounds for bounds, names in _BOUNDS.items() if name in names), (None, None))
    if low is not None and high is not None and low <= metric.value <= float(high):
        unit = {"metric_unit": "proportion"} if high == 1.0 else {}
        config |= {"score_type": "continuous", "min_score": low, "max_score": high, **unit}
    return {**config, "additional_details": _texts(details)}


def _score_details(metric: Metric, record: Record, questions: Questions) -> dict[str, Any]:
    noticed = record.noticed(metric.benchmark)
    composition = composition_of(metric, questions, record.metrics)
    interval = None if isinstance(composition, str) else composed(composition)[1]
    uncertainty: dict[str, Any] = {"num_samples": metric.n}
    if metric.stderr is not None and math.isfinite(metric.stderr):
        ours = interval is not None and interval.stderr is not None and math.isclose(interval.stderr, metric.stderr)
        made = {"method": "analytic" if ours else "the harness's own"} if questions else {}
        uncertainty["standard_error"] = {"value": metric.stderr, **made}
    if metric.low is not None and metric.high is not None:
        ends = {"lower": metric.low, "upper": metric.high, "confidence_level": CONFIDENCE}
        if interval is None:
            interval = normal_interval(metric.value, metric.stderr)
        same = math.isclose(interval.low or 0.0, metric.low) and math.isclose(interval.high or 0.0, metric.high)
        method = interval.method if same and questions else None
        uncertainty["confidence_interval"] = ends | ({"method": method} if method else {})
    clusters = None if isinstance(composition, str) else composition.clusters
    details: dict[str, Any] = {"recomputed_from_samples": metric.recomputed, "clusters": clusters}
    if noticed is not None:
        details |= {
            "prompts_truncated": noticed.truncated,
            "questions_skipped": noticed.skipped,
            "answers_at_limit": noticed.at_limit,
            "score_over_completed_answers": noticed.completed.get(metric.name),
            "control": noticed.control,
            "notes": list(noticed.notes) or None,
        }
    return {"score": metric.value, "details": _texts(details), "uncertainty": uncertainty}


def _write_samples(item: FoundRecord, log: dict[str, Any], folder: Path) -> int:
    place = _path(log, item.record, "_samples.jsonl")
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    digest, lines = hashlib.sha256(), 0
    with (folder / place).open("wb") as file:
        for sample in samples_of(item):
            for row in sample_rows(sample, log):
                line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
                digest.update(line)
                file.write(line)
                lines += 1
    if not lines:
        (folder / place).unlink()
        return 0
    log["detailed_evaluation_results"] = {
        "format": "jsonl",
        "file_path": place,
        "hash_algorithm": "sha256",
        "checksum": digest.hexdigest(),
        "total_rows": lines,
    }
    return lines


def sample_rows(sample: Sample, log: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a sample in the schema's form, for each result of the log that it contributes to."""
    results = {result["evaluation_result_id"]: result for result in log["evaluation_results"]}
    reference = [] if sample.target is None else [sample.target]
    for metric, score in sample.scores.items():
        result = results.get(f"{sample.benchmark}/{metric}")
        if result is None or not math.isfinite(score):
            continue
        right_or_wrong = _RIGHT_OR_WRONG.fullmatch(metric.partition(",")[0]) is not None
        chosen = bool(sample.choices and sample.log_likelihoods)
        metadata = {
            "finish_reason": sample.finish,
            "output_tokens": sample.tokens,
            "prompt_truncated": sample.truncated or None,
            "cluster": sample.cluster,
            "log_likelihoods": list(sample.log_likelihoods) or None,
            "is_correct": None if right_or_wrong else _CORRECT_UNKNOWN,
            "interaction_type": _TURNS_UNKNOWN if log["eval_library"]["name"] == "inspect_ai" else None,
        }
        yield {
            "schema_version": SCHEMA_VERSION,
            "evaluation_id": log["evaluation_id"],
            "model_id": log["model_info"]["id"],
            "evaluation_name": sample.benchmark,
            "evaluation_result_id": result["evaluation_result_id"],
            "sample_id": sample.id,
            "sample_hash": hashlib.sha256("".join([sample.prompt, *reference]).encode()).hexdigest(),
            "interaction_type": "single_turn",
            "input": {
                "raw": sample.prompt,
                "formatted": sample.asked if sample.context else None,
                "reference": reference,
                "choices": list(sample.choices) or None,
            },
            "output": {"raw": [sample.output]},
            "answer_attribution": [
                {
                    "turn_idx": 0,
                    "source": "output.raw",
                    "extracted_value": sample.output,
                    "extraction_method": "likeliest choice",
                    "is_terminal": True,
                }
            ]
            if chosen
            else [],
            "evaluation": {"score": score, "is_correct": right_or_wrong and score == 1.0},
            "metadata": _texts(metadata),
        }


def _path(log: Mapping[str, Any], record: Record, end: str) -> str:
    developer, model = log["model_info"]["id"].split("/")
    content = json.dumps([log["evaluation_id"], record.attempt, record.created.isoformat()])
    name = uuid.UUID(bytes=hashlib.sha256(content.encode()).digest()[:16], version=4)
    return f"data/{log['eval_library']['name']}/{developer}/{model}/{name}{end}"


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
        for name, value in values.items()
        if value is not None
    }
