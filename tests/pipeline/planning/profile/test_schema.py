"""The profile file: it is read back as it was, and whatever is wrong with it is said in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.profile.schema import Profile, ProfileIdentity, load_profile
from rlinf.errors import EXIT_BAD_INPUT, PlanError
from tests.pipeline.planning.profile.examples import IDENTITY, profile


def test_a_saved_profile_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    assert load_profile(path) == profile()
    assert list(tmp_path.iterdir()) == [path]


def saved(folder: Path, change: Any = None) -> Path:
    values = json.loads(profile().model_dump_json())
    if change is not None:
        change(values)
    path = folder / "profile.json"
    path.write_text(json.dumps(values))
    return path


def first_time(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["kinds"]["a100"]["points"][0]["time"]
    return found


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda v: first_time(v).update(seconds=[-1.0, 2.0]), "time.seconds.0"),
        (lambda v: first_time(v).update(seconds=[1.0, float("inf")]), "time.seconds.1"),
        (lambda v: first_time(v).update(median_s=1.0), "median_s"),
        (lambda v: v.update(schema_version=1), "schema_version"),
        (lambda v: first_time(v).update(seconds=[]), "time.seconds"),
        (lambda v: v["kinds"]["a100"]["points"][0].update(processes=0), "points.0.processes"),
        (lambda v: v["kinds"]["a100"]["points"][0].update(time=None), "points.0"),
        (lambda v: v["kinds"]["a100"].update(gpus=4), "kinds.a100.gpus"),
        (lambda v: v.update(kinds={}), "kinds"),
        (lambda v: v.pop("lengths"), "lengths"),
        (lambda v: v.update(lengths=[]), "lengths"),
        (lambda v: v.update(schema_version=99), "schema_version"),
        (lambda v: v.pop("schema_version"), "schema_version"),
        (lambda v: v.update(taken="yesterday"), "taken"),
    ],
)
def test_a_wrong_key_is_named_with_the_file(tmp_path: Path, change: Any, key: str) -> None:
    path = saved(tmp_path, change)
    with pytest.raises(PlanError, match=r"measure again|Measure again") as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"kinds": ', "\x00", "[" * 100_000])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"profile\.json") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_a_cut_file_is_never_read_as_a_profile(data: st.DataObject) -> None:
    text = profile().model_dump_json()
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no file .*make one with: rlinf profile"):
        load_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "words"),
    [("model", "model"), ("config", "configuration"), ("code", "version of the code")],
)
def test_a_profile_of_something_else_is_refused(name: str, words: str) -> None:
    other = ProfileIdentity(**{**IDENTITY.model_dump(), name: "other"})
    with pytest.raises(PlanError, match=rf"identity.{name}: this profile is of another {words}"):
        profile().check_identity(other, "profile.json")


def test_overheads_are_those_of_the_nearest_number_of_processes() -> None:
    measured = profile().kinds["a100"]
    assert [measured.overhead_s("trainer_load", n) for n in (1, 3, 64)] == [0.5, 1.5, 1.5]
    assert measured.overhead_s("offload", 1) == 0.0


def test_every_key_with_a_quantity_names_its_unit() -> None:
    counts = {"processes", "nodes", "samples", "lengths"}
    units = ("_s", "_bytes", "_bytes_per_s", "_share", "seconds", "per_node", "duty_cycle")
    numbers = {
        name
        for part in Profile.model_json_schema()["$defs"].values()
        for name, entry in part.get("properties", {}).items()
        if "number" in json.dumps(entry) or "integer" in json.dumps(entry)
    }
    bare = {name for name in numbers - counts if not name.endswith(units)}
    assert not bare
    assert "weights_bytes" in Profile.model_json_schema()["properties"]
