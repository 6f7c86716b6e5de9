"""What a run has finished: decided by manifests alone, never by what a driver remembers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.flow import Graph, Node
from pipeline.run import Run
from rlinf.artifacts import (
    MANIFEST,
    PRUNED,
    Manifest,
    is_pruned,
    quarantine,
    read_manifest,
    verify,
)
from rlinf.errors import ArtifactError, OtherWorkError
from stages.code import Code
from stages.flow import EVALUATE
from stages.identity import Ledger, read_ledger, stage_key
from stages.retention import Retention

SET_ASIDE = "set-aside"
"""Folder of a run for results that were made anew: by time, then as in the run."""
log = logging.getLogger("rlinf")


def has_results(run: Path) -> bool:
    """Whether a stage of a run was ever committed, if only to be withdrawn or set aside since."""
    patterns = (f"*/{MANIFEST}*", f"it/*/*/{MANIFEST}*", f"{EVALUATE}/*/{MANIFEST}*")
    found = (path for pattern in patterns for path in run.glob(pattern))
    return (run / SET_ASIDE).exists() or next(found, None) is not None


def left_out(graph: Graph, run: Path, node: Node) -> bool:
    """Whether a node is an evaluation, not made, of weights that retention has removed: iterations
    would have to be made again for it."""
    if node.stage != EVALUATE or (graph.folder(run, node) / MANIFEST).exists():
        return False
    return any(is_pruned(graph.folder(run, source)) for source in graph.inputs(node).values())


@dataclass
class Committed:
    """The nodes known to be done.

    A result counts if its key is the digest of the configuration, the code, and the inputs it is to
    be made from. One that is in the ledger of what was kept counts if its inputs are still there.
    """

    run: Run
    graph: Graph
    done: dict[Node, str] = field(default_factory=dict)
    """With the digests of their contents; manifests of a long run would fill the memory."""
    stale: list[Node] = field(default_factory=list)
    """Made by another configuration or other code; they stay until somebody says what to do."""
    waiting: set[Node] = field(default_factory=set)
    """Right if the inputs that are made anew turn out to be what they were."""
    code: Code = field(init=False)
    ledger: Ledger = field(init=False)
    aside: Path = field(init=False)
    """Where this start puts what it makes anew."""

    def __post_init__(self) -> None:
        self.code = Code.of(self.run.config)
        self._digests = {stage: self.code.digest(stage) for stage in self.code.stages}
        self.ledger = read_ledger(self.run.folder)
        self.aside = self.run.folder / SET_ASIDE / time.strftime("%Y-%m-%dT%H-%M-%S")

    def look(self, node: Node) -> Manifest | None:
        """The valid manifest of a node whose inputs are all done; a damaged one is withdrawn."""
        if any(source not in self.done for source in self.graph.inputs(node).values()):
            return None
        manifest = self._whole(node)
        return manifest if manifest is not None and self._counts(node, manifest) else None

    def recover(self, *, kept: bool = True) -> None:
        """Find all that is done, and what cannot count.

        Args:
            kept: whether results that were kept earlier count.
        """
        self.done.clear()
        self.stale.clear()
        self.waiting.clear()
        self.ledger = read_ledger(self.run.folder) if kept else Ledger()
        for node in self.graph.nodes():
            manifest = self._whole(node)
            if manifest is None:
                continue
            there = all(source in self.done for source in self.graph.inputs(node).values())
            if there and self._counts(node, manifest):
                self.done[node] = manifest.content
            elif self._own(node, manifest):
                self.waiting.add(node)
            else:
                self.stale.append(node)

    def redone(self) -> list[Node]:
        """What has to go, so that the run becomes what a fresh one of its configuration would be.

        That is what is stale, data that the retention policy removed though it would stay in a
        fresh run, and removed data that something else is made anew from. After :meth:`recover`
        without what was kept.
        """
        last = Retention(self.run.config, self.run.folder, self.graph.iterations - 1)
        known = {*self.done, *self.waiting}
        gone = set(self.stale)
        for node in known:
            stays = node.stage in self.graph.flow.stages and last.keeps(*node)
            if stays and is_pruned(self._folder(node)):
                gone.add(node)
        for node in reversed(list(self.graph.nodes())):
            if node in known and node not in gone:
                continue
            sources = self.graph.inputs(node).values()
            gone.update(s for s in sources if s in known and is_pruned(self._folder(s)))
        return _in_order(gone)

    def affected(self, gone: Iterable[Node]) -> list[Node]:
        """What goes, and what is committed and was made of that."""
        found = set(gone)
        for node in self.graph.nodes():
            if node in self.waiting and not found.isdisjoint(self.graph.inputs(node).values()):
                found.add(node)
        return _in_order(found)

    def leftovers(self) -> list[Path]:
        """Committed outputs that the graph of the configuration does not have, sorted.

        They are of more iterations, of other evaluations or of another flow.
        """
        run, wanted = self.run.folder, set(map(self._folder, self.graph.nodes()))
        patterns = (f"it/*/*/{MANIFEST}", f"{EVALUATE}/*/{MANIFEST}", f"*/{MANIFEST}")
        found = {path.parent for pattern in patterns for path in run.glob(pattern)}
        return sorted(found - wanted)

    def keys(self, nodes: Iterable[Node]) -> Iterator[tuple[str, str]]:
        """Names of nodes with the keys they were committed under."""
        for node in nodes:
            manifest = self._whole(node)
            if manifest is not None:
                yield node.name, manifest.key

    def make_way(self, node: Node) -> None:
        """See that a node can be committed: what was made of other inputs is set aside.

        Raises:
            OtherWorkError: what is there was made by another configuration or other code.
        """
        manifest = self._whole(node)
        if manifest is None:
            return
        if not self._own(node, manifest):
            raise OtherWorkError(
                f"{node.name}: a job with another configuration or other code committed it while "
                "this run goes on; it stays. Start the run again to be told what differs"
            )
        where = self.set_aside(node)
        log.warning("%s was made of other inputs than there are now; it is in %s", node.name, where)

    def set_aside(self, node: Node) -> Path:
        """Move an output out of the way, whole; returns where it is."""
        self.waiting.discard(node)
        return self.move_aside(self._folder(node))

    def move_aside(self, folder: Path) -> Path:
        """Move a folder or file of the run out of the way, whole; returns where it is."""
        target = self.aside / folder.relative_to(self.run.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{folder.name}.{number}")
        folder.rename(target)
        return target

    def _counts(self, node: Node, manifest: Manifest) -> bool:
        contents = {name: self.done[source] for name, source in self.graph.inputs(node).items()}
        if manifest.key == self._key(node, contents):
            return True
        # The configuration that it is kept under may take other outputs than it was made of.
        return self.ledger.keeps(manifest) and (
            manifest.inputs == contents
            or set(self.done.values()).issuperset(manifest.inputs.values())
        )

    def _own(self, node: Node, manifest: Manifest) -> bool:
        """Whether configuration and code are the same, whatever it was made of."""
        return self.ledger.keeps(manifest) or manifest.key == self._key(node, manifest.inputs)

    def _whole(self, node: Node) -> Manifest | None:
        folder, manifest = self._folder(node), None
        try:
            manifest = read_manifest(folder)
            if manifest is not None and not is_pruned(folder):
                verify(folder, manifest, checksums=False)
            return manifest
        except ArtifactError as error:
            if manifest is not None and any(path.name == PRUNED for path in folder.iterdir()):
                # Pools of an earlier driver prune on. Listed, for that a file was not there a
                # moment ago is what a network filesystem remembers.
                return manifest
            log.warning("%s; it will be rebuilt", error)
            quarantine(error.manifest, error.data)
            return None

    def _folder(self, node: Node) -> Path:
        return self.graph.folder(self.run.folder, node)

    def _key(self, node: Node, inputs: dict[str, str]) -> str:
        code = self._digests[node.stage]
        return stage_key(self.run.config, node.stage, node.iteration, inputs, code)


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.iteration, node.stage))
