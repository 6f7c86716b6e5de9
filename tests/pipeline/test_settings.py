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

from pipeline.commands.experiment import drive, prepare
from pipeline.record import read_record
from pipeline.report.data import read
from pipeline.report.page import html
from pipeline.run import Run
from pipeline.settings import flat, settings_in_effect
from rlinf.config import RunConfig, digest, semantic, validate
from rlinf.errors import ConfigError
from rlinf.track.base import settings_of
from stages.code import REGISTRIES
from stages.layout import CONFIG, RUN

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / RUN).read_text())
    return found


def test_every_key_of_every_section_is_in_the_record(tiny_run: Path) -> None:
    settings, config = record(tiny_run)["settings"], Run.open(tiny_run).config
    assert settings.keys() == RunConfig.model_fields.keys()
    for section in ("rollout", "optimizer", "warm_start", "evaluate", "retention"):
        expected = getattr(config, section).model_dump(mode="json")
        assert settings[section] == expected
    for section, registry in REGISTRIES.items():
        part = getattr(config, section)
        fields = registry.get(part.name).Config.model_fields
        assert settings[section].keys() == {"name", *fields}
    assert settings["algorithm"]["clip_high"] == 0.2
    assert settings["cluster"]["retries"] == 2
    assert {"param_dtype", "token_budget"} <= settings["trainer"].keys()
    assert "aggregation" in settings["algorithm"]


def test_what_differs_from_its_default_is_told_apart(tiny_run: Path) -> None:
    changed = record(tiny_run)["changed"]
    assert {"algorithm.entropy_bonus", "optimizer.lr", "rollout.batch", "model.hidden"} <= set(
        changed
    )
    assert {"algorithm.clip_high", "retention.last", "cluster.retries"}.isdisjoint(changed)


def test_the_identity_of_results_does_not_depend_on_it(tiny_run: Path) -> None:
    about = record(tiny_run)
    frozen = yaml.safe_load((tiny_run / CONFIG).read_text())
    assert about["id"] == about["frozen"] == digest(semantic(frozen))


def test_a_run_of_an_earlier_version_gets_its_settings_when_it_goes_on(
    tiny_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    known = read_record(run)
    assert known is not None
    from pipeline.record import _seal

    old = known.model_copy(update={"settings": None, "changed": None, "derived": None})
    old = old.model_copy(update={"seal": _seal(old)})
    (run / RUN).write_text(json.dumps(old.model_dump(exclude_none=True)))
    assert settings_of(run, Run.open(run).config) == Run.open(run).config.semantic()
    drive(Run.open(run))
    assert record(run)["settings"] == record(tiny_run)["settings"]
    assert record(run)["id"] == record(tiny_run)["id"]


def test_a_later_start_with_other_settings_renews_them(compose: Compose, tmp_path: Path) -> None:
    prepare(compose())
    prepare(compose("retention.last=7", "optimizer.lr=0.5"))
    found = record(tmp_path / "tiny")
    assert found["settings"]["retention"]["last"] == 7
    assert found["settings"]["optimizer"]["lr"] == 0.5
    assert "retention.last" in found["changed"]


def test_settings_that_change_no_result_are_renewed_too(compose: Compose, tmp_path: Path) -> None:
    begun = prepare(compose("cluster=inprocess"))
    identity = record(begun.folder)["id"]
    prepare(compose("cluster=local", "cluster.retries=5"))
    found = record(begun.folder)
    cluster = found["settings"]["cluster"]
    assert (cluster["launcher"], cluster["retries"]) == ("local", 5)
    assert "cluster.retries" in found["changed"]
    assert found["id"] == identity
    assert "was" not in found


def test_the_report_shows_them_with_changes_first(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    values = yaml.safe_load((run / CONFIG).read_text())
    values["cluster"]["env"] = {"TOKEN": "secret-word"}
    (run / CONFIG).write_text(yaml.safe_dump(values))
    from pipeline.record import write_record

    write_record(run, values)
    text = html(read(run))
    rows = re.findall(r'<tr class="setting"><td>(?:<b>)?([^<]+).*?</td><td>([^<]*)</td>', text)
    shown = dict(rows)
    assert shown["algorithm.clip_high"] == "0.2"
    assert {key for key, _ in flat(record(run)["settings"])} == shown.keys()
    changed = set(record(run)["changed"])
    assert {key for key, _ in rows[: len(changed)]} == changed
    assert "secret-word" not in text


def test_trackers_are_given_what_can_change_a_result(tiny_run: Path) -> None:
    given = settings_of(tiny_run, Run.open(tiny_run).config)
    assert given["algorithm"]["clip_high"] == 0.2
    assert {"run", "cluster", "log"}.isdisjoint(given)


def test_tensorboard_has_them_as_text(tiny_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlinf.track.tensorboard import TensorBoard

    shutil.copy(tiny_run / RUN, tmp_path / RUN)
    for step in (1, 2):
        board = TensorBoard(tmp_path, Run.open(tiny_run).config)
        board.log(step, {"train/loss": 1.0})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("settings/text_summary")
    assert "clip_high: 0.2" in text.tensor_proto.string_val[0].decode()


def test_a_key_that_its_part_does_not_know_is_refused(compose: Compose) -> None:
    config = validate(RunConfig, compose("trainer.token_budgets=1"))
    with pytest.raises(ConfigError, match=r"trainer\.token_budgets: unknown key"):
        settings_in_effect(config)
