"""Published folders of each family are recognized, and their own files state the facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.models.gr00t_folder import Gr00tConfig, Gr00tFolder
from rlinf.models.wall_oss_folder import WallOSSConfig, WallOSSFolder
from tests.rlinf.models import gr00t_folders, wall_oss_folders


def read_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


@pytest.mark.parametrize("version", gr00t_folders.VERSIONS)
def test_a_published_folder_of_gr00t(version: str, tmp_path: Path) -> None:
    source, tag = tmp_path / "source", gr00t_folders.TAGS[version]
    gr00t_folders.write_folder(source, version)
    assert Gr00tFolder.recognizes("gr00t", source, read_settings(source))
    options = Gr00tConfig(path=source, vlm_path=tmp_path / "vlm", embodiment=tag)
    folder = Gr00tFolder("gr00t", source, options, gr00t_folders.SPEC)
    prompt, _ = folder.prompt()
    assert "{instruction}" in prompt
    assert ("lower case" in prompt) == (version == "n1.7")
    if version == "n1.5":
        file, low_name, high_name = "experiment_cfg/metadata.json", "min", "max"
        groups = json.loads((source / file).read_text())[tag]["statistics"]
    else:
        file, low_name, high_name = "statistics.json", "q01", "q99"
        groups = json.loads((source / file).read_text())[tag]
    ranges = folder.ranges()
    for feature, kind in ((STATE_FEATURE, "state"), (ACTION_FEATURE, "action")):
        for values, name in ((ranges[feature].low, low_name), (ranges[feature].high, high_name)):
            expected = [x for group in groups[kind].values() for x in group[name]]
            np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert file in ranges[feature].source
        assert tag in ranges[feature].source
    assert folder.action_size()[0] == 3
    predicted, executed, _ = folder.chunk()
    assert predicted >= executed > 1
    assert not list(folder.steps()), "it has no processors"


def test_an_original_folder_of_wall_oss(tmp_path: Path) -> None:
    wall_oss_folders.write_folder(tmp_path / "lerobot")
    source = tmp_path / "original"
    wall_oss_folders.to_original(tmp_path / "lerobot", source, ("lab", "home"))
    for folder in (source, tmp_path / "lerobot"):
        assert WallOSSFolder.recognizes("wall_oss", folder, read_settings(folder))
    options = WallOSSConfig(path=source, camera_map=wall_oss_folders.CAMERAS, normalizer="home")
    folder = WallOSSFolder("wall_oss", source, options, wall_oss_folders.SPEC)
    assert "state token" in folder.prompt()[0]
    tensors, actions = load_file(source / "model.safetensors"), folder.ranges()[ACTION_FEATURE]
    prefix, size = "action_preprocessor.normalizer_action.", folder.action_size()[0]
    low = tensors[f"{prefix}min.home"][:size]
    np.testing.assert_allclose(actions.low, low, rtol=1e-6)
    np.testing.assert_allclose(actions.high, low + tensors[f"{prefix}delta.home"][:size], rtol=1e-6)
    assert "home" in actions.source
