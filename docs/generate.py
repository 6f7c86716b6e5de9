"""Write the generated pages of the documentation: ``python docs/generate.py [--check]``.

The configuration reference comes from the ``Config`` classes, the command line from its parser, the
run folder from ``stages/layout.py``, the figures from the files of ``benchmarks/``. Meanings of
metrics and figures are in ``docs/data``. Pages of ``howto`` show the files of ``docs/examples``.
``--check`` writes nothing and names the pages that differ from the ones on disk.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DATA = DOCS / "data"
NOTE = "<!-- Written by docs/generate.py. Do not edit. -->"
WRITTEN = {"forecast"}
"""Keys that the program writes; their tables are left out."""
ROLE = re.compile(r":\w+:`~?([\w.]+)`")


def plain(text: str) -> str:
    """Turn a docstring into one line of Markdown."""
    text = ROLE.sub(lambda match: f"`{'.'.join(match[1].split('.')[-2:])}`", text)
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, in Markdown."""
    return re.split(r"(?<=[.:]) (?=[A-Z])", plain((text or "").split("\n\n")[0]))[0]


def summary(one: Any) -> str:
    """Return the first sentence about a class or function; of its module if it refers to that."""
    text = first_sentence(one.__doc__ or "")
    if not text or text.startswith("See "):
        text = first_sentence(inspect.getmodule(one).__doc__ or "")  # type: ignore[union-attr]
    return text


@cache
def field_docs(section: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, without those of its bases."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found, last = {}, ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last] = str(node.value.value)
        else:
            last = ""
    return found


def meaning(section: type[BaseModel], name: str) -> str:
    """Return the docstring of a field from the nearest class that has one."""
    for cls in section.__mro__:
        if name in vars_of(cls) and (text := field_docs(cls).get(name)):
            return plain(text)
    known = fallbacks()
    if own := known.get(f"{section.__name__}.{name}"):
        return own
    kinds = [one for one in sections_of(section.model_fields[name].annotation) if one.__doc__]
    if kinds:
        return first_sentence(kinds[0].__doc__ or "")
    return known.get(name, "")


@cache
def fallbacks() -> dict[str, str]:
    """Return meanings of keys whose classes do not say any."""
    known: dict[str, str] = yaml.safe_load((DATA / "keys.yaml").read_text())
    return known


def sections_of(hint: Any) -> list[type[BaseModel]]:
    """Return the sections that a type holds."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [one for inner in get_args(hint) for one in sections_of(inner)]


def vars_of(section: type) -> dict[str, Any]:
    """Return the annotations of a class itself; empty for classes that are no sections."""
    named = section is not BaseModel and issubclass(section, BaseModel)
    return inspect.get_annotations(section) if named else {}


def type_name(hint: Any) -> str:
    """Return a short name of a type, such as ``list of text`` or ``int or null``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if hint is Any:
        return "any"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list, frozenset, set):
        inner = [type_name(one) for one in arguments if one is not ...]
        return f"list of {inner[0]}" if ... in arguments or len(inner) == 1 else str(inner)
    if origin is dict:
        return f"table of {type_name(arguments[1])}"
    if arguments and hasattr(hint, "__metadata__"):
        return type_name(arguments[0])
    if arguments:
        return " or ".join(type_name(one) for one in arguments)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        if hint.__name__ == "Forecast":
            return "table"
        return f"[{hint.__name__}](#{anchor(hint)})"
    names = {"str": "text", "Path": "path", "bool": "true or false", "float": "number"}
    name = getattr(hint, "__name__", str(hint))
    return names.get(name, name)


def anchor(section: type[BaseModel]) -> str:
    """Return the anchor of the table of a section on its page."""
    return section.__name__.lower()


def default_of(field: Any) -> str:
    """Return a field's default as it stands in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        return "see there"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        value = [one.model_dump() if isinstance(one, BaseModel) else one for one in value]
    text = json.dumps(value, default=str)
    return f"`{text}`".replace("|", "\\|")


def sections_within(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the sections that the fields of a section hold, in order, each once."""
    seen: list[type[BaseModel]] = []

    def visit(hint: Any) -> None:
        if isinstance(hint, type) and issubclass(hint, BaseModel) and hint not in seen:
            seen.append(hint)
            for field in hint.model_fields.values():
                visit(field.annotation)
        for one in get_args(hint):
            visit(one)

    for name, field in section.model_fields.items():
        if name not in WRITTEN:
            visit(field.annotation)
    yield from seen


def table(section: type[BaseModel], names: list[str] | None = None) -> str:
    """Return the table of the keys of a section."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in section.model_fields if names is None else names:
        field = section.model_fields[name]
        shown = [f"`{name}`", type_name(field.annotation), default_of(field)]
        lines.append(f"| {' | '.join(shown)} | {meaning(section, name)} |")
    return "\n".join(lines) + "\n"


def section_text(title: str, section: type[BaseModel], level: int = 2) -> str:
    """Return heading, description and table of a section, and those of the sections within it."""
    text = f"{'#' * level} {title}\n\n{description(section)}{table(section)}\n"
    for inner in sections_within(section):
        heading = f"{'#' * (level + 1)} {inner.__name__}"
        text += f"{heading}\n\n{description(inner)}{table(inner)}\n"
    return text


def description(section: type[BaseModel]) -> str:
    """Return the docstring of a section as a paragraph; nothing if it has none of its own."""
    own = section.__dict__.get("__doc__") or ""
    return f"{plain(own)}\n\n" if own else ""


def configuration() -> str:
    """Return the page of the settings that every run has."""
    from pipeline.resources import ClusterConfig
    from rlinf.config import RunConfig
    from rlinf.track import LogConfig
    from stages.identity import CLASS_REGISTRIES

    text = (
        "# Configuration\n\n"
        "Set any key in a YAML file of an experiment or on the command line as `section.key=value`."
        "\nThe error for an unknown key suggests the nearest valid one. Components have separate "
        "pages: "
        + ", ".join(f"[`{name}`](config-{name}.md)" for name in CLASS_REGISTRIES)
        + ", and so do [plans and site files](config-plan.md).\n\n"
        "Composition is [Hydra's](https://hydra.cc/docs/1.3/intro/): an experiment in "
        "`configs/experiment` chooses one file of each group of `configs/` and overrides keys.\n\n"
        "## Top level\n\n" + table(RunConfig).replace("(#namedcomponent)", "(#parts)")
    )
    text += "\n## Parts\n\nEach of these sections has the key `name`, which chooses a class.\n\n"
    text += "| section | registered names |\n|---|---|\n"
    for name, registry in CLASS_REGISTRIES.items():
        names = ", ".join(f"`{one}`" for one in registry.names())
        text += f"| [`{name}`](config-{name}.md) | {names} |\n"
    parts = {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, BaseModel)
        and name not in CLASS_REGISTRIES
    }
    done: set[type] = set()
    for name, section in {**parts, "cluster": ClusterConfig, "log": LogConfig}.items():
        text += f"\n## {section.__name__}\n\nThe section `{name}`. {description(section)}"
        text += "" if section.__doc__ else "\n\n"
        text += table(section)
        for inner in sections_within(section):
            if inner not in done and inner not in parts.values():
                done.add(inner)
                text += f"\n### {inner.__name__}\n\n{description(inner)}{table(inner)}"
    return text


def known_keys() -> dict[str, set[str]]:
    """Return the keys of every section of the configuration, those of all classes together."""
    from pipeline.resources import ClusterConfig
    from rlinf.config import RunConfig
    from rlinf.track import LogConfig
    from stages.identity import CLASS_REGISTRIES

    keys = {"cluster": set(ClusterConfig.model_fields), "log": set(LogConfig.model_fields)}
    for name, field in RunConfig.model_fields.items():
        for section in sections_of(field.annotation):
            keys[name] = set(section.model_fields)
    for name, registry in CLASS_REGISTRIES.items():
        classes = [registry.get(one).Config for one in registry.names()]
        keys[name] = {"name"}.union(*(set(config.model_fields) for config in classes))
    return keys


def part_pages() -> Iterator[tuple[str, str]]:
    """Yield name and text of a page for each section that chooses a class."""
    from stages.identity import CLASS_REGISTRIES

    for section, registry in CLASS_REGISTRIES.items():
        yield f"reference/config-{section}.md", part_page(section, registry)


def part_page(section: str, registry: Any) -> str:
    """Return the page of a section: keys of each class once, with those of its bases apart."""
    classes = {name: registry.get(name).Config for name in registry.names()}
    users: dict[type, list[str]] = {}
    for name, config in classes.items():
        for cls in config.__mro__:
            if vars_of(cls):
                users.setdefault(cls, []).append(name)
    text = (
        f"# Keys of `{section}`\n\n`{section}.name` chooses the class. Use `module:Class` for your "
        f"own class; its keys are in the same section.\n\n"
        f"| `{section}.name` | what it is | keys |\n|---|---|---|\n"
    )
    for name, config in classes.items():
        tables = [cls for cls in config.__mro__ if cls in users]
        links = ", ".join(f"[{cls.__name__}](#{anchor(cls)})" for cls in tables)
        what = summary(registry.get(name))
        text += f"| `{name}` | {what} | {links or 'none'} |\n"
    within: list[type[BaseModel]] = []
    for cls, names in users.items():
        named = ", ".join(f"`{name}`" for name in names)
        text += f"\n## {cls.__name__}\n\nOf {named}. {description(cls)}"
        text += "" if cls.__dict__.get("__doc__") else "\n\n"
        text += table(cls, [name for name in vars_of(cls) if name in cls.model_fields])
        within += [one for one in sections_within(cls) if one not in users and one not in within]
    for inner in within:
        text += f"\n## {inner.__name__}\n\n{description(inner)}{table(inner)}"
    return text


def plan() -> str:
    """Return the page of plans and site files."""
    from pipeline.plan import Plan
    from slurm.site import SiteConfig

    return (
        "# Plans and site files\n\n"
        "A plan (`plan=FILE`) sets the resources and the placement of each stage. A site file "
        "(`cluster.site=FILE`) describes the partitions of a cluster. Neither changes results.\n\n"
        + section_text("Plan", Plan)
        + section_text("Site", SiteConfig)
    )


def experiments() -> str:
    """Return the page of the experiments in ``configs/experiment``."""
    text = (
        "# Experiments\n\nEach experiment is a file in `configs/experiment`. Start it with "
        "`rlinf run experiment=NAME`.\n\n| `experiment=` | what it does |\n|---|---|\n"
    )
    for path in sorted((ROOT / "configs" / "experiment").glob("*.yaml")):
        lines = path.read_text().splitlines()[1:]
        comment = []
        for line in lines:
            if not line.startswith("# ") or line.startswith("#   "):
                break
            comment.append(line.removeprefix("# "))
        shown = re.sub(r"\s*\(docs/[\w./-]+\)", "", " ".join(comment)).rstrip(":")
        text += f"| `{path.stem}` | {plain(shown)} |\n"
    return text


def recipes() -> str:
    """Return the page of the experiments for GPUs, with their memory and time from data sheets."""
    from benchmarks.recipes import tables

    return (DATA / "recipes.md").read_text() + "\n" + tables()


def command_line() -> str:
    """Return the page of the commands, from the parser itself."""
    import typer

    from pipeline.commands.cli import app

    text = (
        "# Command line\n\n`rlinf COMMAND --help` prints the same. `python -m rlinf.launch` is "
        "`rlinf run`. Exit codes: 0 done, 65 bad input, 66 a damaged input was withdrawn, 75 start "
        "again, anything else a failure.\n"
    )
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        words = " ".join(map(placeholder, arguments(command)))
        text += f"\n## rlinf {name}\n\n    rlinf {name} [options] {words}\n\n"
        text += f"{plain(command.help or '')}\n\n"
        rows = [option_row(one) for one in command.params]
        if rows := [row for row in rows if row]:
            text += "| argument or option | default | meaning |\n|---|---|---|\n" + "".join(rows)
    return text


def placeholder(argument: Any) -> str:
    """Return the placeholder of an argument in the usage of its command."""
    name = (argument.metavar or argument.name).upper()
    many = "..." if argument.nargs == -1 else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def arguments(command: Any) -> list[Any]:
    """Return the positional arguments of a command."""
    return [one for one in command.params if one.param_type_name == "argument"]


def option_row(parameter: Any) -> str:
    """Return the line of a parameter in the table of its command."""
    if parameter.param_type_name == "argument":
        name, default = placeholder(parameter), ""
    else:
        name = ", ".join(parameter.opts)
        shown = parameter.default
        default = "" if shown in (None, False) or callable(shown) else f"`{shown}`"
    return f"| `{name}` | {default} | {plain(getattr(parameter, 'help', '') or '')} |\n"


def run_folder() -> str:
    """Return the page of the files of a run, from the module that names them."""
    from stages import layout

    source = Path(inspect.getfile(layout)).read_text()
    rows, names = [], list[str]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            names = [getattr(layout, one.id) for one in targets]  # type: ignore[attr-defined]
            rows.append([names, ""])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and rows:
            rows[-1][1] = plain(str(node.value.value))
        elif isinstance(node, ast.FunctionDef):
            break
    text = (DATA / "run-folder.md").read_text() + "\n## Names\n\n"
    text += "From `stages/layout.py`.\n\n| name | meaning |\n|---|---|\n"
    for found, what in rows:
        text += f"| {', '.join(f'`{one}`' for one in found)} | {what} |\n"
    return text


def metrics() -> str:
    """Return the page of the metrics."""
    known = yaml.safe_load((DATA / "metrics.yaml").read_text())
    text = (
        "# Metrics\n\nMetrics are named `stage/metric`. Each line of `metrics.jsonl` has the "
        "metrics of one iteration. `rlinf.api.load(RUN).metrics()` returns them, and trackers get "
        "them under the same names. A run has only the metrics of the features that it uses.\n"
    )
    for stage, names in known.items():
        text += f"\n## {stage}\n\n| metric | meaning |\n|---|---|\n"
        text += "".join(f"| `{stage}/{name}` | {plain(what)} |\n" for name, what in names.items())
    return text


def api() -> str:
    """Return the page of the Python API; the site replaces ``:::`` by signatures."""
    from pipeline.commands.results import RunResults
    from rlinf import api as python_api
    from rlinf.data.trajectory import PolicyOutputs, StepRewards, Trajectory
    from stages.identity import CLASS_REGISTRIES

    groups: dict[str, list[Any]] = {
        "Run and read": [python_api.run, python_api.load],
        "Results": [RunResults],
        "Data": [Trajectory, StepRewards, PolicyOutputs],
        "Base classes": [base_of(registry) for registry in CLASS_REGISTRIES.values()],
    }
    text = (
        "# Python API\n\n```python\nfrom rlinf import api\n\n"
        'run = api.run("cartpole_ppo", {"iterations": 20})\nprint(run.metrics()[-1])\n```\n\n'
        "| name | what it does |\n|---|---|\n"
    )
    for members in groups.values():
        for one in members:
            text += f"| `{path_of(one)}` | {summary(one)} |\n"
    for title, members in groups.items():
        text += f"\n## {title}\n"
        for one in members:
            text += f"\n::: {path_of(one)}\n"
    return text


def base_of(registry: Any) -> Any:
    """Return the base class of the parts of a registry."""
    part = registry.get(registry.names()[0])
    names = [value for value in vars(registry).values() if isinstance(value, str) and ":" in value]
    module, _, attribute = names[0].partition(":")
    return next(
        cls for cls in part.__mro__ if (cls.__module__, cls.__name__) == (module, attribute)
    )


def path_of(one: Any) -> str:
    """Return the dotted path of a class or function."""
    return f"{one.__module__}.{one.__qualname__}"


def figures() -> str:
    """Return the page of measured figures, from the files that benchmarks write."""
    from benchmarks import learning

    known = yaml.safe_load((DATA / "figures.yaml").read_text())
    rows = {
        row["name"]: row
        for row in json.loads((ROOT / "benchmarks/results.json").read_text())["rows"]
    }
    text = (DATA / "figures.md").read_text()
    for title, names in known.items():
        text += f"\n## {title}\n\n| row | value | goal | what is measured |\n|---|---|---|---|\n"
        for name, what in names.items():
            if row := rows.get(name):
                text += f"| `{name}` | {value_of(row)} | {goal_of(row)} | {plain(what)} |\n"
    text += (
        "\n## Learning curves\n\nEach row is a training run with one to three seeds; their values "
        "are separated by /. `make bench-learning NAME=ROW` repeats it.\n\n"
        + learning.table(learning.curves())
        + "\n"
    )
    for path in sorted((DOCS / "images").glob("learning-*.png")):
        title = path.stem.removeprefix("learning-").replace("-", " ")
        text += f"\n![Held-out score over steps: {title}](../images/{path.name})\n"
    return text


def value_of(row: dict[str, Any]) -> str:
    """Return value, unit and spread of a benchmark row."""
    plain_units = {"", "share", "ratio", "return", "place", "of the sum", "of throughput"}
    unit = "" if row["unit"] in plain_units else "x" if row["unit"] == "x" else f" {row['unit']}"
    spread = f" (± {row['spread']:.2g})" if row["spread"] else ""
    return f"{row['value']:,.4g}{unit}{spread}"


def goal_of(row: dict[str, Any]) -> str:
    """Return the goal of a figure and whether it was reached."""
    if row["goal"] is None:
        return ""
    up = row["better"] == "higher"
    reached = row["value"] >= row["goal"] if up else row["value"] <= row["goal"]
    return f"{'≥' if up else '≤'} {row['goal']:g}: {'reached' if reached else 'missed'}"


OPENVLA_PARAMETERS = 7_541_237_184
"""Numbers in the tensors of openvla-7b."""
LORA_RANK = 16


def vla_memory() -> str:
    """Return the table of memory of published policies, from networks on the meta device."""
    text = (DATA / "vla-memory.md").read_text()
    text += (
        "\n| policy | parameters | bfloat16 | float32 | all weights trained | adapters trained |\n"
    )
    text += "|---|---|---|---|---|---|\n"
    for name, (parameters, adapters) in published_sizes().items():
        sizes = [2 * parameters, 4 * parameters, 16 * parameters]
        cells = [f"{size / 2**30:.1f}" for size in sizes]
        cells.append(f"{(4 * parameters + 16 * adapters) / 2**30:.1f}" if adapters else "")
        text += f"| {name} | {parameters / 1e9:.2f} B | {' | '.join(cells)} |\n"
    return text


def published_sizes() -> dict[str, tuple[int, int]]:
    """Return the number of parameters, and of adapters of rank 16 on the linear layers of all
    blocks, for each published policy; 0 adapters if the network is not built."""
    import torch

    from rlinf.models.pi0_folder import DEFAULTS, KIND_DEFAULTS, network_sizes
    from rlinf.models.pi0_network import PiFlowMatching
    from rlinf.models.wall_oss_folder import PUBLISHED_NETWORK
    from rlinf.models.wall_oss_network import WallModel

    sizes = {}
    with torch.device("meta"):
        for kind in ("pi0", "pi05"):
            settings = {"type": kind, **DEFAULTS, **KIND_DEFAULTS[kind]}
            sizes[f"`{kind}`"] = PiFlowMatching(settings, network_sizes(settings))
        sizes["`wall_oss`"] = WallModel(PUBLISHED_NETWORK)
    found = {name: (count(module), LORA_RANK * widths(module)) for name, module in sizes.items()}
    return {**found, "`vla` (OpenVLA)": (OPENVLA_PARAMETERS, 0)}


def count(module: Any) -> int:
    """Return the number of trained parameters of a network."""
    return sum(parameter.numel() for parameter in module.parameters())


def widths(module: Any) -> int:
    """Return the sum of input and output sizes of the linear layers in the blocks of a network."""
    from torch import nn

    linears = (
        m for n, m in module.named_modules() if isinstance(m, nn.Linear) and IN_BLOCK.search(n)
    )
    return sum(linear.in_features + linear.out_features for linear in linears)


IN_BLOCK = re.compile(r"(layers|blocks)\.\d+\.")


PAGES: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/config-plan.md": plan,
    "reference/experiments.md": experiments,
    "reference/recipes.md": recipes,
    "reference/cli.md": command_line,
    "reference/run-folder.md": run_folder,
    "reference/metrics.md": metrics,
    "reference/api.md": api,
    "reference/vla-memory.md": vla_memory,
    "explanation/figures.md": figures,
}


EXAMPLE = re.compile(r"`([\w./]+\.(py|yaml))`\n\n```(?:python|yaml)\n.*?```\n", re.DOTALL)


def with_examples(text: str) -> str:
    """Return a page whose code blocks below the name of an example hold that file."""

    def shown(match: re.Match[str]) -> str:
        path = DOCS / "examples" / match[1]
        if not path.exists():
            return match[0]
        kind = "python" if match[2] == "py" else "yaml"
        return f"`{match[1]}`\n\n```{kind}\n{path.read_text()}```\n"

    return EXAMPLE.sub(shown, text)


def noted(text: str) -> str:
    """Return a page with a note below its title that a script writes it."""
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{NOTE}\n\n{rest.rstrip()}\n"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield path and text of every generated page, and of pages that show examples."""
    for name, make in PAGES.items():
        yield DOCS / name, noted(make())
    for name, text in part_pages():
        yield DOCS / name, noted(text)
    for path in sorted((DOCS / "howto").glob("*.md")):
        yield path, with_examples(path.read_text())


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="name pages that differ; write none")
    check = parser.parse_args().check
    stale = []
    for path, text in pages():
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in stale:
        print(f"{'differs' if check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    sys.exit(main())
