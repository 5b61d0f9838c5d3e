"""Checkpoints that no engine loads, by their files, and the command with which their framework exports them.

Sources: GPT-NeoX (EleutherAI/gpt-neox, tools/ckpts/convert_neox_to_hf.py); DeepSpeed (`zero_to_fp32.py`, which it
copies next to a checkpoint); verl (volcengine/verl 17321c5, verl/model_merger); MaxText on orbax
(AI-Hypercomputer/maxtext fd85ceb, maxtext/checkpoint_conversion/to_huggingface.py); litgpt (`litgpt
convert_from_litgpt`); llm-foundry on composer (mosaicml/llm-foundry, scripts/inference/convert_composer_to_hf.py);
OLMo-core (allenai/OLMo-core c26f97d, src/examples/huggingface/convert_checkpoint_to_hf.py); Lightning; llama.cpp.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from pools.weights.formats import EXPORTERS, VERL_RECIPE, ZERO_RECIPE
from resources.storage import storage
from resources.storage.listings import FileInfo
from tasks.spec.names import how_many

_WITH_CODE = "allow the export, in which a checkpoint can run code (--engine trust_remote_code=true)"
_FOREIGN = {
    r"layer_\d+-model_\d+-model_states\.pt": "a checkpoint of GPT-NeoX; export it: python "
    "tools/ckpts/convert_neox_to_hf.py --input_dir {root} --config_file CONFIG --output_dir {export}",
    r"model_world_size_\d+_rank_\d+\.pt": f"shards of verl; export them: python -m "
    f"{EXPORTERS[VERL_RECIPE].replace('{target}', '{folder}/merged_hf')}, or {_WITH_CODE}; or train with hf_model in "
    "checkpoint.save_contents",
    r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(?:optim|model)_states\.pt|mp_rank_\d+_model_states\.pt": "a "
    f"checkpoint of DeepSpeed; export it: python -m "
    f"{EXPORTERS[ZERO_RECIPE].format(folder='{above}', target='{export}', tag='{tag}')}, and copy config.json and the "
    f"tokenizer there, or, with both next to it, {_WITH_CODE}; or train with stage3_gather_16bit_weights_on_model_save",
    r"_METADATA|_CHECKPOINT_METADATA": "a checkpoint of orbax; if MaxText wrote it, export it: python -m "
    "maxtext.checkpoint_conversion.to_huggingface CONFIG model_name=NAME load_parameters_path={folder} "
    "base_output_directory={export}",
    r"lit_model\.pth": "a checkpoint of litgpt; export it: litgpt convert_from_litgpt {root} {export}, rename its "
    "model.pth to pytorch_model.bin, and copy config.json and the tokenizer of its base there",
    r"ep\d+-ba\d+-rank\d+\.pt": "a checkpoint of composer; export it with llm-foundry: python "
    "scripts/inference/convert_composer_to_hf.py --composer_path {file} --hf_output_path {export}; or train with its "
    "callback hf_checkpointer",
    r".*\.ckpt": "a checkpoint of Lightning; load it in your training code, and export it: "
    "model.save_pretrained('{export}')",
    r".*\.gguf": "GGUF, a format of llama.cpp; evaluate the checkpoint that it was made from",
}
_EVERY = re.compile("|".join(f"(?:{pattern})" for pattern in _FOREIGN))
_BRIDGE = (
    "./scripts/conversion/convert.sh export --executor local --device cpu --hf-model MODEL --megatron-path {root} "
    "--hf-path {export}"
)
_SHARDED = {
    "weights/.*": "a checkpoint of NeMo 2; export it with nemo_toolkit[run] below 3, which has the command: "
    "nemo llm export path={root} target=hf output_path={export}",
    "trainer/.*": "a training state of prime-rl, which exports none; have weights broadcast through files "
    "(weight_broadcast.type filesystem), and keep them with deployments/hooks/assay_prime_rl.py",
    r"run_config\.yaml": f"a checkpoint of Megatron-Bridge; export it: {_BRIDGE}; or train with "
    "checkpoint.also_save_hf_checkpoint=true, which exports each into hf/",
    r".*/model_optim_rng\.pt": "a checkpoint of Megatron-LM in its torch format; load it there with "
    "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER, and export that with Megatron-Bridge: "
    + _BRIDGE.replace("{root}", "FOLDER"),
    r"metadata\.json": "a checkpoint of Megatron-LM, which exports none; make run_config.yaml as Megatron-Bridge's "
    f"docs/megatron-lm-to-megatron-bridge.md says, and export it: {_BRIDGE}",
    "model_and_optim/.*": "a checkpoint of OLMo-core; export it: python "
    "src/examples/huggingface/convert_checkpoint_to_hf.py -i {root} -o {export}",
    ".*": "a checkpoint of torch.distributed.checkpoint; export it, as torchtitan does: python "
    "scripts/checkpoint_conversion/convert_to_hf.py {root} {export} --hf_assets_path ASSETS --model_name NAME "
    "--model_flavor FLAVOR, and copy config.json and the tokenizer from ASSETS; or train with "
    "--checkpoint.last_save_in_hf",
}  # by path below the checkpoint's folder, of a checkpoint of torch.distributed.checkpoint or Megatron


@lru_cache(4096)
def is_foreign(name: str) -> bool:
    """Returns True for the name of a file that only a training framework, or llama.cpp, loads."""
    return _EVERY.fullmatch(name) is not None


def how_exported(root: str, files: Mapping[str, str], export: str, *, sharded: bool = False) -> str | None:
    """Returns what a checkpoint in the folder `root` is and how it is exported to the folder `export`; None if none of
    its files says so. `files`: their locations, by their paths below `root`. `sharded`: True for a checkpoint of
    torch.distributed.checkpoint or of Megatron."""
    named = {path if sharded else posixpath.basename(path): file for path, file in sorted(files.items(), reverse=True)}
    held = named if sharded else {name: file for name, file in named.items() if is_foreign(name)}
    for pattern, words in (_SHARDED if sharded else _FOREIGN).items():
        for name, file in held.items():
            if re.fullmatch(pattern, name):
                root, file, export = map(storage.absolute, (root, file, export))  # it runs in the framework's folder
                folder = storage.parent(file)
                above, tag = storage.parent(folder), storage.basename(folder)
                return words.format(root=root, folder=folder, file=file, export=export, above=above, tag=tag)
    return None


_LOOKS_LIKE = {
    "record.json": "records of evaluations: see assay records",
    ".parquet": "a data set",
    ".arrow": "a data set",
    ".jsonl": "a data set, or logs",
    ".py": "code",
}


def described_as(files: Sequence[FileInfo]) -> str:
    """Returns files that belong to no checkpoint as text: their number, their endings, and what they look like."""
    names = [file.uri.rpartition("/")[2] for file in files]
    endings = Counter(name if name in _LOOKS_LIKE else posixpath.splitext(name)[1] or name for name in names)
    most = endings.most_common(4)
    counted = ", ".join(f"{number:,} {ending}" for ending, number in most)
    telling = "record.json" if "record.json" in endings else most[0][0]
    guess = f"; it looks like {_LOOKS_LIKE[telling]}" if telling in _LOOKS_LIKE else ""
    return f"{how_many(len(files), 'file')}, none of a checkpoint ({ascii(counted)[1:-1]}){guess}"
