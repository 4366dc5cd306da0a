"""The benchmarks of what is learnt: their statistics, a short run of each, and their figures."""

import importlib
import json
import math
import random
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch):
    """A module of `benchmarks/`, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("p", "df", "quantile"),
    [(0.95, 1, 6.313752), (0.975, 4, 2.776445), (0.95, 15, 1.753050), (0.975, 23, 2.068658), (0.05, 9, -1.833113)],
)
def test_quantiles_are_those_of_the_table(benchmark_module, p, df, quantile):
    statistics = benchmark_module("_equivalence")
    assert statistics.t_quantile(p, df) == pytest.approx(quantile, abs=1e-6)
    assert statistics.t_tail(quantile, df) == pytest.approx(1 - p, abs=1e-7)


def test_arms_are_equivalent_where_the_whole_interval_lies_within_the_margin(benchmark_module):
    equivalence = benchmark_module("_equivalence").equivalence
    # mean 0.0014 and standard deviation 0.0074027: t of the nearer side is (0.01 - 0.0014) / 0.0033106 = 2.5977
    found = equivalence([0.01, -0.01, 0.005, 0.0, 0.002], margin=0.01)
    assert (found.mean, found.sd) == pytest.approx((0.0014, 0.0074027), rel=1e-4)
    assert (found.low, found.high) == pytest.approx(
        (0.0014 - 2.131847 * 0.0033106, 0.0014 + 2.131847 * 0.0033106), 1e-4
    )
    assert found.p == pytest.approx(0.030096, abs=1e-5) and found.equivalent
    # a small mean is not enough where the seeds scatter, nor do small differences help that are all on one side
    assert not equivalence([0.05, -0.05, 0.04, -0.04], margin=0.01).equivalent
    assert not equivalence([0.012, 0.011, 0.012, 0.011], margin=0.01).equivalent
    assert equivalence([0.0, 0.0, 0.0], margin=0.01).equivalent


def test_arms_further_apart_than_the_margin_seldom_count_as_equivalent(benchmark_module):
    equivalence, generator = benchmark_module("_equivalence").equivalence, random.Random(0)
    runs = [equivalence([generator.gauss(0.01, 0.008) for _ in range(16)], margin=0.01) for _ in range(400)]
    assert sum(run.equivalent for run in runs) / len(runs) == pytest.approx(0.05, abs=0.03)


def small(setting, **more):
    sizes = {"steps": 2, "pretrain_steps": 1, "batch": 16, "micro_batch": 8, "vocab": 32, "held_out": 20}
    return setting(**sizes, **more)


@pytest.mark.nightly
def test_all_arms_learn_from_one_start(benchmark_module, tmp_path):
    learning, arithmetic = benchmark_module("learning"), benchmark_module("_arithmetic")
    setting = small(arithmetic.Setting)
    seed, accuracy = learning.pretrain(3, setting, "cpu", tmp_path)
    assert (seed, 0 <= accuracy <= 1) == (3, True)
    results = [learning.train(3, arm, setting, "cpu", tmp_path) for arm in arithmetic.ARMS]
    for entry in results:
        assert all(len(entry[key]) == 1 and math.isfinite(entry[key][0]) for key in ("accuracy", *learning.CURVES))
        assert entry["entropy"][0] == pytest.approx(results[0]["entropy"][0], rel=1e-2)
    assert all(entry["layout"] == "packed" and entry["recomputed"] == 0 for entry in results[2:])
    again = [{**entry, "seed": 4} for entry in results]
    assert learning.complete([*results, *again[:2]], list(arithmetic.ARMS)) == results
    record = learning.make_record([*results, *again], setting)
    assert [row[0] for row in learning.rows_of_table(record)] == list(arithmetic.ARMS)


def test_arms_that_learn_nothing_show_nothing(benchmark_module):
    learning = benchmark_module("learning")
    assert learning.has_learnt([{"arm": "stock", "at_start": 0.5, "accuracy": [0.1, 0.9, 0.9, 0.9]}])
    assert not learning.has_learnt([{"arm": "stock", "at_start": 0.0, "accuracy": [0.0, 0.0, 0.0]}])


@pytest.mark.nightly
def test_all_arms_replay_the_recorded_tokens(benchmark_module, tmp_path, monkeypatch):
    replay, arithmetic = benchmark_module("replay"), benchmark_module("_arithmetic")
    # such a start answers nothing right, and without a reward weights do not move
    monkeypatch.setattr(
        arithmetic.task,
        "correct_sum",
        lambda prompts, completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids],
    )
    monkeypatch.setattr(arithmetic.Start, "accuracy_of", lambda start, model: 0.5)
    common = (small(arithmetic.Setting, iterations=1), 2, "cpu", tmp_path)
    stock = replay.record_stock(3, *common)
    again, *others = [replay.replay(3, arm, *common) for arm in arithmetic.ARMS]
    assert again["drift"] == {2: 0.0}
    assert again["entropy"] == stock["entropy"]
    assert all(0 < drift < 1 for entry in others for drift in entry["drift"].values())
    lines = replay.compare([stock, *others, *({**entry, "seed": 4} for entry in others)])
    assert {line["step"] for line in lines} == {2}
    assert len(replay.rows_of_table({"comparison": lines})) == 1


def made_up(module, keys, seed, arm):
    generator = random.Random(f"{seed} {arm}")
    return {"seed": seed, "arm": arm, **{key: [generator.random() for _ in range(3)] for key in keys}}


def test_figures_are_drawn_from_records(benchmark_module, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures, learning, replay = (benchmark_module(name) for name in ("figures", "learning", "replay"))
    arithmetic = benchmark_module("_arithmetic")
    about = {"device": "a CPU", "versions": {"trl": "1", "torch": "2"}, "commit": "0123456789"}
    keys = ("accuracy", *learning.CURVES)
    runs = [made_up(learning, keys, seed, arm) for seed in range(4) for arm in arithmetic.ARMS]
    record = learning.make_record(runs, arithmetic.Setting(steps=30), **about)
    drifts = [
        {"seed": seed, "arm": arm, "drift": {50: 0.1 + seed / 100, 100: 0.2 + seed / 100}}
        for seed in range(3)
        for arm in ("null", "ours", "ours, in chunks")
    ]
    stock = [{"seed": seed, "arm": "stock"} for seed in range(3)]
    (tmp_path / "results").mkdir()
    for name, content in (
        ("learning", record),
        ("replay", {**about, "comparison": replay.compare(drifts), "results": [*stock, *drifts]}),
    ):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(figures, "HERE", tmp_path)
    drawn = [figures.draw_learning("learning.json"), figures.draw_replay("replay.json")]
    paired = figures.draw_differences("learning.json", ("accuracy", "entropy"))
    assert [len(figure.axes) for figure in (*drawn, paired)] == [6, 1, 2]
    assert [{len(axes.lines) for axes in figure.axes} for figure in (*drawn, paired)] == [{4}, {3}, {4}]
    null, entropies = paired.axes[1].lines[0], {(entry["arm"], entry["seed"]): entry["entropy"] for entry in runs}
    differences = [entropies["null", seed][-1] - entropies["stock", seed][-1] for seed in range(4)]
    assert null.get_ydata()[-1] == pytest.approx(sum(differences) / 4)
    pyplot.close("all")
