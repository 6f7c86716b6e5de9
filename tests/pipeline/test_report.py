"""The report shows what is there, hides nothing dangerous, and needs nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline import metrics
from pipeline.commands.experiment import prepare_run, run_experiment
from pipeline.commands.status import read_status
from pipeline.health_checks import run_warnings
from pipeline.report import write_report
from pipeline.report.data import read_report_data, transcript_columns
from pipeline.report.page import redact_yaml, stage_table, summary_tiles
from pipeline.run import Run, write_problem_sets
from pipeline.transcripts import TranscriptSample, read_samples, select_samples
from rlinf import package_paths
from rlinf.artifacts import content_digest, prune_output, read_manifest
from rlinf.channels.record_files import read_records, write_records
from rlinf.envs.base import ProblemSetSize
from stages.layout import DATA_FILE
from tests.conftest import TINY

Compose = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pipeline.commands.experiment import compose as hydra_compose

    root = tmp_path_factory.mktemp("runs")
    words = ["experiment=arithmetic_grpo", f"++run.root={root}", *TINY]
    run_experiment(hydra_compose([*words, "++log.trackers=[tensorboard]"]))
    return root / "tiny"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    return copy


def test_every_metric_is_in_the_page_and_nothing_comes_from_outside(run: Path) -> None:
    page = write_report(run).read_text()
    content = data_of(page)
    shown = {plot["name"] for plot in plots_of(content)}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    recorded = {name for row in rows for name in row} - {"iteration"}
    assert len(recorded) > 15
    assert recorded <= shown
    assert {"learning", "sft-score", "stage-times", "throughput", "machine-memory"} <= shown
    assert len(shown) == len(plots_of(content)), "no chart stands twice"
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)\s*=\s*["\']?([^"\'#\s>][^\s>]*)', markup) == []
    assert "default-src 'none'" in page
    assert "Permission is hereby granted" in page


def test_the_report_leads_with_what_shows_learning(run: Path) -> None:
    """Then losses and gradients, then times; settings stand above the charts."""
    for iteration in (0, 1):
        edit_metrics(
            run,
            iteration,
            "train",
            dict.fromkeys(("approx_kl", "grad_norm", "entropy", "lr", "loss"), iteration + 1.0),
        )
        edit_metrics(run, iteration, "reward", {"mean": iteration + 1.0})
        edit_metrics(run, iteration, "rollout", {"completion_length": iteration + 1.0})
    page = write_report(run).read_text()
    groups = {group["title"]: group["plots"] for group in data_of(page)["groups"]}
    assert [plot["name"] for plot in groups["Learning"]] == [
        "learning",
        "reward/mean",
        "rollout/completion_length",
        "train/approx_kl",
        "train/entropy",
    ]
    names = [plot["name"] for plot in groups["Optimization"]]
    assert names[:2] == ["train/loss", "train/grad_norm"]
    assert "train/lr" in names
    order = list(groups)
    assert order[:3] == ["Learning", "Supervised fine-tuning", "Optimization"]
    assert order[-2:] == ["Time", "Hardware"]
    places = [page.index(f'id="{name}"') for name in ("settings", "controls", "plots", "gantt")]
    assert places == sorted(places)


def test_metrics_that_do_not_change_stand_behind_one_line(run: Path) -> None:
    for iteration in (0, 1):
        edit_metrics(run, iteration, "train", {"lr": 0.25, "loss": iteration + 1.0})
    page = write_report(run).read_text()
    content = data_of(page)
    constant = {plot["name"]: plot["value"] for plot in content["constant"]}
    assert constant["train/lr"] == 0.25
    assert "train/loss" not in constant
    assert constant.keys().isdisjoint({p["name"] for g in content["groups"] for p in g["plots"]})
    (line,) = re.findall(r'<details id="constant"><summary>(.*?)</summary>', page)
    assert f"{len(constant)} metrics did not change:" in line
    assert "train/lr (0.25)" in line
    assert "train/loss" not in line


def test_a_run_of_one_iteration_hides_no_metric(run: Path) -> None:
    shutil.rmtree(run / "it/0001")
    page = write_report(run).read_text()
    assert not any(plot["name"].startswith("train/") for plot in data_of(page)["constant"])


def plots_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """All charts of a page, with those that it hides."""
    shown = [plot for group in content["groups"] for plot in group["plots"]]
    return [*shown, *content["constant"]]


def edit_metrics(run: Path, iteration: int, stage: str, values: dict[str, float]) -> None:
    """Change metrics of a finished stage."""
    folder = run / f"it/{iteration:04d}" / stage
    manifest = read_manifest(folder)
    assert manifest is not None
    manifest.metrics.update(values)
    content = content_digest(manifest.files, manifest.metrics)
    (folder / "manifest.json").write_text(replace(manifest, content=content).to_json())


HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'><!--"


def test_hostile_names_and_transcripts_stay_text(run: Path) -> None:
    make_hostile(run)
    page = write_report(run).read_text()
    assert HOSTILE in data_of(page)["transcripts"]["columns"]["text"]
    assert f"train/{HOSTILE}" in {plot["name"] for plot in plots_of(data_of(page))}
    assert "<img" not in page
    assert "window.broken = 1</script>" not in page
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page
    assert len(scripts) == 2


def make_hostile(run: Path) -> None:
    """Prompts, texts, answers and a metric that would like to be markup."""
    folder = run / "it/0001/rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    (path,) = (folder / manifest.data).glob("*.h5")
    records = read_records(path)
    for record in records:
        record.info |= dict.fromkeys(("text", "prompt_text", "answer"), HOSTILE)
    path.unlink()
    write_records(path, records)
    for iteration in (0, 1):
        edit_metrics(run, iteration, "train", {HOSTILE: float(iteration)})


def data_of(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return dict(json.loads(text))


def test_a_run_tells_what_it_was_made_with_and_what_stages_used(run: Path) -> None:
    page = write_report(run).read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    about = json.loads((run / "run.json").read_text())
    assert facts["seed"] == str(read_report_data(run).run.config.seed)
    assert facts["started"] == about["created"]
    assert facts["started on"] == facts["hosts"] == socket.gethostname()
    assert {"python", "torch", "transformers", "rlinf", "commit"} <= facts.keys() | (
        set() if (package_paths.ROOT / ".git").exists() else {"commit"}
    )
    table = {row["stage"]: row for row in stage_table(read_report_data(run))}
    assert float(table["train"]["memory"]) > 0.05
    assert float(table["sft"]["cores"]) > 0
    (run / "run.json").write_text(json.dumps({"name": "of an earlier version"}))
    assert "<dt>seed</dt>" in write_report(run).read_text()


def test_what_speaks_against_a_run_is_said_at_the_top(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "reward/used_fraction": 0.0}) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(lines))
    result = run_warnings(Run.open(run))
    assert result
    page = write_report(run).read_text()
    top = page.partition('id="notices"')[2].partition("</ul>")[0]
    assert top.count("<li>") == len(result)


def test_a_page_of_many_transcripts_has_the_worst_and_the_best() -> None:
    many = [
        TranscriptSample(
            i, 10, i / 1000, "length" if i == 555 else "stop", f"p{i // 8}", f"t{i}", ""
        )
        for i in range(1000)
    ]
    some = select_samples(many, 40)
    assert len(some) == len(set(some)) == 40
    assert {many[0], many[1], many[999], many[998], many[555]} <= set(some)
    assert select_samples(many[:3], 40) == [many[0], many[2], many[1]]
    long = [s._replace(text="x" * 20_000) for s in many]
    packed = transcript_columns({4: long, 9: many[:8]})
    texts = packed["columns"]["text"]
    assert packed["iterations"] == [5, 10]
    assert packed["total"] == 1008
    assert sum(map(len, texts)) < 4_200_000
    assert "[… 11,000 characters left out …]" in texts[0]
    assert packed["columns"]["iteration"].count(10) == 8
    assert packed["columns"]["sample"][:2] == [0, 1]
    assert len(packed["prompts"]) == len(set(packed["prompts"]))


def test_unfinished_and_pruned_runs_have_a_report(run: Path, compose: Compose) -> None:
    shutil.rmtree(run / "it/0001/train")
    prune_output(run / "it/0000/rollout")
    shutil.rmtree(run / "evaluate")
    assert write_report(run).exists()
    empty = prepare_run(compose())
    assert write_report(empty.folder).exists()


def test_an_altered_file_of_trajectories_is_left_out_and_said(run: Path) -> None:
    """Whichever bit it is: a run that has ended well has its report."""
    (path,) = (run / "it/0001/rollout").glob("data-*/trajectories-r*.h5")
    whole, random, unreadable = path.read_bytes(), np.random.default_rng(0), 0
    path.chmod(0o600)
    for at in random.integers(len(whole), size=400):
        data = bytearray(whole)
        data[at] ^= 1 << int(random.integers(8))
        path.write_bytes(bytes(data))
        if not read_samples(run, 1):
            unreadable += 1
            last = bytes(data)
    assert unreadable
    path.write_bytes(last)
    page = data_of(write_report(run).read_text())
    assert page["transcripts"]["unreadable"] == [2]


def test_metrics_are_rebuilt_to_the_same_bytes(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").unlink()
    metrics.rewrite_metrics(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    assert len(timings) == 10
    assert all(timing["end"] > timing["start"] for timing in timings)


def test_tensorboard_has_each_step_once(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2]
    assert [event.step for event in events.Scalars("evaluate/score")] == [0, 1, 2]


def test_the_status_of_a_run(run: Path) -> None:
    status = read_status(run)
    assert (status.iterations_done, status.iterations_total, status.stage) == (2, 2, "finished")
    assert status.versions == [0, 1, 2]
    shutil.rmtree(run / "it/0001/train")
    shutil.rmtree(run / "it/0001/sync")
    status = read_status(run)
    assert (status.iterations_done, status.stage) == (1, "train of iteration 2")
    assert status.eta_s is not None


def test_the_tiles_name_the_scores(run: Path) -> None:
    shown = dict(summary_tiles(read_report_data(run)))
    assert shown["iterations"] == "2 of 2"
    labels = list(shown)
    assert labels[:2] == ["held-out score (iteration 2)", "held-out score at the start"]
    assert labels.index("reward") < labels.index("loss") < labels.index("iterations")
    assert {"completion_length", "approx_kl", "entropy", "tokens generated"} <= shown.keys()


def test_workers_of_pools_have_lanes_of_their_own_and_waits_do_not_count(run: Path) -> None:
    assert "<h2>Idle time</h2>" in write_report(run).read_text()
    manifest = read_manifest(run / "it/0001/train")
    assert manifest is not None
    (whole,) = [span for span in manifest.timing["spans"] if span["name"] == "train"]
    whole["worker"] = "pool-1-3-r0"
    wait = {**whole, "name": "wait", "end": (whole["start"] + whole["end"]) / 2}
    manifest.timing["spans"] = [wait, whole]
    (run / "it/0001/train/manifest.json").write_text(manifest.to_json())
    data = read_report_data(run)
    lane = f"pool 1 · rank 0 · {whole['host']}"
    mine = [piece for piece in data.segments if piece.lane == lane]
    assert [piece.is_computing for piece in mine] == [False, True]
    (entry,) = [s for s in data.stages if (s["stage"], s["iteration"]) == ("train", 1)]
    assert entry["seconds"] == pytest.approx((whole["end"] - whole["start"]) / 2, abs=1e-6)
    page = write_report(run).read_text()
    assert lane in page
    assert lane in data_of(page)["gantt"]["lanes"]


def test_sets_of_problems_are_listed(run: Path) -> None:
    assert 'id="problem-sets"' not in write_report(run).read_text(), "the task has no files"
    sets = [
        ProblemSetSize("task.train_sets.sums.train", 1_000_000, 0.75, 4096, 41, 812),
        ProblemSetSize("task.train_sets.facts.train", 300, 0.25, 300, 0, 90),
        ProblemSetSize("task.test", 300, None, 300, 3, 1020),
    ]
    write_problem_sets(run, sets)
    section = (
        write_report(run).read_text().partition('id="problem-sets"')[2].partition("</section>")[0]
    )
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    assert [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows[1:]] == [
        ["task.train_sets.sums.train", "1,000,000", "75 %", "1 %", "812"],
        ["task.train_sets.facts.train", "300", "25 %", "0 %", "90"],
        ["task.test", "300", "", "1 %", "1,020"],
    ]
    (run / DATA_FILE).write_text("[{}]")
    assert 'id="problem-sets"' not in write_report(run).read_text(), (
        "a damaged file hides nothing else"
    )


def test_a_page_to_be_sent_has_no_secrets(run: Path) -> None:
    """Neither among the settings in effect, nor in the configuration, nor in the plan."""
    secrets = {
        "cluster": {"env": {"KEY": "s3cret1"}, "notify_command": ["curl", "https://hooks/s3cret2"]},
        "log": {"mlflow": {"tracking_uri": "https://u:s3cret3@server:5000/a"}},
        "reward": {"kwargs": {"api_key": "s3cret4", "max_tokens": 7}},
    }
    record = json.loads((run / "run.json").read_text())
    values = yaml.safe_load((run / "config.yaml").read_text())
    for name, section in secrets.items():
        record["settings"][name] |= section
    values["cluster"] |= secrets["cluster"]
    values["log"] |= {"trackers": ["mlflow"], **secrets["log"]}
    (run / "run.json").write_text(json.dumps(record))
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    page = write_report(run).read_text()
    assert "s3cret" not in page
    assert "(not shown)@server:5000/a" in page


def test_a_page_to_be_sent_has_no_secrets_of_the_environment() -> None:
    config = "run:\n  name: a\ncluster:\n  launcher: slurm\n  env: {JUDGE_KEY: sk-1, OTHER: x}\n"
    values = redact_yaml(config)
    assert "sk-1" not in values
    assert yaml.safe_load(values)["cluster"] == {
        "launcher": "slurm",
        "env": {"JUDGE_KEY": "(not shown)", "OTHER": "(not shown)"},
    }
    assert "hooks" not in redact_yaml(
        "cluster: {notify_command: [curl, https://hooks.example/T/S]}\n"
    )
    plain = "# as it is\nrun: {name: a}\ncluster: {env: {}}\n"
    assert redact_yaml(plain) == plain
