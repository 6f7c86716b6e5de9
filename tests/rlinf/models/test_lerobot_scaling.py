"""States and actions scaled as LeRobot's processors do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.errors import DataError
from rlinf.models.lerobot_folder import (
    POSTPROCESSOR,
    UNNORMALIZER_STEP,
    FeatureNormalizer,
    read_feature_statistics,
    read_normalizer,
    replace_statistics,
)
from rlinf.models.smolvla_folder import (
    SmolVLAConfig,
    new_policy_config,
    write_smolvla_processors,
)

SPEC = {
    "observation": 2,
    "action": {"kind": "box", "size": 2},
    "images": {"front": [16, 16]},
}
STATISTICS = {
    STATE_FEATURE: {"mean": [0.0, 0.0], "std": [1.0, 1.0]},
    ACTION_FEATURE: {"mean": [1.0, -1.0], "std": [2.0, 3.0], "min": [-4.0, 1.0], "max": [4.0, 1.0]},
}


@pytest.mark.parametrize(
    ("mode", "restored"),
    [
        ("IDENTITY", [0.5, -1.0]),
        ("MEAN_STD", [2.0, -4.0]),
        # A number that is always the same stays what it is.
        ("MIN_MAX", [2.0, 1.0]),
    ],
)
def test_each_way_of_scaling_and_its_inverse(mode: str, restored: list[float]) -> None:
    scaling = FeatureNormalizer.from_statistics(mode, STATISTICS[ACTION_FEATURE], 2, "here")
    values = torch.tensor([0.5, -1.0])
    found = scaling.unnormalize(values)
    torch.testing.assert_close(found, torch.tensor(restored))
    torch.testing.assert_close(scaling.normalize(found), values)


def test_quantiles_take_the_statistics_of_that_name() -> None:
    known = {"q01": [0.0], "q99": [4.0], "q10": [1.0], "q90": [3.0]}
    one = FeatureNormalizer.from_statistics("QUANTILES", known, 1, "here").unnormalize(
        torch.tensor([1.0])
    )
    other = FeatureNormalizer.from_statistics("QUANTILE10", known, 1, "here").unnormalize(
        torch.tensor([1.0])
    )
    assert (float(one), float(other)) == (4.0, 3.0)


@pytest.mark.parametrize(
    ("mode", "known", "message"),
    [
        ("QUANTILES", {"mean": [0.0]}, r"here: no q01, q99.*model\.norm_stats"),
        ("MEAN_STD", {"mean": [0.0] * 3, "std": [1.0] * 3}, r"here: of 3 numbers.* 2"),
        ("WHITENED", {}, r"here: scaled by 'WHITENED'; known are IDENTITY"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    mode: str, known: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        FeatureNormalizer.from_statistics(mode, known, 2, "here")


def test_a_folder_is_given_other_statistics(tmp_path: Path) -> None:
    write_smolvla_processors(tmp_path, new_policy_config(SmolVLAConfig(), SPEC), STATISTICS)
    (tmp_path / "stats.json").write_text(
        json.dumps(
            {
                STATE_FEATURE: {"mean": [1.0, 2.0, 9.0], "std": [1.0, 1.0, 1.0]},
                ACTION_FEATURE: {"mean": [5.0, 6.0], "std": [1.0, 1.0]},
            }
        )
    )
    path = tmp_path / f"{POSTPROCESSOR}.json"
    known = json.loads(path.read_text())
    known["steps"].append({"registry_name": "another", "state_file": "another.safetensors"})
    path.write_text(json.dumps(known))
    save_file({"own": torch.ones(1)}, tmp_path / "another.safetensors")
    replace_statistics(
        tmp_path,
        read_feature_statistics(tmp_path / "stats.json", {STATE_FEATURE: 2, ACTION_FEATURE: 2}),
    )
    assert list(load_file(tmp_path / "another.safetensors")) == ["own"], "of another step"
    found = read_normalizer(tmp_path, POSTPROCESSOR, UNNORMALIZER_STEP, ACTION_FEATURE, 2)
    assert found.low.tolist() == [5.0, 6.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"no stats\.json of a data set of LeRobot"),
        ('{"action": {"mean": [1]}}', r"observation\.state"),
        (
            '{"action": {"mean": [1]}, "observation.state": {"mean": [0, 0]}}',
            r"action\.mean has 1 numbers; 2 are needed",
        ),
    ],
)
def test_a_file_of_other_statistics_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "stats.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_feature_statistics(tmp_path / "stats.json", {STATE_FEATURE: 2, ACTION_FEATURE: 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda known: known["steps"].clear(), r"no step unnormalizer_processor"),
        (lambda known: known["steps"][0].pop("config"), r"not as LeRobot writes it"),
        (lambda known: known["steps"][0].pop("state_file"), r"no mean, std.*MEAN_STD"),
    ],
)
def test_a_processor_of_another_kind_is_refused(
    tmp_path: Path, change: object, message: str
) -> None:
    write_smolvla_processors(tmp_path, new_policy_config(SmolVLAConfig(), SPEC), STATISTICS)
    path = tmp_path / f"{POSTPROCESSOR}.json"
    known = json.loads(path.read_text())
    change(known)  # type: ignore[operator]
    path.write_text(json.dumps(known))
    with pytest.raises(DataError, match=message):
        read_normalizer(tmp_path, POSTPROCESSOR, UNNORMALIZER_STEP, ACTION_FEATURE, 2)
