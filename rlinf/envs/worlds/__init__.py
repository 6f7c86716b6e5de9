"""Simulators that ``task=gym`` steps: what makes a world of each.

A *world* has the methods of a Gymnasium environment (:mod:`rlinf.envs.simulator`). It is made by
``make(id, kwargs)`` of a module that is imported by its file's path, under the interpreter that
``task.python`` names: it imports the simulator, numpy and the standard library, nothing of this
package, and runs on Python 3.9. What can never work it refuses by ValueError, or by ImportError
where a package is not there.
"""

from rlinf.registry import Registry

worlds = Registry(
    "world",
    {
        "gymnasium": "rlinf.envs.worlds.gymnasium:make",
        "libero": "rlinf.envs.worlds.libero:make",
        "metaworld": "rlinf.envs.worlds.metaworld:make",
    },
    base="builtins:object",
)
