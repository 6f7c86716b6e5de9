"""The settings in effect, defaults included, stand in run.json and in the report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import drive, prepare_run, run_experiment
from pipeline.commands.status import read_status, show_status
from pipeline.metrics import stage_manifest
from pipeline.report.data import read_report_data
from pipeline.report.page import report_html
from pipeline.run import Run, effective_settings, flatten, read_run_record
from rlinf.config import RunConfig, json_digest, select_semantic, validate
from rlinf.errors import ConfigError
from rlinf.track.trackers import settings_of_run
from stages.context import COMPUTE
from stages.identity import CLASS_REGISTRIES
from stages.layout import CONFIG_FILE, RUN_FILE

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / RUN_FILE).read_text())
    return found


def test_every_key_of_every_section_is_in_the_record(tiny_run: Path) -> None:
    settings, config = record(tiny_run)["settings"], Run.open(tiny_run).config
    assert settings.keys() == RunConfig.model_fields.keys()
    for section in ("rollout", "optimizer", "sft", "evaluate", "checkpoint"):
        expected = getattr(config, section).model_dump(mode="json")
        assert settings[section] == expected
    for section, registry in CLASS_REGISTRIES.items():
        part = getattr(config, section)
        fields = registry.get(part.name).Config.model_fields
        assert settings[section].keys() == {"name", *fields}
    assert settings["algorithm"]["clip_ratio_high"] == 0.2
    assert settings["cluster"]["max_retries"] == 2
    assert {"param_dtype", "max_tokens_per_microbatch"} <= settings["trainer"].keys()
    assert "loss_agg_mode" in settings["algorithm"]


def test_what_differs_from_its_default_is_told_apart(tiny_run: Path) -> None:
    changed = record(tiny_run)["non_default"]
    assert {"algorithm.entropy_coeff", "optimizer.lr", "rollout.batch_size", "model.hidden"} <= set(
        changed
    )
    assert {"algorithm.clip_ratio_high", "checkpoint.keep_last", "cluster.max_retries"}.isdisjoint(
        changed
    )


def test_the_identity_of_results_does_not_depend_on_it(tiny_run: Path) -> None:
    about = record(tiny_run)
    frozen = yaml.safe_load((tiny_run / CONFIG_FILE).read_text())
    assert about["id"] == about["config_digest"] == json_digest(select_semantic(frozen))


def test_a_run_of_an_earlier_version_gets_its_settings_when_it_goes_on(
    tiny_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    known = read_run_record(run)
    assert known is not None
    from pipeline.run import _checksum

    old = known.model_copy(update={"settings": None, "non_default": None, "derived": None})
    old = old.model_copy(update={"checksum": _checksum(old)})
    (run / RUN_FILE).write_text(json.dumps(old.model_dump(exclude_none=True)))
    assert settings_of_run(run, Run.open(run).config) == Run.open(run).config.semantic_values()
    drive(Run.open(run))
    assert record(run)["settings"] == record(tiny_run)["settings"]
    assert record(run)["id"] == record(tiny_run)["id"]


def test_a_later_start_with_other_settings_renews_them(compose: Compose, tmp_path: Path) -> None:
    prepare_run(compose())
    prepare_run(compose("checkpoint.keep_last=7", "optimizer.lr=0.5"))
    found = record(tmp_path / "tiny")
    assert found["settings"]["checkpoint"]["keep_last"] == 7
    assert found["settings"]["optimizer"]["lr"] == 0.5
    assert "checkpoint.keep_last" in found["non_default"]


def test_settings_that_change_no_result_are_renewed_too(compose: Compose, tmp_path: Path) -> None:
    begun = prepare_run(compose("cluster=inprocess"))
    identity = record(begun.folder)["id"]
    prepare_run(compose("cluster=local", "cluster.max_retries=5"))
    found = record(begun.folder)
    cluster = found["settings"]["cluster"]
    assert (cluster["launcher"], cluster["max_retries"]) == ("local", 5)
    assert "cluster.max_retries" in found["non_default"]
    assert found["id"] == identity
    assert "previous_digest" not in found


def test_the_report_shows_them_with_changes_first(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    values = yaml.safe_load((run / CONFIG_FILE).read_text())
    values["cluster"]["env"] = {"TOKEN": "secret-word"}
    (run / CONFIG_FILE).write_text(yaml.safe_dump(values))
    from pipeline.run import write_run_record

    write_run_record(run, values)
    text = report_html(read_report_data(run))
    rows = re.findall(r'<tr class="setting"><td>(?:<b>)?([^<]+).*?</td><td>([^<]*)</td>', text)
    shown = dict(rows)
    assert shown["algorithm.clip_ratio_high"] == "0.2"
    assert {key for key, _ in flatten(record(run)["settings"])} == shown.keys()
    changed = set(record(run)["non_default"])
    assert {key for key, _ in rows[: len(changed)]} == changed
    assert "secret-word" not in text


def test_trackers_are_given_every_key(tiny_run: Path) -> None:
    given = settings_of_run(tiny_run, Run.open(tiny_run).config)
    assert given["algorithm"]["clip_ratio_high"] == 0.2
    assert given["cluster"]["max_retries"] == 2
    assert dict(flatten(given)).keys() == dict(flatten(record(tiny_run)["settings"])).keys()


def test_tensorboard_has_them_as_text(tiny_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlinf.track.trackers import TensorBoardTracker

    shutil.copy(tiny_run / RUN_FILE, tmp_path / RUN_FILE)
    for step in (1, 2):
        board = TensorBoardTracker(tmp_path, Run.open(tiny_run).config)
        board.log(step, {"train/loss": 1.0})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("settings/text_summary")
    assert "clip_ratio_high: 0.2" in text.tensor_proto.string_val[0].decode()


def test_data_type_and_device_are_those_in_which_the_stages_computed(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages decide them where they run, if the configuration leaves them open."""
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = compose("engine.dtype=bfloat16", "iterations=1", "log.trackers=[tensorboard]")
    run_experiment(values)
    run = tmp_path / "tiny"
    trainer = {"dtype": "float32", "device": "cpu"}
    engine = {"dtype": "bfloat16", "device": "cpu"}
    expected = {
        "rollout": {"engine": engine},
        "reward": {},
        "train": {"trainer": trainer},
    }
    for stage, parts in expected.items():
        manifest = stage_manifest(run, stage, 0)
        assert manifest is not None
        assert manifest.extra.get(COMPUTE, {}) == parts
    texts = {"engine": "bfloat16 on cpu", "trainer": "float32 on cpu"}
    assert read_status(run).compute == texts
    show_status(run, watch=False)
    printed = capsys.readouterr().out
    page = report_html(read_report_data(run))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for part, text in texts.items():
        assert re.search(rf"{part} computes in\W+{text}", printed)
        assert f"<dt>{part} computes in</dt><dd>{text}</dd>" in page
        logged = events.Tensors(f"compute/{part}/text_summary")
        assert [entry.tensor_proto.string_val[0].decode() for entry in logged] == [text]


def test_a_key_that_its_part_does_not_know_is_refused(compose: Compose) -> None:
    config = validate(RunConfig, compose("trainer.token_budgets=1"))
    with pytest.raises(ConfigError, match=r"trainer\.token_budgets: unknown key"):
        effective_settings(config)
