"""``rlinf evaluate`` scores a model folder or a run on sets of problems; compare pairs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pipeline.commands.evaluate
from pipeline.commands.cli import app
from pipeline.commands.evaluate import (
    named_sets,
    run_evaluation,
    show_comparison,
    show_result,
)
from pipeline.commands.experiment import compose_words, run_experiment
from pipeline.evaluation.results import EvaluationResult
from rlinf.errors import ConfigError, InputError, InterruptedByUser
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from tests.rlinf.envs.test_multiple_choice import ROWS, write

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
SUMS = [{"question": f"{i}+{i}=", "answer": f"{i} plus {i}\n#### {2 * i}"} for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two model folders, and the files of two sets."""
    folder = tmp_path_factory.mktemp("evaluate")
    config = CausalLMConfig(
        architecture="llama", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64
    )
    for seed in (0, 1):
        model = folder / f"model-{seed}"
        model.mkdir()
        alphabet = "".join(map(chr, range(32, 127))) + "\n"
        CausalLM.create(config, {"alphabet": alphabet}, seed, model)
    write(folder / "sums.jsonl", SUMS)
    write(folder / "gpqa.jsonl", ROWS[:4])
    return folder


def evaluate(
    folder: Path, model: Path, *overrides: str, sets: Sequence[str] = ("sums", "gpqa_diamond")
) -> tuple[Path, EvaluationResult]:
    suites = [f"gpqa_diamond={folder / 'gpqa.jsonl'}"] if "gpqa_diamond" in sets else []
    protocol = ["gpqa_diamond.samples_per_problem=3", "gpqa_diamond.horizon=12"]
    words = [f"run.root={folder / 'runs'}", "sums.horizon=6", *(protocol if suites else [])]
    return run_evaluation(model, suites, [folder / "sums.jsonl"], [*words, *overrides])


def test_sets_with_their_own_protocols_are_scored_and_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, result = evaluate(folder, folder / "model-0")
    sums, choices = result.sets["sums"], result.sets["gpqa_diamond"]
    assert (sums.num_problems, sums.samples_per_problem) == (6, 1)
    assert (choices.num_problems, choices.samples_per_problem) == (4, 3)
    assert sorted(choices.pass_at_k) == [1, 2, 3]
    assert [len(scores) for scores in choices.scores] == [3] * 4
    assert choices.average.mean == choices.pass_at_k[1].mean
    assert 0 < sums.mean_tokens <= 6
    assert 0 < choices.mean_tokens <= 12
    assert choices.protocol["temperature"] == 0.6
    assert EvaluationResult.load(run) == result
    show_result(result)
    assert "gpqa_diamond" in capsys.readouterr().out
    page = (run / "report" / "evaluation.html").read_text()
    assert "Protocol of gpqa_diamond" in page
    assert result.model_digest in page
    manifest = run / "evaluate/0000/manifest.json"
    before = manifest.stat().st_mtime_ns
    assert evaluate(folder, folder / "model-0")[1] == result, "the same command computes nothing"
    assert manifest.stat().st_mtime_ns == before
    other, _ = evaluate(folder, folder / "model-1")
    capsys.readouterr()
    comparison = show_comparison(run, other)
    assert sorted(comparison) == ["gpqa_diamond", "sums"]
    shown = capsys.readouterr().out
    assert "95 % interval" in shown
    assert f"left: {run}\n" in shown
    assert f"right: {other}\n" in shown


def test_the_commands_evaluate_and_compare(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "aime.jsonl", [{"problem": "1+1=", "answer": "2"}])
    runs = []
    for seed in (0, 1):
        words = [f"run.root={tmp_path}", "aime.samples_per_problem=2", "aime.horizon=4"]
        suite = ["--suite", f"aime={tmp_path / 'aime.jsonl'}", "--name", f"aime-{seed}"]
        done = CliRunner().invoke(app, ["evaluate", str(folder / f"model-{seed}"), *suite, *words])
        assert done.exit_code == 0, done.output
        assert "evaluation on aime; stages run in this process" in done.output
        assert "before iteration" not in done.output
        assert f"page: {tmp_path / f'aime-{seed}' / 'report' / 'evaluation.html'}" in done.output
        runs.append(str(tmp_path / f"aime-{seed}"))
    done = CliRunner().invoke(app, ["compare", *runs])
    assert done.exit_code == 0, done.output
    assert "points" in done.output


def test_unlike_protocols_are_not_compared(folder: Path) -> None:
    results = []
    for seed, words in ((0, ["sums.temperature=0.5"]), (1, [])):
        name = f"run.name=unlike-{seed}"
        results.append(evaluate(folder, folder / f"model-{seed}", name, *words, sets=["sums"])[0])
    with pytest.raises(ConfigError, match=r"sums: .*not comparable.* differ in temperature;"):
        show_comparison(*results)


def test_other_problems_are_another_protocol(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "sums.jsonl"
    write(other, [*SUMS[:5], {"question": "9+9=", "answer": "18"}])
    words = [f"run.root={tmp_path}", "sums.horizon=6"]
    left, _ = run_evaluation(folder / "model-0", (), [other], [*words, "run.name=left"])
    right, _ = run_evaluation(
        folder / "model-0", (), [folder / "sums.jsonl"], [*words, "run.name=right"]
    )
    with pytest.raises(ConfigError, match="differ in test_file"):
        show_comparison(left, right)


def test_weights_of_a_run_are_evaluated(tiny_run: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(3)]
    write(tmp_path / "sums.jsonl", rows)
    words = [f"run.root={tmp_path}", "sums.horizon=4"]
    run, result = run_evaluation(tiny_run, (), [tmp_path / "sums.jsonl"], words)
    assert result.sets["sums"].num_problems == 3
    assert run.name == "evaluate-tiny-sums"


def test_problems_that_the_run_was_trained_on_are_counted(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal questions count, whatever their white space; both while a run trains and after."""
    train, test, other = (tmp_path / f"{name}.jsonl" for name in ("train", "test", "other"))
    write(train, SUMS)
    write(test, [{"question": "8+8=", "answer": "16"}])
    spaced = [{**row, "question": f" {row['question']} "} for row in SUMS[:2]]
    write(other, [*spaced, {"question": "9+9=", "answer": "18"}])
    words = ["experiment=jsonl_grpo", f"model.path={folder / 'model-0'}", f"run.root={tmp_path}"]
    words += [f"task.train={train}", f"task.test={test}", "run.name=trained", "iterations=1"]
    words += ["task.prompt_template='{prompt}'", "rollout.batch_size=1", "rollout.group_size=2"]
    words += ["rollout.horizon=3", "evaluate.samples=1", "evaluate.every=0", "log.trackers=[]"]
    words += ["+suite@evaluate.sets.other=data", f"evaluate.sets.other.task.test={other}"]
    run_experiment(compose_words([*words, "evaluate.sets.other.horizon=3"]))
    message = "evaluate.sets.other: 2 of 3 held-out problems are training problems (task.train) of"
    assert f"{message} trained too" in caplog.text
    caplog.clear()
    run_evaluation(tmp_path / "trained", (), [other], [f"run.root={tmp_path}", "other.horizon=3"])
    assert f"{message} trained too" in caplog.text
    caplog.clear()
    train.unlink()
    words = [f"run.root={tmp_path}", "other.horizon=3", "run.name=again"]
    run_evaluation(tmp_path / "trained", (), [other], words)
    assert message not in caplog.text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sumz.horizon=3", "sumz.horizon=3: there is no set 'sumz'; the sets are sums; did you"),
        ("maths.horizon=3", "maths.horizon=3: there is no set 'maths'; the sets are sums$"),
        ("sums.horizont=3", "evaluate.sets.sums.horizont: unknown key; did you mean 'horizon'"),
    ],
)
def test_a_misspelt_override_names_the_sets(folder: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(folder, folder / "model-0", word, sets=["sums"])


def test_a_stop_string_that_never_matches_is_an_error_of_its_set(folder: Path) -> None:
    word = "sums.sampling.stop=['x<|endoftext|>']"
    with pytest.raises(ConfigError, match=r"evaluate.sets.sums.sampling.stop: .*would never match"):
        evaluate(folder, folder / "model-0", word, "run.name=stop", sets=["sums"])


def test_a_damaged_or_missing_result_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluation.json: no such file"):
        EvaluationResult.load(tmp_path)
    (tmp_path / "evaluation.json").write_text(json.dumps({"sets": {}}))
    with pytest.raises(InputError, match=r"evaluation.json: damaged"):
        EvaluationResult.load(tmp_path)


@pytest.mark.parametrize(
    ("suites", "data", "message"),
    [
        ([], [], "nothing to evaluate on: add --suite NAME=FILE or --data FILE; suites: aime"),
        (["gsm9k=x"], [], "unknown suite 'gsm9k'; did you mean 'gsm8k'"),
        (["gsm8k"], [], r"--suite gsm8k: name the file .* gsm8k=FILE.jsonl"),
        (["gsm8k=a"], ["gsm8k.jsonl"], "the set 'gsm8k' is already that of"),
        ([], ["engine.jsonl"], "engine.jsonl: a set cannot have the name 'engine'"),
        ([], ["score.jsonl"], "score.jsonl: a set cannot have the name 'score'"),
    ],
)
def test_sets_that_are_none_are_refused(suites: list[str], data: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_sets(suites, list(map(Path, data)))


def test_nothing_is_written_if_a_file_is_malformed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    shutil.copy(folder / "sums.jsonl", path)
    path.write_text(path.read_text() + '\n{"question": "1+1="}')
    with pytest.raises(
        InputError, match=r"evaluate.sets.sums: .*sums.jsonl, line 7: no field 'answer'"
    ):
        run_evaluation(folder / "model-0", (), [path], [f"run.root={tmp_path / 'runs'}"])
    assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match="no such folder; name a model folder or a run directory"):
        run_evaluation(folder / "model-9", (), [path], [])


def test_a_response_that_is_too_long_for_the_model_is_an_error_of_its_set(
    folder: Path, tmp_path: Path
) -> None:
    long = {**ROWS[0], "Question": "Which? " * 60}
    write(tmp_path / "gpqa.jsonl", [long])
    suites = [f"gpqa_diamond={tmp_path / 'gpqa.jsonl'}"]
    words = [f"run.root={tmp_path}", "gpqa_diamond.horizon=8", "gpqa_diamond.samples_per_problem=1"]
    words += ['gpqa_diamond.task.prompt_template="{prompt}"', "model.max_model_len=512"]
    message = r"^evaluate.sets.sums.horizon: prompts of up to \d+ tokens and 512 new"
    with pytest.raises(ConfigError, match=message):
        run_evaluation(folder / "model-0", suites, [folder / "sums.jsonl"], words)
    # The longest prompt and the longest response are in different sets, and both fit.
    words.append("sums.horizon=400")
    _, result = run_evaluation(folder / "model-0", suites, [folder / "sums.jsonl"], words)
    assert list(result.sets) == ["gpqa_diamond", "sums"]


def test_other_examples_are_another_protocol(tmp_path: Path) -> None:
    """Of two evaluations with few-shot examples, the examples must be equal."""
    path = tmp_path / "chat"
    path.mkdir()
    config = CausalLMConfig(
        architecture="llama", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64
    )
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    CausalLM.create(config, {"alphabet": alphabet}, 0, path)
    tokenizer_file = path / "tokenizer_config.json"
    tokenizer = json.loads(tokenizer_file.read_text())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer_file.write_text(json.dumps({**tokenizer, "chat_template": template}))
    write(tmp_path / "sums.jsonl", SUMS[:2])
    results = []
    for number in (3, 4):
        train = tmp_path / f"train-{number}.jsonl"
        write(train, [SUMS[number], SUMS[5]])
        words = [f"run.root={tmp_path}", f"run.name=train-{number}", "sums.horizon=4"]
        words += ["sums.task.num_fewshot=1", f"sums.task.train={train}"]
        results.append(run_evaluation(path, (), [tmp_path / "sums.jsonl"], words)[0])
    with pytest.raises(ConfigError, match="differ in train_file"):
        show_comparison(*results)


def test_after_an_interrupt_the_same_command_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: object) -> None:
        raise InterruptedByUser("interrupted; continue with: rlinf resume")

    monkeypatch.setattr(pipeline.commands.evaluate, "drive", interrupted)
    with pytest.raises(InterruptedByUser, match="Continue with the same rlinf evaluate command"):
        evaluate(folder, folder / "model-0", "run.name=interrupted", sets=["sums"])
    monkeypatch.undo()
    _, result = evaluate(folder, folder / "model-0", "run.name=interrupted", sets=["sums"])
    assert result.sets["sums"].num_problems == 6
