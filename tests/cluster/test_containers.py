"""Workers run in a container that sees only what is bound, and the driver runs outside of it.

Apptainer itself runs where ``make apptainer`` has unpacked it. Everywhere else, a stand-in with its
command line gives the process a root of its own: the system without the commands of Slurm, and the
folders that are bound.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
import yaml

from rlinf import package_paths
from tests.cluster.test_pools import shown
from tests.cluster.test_runs import words
from tests.cluster.test_submit import rlinf
from tests.environments import need_apptainer
from tests.pipeline.helpers import contents
from tests.slurm.wrapped import write_command

pytestmark = pytest.mark.cluster
STAND_IN = r"""
[ "$1" = exec ] || { echo "unexpected: $1" >&2; exit 90; }
shift; bound=()
while [[ $1 == --* ]]; do
  case $1 in
    --nv) shift;;
    --bind) bound+=("$2"); shift 2;;
    *) echo "unexpected: $1" >&2; exit 91;;
  esac
done
[ -f "$1" ] || { echo "no image $1" >&2; exit 92; }
export APPTAINER_CONTAINER=$1; shift
echo "$(hostname) $*" >> LOG
exec unshare --mount bash -c '
  set -e
  here=$PWD; root=$(mktemp -d); mount -t tmpfs none "$root"
  mkdir "$root"/{usr,etc,proc,sys,dev,tmp,images}
  for folder in usr etc proc sys dev; do mount --rbind "/$folder" "$root/$folder"; done
  ln -s usr/bin usr/lib usr/lib64 usr/sbin "$root"
  for command in sbatch srun scontrol squeue scancel sacct sinfo; do
    mount --bind /dev/null "$root/usr/bin/$command"
  done
  while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; shift; done
  shift
  exec chroot "$root" bash -c "cd \"\$0\" && exec \"\$@\"" "$here" "$@"
' container "${bound[@]}" -- "$@"
"""


APPTAINER = r"""
echo "$(hostname) $*" >> LOG
shift
exec FOLDER/usr/bin/apptainer exec --userns "$@"
"""
"""In a user namespace, as for a user without privileges."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", ["stand-in", "apptainer"])
def test_workers_run_in_the_container_and_the_driver_does_not(
    cluster: Path, tiny_run: Path, tmp_path: Path, program: str
) -> None:
    log, image = tmp_path / "calls", tmp_path / "rlinf.sif"
    script = STAND_IN
    if program == "apptainer":
        unpacked = need_apptainer()
        script = APPTAINER.replace("FOLDER", str(unpacked))
        shutil.copy(unpacked / "image.sif", image)
    else:
        image.touch()
    command = write_command(tmp_path / "bin", "apptainer", script.replace("LOG", str(log)))
    folders = (package_paths.ROOT, sys.base_prefix, sys.prefix, tmp_path)
    bound = [word for folder in folders for word in ("--bind", str(folder))]
    container = [str(command), "exec", "--nv", *bound, str(image), sys.executable]
    stages = ["rollout", "reward", "inference", "train"]
    plan = {
        "defaults": {"mem_mb": 2000, "time_limit_min": 10},
        "pools": [{"stages": stages, "devices": {"cpu": 1}}],
    }
    site = {"defaults": {"python_command": container, "setup": [f"echo setup >> {log}"]}}
    for name, values in (("plan", plan), ("site", site)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    files = [f"plan={tmp_path}/plan.yaml", f"cluster.site={tmp_path}/site.yaml"]
    rlinf("submit", *words(tmp_path, "cluster=slurm", "cluster.poll_interval_s=0.2", *files))
    run, deadline = tmp_path / "tiny", time.monotonic() + 200
    while not (run / "report" / "report.html").exists():
        assert time.monotonic() < deadline, shown("squeue")
        time.sleep(0.5)
    assert contents(run) == contents(tiny_run)
    calls = log.read_text().splitlines()
    assert calls.count("setup") == 2, "of the driver's job and of the pool's"
    started = [line for line in calls if line != "setup"]
    assert len(started) == 1
    assert "stages.worker.main" in started[0]
