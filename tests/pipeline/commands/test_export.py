"""Exported models have a card, and adapters can be loaded by PEFT."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.commands.export import export_adapter, export_weights
from pipeline.commands.model_card import evaluation_estimates, hub_name
from pipeline.run import Run
from rlinf import __version__, api
from rlinf.errors import ArtifactError, InputError
from tests.pipeline.helpers import language_model, problem_file, run_here


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Return front matter and text of a model card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_an_exported_model_has_a_card(tiny_run: Path, tmp_path: Path) -> None:
    export_weights(tiny_run, tmp_path / "tuned", None)
    front, text = card_of(tmp_path / "tuned")
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlinf", "reinforcement-learning", "grpo"],
    }
    assert "# tuned\n" in text
    for row in (
        "| base model | none |",
        "| algorithm | grpo |",
        "| weights | after 2 of 2 iterations |",
        f"| rlinf | {__version__} |",
    ):
        assert row in text
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert settings["algorithm"]["clip_ratio_high"] == 0.2, "a default is among the settings"
    assert settings["optimizer"]["lr"] == 0.01
    assert {"cluster", "log", "run"}.isdisjoint(settings), "a reader of the card has another site"


def test_scores_of_a_card_have_the_standard_error_of_their_samples(
    tiny_run: Path, tmp_path: Path
) -> None:
    estimates = evaluation_estimates(Run.open(tiny_run), [0, 2, 7])
    assert estimates.keys() == {0, 2}
    scores = {row["version"]: row["score"] for row in api.load(tiny_run).evaluations()}
    for version, by_set in estimates.items():
        ((name, estimate),) = by_set.items()
        assert name == ""
        assert estimate.mean == pytest.approx(scores[version])
        share = estimate.mean  # eight samples of score 0 or 1
        assert estimate.standard_error == pytest.approx(
            math.sqrt(share * (1 - share) * 8 / 7 / 8), abs=1e-9
        )
    export_weights(tiny_run, tmp_path / "start", 0)
    _, text = card_of(tmp_path / "start")
    assert "| 0 | held-out samples | " in text
    assert "| 2 | held-out" not in text
    assert "before the first iteration, after SFT" in text


def test_the_hub_name_is_that_of_the_cache() -> None:
    folder = Path("/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db6")
    assert hub_name(folder) == "Qwen/Qwen2.5-0.5B"
    assert hub_name(Path("/models/Qwen2.5-0.5B")) is None


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that trains adapters of a model from a folder."""
    pytest.importorskip("peft", reason="the extra 'peft' is not installed")
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    root = tmp_path_factory.mktemp("lora")
    words = [
        "experiment=jsonl_grpo",
        "iterations=2",
        f"model.path={language_model(root / 'models--me--small')}",
        f"task.train={problem_file(root / 'train.jsonl')}",
        f"task.test={problem_file(root / 'test.jsonl', start=50)}",
        "rollout.batch_size=2",
        "rollout.group_size=2",
        "rollout.horizon=4",
        "evaluate.samples=4",
        "evaluate.every=1",
        "optimizer.lr=0.05",
        "algorithm.entropy_coeff=0.1",
        "trainer.lora={rank: 4, alpha: 8}",
        "checkpoint.save_every=2",
        f"run.root={root}",
        "run.name=lora",
        "log.trackers=[]",
    ]
    run_here(words)
    return root / "lora"


def test_peft_loads_exported_adapters(lora_run: Path, tmp_path: Path) -> None:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    done = CliRunner().invoke(
        app, ["export", str(lora_run), str(tmp_path / "adapter"), "--adapter"]
    )
    assert done.stdout == f"version 2 in {tmp_path / 'adapter'}\n", done.exception
    export_weights(lora_run, tmp_path / "merged", 2)
    base_folder = PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    found = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=name)
    changed = [name for name in start if not torch.equal(start[name], merged[name])]
    assert len(changed) == 14, "seven layers in each of two blocks were trained"
    front, text = card_of(tmp_path / "adapter")
    assert (front["library_name"], front["base_model"]) == ("peft", "me/small")
    assert "| base model | me/small |" in text
    assert "| `task.train` | " in text


def test_adapters_that_peft_could_not_use_are_refused(
    lora_run: Path, tiny_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"trainer\.lora is not set"):
        export_adapter(tiny_run, tmp_path / "out", None)
    with pytest.raises(InputError, match=r"no checkpoint of version 9 on disk; available: 1, 2"):
        export_adapter(lora_run, tmp_path / "out", 9)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="not empty"):
        export_adapter(lora_run, tmp_path / "full", None)
    assert not (tmp_path / "out").exists()


def test_the_adapters_of_an_evaluated_version_between_checkpoints_are_exported(
    lora_run: Path, tmp_path: Path
) -> None:
    """Any evaluated version can be the best one."""
    assert export_adapter(lora_run, tmp_path / "adapter", 1) == 1


def test_damage_is_found_before_scores_are_printed(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    (file,) = (run / "evaluate" / "0002").glob("data-*/trajectories-r*.h5")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError):
        evaluation_estimates(Run.open(run), [2])
