"""GRPO without a trainer: `FusedLinearGRPOLoss` in a loop of one's own.

    python examples/custom_loop.py

The loss takes the hidden states that predict the completion, and the head. No logits of the whole batch exist, neither
here nor in backward.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fused_grpo import FusedLinearGRPOLoss, read_hidden_states, read_lm_head


PROMPTS = ["The quick brown fox", "Once upon a time", "In the middle of the night", "To be or not to be"]


def reward(completions: list[str]) -> torch.Tensor:
    """How many different letters each completion has, `[completions]`."""
    return torch.tensor([float(len(set(text))) for text in completions])


def ends_with_eos(tokens: torch.Tensor, eos: int) -> torch.Tensor:
    """Mask `[B, T]` of the tokens up to the first end of text, that included."""
    after = (tokens == eos).long().cumsum(1) - (tokens == eos).long()
    return after == 0


def main(
    model: Annotated[str, typer.Option(help="A model of the Hub, or its folder.")] = "Qwen/Qwen3-0.6B",
    steps: Annotated[int, typer.Option(min=1)] = 20,
    group: Annotated[int, typer.Option(min=2, help="Completions for each prompt.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-6,
) -> list[dict[str, float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    loss_function = FusedLinearGRPOLoss(beta=0.0, loss_type="dapo", temperature=1.0)
    log = []
    for step in range(steps):
        prompts = [PROMPTS[step % len(PROMPTS)]] * group
        batch = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
        ids = policy.generate(**batch, max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0)
        width = batch["input_ids"].shape[1]
        tokens = ids[:, width:]  # [B, T]
        mask = ends_with_eos(tokens, tokenizer.eos_token_id)

        rewards = reward(tokenizer.batch_decode(tokens, skip_special_tokens=True)).to(device)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # [B]

        seen = torch.cat([batch["attention_mask"], mask.long()], dim=1)
        hidden = read_hidden_states(policy, input_ids=ids, attention_mask=seen)  # [B, prompt + T, H]
        output = loss_function(
            hidden[:, width - 1 : -1],  # each predicts the token after it
            read_lm_head(policy),
            tokens,
            mask,
            advantages,
            return_outputs=True,
        )
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.append({"loss": output.loss.item(), "reward": rewards.mean().item(), "grad_norm": norm.item()})
        print(step, log[-1], "entropy", round(output.metrics["entropy"].item(), 3))
    return log


if __name__ == "__main__":
    typer.run(main)
