"""A policy folder that does not fit a suite is refused with the file and the key that say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.commands.evaluate_robot import compose_suite
from pipeline.evaluation.policy_check import check_policy, policy_name
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import STATISTICS_FILE
from rlinf.models.base import Policy
from rlinf.models.gr00t import Gr00tPolicy
from rlinf.models.gr00t_folder import Gr00tConfig
from rlinf.models.openvla import OpenVLAOFTPolicy, OpenVLAPolicy
from rlinf.models.openvla_folder import OpenVLAConfig, OpenVLAOFTConfig
from rlinf.models.pi0 import Pi0Policy, Pi05Policy
from rlinf.models.pi0_folder import PiConfig
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.smolvla_folder import SmolVLAConfig
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.models.wall_oss_folder import WallOSSConfig
from tests.rlinf.models.pi0_folders import SIZES as PI_SIZES
from tests.rlinf.models.test_pi0_folder import small_variants, to_openpi  # noqa: F401

SUITE = "libero_spatial"
CAMERAS = ("agentview", "robot0_eye_in_hand")
SPEC: dict[str, Any] = {
    "observation": 8,
    "action": {"kind": "box", "size": 7, "low": [-1.0] * 7, "high": [1.0] * 7},
    "images": {camera: [256, 256] for camera in CAMERAS},
    "instruction": True,
}
TOKEN_SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 48}
VISION = {"vision_hidden": 16, "vision_heads": 2, "patch_size": 64}
FLOW_VISION = {"vision_hidden": 16, "vision_heads": 2, "image_size": 28, "patch_size": 7}
PROMPT = "do {instruction}"
POLICIES: dict[str, tuple[type[Policy], Any]] = {
    "pi0": (Pi0Policy, PiConfig(**PI_SIZES)),
    "pi05": (Pi05Policy, PiConfig(**PI_SIZES)),
    "smolvla": (SmolVLAPolicy, SmolVLAConfig(**TOKEN_SIZES, **FLOW_VISION)),
    "gr00t": (Gr00tPolicy, Gr00tConfig(**TOKEN_SIZES, **FLOW_VISION)),
    "wall_oss": (WallOSSPolicy, WallOSSConfig(**TOKEN_SIZES, **FLOW_VISION)),
    "openvla": (OpenVLAPolicy, OpenVLAConfig(**TOKEN_SIZES, **VISION, prompt=PROMPT)),
    "openvla_oft": (OpenVLAOFTPolicy, OpenVLAOFTConfig(**TOKEN_SIZES, **VISION, prompt=PROMPT)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small folders that fit the suite, by the names of their policies."""
    root = tmp_path_factory.mktemp("policies")
    for name, (policy, config) in POLICIES.items():
        (root / name).mkdir()
        policy.create(config, SPEC, 0, root / name)
    return root


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders / name, tmp_path / name))


def checked(folder: Path, *overrides: str, trained: dict[str, Any] | None = None) -> list[str]:
    """The names of the aspects that fit."""
    _, values = compose_suite(folder, SUITE, overrides)
    return [a.name for a in check_policy(validate(RunConfig, values), SUITE, trained)]


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_statistics(folder: Path, feature: str, **rows: list[float]) -> None:
    """Replace statistics of a feature in all processors of a folder of LeRobot."""
    for path in folder.glob("policy_*processor_step_*.safetensors"):
        tensors = load_file(path)
        for name, numbers in rows.items():
            tensors[f"{feature}.{name}"] = torch.tensor(numbers)
        save_file(tensors, path)


def change_bins(folder: Path, **rows: list[Any]) -> None:
    """Replace action statistics of a token policy."""
    change_json(
        folder / STATISTICS_FILE, lambda datasets: datasets["actions"]["action"].update(rows)
    )


@pytest.mark.parametrize("name", POLICIES)
def test_a_folder_that_fits_passes_all_aspects(folders: Path, name: str) -> None:
    assert policy_name(folders / name) == name
    found = checked(folders / name)
    assert [a for a in found if "statistics" not in a] == [
        *("prompt", "images", "gripper", "chunk", "action", "files")
    ]


def test_the_command_prints_the_aspects_up_to_the_first_that_does_not_fit(
    folders: Path, copied: Callable[[str], Path]
) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(folders / "pi05"), "--suite", SUITE, "--check"])
    assert done.exit_code == 0, done.output
    assert "fits libero_spatial" in done.output
    folder = copied("pi05")
    change_json(folder / "config.json", lambda c: c.update(chunk_size=50, n_action_steps=50))
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--suite", SUITE, "--check"])
    assert isinstance(done.exception, ConfigError)
    assert "config.json: n_action_steps: 50 of 50 actions are executed" in str(done.exception)
    assert "gripper" in done.output
    assert "fits" not in done.output


def test_a_folder_of_no_robot_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        policy_name(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=r"config\.json: \{'model_type': 'qwen2'\} does not"):
        policy_name(tmp_path)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.usefixtures("small_variants")
def test_openpis_folders_are_told_apart_by_their_networks(
    folders: Path, tmp_path: Path, kind: str
) -> None:
    to_openpi(folders / kind, tmp_path / "openpi")
    assert policy_name(tmp_path / "openpi") == kind


# The prompt.


@pytest.mark.usefixtures("small_variants")
def test_whether_the_prompt_has_the_state_is_never_guessed(folders: Path, tmp_path: Path) -> None:
    to_openpi(folders / "pi05", tmp_path / "openpi")
    with pytest.raises(ConfigError, match=r"model\.state_in_prompt: .*openpi does not say"):
        checked(tmp_path / "openpi", f"model.tokenizer_path={folders / 'pi05' / 'tokenizer'}")
    with pytest.raises(DataError, match=r"model\.tokenizer_path: .*has neither tokenizer\.json"):
        checked(tmp_path / "openpi", "model.state_in_prompt=false")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pi05", r"policy_preprocessor\.json has neither the step pi0_new_line_processor nor"),
        ("smolvla", r"policy_preprocessor\.json: steps: there is no smolvla_new_line_processor"),
    ],
)
def test_a_step_that_makes_the_prompt_must_be_there(
    copied: Callable[[str], Path], name: str, message: str
) -> None:
    folder = copied(name)

    def drop(values: dict[str, Any]) -> None:
        ends = ("new_line_processor", "tokenizer_processor_step")
        values["steps"] = [s for s in values["steps"] if not s["registry_name"].endswith(ends)]

    change_json(folder / "policy_preprocessor.json", drop)
    with pytest.raises(DataError, match=message):
        checked(folder)


def test_a_state_in_the_prompt_needs_a_range(copied: Callable[[str], Path]) -> None:
    folder = copied("pi05")
    change_json(
        folder / "config.json", lambda c: c["normalization_mapping"].update(STATE="MEAN_STD")
    )
    with pytest.raises(DataError, match=r"config\.json: normalization_mapping\.STATE: MEAN_STD"):
        checked(folder)


def test_a_prompt_without_the_instruction_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("openvla_oft")
    change_json(folder / "config.json", lambda c: c.update(prompt="go"))
    with pytest.raises(DataError, match=r"config\.json: prompt: 'go' has no {instruction}"):
        checked(folder)


# Statistics.


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"q99": [1.0] * 6}, r"action: of 7 numbers|of 6 numbers, and there are 7"),
        ({"q99": [float("nan")] * 7}, r"action: some statistics are not finite"),
        ({"q99": [1.0] * 6 + [-1.0]}, r"action: component 6 has the range -1 to -1"),
        ({"q99": [1.0] * 3 + [57.0] * 3 + [1.0]}, r"action: component 3 reaches 57, .*another"),
        (
            {"q01": [-0.02] * 6 + [-1.0], "q99": [0.03] * 6 + [1.0]},
            r"action: changes of position stay below 0\.03, .*libero_spatial reach 1",
        ),
    ],
)
def test_statistics_of_other_data_are_refused(
    copied: Callable[[str], Path], rows: dict[str, list[float]], message: str
) -> None:
    folder = copied("pi05")
    change_statistics(folder, "action", **rows)
    with pytest.raises(DataError, match=rf"policy_postprocessor\.json: .*({message})"):
        checked(folder)


def test_statistics_that_are_missing_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("pi05")
    for path in folder.glob("policy_preprocessor_step_*.safetensors"):
        tensors = load_file(path)
        del tensors["observation.state.q99"]
        save_file(tensors, path)
    with pytest.raises(DataError, match=r"policy_preprocessor\.json: observation\.state: no q99"):
        checked(folder)


def test_only_the_gripper_may_be_unscaled(copied: Callable[[str], Path]) -> None:
    folder = copied("openvla_oft")
    change_bins(folder, mask=[True, False, True, True, True, True, False])
    with pytest.raises(DataError, match=r"statistics\.json: actions\.action\.mask: component 1"):
        checked(folder)


# Images.


def test_images_are_not_rotated_twice(copied: Callable[[str], Path]) -> None:
    folder = copied("pi05")
    step = {"registry_name": "libero_processor", "config": {}}
    change_json(folder / "policy_preprocessor.json", lambda values: values["steps"].insert(0, step))
    with pytest.raises(DataError, match=r"preprocessor\.json: steps\.0: libero_processor would"):
        checked(folder)


def test_a_step_that_is_not_applied_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("smolvla")
    step = {"registry_name": "delta_action_processor", "config": {}}
    change_json(folder / "policy_postprocessor.json", lambda values: values["steps"].append(step))
    with pytest.raises(DataError, match=r"postprocessor\.json: steps\.2: the step delta_action_"):
        checked(folder)


def test_a_policy_of_upright_images_is_refused(folders: Path) -> None:
    trained: dict[str, Any] = {"kwargs": {"benchmark_images": True}}
    assert "images" in checked(folders / "pi05", trained=trained)
    with pytest.raises(ConfigError, match=r"run: task\.kwargs\.benchmark_images is not true"):
        checked(folders / "pi05", trained={"kwargs": {}})


# The gripper.


def test_a_gripper_between_0_and_1_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("openvla_oft")
    low, high = [-1.0] * 6 + [0.0], [1.0] * 7
    change_bins(folder, q01=low, q99=high, mask=[True] * 6 + [False])
    with pytest.raises(DataError, match=r"actions\.action: component 6: the gripper is between 0"):
        checked(folder)
    folder = copied("pi0")
    change_statistics(folder, "action", mean=[0.0] * 6 + [0.5], std=[0.3] * 6 + [0.5])
    with pytest.raises(DataError, match=r"action: component 6: the gripper is between 0 and 1"):
        checked(folder)


# The chunk, and the size of actions.


def test_long_open_loops_are_refused_until_they_are_cut(copied: Callable[[str], Path]) -> None:
    folder = copied("smolvla")
    change_json(folder / "config.json", lambda c: c.update(chunk_size=50, n_action_steps=50))
    with pytest.raises(ConfigError, match=r"config\.json: n_action_steps: 50 of 50 actions"):
        checked(folder)
    assert "chunk" in checked(folder, "model.chunk_size=10")


@pytest.mark.parametrize(
    ("name", "key"), [("pi05", r"output_features\.action\.shape"), ("openvla_oft", "action_dim")]
)
def test_a_policy_of_another_robot_is_refused(tmp_path: Path, name: str, key: str) -> None:
    policy, config = POLICIES[name]
    (tmp_path / name).mkdir()
    action = {"kind": "box", "size": 8, "low": [-1.0] * 8, "high": [1.0] * 8}
    policy.create(config, {**SPEC, "action": action}, 0, tmp_path / name)
    with pytest.raises(ConfigError, match=rf"config\.json: {key}: 8 numbers, .*libero_spatial"):
        checked(tmp_path / name)


@pytest.mark.usefixtures("small_variants")
def test_openpis_statistics_say_the_size_of_actions(folders: Path, tmp_path: Path) -> None:
    to_openpi(folders / "pi05", tmp_path / "openpi")
    path = tmp_path / "openpi" / "assets" / "lab" / "norm_stats.json"

    def widen(values: dict[str, Any]) -> None:
        for rows in values["norm_stats"]["actions"].values():
            rows.append(rows[-1])

    change_json(path, widen)
    words = [f"model.tokenizer_path={folders / 'pi05' / 'tokenizer'}"]
    words += ["model.state_in_prompt=true"]
    with pytest.raises(ConfigError, match=r"norm_stats\.json: norm_stats\.actions\.mean: 8 num"):
        checked(tmp_path / "openpi", *words)


def test_tensors_and_cameras_are_checked_last(copied: Callable[[str], Path]) -> None:
    folder = copied("pi05")
    words = ["~task.images.robot0_eye_in_hand"]
    with pytest.raises(ConfigError, match=r"task\.images: the model sees .*set model\.camera_map"):
        checked(folder, *words)
    assert "files" in checked(folder, *words, "model.camera_map={agentview: agentview}")
