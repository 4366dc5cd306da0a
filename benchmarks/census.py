"""
Which layout the rows of every architecture get: of all classes in transformers' tables of causal models and of models
that take images, those that can be built from their default configuration, without weights.

    python benchmarks/census.py
    python benchmarks/census.py --only LlamaForCausalLM --only Qwen3VLForConditionalGeneration --dry

Writes `benchmarks/results/census.json` and the table in `docs/architectures.md`. A class
that is new here goes into `_compat/tried_architectures.py` once it was trained beside stock.
"""

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from records import as_text
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trl_fused_grpo._compat import architecture as architecture_compat
from trl_fused_grpo._compat.tried_architectures import is_tried
from trl_fused_grpo.modeling.layers.unpacked import unpacked_layers
from trl_fused_grpo.modeling.rows import layout_choice


ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "census.json"
PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- census: written by benchmarks/census.py -->", "<!-- end of census -->"
LAYOUTS = {
    "packed": "one row without padding",
    "around": "packed, with rows of their own for some layers (a state, attention of another kind)",
    "padded": "rows as TRL pads them",
    "refused": "trains with `use_liger_loss=False` alone, as stock does",
}
Entry = dict[str, Any]


def architectures() -> dict[str, str]:
    """The class names of both tables and the first model type of each."""
    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    found: dict[str, str] = {}
    for table in tables:
        for model_type, classes in table.items():
            for name in [classes] if isinstance(classes, str) else classes:
                found.setdefault(name, model_type)
    return dict(sorted(found.items()))


def build(name: str) -> PreTrainedModel:
    """
    A model of a class from its default configuration, on the meta device, in training as TRL loads it.

    Raises:
        whatever the class raises on its defaults, or on a package that is missing.
    """
    model_class = getattr(transformers, name)
    config = model_class.config_class()
    is_causal_lm = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if is_causal_lm and hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True  # an encoder is a causal model only with it
    with torch.device("meta"), no_init_weights():
        return model_class._from_config(config).train()


def layout_of(model: PreTrainedModel) -> tuple[str, str | None]:
    """The layout that is chosen for a model before anything runs, and why not a better one."""
    if (reason := why_refused(model)) is not None:
        return "refused", reason
    if (reason := layout_choice.why_not_packed(model, model)) is not None:
        return "padded", reason
    if not is_tried(model):
        return "padded", "it was not tried without padding yet"
    return ("around" if any(unpacked_layers(model)) else "packed"), None


def why_refused(model: PreTrainedModel) -> str | None:
    """Why the head of a model cannot run apart from it, or `None`."""
    try:
        architecture_compat.backbone(model)
        model.get_input_embeddings()
    except ValueError:
        return "it does not name its backbone"
    except NotImplementedError:
        return "it does not name its input embeddings"
    return "it has no output projection" if model.get_output_embeddings() is None else None


def examine(name: str) -> Entry:
    """One entry of the census; `error` where the class cannot be built."""
    try:
        model = build(name)
    except Exception as error:  # whatever a class makes of its own defaults
        return {"class": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]}
    entry: Entry = {"class": name}
    entry["layout"], entry["reason"] = layout_of(model)
    return {key: value for key, value in entry.items() if value is not None}


def examine_all(names: list[str]) -> Entry:
    """The whole record."""
    entries = [examine(name) for name in names]
    built = [entry for entry in entries if "error" not in entry]
    return {
        "transformers": transformers.__version__,
        "built": len(built),
        "summary": {layout: sum(entry["layout"] == layout for entry in built) for layout in LAYOUTS},
        "architectures": built,
        "not_built": [entry for entry in entries if "error" in entry],
    }


def as_markdown(record: Entry) -> str:
    """The record as it stands in the docs: the architectures of each layout, by the reason why they are not packed."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in record["architectures"]:
        groups.setdefault((entry["layout"], entry.get("reason", "")), []).append(entry["class"])
    lines = [f"transformers {record['transformers']}, {record['built']} architectures:", ""]
    lines += ["| layout | why not packed | number | architectures |", "| --- | --- | --- | --- |"]
    for layout, meaning in LAYOUTS.items():
        of_layout = [(reason, names) for (other, reason), names in groups.items() if other == layout]
        for place, (reason, names) in enumerate(sorted(of_layout, key=lambda group: -len(group[1]))):
            title = layout if place else f"{layout}: {meaning}"
            lines.append(f"| {title} | {reason} | {len(names)} | {', '.join(names)} |")
    lines += ["", f"{len(record['not_built'])} more are not built from their defaults, or for want of a package."]
    return "\n".join(lines)


def write_page(page: str, record: Entry) -> str:
    """A page with the census in the place between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{as_markdown(record)}\n{END}{after}"


def main(
    only: Annotated[list[str] | None, typer.Option(help="classes to look at; all by default")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="print the record instead of writing it")] = False,
) -> None:
    """Take the census."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    record = examine_all(only or list(architectures()))
    if dry or only:
        print(json.dumps(record, indent=1))
        return
    RECORD.write_text(as_text(record), encoding="utf-8")
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    print(record["summary"])


if __name__ == "__main__":
    typer.run(main)
