"""What a run has finished: decided by manifests alone, never by what a driver remembers."""

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
from stages.identity import CodeSnapshot, Ledger, read_ledger, stage_key
from stages.retention import RetentionPolicy

ARCHIVE = "set-aside"
"""Folder of a run for results that were made anew: by time, then as in the run."""
log = logging.getLogger("rlinf")


def has_results(run: Path) -> bool:
    """Whether a stage of a run was ever committed, if only to be withdrawn or set aside since."""
    patterns = (f"*/{MANIFEST}*", f"it/*/*/{MANIFEST}*", f"{EVALUATE}/*/{MANIFEST}*")
    found = (path for pattern in patterns for path in run.glob(pattern))
    return (run / ARCHIVE).exists() or next(found, None) is not None


def is_skipped(graph: Graph, run: Path, node: StageNode) -> bool:
    """Whether a node is an evaluation, not made, of weights that retention has removed: iterations
    would have to be made again for it."""
    if node.stage != EVALUATE or (graph.output_folder(run, node) / MANIFEST).exists():
        return False
    return any(
        is_pruned(graph.output_folder(run, source)) for source in graph.inputs(node).values()
    )


@dataclass
class RunState:
    """The nodes known to be done.

    A result counts if its key is the digest of the configuration, the code, and the inputs it is to
    be made from. One that is in the ledger of what was kept counts if its inputs are still there.
    """

    run: Run
    graph: Graph
    done: dict[StageNode, str] = field(default_factory=dict)
    """With the digests of their contents; manifests of a long run would fill the memory."""
    mismatched: list[StageNode] = field(default_factory=list)
    """Made by another configuration or other code; they stay until somebody says what to do."""
    unverified: set[StageNode] = field(default_factory=set)
    """Right if the inputs that are made anew turn out to be what they were."""
    code: CodeSnapshot = field(init=False)
    ledger: Ledger = field(init=False)
    archive_folder: Path = field(init=False)
    """Where this start puts what it makes anew."""

    def __post_init__(self) -> None:
        self.code = CodeSnapshot.from_checkout(self.run.config)
        self._digests = {stage: self.code.digest(stage) for stage in self.code.stages}
        self.ledger = read_ledger(self.run.folder)
        self.archive_folder = self.run.folder / ARCHIVE / time.strftime("%Y-%m-%dT%H-%M-%S")

    def lookup(self, node: StageNode) -> Manifest | None:
        """The valid manifest of a node whose inputs are all done; a damaged one is withdrawn."""
        if any(source not in self.done for source in self.graph.inputs(node).values()):
            return None
        manifest = self._whole(node)
        return manifest if manifest is not None and self._counts(node, manifest) else None

    def scan(self, *, accept_mismatches: bool = True) -> None:
        """Find all that is done, and what cannot count.

        Args:
            kept: whether results that were kept earlier count.
        """
        self.done.clear()
        self.mismatched.clear()
        self.unverified.clear()
        self.ledger = read_ledger(self.run.folder) if accept_mismatches else Ledger()
        for node in self.graph.nodes():
            manifest = self._whole(node)
            if manifest is None:
                continue
            there = all(source in self.done for source in self.graph.inputs(node).values())
            if there and self._counts(node, manifest):
                self.done[node] = manifest.content
            elif self._own(node, manifest):
                self.unverified.add(node)
            else:
                self.mismatched.append(node)

    def nodes_to_redo(self) -> list[StageNode]:
        """What has to go, so that the run becomes what a fresh one of its configuration would be.

        That is what is stale, data that the retention policy removed though it would stay in a
        fresh run, and removed data that something else is made anew from. After :meth:`recover`
        without what was kept.
        """
        last = RetentionPolicy(self.run.config, self.run.folder, self.graph.iterations - 1)
        known = {*self.done, *self.unverified}
        gone = set(self.mismatched)
        for node in known:
            stays = node.stage in self.graph.flow.stages and last.should_keep(*node)
            if stays and is_pruned(self._folder(node)):
                gone.add(node)
        for node in reversed(list(self.graph.nodes())):
            if node in known and node not in gone:
                continue
            sources = self.graph.inputs(node).values()
            gone.update(s for s in sources if s in known and is_pruned(self._folder(s)))
        return _in_order(gone)

    def dependents(self, removed: Iterable[StageNode]) -> list[StageNode]:
        """What goes, and what is committed and was made of that."""
        found = set(removed)
        for node in self.graph.nodes():
            if node in self.unverified and not found.isdisjoint(self.graph.inputs(node).values()):
                found.add(node)
        return _in_order(found)

    def outputs_outside_graph(self) -> list[Path]:
        """Committed outputs that the graph of the configuration does not have, sorted.

        They are of more iterations, of other evaluations or of another flow.
        """
        run, wanted = self.run.folder, set(map(self._folder, self.graph.nodes()))
        patterns = (f"it/*/*/{MANIFEST}", f"{EVALUATE}/*/{MANIFEST}", f"*/{MANIFEST}")
        found = {path.parent for pattern in patterns for path in run.glob(pattern)}
        return sorted(found - wanted)

    def manifest_keys(self, nodes: Iterable[StageNode]) -> Iterator[tuple[str, str]]:
        """Names of nodes with the keys they were committed under."""
        for node in nodes:
            manifest = self._whole(node)
            if manifest is not None:
                yield node.name, manifest.key

    def clear_for(self, node: StageNode) -> None:
        """See that a node can be committed: what was made of other inputs is set aside.

        Raises:
            ConflictingOutputError: what is there was made by another configuration or other code.
        """
        manifest = self._whole(node)
        if manifest is None:
            return
        if not self._own(node, manifest):
            raise ConflictingOutputError(
                f"{node.name}: a job with another configuration or other code committed it while "
                "this run goes on; it stays. Start the run again to be told what differs"
            )
        where = self.archive(node)
        log.warning("%s was made of other inputs than there are now; it is in %s", node.name, where)

    def archive(self, node: StageNode) -> Path:
        """Move an output out of the way, whole; returns where it is."""
        self.unverified.discard(node)
        return self.archive_path(self._folder(node))

    def archive_path(self, folder: Path) -> Path:
        """Move a folder or file of the run out of the way, whole; returns where it is."""
        target = self.archive_folder / folder.relative_to(self.run.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{folder.name}.{number}")
        folder.rename(target)
        return target

    def _counts(self, node: StageNode, manifest: Manifest) -> bool:
        contents = {name: self.done[source] for name, source in self.graph.inputs(node).items()}
        if manifest.key == self._key(node, contents):
            return True
        # The configuration that it is kept under may take other outputs than it was made of.
        return self.ledger.accepts(manifest) and (
            manifest.inputs == contents
            or set(self.done.values()).issuperset(manifest.inputs.values())
        )

    def _own(self, node: StageNode, manifest: Manifest) -> bool:
        """Whether configuration and code are the same, whatever it was made of."""
        return self.ledger.accepts(manifest) or manifest.key == self._key(node, manifest.inputs)

    def _whole(self, node: StageNode) -> Manifest | None:
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
                # Pools of an earlier driver prune on. Listed, for that a file was not there a
                # moment ago is what a network filesystem remembers.
                return manifest
            log.warning("%s; it will be rebuilt", error)
            withdraw_manifest(error.manifest, error.data)
            return None

    def _folder(self, node: StageNode) -> Path:
        return self.graph.output_folder(self.run.folder, node)

    def _key(self, node: StageNode, inputs: dict[str, str]) -> str:
        code = self._digests[node.stage]
        return stage_key(self.run.config, node.stage, node.iteration, inputs, code)


def _in_order(nodes: Iterable[StageNode]) -> list[StageNode]:
    return sorted(nodes, key=lambda node: (node.iteration, node.stage))
