"""Cases drawn at random: what is drawn, what is told apart, what a failure is shrunk to."""

import json
import shlex
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.harness import compare, fuzz
from tests.harness.random_cases import draw, name_of, options_of, random_case
from tests.harness.rounding import Compared, rounding_verdict
from tests.harness.shrink import shrink
from tests.harness.steps import make_data, run_steps, stock_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat.trl import RETURNS_AUX_LOSS, TRL
from trl_fused_grpo._compat.trl_images import MULTIMODAL_INPUTS
from trl_fused_grpo.parity.judge import Result
from trl_fused_grpo.parity.trainers import load_weights, noisy_weights


def with_wrong_loss(option, factor):
    """A trainer with a planted fault: its loss is wrong by a factor where an option is set."""

    class Wrong(FusedGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * (factor if getattr(self.args, option) else 1.0)

    return Wrong


@pytest.mark.any_trl
def test_a_seed_and_an_index_draw_the_same_options():
    assert draw(3, 5) == draw(3, 5)
    assert options_of("random:3:5").items() <= draw(3, 5).items()
    assert len({name_of(draw(3, index)) for index in range(50)}) == 50
    assert draw(3, 5) != draw(4, 5)


@pytest.mark.any_trl
def test_options_are_the_same_after_json():
    for index in range(200):
        options = draw(0, index)
        assert options_of(name_of(options)) == options
        case = random_case(name_of(options))
        assert case.name == name_of(options)
        assert case.seed == options["seed"]


@pytest.mark.any_trl
def test_every_option_goes_where_it_belongs():
    case = random_case(
        'random:{"model":"moe","rows":4,"rollout":true,"truncated_rows":[1],"beta":0.1,"fused_layout":"padded"}'
    )
    assert (case.model, case.data.truncated_rows) == ("moe", (1,))
    assert dict(case.fused) == {"fused_layout": "padded"}
    assert dict(case.config) == {
        "beta": 0.1,
        "per_device_train_batch_size": 4,
        "num_generations": 3,
        **({"router_aux_loss_coef": 0.0} if RETURNS_AUX_LOSS else {}),
    }


@pytest.mark.any_trl
def test_customisations_and_the_compiler_are_drawn():
    drawn = [draw(0, index) for index in range(300)]
    customised = [options["stepwise"] for options in drawn if "stepwise" in options]
    assert len(set(customised)) > 20
    assert any(options.get("fused_compile") for options in drawn)
    assert not any("stepwise" in options and "fused_layout" in options for options in drawn)


@pytest.mark.any_trl
def test_a_model_that_draws_random_numbers_generates_nothing():
    """It draws more of them for rows with padding, and TRL shuffles a generation batch with those that follow."""
    drawn = [options for index in range(300) if (options := draw(0, index)).get("model") == "phimoe"]
    assert drawn
    assert not any("rollout" in options for options in drawn)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["instance-compute-loss", "behind-compute-loss", "layer-hook-token", "substep-gradients"]
)
def test_a_customisation_is_made_to_both_trainers(settings, name):
    options = {"seed": 5, "rollout": True, "gradient_accumulation_steps": 2, "fused_max_tokens_per_forward": 10_000}
    plain, changed = ({**options, **more} for more in ({}, {"stepwise": name}))
    results = [compare(random_case(name_of(each)), settings) for each in (plain, changed)]
    assert [result.verdict for result in results] == ["equal", "equal"], [result.reason for result in results]
    takes_effect = name != "substep-gradients"  # a callback, of which a single step calls none
    assert (results[0].loss != results[1].loss or results[1].layout == "padded") == takes_effect


@pytest.mark.any_trl
@pytest.mark.parametrize("name", ["random:", "random:1", "random:a:b", "random:{beta}", "random:1:2:3"])
def test_a_name_that_means_no_case_is_a_bad_argument(harness, name):
    result = harness("--case", name)
    assert result.exit_code == 2
    assert "is neither" in " ".join(result.output.split())


def test_drawn_cases_are_equal(harness, tmp_path):
    file = tmp_path / "random.json"
    result = harness("--random", "6", "--seed", "7", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "6 cases drawn" in result.output
    names = [case["name"] for case in json.loads(file.read_text())["cases"]]
    assert names == [f"random:7:{index}" for index in range(6)]


def test_after_some_minutes_no_case_begins(harness, settings, monkeypatch):
    started = []

    def compare(case, settings):
        started.append(case.name)
        return Result(case.name, "", "equal")

    monkeypatch.setattr(fuzz, "compare", compare)
    # A case takes 0.1 seconds, on a busy machine too
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: 0.1 * len(started)))
    result = harness("--random", "1000", "--seed", "7", "--minutes", "0.01")
    assert result.exit_code == 0, result.output
    assert 1 <= len(started) <= 6
    assert f"{len(started)} cases of 1000 drawn" in result.output


def test_what_came_out_is_written_while_a_run_lasts(harness, monkeypatch, tmp_path):
    file = tmp_path / "random.json"

    def compare(case, settings):
        if case.name.endswith(":103"):
            raise KeyboardInterrupt
        return Result(case.name, "", "equal")

    monkeypatch.setattr(fuzz, "compare", compare)
    assert harness("--random", "200", "--seed", "7", "--json", str(file)).exit_code != 0
    assert len(json.loads(file.read_text())["cases"]) == 100


@pytest.mark.nightly
@pytest.mark.any_trl
def test_a_planted_fault_is_shrunk_to_a_command_that_repeats_it(harness, monkeypatch, settings):
    options = {
        "seed": 5,
        "rollout": True,
        "gradient_accumulation_steps": 2,
        "beta": 0.04,
        "truncated_rows": [1, 4],
        "mask_truncated_completions": True,
        "fused_share_prompts": False,
    }
    monkeypatch.setattr("tests.harness.rounding.MOVES", 2)  # enough for what is no rounding
    monkeypatch.setattr("tests.harness.command.drawn_names", lambda *_: [name_of(options)])
    monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", with_wrong_loss("mask_truncated_completions", 1.001))
    result = harness("--random", "1")
    assert result.exit_code == 1, result.output
    [command] = [line for line in result.output.splitlines() if line.strip().startswith("python -m tests.harness")]
    arguments = shlex.split(command)[3:]
    assert options_of(arguments[-1]) == {"mask_truncated_completions": True}
    assert harness(*arguments).exit_code == 1
    monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", FusedGRPOTrainer)
    assert harness(*arguments).exit_code == 0


@pytest.mark.any_trl
def test_shrinking_keeps_one_of_several_rows(settings, monkeypatch):
    monkeypatch.setattr(
        "tests.harness.shrink.compare",
        lambda case, _: replace(found, verdict="different" if 4 in getattr(case.data, "empty_rows", ()) else "equal"),
    )
    options = {"empty_rows": [1, 4], "beta": 0.1}
    found = replace(compare(random_case("random:{}"), settings), verdict="different")
    assert shrink(options, found, settings)[0] == {"empty_rows": [4]}
    assert shrink(options, found, settings, until=time.monotonic() - 1) == (options, found)


@pytest.mark.any_trl
@pytest.mark.parametrize(("factor", "verdict"), [(1 + 3e-5, "different"), (1.0, "equal")])
def test_a_small_fault_is_no_rounding(settings, monkeypatch, factor, verdict):
    monkeypatch.setattr("tests.harness.rounding.MOVES", 2)
    monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", with_wrong_loss("delta", factor))
    name = 'random:{"delta":2.0,"old":"far","loss_type":"bnpo"}'
    assert compare(random_case(name), settings).verdict == verdict


@pytest.mark.nightly
@pytest.mark.any_trl
def test_tokens_of_one_entropy_at_the_quantile_are_a_tie(settings):
    """The first tokens of completions to one prompt have one entropy; stock counts all of them, or by rounding some."""
    case = random_case(
        'random:{"seed":952574,"rollout":true,"gradient_accumulation_steps":2,"rows":2,"lengths":974255,"group":4,'
        '"top_entropy_quantile":0.37}'
    )
    stock = stock_trainer(case, settings)
    start = noisy_weights(stock, case.noise)
    data = make_data(case, load_weights(stock, start), case.seed)
    outcome = run_steps(stock, case, data, torch.float32)

    def with_other_entropies(scale):
        trainer = load_weights(stock_trainer(case, settings), start)
        compute = trainer._get_per_token_logps_and_entropies

        def moved(*args, **kwargs):
            logps, entropies, *others = compute(*args, **kwargs)
            rows = torch.arange(len(entropies)).unsqueeze(1)
            return logps, entropies * (1 + scale * rows), *others

        trainer._get_per_token_logps_and_entropies = moved
        return Compared(start, data, outcome, run_steps(trainer, case, data, torch.float32))

    assert rounding_verdict(case, settings, with_other_entropies(1e-6)) == "tie"
    assert rounding_verdict(case, settings, with_other_entropies(-0.2)) is None


@pytest.mark.skipif(not RETURNS_AUX_LOSS, reason="TRL >= 1.7 has the auxiliary loss, with which prompts are not shared")
def test_of_three_tokens_of_one_entropy_one_may_leave_the_quantile(settings):
    options = {"seed": 2, "model": "moe", "router_aux_loss_coef": 0.3, "rollout": True, "lengths": 853575}
    case = random_case(name_of({**options, "top_entropy_quantile": 0.2}))
    assert compare(case, settings).verdict in ("tie", "equal")


@pytest.mark.nightly
@pytest.mark.any_trl
def test_a_tie_is_seen_where_a_sum_cancels_too(settings):
    """Moved weights move a gradient that cancels by more than the tolerance, whatever is in the quantile."""
    options = {"seed": 577990, "model": "qwen3.5", "gradient_accumulation_steps": 4, "accumulation_windows": 2}
    options |= {"rows": 2, "lengths": 558284, "group": 2, "loss_type": "luspo", "importance_sampling_level": "sequence"}
    options |= {"temperature": 0.9, "beta": 1.0, "top_entropy_quantile": 0.2, "old": "far", "reference": True}
    result = compare(random_case(name_of({**options, "repeated_prompts": True, "fused_logits_mib": 0.5})), settings)
    if result.verdict == "skipped":
        pytest.skip(result.reason)
    assert result.verdict in ("tie", "equal"), result.reason


# What drawn cases have found, each with what was wrong
FOUND = {
    # A prompt-learning adapter that was switched off looked active, so that the reference's log-probs were left out
    "prefix-tuning": {"adapter": "prefix-tuning", "rollout": True, "beta": 0.001, "sampling": "sequence"},
    "prompt-tuning": {"adapter": "prompt-tuning", "rollout": True, "beta": 0.1, "sampling": "token"},
    # Sequences were left out although a weight of each is logged
    "vespo-left-out": {
        "steps_per_generation": 4,
        "loss_type": "vespo",
        "old": "drifted",
        "fused_skip_zero_grad_sequences": True,
    },
    # A comparison took the coefficient that the loss had set for the next step, and warned
    "verified-adaptive-entropy": {
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 100.0,
        "fused_verify": 1,
    },
    # A dropout of another head, which the model does not have, kept old log-probs in a forward of their own
    "gpt2-on-policy": {"model": "gpt2", "rollout": True, "sampling": "token"},
    # Old log-probs came from the training forward, whose rows are others: before transformers 5.18 they see each other
    "rows-that-see-others": {"model": "doge", "rollout": True, "steps_per_generation": 4, "rows": 2, "group": 2},
    "rows-that-see-others-kl": {
        "model": "doge",
        "rollout": True,
        "steps_per_generation": 4,
        "rows": 2,
        "group": 2,
        "beta": 0.1,
    },
    # The entropy of a micro-batch without a gradient was no number
    "all-left-out": {"rollout": True, "rows": 3, "fused_skip_zero_grad_sequences": True, "equal_completions": True},
    # The mask of the images' patches had the shape of the tokens' mask, and was cut as that is
    "patches-as-tokens": {
        "model": "lfm2-vl",
        "rows": 4,
        "lengths": 996335,
        "gradient_accumulation_steps": 3,
        "images": "shaped-patches",
    },
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(settings, options):
    needed = (1, 8) if "entropy_coef" in options else (1, 0) if options.get("loss_type") == "vespo" else (0,)
    if TRL.release < needed:
        pytest.skip("this TRL has no such loss")
    if "images" in options and "spatial_shapes" not in MULTIMODAL_INPUTS:
        pytest.skip("this TRL does not know these images")
    result = compare(random_case(name_of(options)), settings)
    assert result.verdict == "equal", result.reason
