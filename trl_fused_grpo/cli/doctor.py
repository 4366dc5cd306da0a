"""`trl-fused-grpo doctor`: what is installed, and what a training of a model and a configuration would do."""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import yaml
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo._compat.trl_cli import launch_options, option_names, script_classes
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.parity.tiny import tokenizer
from trl_fused_grpo.training.checks import check_kl_estimator
from trl_fused_grpo.training.summary import Summary, SummaryLine, device_line, versions, versions_line

from .grpo import check_values, read_options
from .parity import _quiet
from .words import refuse, unknown_name


# Options that would start processes, write files or report to a service
_LEFT_OUT = (
    *("deepspeed", "fsdp", "fsdp_config", "output_dir", "logging_dir"),
    *("push_to_hub", "report_to", "trackio_space_id"),
)
_DISTRIBUTED = ("deepspeed", "fsdp")


def doctor(model: str | None, config: Path | None, device: str | None, as_json: bool) -> int:
    """Print what a training would do, and return the exit code: 1 where the trainer would refuse."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    summary, refused = Summary([versions_line(), device_line(torch.device(device))]), None
    if model is not None or config is not None:
        # What TRL prints goes to stderr, so that nothing but the table is on stdout
        with _quiet(), contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
            try:
                summary = _of_training(model, config, device, Path(folder))
            except Exception as error:  # whatever the trainer says is the answer
                refused = f"{type(error).__name__}: {error}"
    if as_json:
        lines = [line._asdict() for line in summary]
        print(json.dumps({"versions": versions(), "summary": lines, "refused": refused}, indent=2))
    else:
        print(summary)
        if refused:
            print(f"\nThe trainer refuses this. {refused}")
    return 1 if refused else 0


def _of_training(model: str | None, config: Path | None, device: str, folder: Path) -> Summary:
    """The summary of a trainer that is made as TRL would make it, in one process and without weights."""
    try:
        options = read_options(config) if config else {}
    except ValueError as error:
        refuse("doctor", str(error))
    known = option_names(FusedGRPOConfig)
    of_launch = launch_options() - known
    for name in options:
        if name not in known | of_launch:
            refuse("doctor", f"{config}: {unknown_name(name, known)}")
    check_values(options)
    left_out = [name for name in options if name in of_launch or (name in _DISTRIBUTED and options[name])]
    options = {name: value for name, value in options.items() if name not in of_launch.union(_LEFT_OUT)}
    args, model_args = _parsed(options, folder)
    name = model or model_args.model_name_or_path
    if name is None:
        refuse("doctor", "no model: give --model, or model_name_or_path in the configuration.")
    trainer = _trainer(name, args, model_args)
    # Taken to be on a device that need not be here
    with temporary_attr(trainer.accelerator.state, "device", torch.device(device)):
        summary = trainer.fused_summary()
    for option in left_out:
        summary.append(SummaryLine(option, "left out here: this looks at one process"))
    if options.get("load_in_4bit") or options.get("load_in_8bit"):
        summary.append(SummaryLine("quantization", "left out here: layers are looked at as they are without it"))
    return summary


def _parsed(options: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """The trainer's and the model's arguments, by TRL's parser."""
    options["output_dir"] = str(folder / "output")
    options["report_to"] = "none"
    if not torch.cuda.is_available():
        options["use_cpu"] = True  # else mixed precision is refused
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(options), encoding="utf-8")
    parser, said = trl.TrlParser(script_classes(FusedGRPOConfig)), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, args, model_args, _ = parser.parse_args_and_config(["--config", str(file)])
    except SystemExit as error:  # of argparse, whose last line says why, below all options that there are
        raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from error
    return args, model_args


class _Unplaced(FusedGRPOTrainer):
    """A trainer that leaves its model where it is: there are no weights to compute with."""

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        pass


def _trainer(name: str, args: Any, model_args: Any) -> Any:
    """A trainer as TRL's own script makes it, without generation engine and reference model."""
    use_vllm, beta = args.use_vllm, args.beta
    args.use_vllm, args.beta = False, 0.0  # the constructor would start vLLM, and load a reference
    init = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": getattr(model_args, "trust_remote_code", getattr(args, "trust_remote_code", False)),
        **(args.model_init_kwargs or {}),
    }
    args.model_init_kwargs = None
    rewards: Any = [lambda completions, **_: [0.0] * len(completions)] * len(args.reward_weights or [1.0])
    prompts = Dataset.from_dict({"prompt": ["w5 w6"] * 8})
    trainer: Any = _Unplaced(
        model=_model_without_weights(name, init),
        reward_funcs=rewards,
        args=args,
        train_dataset=prompts,
        eval_dataset=prompts,
        processing_class=tokenizer(),
        peft_config=trl.get_peft_config(model_args),
    )
    args.use_vllm, args.beta = use_vllm, beta
    trainer.use_vllm, trainer.beta = use_vllm, beta
    check_kl_estimator(trainer, trainer._fused.engine.options.kl_estimator)
    return trainer


def _model_without_weights(name: str, init: dict[str, Any]) -> PreTrainedModel:
    """A model of the class that TRL would load. Its weights are memory that nobody has written or read."""
    where = {"revision": init["revision"], "trust_remote_code": bool(init["trust_remote_code"])}
    try:
        config = AutoConfig.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        refuse("doctor", f"the model {name} cannot be loaded: {' '.join(str(error).split())}")
    architecture = (config.architectures or [""])[0]
    auto: Any = transformers.AutoModelForCausalLM
    if architecture.endswith("ForConditionalGeneration"):
        auto = transformers.AutoModelForImageTextToText
    dtype = init["dtype"]
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = {"attn_implementation": init["attn_implementation"]} if init["attn_implementation"] else {}
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=where["trust_remote_code"], **options)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model
