"""`fedhen bench`: what it counts, and what it says."""

from __future__ import annotations

import json

import pytest

from fedhen.benchmark import Loop, count_operations
from fedhen.cli import main
from fedhen.config.recipes import load_recipe
from fedhen.config.toml import apply_settings
from fedhen.experiment.build import build_experiment


def test_operations_are_those_of_the_layers() -> None:
    """Six a multiplication: forward, and backward to inputs and weights; nothing flows back to the images."""
    stem = 1 * 16 * 9 * 64
    simple = stem + 2 * 16 * 16 * 9 * 64 + (16 * 32 * 9 + 32 * 32 * 9 + 16 * 32) * 16 + 32 * 10
    experiment = build_experiment(load_recipe("digits"), accelerator="cpu")
    assert count_operations(experiment, "simple") == 6 * simple - 2 * stem
    deep = (32 * 64 + 64 * 64) * 9 * 4 + 32 * 64 * 4 + (64 * 128 + 128 * 128) * 9 * 4 + 64 * 128 * 4 + 128 * 10
    assert count_operations(experiment, "complex") == 6 * (simple + deep) - 2 * stem


@pytest.mark.slow
def test_bench_measures_both_loops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "digits", "--rounds", "1", "--json", "--accelerator", "cpu", "--set", "data.limit=200"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    # The engine counts round 3 alone, which is all that both have played.
    assert found["fast"]["rounds"] == 1 and found["fast"]["seconds_a_round_of_all"] == found["fast"]["seconds_a_round"]
    same = [found[loop]["seconds_a_round_of_all"] for loop in ("plain", "fast")]
    assert found["ratio"] == pytest.approx(same[0] / same[1])
    # 6 active devices, 10 examples each in one batch, 3 epochs.
    for loop in (found["plain"], found["fast"]):
        assert loop["steps_a_second"] * loop["train"] == pytest.approx(18)
        assert 0 < loop["share_of_ceiling"] == pytest.approx(loop["tflops"] / found["ceiling_tflops"])
    side = found["side_objective"]
    # The exit: a mix and a head from 32 channels to 10 classes, in four bytes each.
    assert side["with"]["bytes_each_way"] - side["without"]["bytes_each_way"] == 4 * (1 + 320 + 10)
    assert side["ratio"]["gflop_an_example"] > 1
    assert "measuring" in err


@pytest.mark.slow
def test_the_same_rounds_are_compared() -> None:
    """Evaluated every other round: three rounds to warm up, then the fourth and later ones, by the same devices."""
    changes = ["evaluation.every=2", "data.limit=100", "training.epochs=1", "rounds=99"]
    played = []
    for rounds in (2, 0):
        loop = Loop(build_experiment(apply_settings(load_recipe("digits"), changes), accelerator="cpu"), rounds)
        while len(loop.steps) < 2 and loop.play_turn():
            pass
        played.append([(step.record["round"], step.record["active"]) for step in loop.steps][:2])
    assert [number for number, _ in played[0]] == [4, 5] and played[0] == played[1]


@pytest.mark.slow
def test_bench_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "data.limit=100", "--set", "training.epochs=1", "--quiet", "--accelerator", "cpu"]
    assert main(["bench", "--rounds", "1", *small]) == 0
    out, err = capsys.readouterr()
    assert "times as fast as the plain loop" in out and "seconds a round" in out and not err


def test_a_benchmark_without_rounds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rounds", "0"]) == 2
    assert "--rounds 0: it must be at least 1" in capsys.readouterr().err
