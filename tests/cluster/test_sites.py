"""Slurm itself accepts the batch scripts of all profiles of sites (``sbatch --test-only``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.sbatch import check_submission
from rlinf.errors import SlurmError
from slurm.inventory import load_inventory
from tests.sites import profiles

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", profiles.NAMES)
def test_a_controller_with_the_sites_configuration_accepts_every_script(
    cluster: Path, tmp_path: Path, name: str
) -> None:
    scripts = sorted((profiles.FOLDER / name / "scripts").iterdir())
    assert scripts
    with profiles.controller(name, cluster, tmp_path):
        answers = {script.name: check_submission(script) for script in scripts}
        found = profiles.inventory_of_controller()
        refused = tmp_path / "refused.sh"
        text = (profiles.FOLDER / name / "scripts" / "driver.sh").read_text()
        refused.write_text(text.replace("--partition=", "--partition=no-"))
        with pytest.raises(SlurmError, match=r"(?i)invalid partition"):
            check_submission(refused)
    assert not [text for text in answers.values() if "to start at" not in text], answers
    assert found == load_inventory(profiles.FOLDER / name / "inventory.json")
