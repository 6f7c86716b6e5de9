"""The state of a run: which stages are finished. Only manifests decide this, never the memory of
a driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.graph import Graph, StageNode
from pipeline.run import Run
from rlinf.artifacts import (
    MANIFEST,
    PRUNED_MARKER,
    Manifest,
    is_pruned,
    read_manifest,
    verify_output,
    withdraw_manifest,
)
from rlinf.errors import ArtifactError, ConflictingOutputError
from stages.flow import EVALUATE
from stages.identity import AcceptedMismatches, CodeSnapshot, read_accepted_mismatches, stage_key
from stages.retention import RetentionPolicy

ARCHIVE = "archive"
"""Folder of a run for replaced results. Each driver or command has a subfolder, named by its start
time, with the same structure as the run."""
log = logging.getLogger("rlinf")


def ever_had_results(run: Path) -> bool:
    """Return whether a stage was ever committed, even if its output was withdrawn or archived
    since."""
    patterns = (f"*/{MANIFEST}*", f"it/*/*/{MANIFEST}*", f"{EVALUATE}/*/{MANIFEST}*")
    manifests = (path for pattern in patterns for path in run.glob(pattern))
    return (run / ARCHIVE).exists() or next(manifests, None) is not None


def is_skipped(graph: Graph, run: Path, node: StageNode) -> bool:
    """Return whether a node is an unfinished evaluation of weights that the retention policy
    removed. An evaluation would require running the iteration of these weights again."""
    if node.stage != EVALUATE or (graph.output_folder(run, node) / MANIFEST).exists():
        return False
    return any(
        is_pruned(graph.output_folder(run, source)) for source in graph.inputs(node).values()
    )


@dataclass
class RunState:
    """The finished nodes of a run.

    A result is valid if its key is the digest of the configuration, the code and its inputs. An
    accepted result (``--keep``) is valid if its inputs still exist.
    """

    run: Run
    graph: Graph
    done: dict[StageNode, str] = field(default_factory=dict)
    """Content digest by finished node. The manifests of a long run would not fit in memory."""
    mismatched: list[StageNode] = field(default_factory=list)
    """Results of another configuration or other code, which no ``--keep`` accepted."""
    unverified: set[StageNode] = field(default_factory=set)
    """Results of this configuration and code whose inputs are missing or have another content. They
    become valid if the inputs are recomputed with the content that the manifests record."""
    code: CodeSnapshot = field(init=False)
    """The code that would compute the stages now."""
    accepted: AcceptedMismatches = field(init=False)
    """Results that an earlier ``--keep`` accepted."""
    archive_folder: Path = field(init=False)
    """Folder to which this process moves replaced results, named by the current time."""

    def __post_init__(self) -> None:
        self.code = CodeSnapshot.current(self.run.config)
        self._code_digests = {stage: self.code.digest(stage) for stage in self.code.stages}
        self.accepted = read_accepted_mismatches(self.run.folder)
        self.archive_folder = self.run.folder / ARCHIVE / time.strftime("%Y-%m-%dT%H-%M-%S")

    def lookup(self, node: StageNode) -> Manifest | None:
        """Return the manifest of a node if it is valid and all inputs are done, else None. Damaged
        output is withdrawn."""
        if any(source not in self.done for source in self.graph.inputs(node).values()):
            return None
        manifest = self._read_intact(node)
        return manifest if manifest is not None and self._is_valid(node, manifest) else None

    def scan(self, *, accept_mismatches: bool = True) -> None:
        """Find all finished nodes and all mismatched results.

        Args:
            accept_mismatches: whether results that an earlier ``--keep`` accepted are valid.
        """
        self.done.clear()
        self.mismatched.clear()
        self.unverified.clear()
        self.accepted = (
            read_accepted_mismatches(self.run.folder) if accept_mismatches else AcceptedMismatches()
        )
        for node in self.graph.nodes():
            manifest = self._read_intact(node)
            if manifest is None:
                continue
            has_inputs = all(source in self.done for source in self.graph.inputs(node).values())
            if has_inputs and self._is_valid(node, manifest):
                self.done[node] = manifest.content
            elif self._is_same_code_and_config(node, manifest):
                self.unverified.add(node)
            else:
                self.mismatched.append(node)

    def nodes_to_redo(self) -> list[StageNode]:
        """Return the nodes that must run again to get the results of a fresh run.

        These are mismatched results, pruned outputs that a fresh run would retain, and pruned
        outputs that other recomputed nodes need. Call :meth:`scan` without accepted mismatches
        first.
        """
        retention = RetentionPolicy(self.run.config, self.run.folder, self.graph.iterations - 1)
        matching = {*self.done, *self.unverified}
        to_redo = set(self.mismatched)
        for node in matching:
            is_retained = node.stage in self.graph.flow.stages and retention.should_keep(*node)
            if is_retained and is_pruned(self._folder(node)):
                to_redo.add(node)
        for node in reversed(list(self.graph.nodes())):
            if node in matching and node not in to_redo:
                continue
            sources = self.graph.inputs(node).values()
            to_redo.update(s for s in sources if s in matching and is_pruned(self._folder(s)))
        return _sort_nodes(to_redo)

    def affected_nodes(self, removed: Iterable[StageNode]) -> list[StageNode]:
        """Return the removed nodes and the unverified nodes that depend on them. Nodes in ``done``
        stay valid."""
        affected = set(removed)
        for node in self.graph.nodes():
            sources = self.graph.inputs(node).values()
            if node in self.unverified and not affected.isdisjoint(sources):
                affected.add(node)
        return _sort_nodes(affected)

    def outputs_outside_graph(self) -> list[Path]:
        """Return the committed outputs that are not in the graph of the configuration, sorted.

        They belong to further iterations, other evaluations or another flow.
        """
        run, expected = self.run.folder, set(map(self._folder, self.graph.nodes()))
        patterns = (f"it/*/*/{MANIFEST}", f"{EVALUATE}/*/{MANIFEST}", f"*/{MANIFEST}")
        committed = {path.parent for pattern in patterns for path in run.glob(pattern)}
        return sorted(committed - expected)

    def manifest_keys(self, nodes: Iterable[StageNode]) -> Iterator[tuple[str, str]]:
        """Yield the name of each committed node and the key in its manifest."""
        for node in nodes:
            manifest = self._read_intact(node)
            if manifest is not None:
                yield node.name, manifest.key

    def clear_for(self, node: StageNode) -> None:
        """Make room for the output of a node: a result computed from other inputs is archived.

        Raises:
            ConflictingOutputError: another configuration or other code committed the present
                output.
        """
        manifest = self._read_intact(node)
        if manifest is None:
            return
        if not self._is_same_code_and_config(node, manifest):
            raise ConflictingOutputError(
                f"{node.name}: a job with another configuration or other code committed it during "
                "this run; it stays. Start the run again to see the differences"
            )
        target = self.archive(node)
        text = "%s was computed from other inputs than the present ones; it is in %s"
        log.warning(text, node.name, target)

    def archive(self, node: StageNode) -> Path:
        """Move the output of a node to the archive; returns its new path."""
        self.unverified.discard(node)
        return self.archive_path(self._folder(node))

    def archive_path(self, folder: Path) -> Path:
        """Move a folder or file of the run to the archive; returns its new path."""
        target = self.archive_folder / folder.relative_to(self.run.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{folder.name}.{number}")
        folder.rename(target)
        return target

    def _is_valid(self, node: StageNode, manifest: Manifest) -> bool:
        contents = {name: self.done[source] for name, source in self.graph.inputs(node).items()}
        if manifest.key == self._key(node, contents):
            return True
        # The accepting configuration may give this node other inputs than those from which the
        # result was computed.
        return self.accepted.accepts(manifest) and (
            manifest.inputs == contents
            or set(self.done.values()).issuperset(manifest.inputs.values())
        )

    def _is_same_code_and_config(self, node: StageNode, manifest: Manifest) -> bool:
        """Return whether configuration and code match, regardless of the inputs."""
        return self.accepted.accepts(manifest) or manifest.key == self._key(node, manifest.inputs)

    def _read_intact(self, node: StageNode) -> Manifest | None:
        """Return the manifest of a node whose output is intact; damaged output is withdrawn."""
        folder, manifest = self._folder(node), None
        try:
            manifest = read_manifest(folder)
            if manifest is not None and not is_pruned(folder):
                verify_output(folder, manifest, checksums=False)
            return manifest
        except ArtifactError as error:
            if manifest is not None and any(
                path.name == PRUNED_MARKER for path in folder.iterdir()
            ):
                # Pools of an earlier driver may be pruning right now. The folder is listed, because
                # ``exists`` may return a cached False on network filesystems.
                return manifest
            log.warning("%s; it will be rebuilt", error)
            withdraw_manifest(error.manifest, error.data)
            return None

    def _folder(self, node: StageNode) -> Path:
        return self.graph.output_folder(self.run.folder, node)

    def _key(self, node: StageNode, inputs: dict[str, str]) -> str:
        code = self._code_digests[node.stage]
        return stage_key(self.run.config, node.stage, node.iteration, inputs, code)


def _sort_nodes(nodes: Iterable[StageNode]) -> list[StageNode]:
    return sorted(nodes, key=lambda node: (node.iteration, node.stage))
