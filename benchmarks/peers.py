"""
One optimizer step of other trainers on the work of `step.py`: TRL's experimental `AsyncGRPOTrainer` and Unsloth's GRPO,
beside stock and ours. All get the same model, completions and sampler's log-probs. Each runs in a process of its own.

- `async` takes made-up samples instead of its worker's and publishes no weights. Its objective has no old log-probs but
  the sampler's, and no `sequence_mask`. It asks the hub for FlashAttention 3; where that cannot be had, torch's
  FlashAttention takes its place, the kernel of ours.
- `unsloth` has its packages in a folder of their own, since it wants an older TRL.

Both run twice: in micro-batches, and with the whole window in one forward, which none but ours does by itself.

    python benchmarks/peers.py --case 0.6b --case 1.7b --json peers.json
    python benchmarks/peers.py --case 0.6b-no-vllm --contender unsloth --contender ours --unsloth-site /tmp/site2
    python benchmarks/peers.py --case tiny --device cpu --contender async
"""

import gc
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer  # Unsloth is to be imported before all that it patches, so that the rest is imported where it is used
from records import write_record


CONTENDERS = ("ours", "stock", "async", "unsloth")
MICRO_BATCHES = {"async": (4, 32), "unsloth": (8, 32)}  # Unsloth wants whole groups
WARM_UP = 2  # steps of a peer that do not count: its compiler meets new lengths in the second too
GIB = 2**30

app = typer.Typer(add_completion=False)


def prepare(name: str, folder: Path, device: str, groups: int = 4) -> dict[str, Any]:
    """Write the model and the work of a case, with so many prompts, for all contenders; what `step.py` says of it."""
    from dataclasses import replace

    from _accumulation import GROUP, reward
    from _step_cases import CASES
    from _trainers import clear_memory, make_model
    from step import make_rollout

    from trl_fused_grpo.parity.tiny import tokenizer

    case = CASES[name]
    model = make_model(case.model, device, case.dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    del model
    rollout = make_rollout(replace(case, vllm=True), device, groups=groups)
    clear_memory()
    work = {key: getattr(rollout, key) for key in ("prompts", "completions", "log_probs", "tokens", "width")}
    work |= {"rewards": reward(rollout.completions), "group": GROUP, "vllm": case.vllm, "lora": case.lora}
    work |= {"longest": case.lengths.longest, "dtype": str(case.dtype).removeprefix("torch."), "options": case.options}
    (folder / "work.json").write_text(json.dumps(work))
    return {"case": name, "tokens": rollout.tokens, "width": rollout.width, "padding": round(rollout.padding, 4)}


def of_this_project(contender: str, name: str, work: dict[str, Any], device: str, repeats: int) -> list[dict[str, Any]]:
    """Stock or ours, as `step.py` runs it."""
    from _rollout import Rollout
    from _step_cases import CASES
    from step import run_arm

    rollout = Rollout(work["prompts"], work["completions"], work["log_probs"] if work["vllm"] else None)
    watched = contender == "ours" and device == "cuda"  # the last step, which does not count then
    return [run_arm(contender, CASES[name], rollout, device, 1 + repeats + watched, {}, None)]


def options_of(work: dict[str, Any], device: str, micro_batch: int, repeats: int) -> dict[str, Any]:
    """Options of a peer: those of `step.py`."""
    from _step_clock import step_options

    rows, steps = len(work["completions"]), WARM_UP + repeats
    options = step_options(micro_batch, rows, work["group"], steps, work["longest"], device)
    return {**options, "optim": "adamw_torch_fused"}  # Unsloth's own default needs bitsandbytes


def timed_training(trainer: Any, work: dict[str, Any], device: str) -> dict[str, Any]:
    """Train; time and peak memory of the steps that count, measured as in `step.py`."""
    from _step_clock import StepClock
    from transformers import PrinterCallback

    clock = StepClock(device)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {**clock.record(WARM_UP, None, work["tokens"]), **{key: logs[-1].get(key) for key in ("loss", "grad_norm")}}


def torch_attention(query: Any, key: Any, value: Any, *sizes: Any, softmax_scale: float, **_: Any) -> Any:
    """`flash_attn_varlen_func` of FlashAttention 3 by torch's: causal, the last query of a sequence at its last key."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if query.is_cuda:
        flash = torch.ops.aten._flash_attention_forward
        return flash(query, key, value, *sizes, 0.0, True, False, scale=softmax_scale)[0]
    parts = []  # for tests
    for (a, b), (c, d) in zip(*(itertools.pairwise(size.tolist()) for size in sizes[:2]), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


class MadeUpWorker:
    """In the place of the rollout worker of `AsyncGRPOTrainer`, and of its queue: the same samples for ever."""

    def __init__(self, work: dict[str, Any]):
        import numpy as np
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        samples = []
        rewards = np.array(work["rewards"]).reshape(-1, work["group"])
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
        for i, (prompt, completion) in enumerate(zip(work["prompts"], work["completions"], strict=True)):
            ids, mask = np.array(prompt + completion), np.array([0] * len(prompt) + [1] * len(completion))
            logps = np.array([0.0] * len(prompt) + work["log_probs"][i], dtype=np.float32)
            advantage, group = float(advantages.flat[i]), i // work["group"]
            samples.append(RolloutSample([], [], ids, mask, logps, advantage, 1, group, {}))
        self.samples = itertools.cycle(samples)
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.start = self.stop = self.update_model_version = self.check_health = lambda *_: None
        self.qsize = lambda: 0

    def get(self, timeout: float | None = None) -> Any:
        """The next sample."""
        return next(self.samples)


def async_trainer(folder: Path, work: dict[str, Any], device: str, fused: bool = False, **options: Any) -> Any:
    """TRL's `AsyncGRPOTrainer`, stock or ours, and what computes stock's attention."""
    from _trainers import forget_accelerate
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental import async_grpo

    trainer_class: Any = async_grpo.AsyncGRPOTrainer
    module: Any = import_module(f"{async_grpo.__name__}.async_grpo_trainer")
    packing: Any = import_module(f"{async_grpo.__name__}.packing")
    forget_accelerate()
    try:
        packing._flash_attn()
    except Exception as error:
        kernel = SimpleNamespace(flash_attn_varlen_func=torch_attention, why=f"{type(error).__name__}: {error}"[:200])
        packing._flash_attn = lambda: kernel
    why = getattr(packing._flash_attn(), "why", None)
    attention = "FlashAttention 3 of the hub" if why is None else f"torch's FlashAttention, since {why}"
    if device == "cpu":  # for tests: it asks for the name of the GPU
        module.get_peak_flops_per_device = lambda *_: None
    nothing = SimpleNamespace(
        **dict.fromkeys(("init_weight_transfer", "pause", "send_weights", "resume", "destroy"), lambda *_: None)
    )
    config: Any = async_grpo.AsyncGRPOConfig
    if fused:
        from trl_fused_grpo import fuse, fuse_config

        trainer_class, config = fuse(trainer_class), fuse_config(config)
    trainer = trainer_class(
        model=str(folder),
        args=config(**options, weight_sync_steps=10**6),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_worker=MadeUpWorker(work),
        weight_transfer=nothing,
    )
    return trainer, attention


def run_async(folder: Path, work: dict[str, Any], device: str, repeats: int, micro_batch: int) -> dict[str, Any]:
    """TRL's `AsyncGRPOTrainer`, whose planner gets exactly the window of a step."""
    options = options_of(work, device, micro_batch, repeats)
    trainer, attention = async_trainer(folder, work, device, **options, token_budget=0)
    return {**timed_training(trainer, work, device), "attention": attention, "trl": version("trl")}


def unsloth_model(folder: Path, work: dict[str, Any]) -> Any:
    """The model as Unsloth patches it, with all weights or adapters on all linear layers to train."""
    unsloth = import_module("unsloth")  # before torch

    model, _ = unsloth.FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=40_960,
        dtype=getattr(sys.modules["torch"], work["dtype"]),
        load_in_4bit=False,
        full_finetuning=not work["lora"],
        use_gradient_checkpointing=True,  # as TRL; its own would move activations to the CPU
        use_exact_model_name=True,
    )
    if work["lora"]:
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = unsloth.FastLanguageModel.get_peft_model(
            model, r=16, lora_alpha=32, lora_dropout=0, target_modules=layers, use_gradient_checkpointing=True
        )
    return model


def run_unsloth(
    model: Any, folder: Path, work: dict[str, Any], device: str, repeats: int, micro_batch: int
) -> dict[str, Any]:
    """Unsloth's GRPOTrainer with TRL's defaults for what it has other defaults for."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    options = {**options_of(work, device, micro_batch, repeats), **work["options"]}
    options |= {"loss_type": "dapo", "beta": options.get("beta", 0.0), "epsilon_high": 0.2}
    options |= {"mask_truncated_completions": False, "lr_scheduler_type": "linear", "warmup_steps": 0}
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: work["rewards"],  # the completions come in their order
        args=GRPOConfig(**options, vllm_importance_sampling_correction=True),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * len(work["completions"])}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    names = {"prompt_ids": "prompts", "completion_ids": "completions", "logprobs": "log_probs"}
    output = {key: work[name] if work["vllm"] or key != "logprobs" else None for key, name in names.items()}
    trainer.rollout_func = lambda prompts, trainer: dict(output)
    trainer.use_vllm, trainer._last_loaded_step = work["vllm"], 0
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    bare = trainer.accelerator.unwrap_model(trainer.model)
    # It compares its packed forward with that of single rows whenever there are more tokens or a longer row than before
    bare._unsloth_seq_packing_grad_verified_T = bare._unsloth_seq_packing_grad_verified_seg = work["tokens"]
    record = timed_training(trainer, work, device)
    record |= {key: version(key) for key in ("unsloth", "trl", "transformers")}
    packed = sys.modules.get("unsloth.utils.hf_packed_attention")
    record["packed_attention"] = dict(packed.HF_PACKED_ATTENTION_STATS) if packed else None
    record["weights"] = sorted({str(parameter.dtype) for parameter in bare.parameters()})
    record["micro_batch_used"] = trainer.args.per_device_train_batch_size
    for flag in ("seq_packing_nograd_ok", "seq_packing_grad_ok", "prefix_grouper_grad_verified"):
        record[flag] = str(getattr(bare, f"_unsloth_{flag}", None))
    return record


def run_alone(contender: str, name: str, folder: Path, device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the records of one contender, which has this process for itself."""
    work = json.loads((folder / "work.json").read_text())
    if contender in ("ours", "stock"):
        yield from of_this_project(contender, name, work, device, repeats)
        return
    if contender == "async" and work["lora"]:
        yield {"name": contender, "failed": "left out: adapters"}
        return
    model = unsloth_model(folder, work) if contender == "unsloth" else None
    for micro in MICRO_BATCHES[contender]:
        try:
            if contender == "async":
                record = run_async(folder, work, device, repeats, micro)
            else:
                record = run_unsloth(model, folder, work, device, repeats, micro)
        except Exception as error:
            traceback.print_exc()
            record = {"failed": f"{type(error).__name__}: {error}"[:400]}
        yield {"name": contender, "micro_batch": micro, **record}
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()


def roomy_memory() -> Path | None:
    """A folder in memory, if a model has room there."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > 16 * GIB else None


def in_a_process(contender: str, folder: Path, site: Path, limit: int, log: Path | None) -> list[dict[str, Any]]:
    """The records of a contender, or why there are none."""
    environment = {**os.environ, "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth")}
    if contender == "unsloth":
        environment["PYTHONPATH"] = f"{site}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, *sys.argv, "--alone", contender, "--folder", str(folder)]
    output = folder / f"{contender}.json"
    with open(log or os.devnull, "w") as file:
        try:
            code = subprocess.run(command, env=environment, timeout=limit, stdout=file, stderr=file).returncode
        except subprocess.TimeoutExpired:
            code = f"more than {limit} s"
    records = json.loads(output.read_text()) if output.exists() else []
    return records if code == 0 else [*records, {"name": contender, "failed": f"exit: {code}"}]


@app.command()
def main(
    case: Annotated[list[str], typer.Option(help="a case of step.py on one GPU; repeatable")],
    contender: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(CONTENDERS)}; repeatable")] = None,
    repeats: Annotated[int, typer.Option(help="steps that count", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    unsloth_site: Annotated[Path, typer.Option(help="the folder with Unsloth's packages")] = Path("/tmp/site2"),
    limit: Annotated[int, typer.Option(help="seconds for a contender, start included")] = 240,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes, and logs beside it")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
    alone: Annotated[str | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time a step of each contender."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore")
    if alone is not None and folder is not None:
        records: list[dict[str, Any]] = []
        try:
            for entry in run_alone(alone, (folder / "case").read_text(), folder, device, repeats):
                records.append(entry)  # a process that is cut short keeps what it has
                (folder / f"{alone}.json").write_text(json.dumps(records))
        except Exception as error:
            traceback.print_exc()
            records.append({"name": alone, "failed": f"{type(error).__name__}: {error}"[:400]})
            (folder / f"{alone}.json").write_text(json.dumps(records))
        return
    from _measure import environment

    record: dict[str, Any] = {**environment(device, commit), "results": []}
    for name in case:
        with tempfile.TemporaryDirectory(dir=roomy_memory()) as temporary:
            work_folder = Path(temporary)
            about = prepare(name, work_folder, device)
            (work_folder / "case").write_text(name)
            for one in contender or CONTENDERS:
                start = time.perf_counter()
                log = json_path.with_suffix(f".{name}.{one}.log") if json_path else None
                for entry in in_a_process(one, work_folder, unsloth_site, limit, log):
                    record["results"].append(about | entry | {"process_s": round(time.perf_counter() - start, 1)})
                    print(json.dumps(record["results"][-1]), flush=True)
                if json_path is not None:  # a run that is cut short keeps what it has
                    write_record(json_path, record)


if __name__ == "__main__":
    app()
