"""What a run has finished: decided by manifests alone, never by what a driver remembers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pipeline.flow import Graph, Node
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, Manifest, is_pruned, quarantine, read_manifest, verify
from rlinf.errors import ArtifactError
from stages.identity import stage_key

log = logging.getLogger("rlinf")


@dataclass
class Committed:
    """The nodes known to be done."""

    run: Run
    graph: Graph
    done: dict[Node, str] = field(default_factory=dict)
    """With the digests of their contents; manifests of a long run would fill the memory."""

    def look(self, node: Node) -> Manifest | None:
        """The valid manifest of a node whose inputs are all done.

        Valid: its key is the digest of the configuration and of the inputs it was made from. A
        damaged one is withdrawn.
        """
        folder = self.graph.folder(self.run.folder, node)
        inputs = self.graph.inputs(node)
        if any(source not in self.done for source in inputs.values()):
            return None
        try:
            manifest = read_manifest(folder)
            if manifest is None or manifest.key != self._key(node):
                return None
            if not is_pruned(folder):
                verify(folder, manifest, checksums=False)
            return manifest
        except ArtifactError as error:
            log.warning("%s; it will be rebuilt", error)
            quarantine(error.manifest, error.data)
            return None

    def recover(self) -> None:
        """Find all that is done."""
        for node in self.graph.nodes():
            manifest = self.look(node)
            if manifest is not None:
                self.done[node] = manifest.content

    def withdraw(self, node: Node) -> None:
        """Take away what stands where a node's output belongs: it belongs to other work."""
        quarantine(self.graph.folder(self.run.folder, node) / MANIFEST)

    def withdraw_stale(self) -> None:
        """:meth:`recover`, and withdraw outputs of another configuration (a shorter schedule, say).

        For programs that look at files only. Outputs whose inputs are not there stay: they may be
        right once those were rebuilt, and are looked at again then.
        """
        for node in self.graph.nodes():
            manifest = self.look(node)
            if manifest is not None:
                self.done[node] = manifest.content
            elif all(source in self.done for source in self.graph.inputs(node).values()):
                self.withdraw(node)

    def _key(self, node: Node) -> str:
        contents = {name: self.done[source] for name, source in self.graph.inputs(node).items()}
        return stage_key(self.run.config, node.stage, node.iteration, contents)
