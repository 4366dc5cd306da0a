"""One model with random weights, and stock and fused trainers that take turns on it."""

import gc
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import EOS_ID, PAD_ID, tokenizer


# Hidden size, layers, heads, key-value heads, head size, MLP size and vocabulary size of each model
SHAPES = {
    "tiny": (64, 2, 4, 2, 16, 128, 1027),
    "small": (256, 6, 4, 2, 64, 768, 4099),
    "thin": (1024, 2, 16, 8, 128, 3072, 1027),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151_936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151_936),
    "8b": (4096, 36, 32, 8, 128, 12_288, 151_936),
}


# Adapters of rank 16 on the attention projections
LORA_ON_ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def make_model(shape: str, device: str, dtype: torch.dtype, lora: dict[str, Any] | None = None) -> Any:
    """
    A Qwen3 model with seeded random weights and tied embeddings; at 8b the head has weights of its own.

    Args:
        shape (`str`): a key of `SHAPES`.
        device (`str`): `"cuda"` or `"cpu"`.
        dtype (`torch.dtype`): of the weights.
        lora (`dict`, *optional*): options of adapters of rank 16 that are trained instead of the weights.
    """
    width, layers, heads, key_heads, head_dim, mlp, vocab = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=shape != "8b",
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model if lora is None else with_adapters(model, lora)


def with_adapters(model: Any, options: dict[str, Any]) -> Any:
    """A model with adapters of rank 16, both of whose factors get a gradient."""
    from peft import LoraConfig, get_peft_model

    # By default lora_B is zero, so that lora_A gets no gradient
    config = LoraConfig(r=16, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-3)
    return model


def forget_accelerate() -> None:
    """Forget the engine and the precision of the trainer before, which Accelerate keeps for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)


class SharedModel:
    """
    One model and the trainers built on it. Each trainer replaces the model's `forward` in its own way. Only the
    replacement of the trainer that runs is in place.

    Args:
        model (`PreTrainedModel` or `PeftModel`): from [`make_model`].
        rows (`int`): completions in a generation batch.
        reward (`Callable`): reward function.
        group (`int`): completions to a prompt.
    """

    def __init__(self, model: Any, rows: int, reward: Callable, group: int):
        self.model, self.rows, self.reward, self.group = model, rows, reward, group
        self.modules = [model, *([model.get_base_model()] if hasattr(model, "get_base_model") else [])]
        self.folder = tempfile.TemporaryDirectory()
        self._forwards: dict[int, list[Callable | None]] = {}

    def build(self, fused: bool, micro_batch: int, optimizer: Any = None, **options: Any) -> Any:
        """
        A trainer, stock or fused, ready to train. Its accumulation window is the generation batch. FSDP2 asks for the
        `optimizer` too, whose parameters it shards.
        """
        weight = next(self.model.parameters())
        device = weight.device.type
        args = (FusedGRPOConfig if fused else GRPOConfig)(
            output_dir=self.folder.name,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=self.rows // micro_batch,
            num_generations=self.group,
            report_to="none",
            disable_tqdm=True,
            **{"use_cpu": device == "cpu", "bf16": weight.dtype == torch.bfloat16, **options},
        )
        self._put([None] * len(self.modules))
        trainer_class: Any = FusedGRPOTrainer if fused else GRPOTrainer
        trainer = trainer_class(
            model=self.model,
            reward_funcs=self.reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * self.rows}),
            processing_class=tokenizer(),
        )
        # What `Trainer.train` does before its first step
        if args.use_liger_kernel and version("transformers") >= "5":  # before, the constructor did it
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(trainer.model, args.liger_kernel_config)
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        if args.gradient_checkpointing and not self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        accelerator = trainer.accelerator
        if optimizer is None:
            trainer.model_wrapped = accelerator.prepare_model(trainer.model)
        else:
            trainer.model_wrapped, trainer.optimizer = accelerator.prepare(trainer.model, optimizer)
        trainer.model_wrapped.train()
        self._forwards[id(trainer)] = [vars(module).get("forward") for module in self.modules]
        return trainer

    @contextmanager
    def running(self, trainer: Any) -> Generator[None, None, None]:
        """While it lasts, the model's `forward` is the one of `trainer`, and SDPA may take every backend."""
        self._put(self._forwards[id(trainer)])
        if torch.cuda.is_available():
            torch.backends.cuda.enable_cudnn_sdp(True)  # a benchmark may have switched it off
        yield
        self._forwards[id(trainer)] = [vars(module).get("forward") for module in self.modules]

    def _put(self, forwards: list[Callable | None]) -> None:
        for module, forward in zip(self.modules, forwards, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward

    @contextmanager
    def in_float32(self) -> Generator[None, None, None]:
        """While it lasts, the weights are float32. Trainers built meanwhile compute in float32."""
        dtypes = [parameter.dtype for parameter in self.model.parameters()]
        self._cast([torch.float32] * len(dtypes))
        try:
            yield
        finally:
            self._cast(dtypes)

    def _cast(self, dtypes: list[torch.dtype]) -> None:
        for parameter, dtype in zip(self.model.parameters(), dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)

    def trained(self) -> list[nn.Parameter]:
        """Parameters that train."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def gradients(self) -> list[Tensor]:
        """
        Their gradients.

        Raises:
            `RuntimeError`: when one has none.
        """
        gradients = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
        if len(gradients) != len(self.trained()):
            raise RuntimeError(f"only {len(gradients)} of {len(self.trained())} parameters have a gradient")
        return gradients

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.trained():
            parameter.grad = None


def norm(tensors: list[Tensor]) -> float:
    """Euclidean norm of all tensors together."""
    norms = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors])
    return torch.linalg.vector_norm(norms.double()).item()


def not_finite(tensors: list[Tensor]) -> int:
    """How many tensors hold a NaN or an infinity."""
    return int(torch.stack([~t.isfinite().all() for t in tensors]).sum())


def distance(tensors: list[Tensor], reference: list[Tensor]) -> float:
    """Euclidean distance of all tensors together, relative to the norm of the reference."""
    norms = [torch.linalg.vector_norm(t - r, dtype=torch.float32) for t, r in zip(tensors, reference, strict=True)]
    return torch.linalg.vector_norm(torch.stack(norms).double()).item() / norm(reference)


def clear_memory() -> None:
    """Free what is no longer referred to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
