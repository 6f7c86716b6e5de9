"""Simulators that ``task=gym`` steps: what makes a world of each.

A *world* has the methods of a Gymnasium environment (:mod:`rlinf.envs.vector_env`). It is made by
``make(id, kwargs)`` of a module that is imported by its file's path, under the interpreter that
``task.python`` names: it imports the simulator, numpy, the standard library and files beside it
that do the same (``from .name import``), nothing else of this package, and runs on Python 3.9. What
can never work it refuses by ValueError, or by ImportError where a package is not there; a text that
begins with ``kwargs.`` is of that key.

What a world may have beside those methods:

- ``starts``, a number of states that an episode may begin in: ``reset(seed=, start=)`` then gets
  one of them in evaluation, that of the held-out start, so that each is played once;
- ``picture(camera, height, width)``, uint8 ``[H, W, 3]``, of one of its ``cameras``. MuJoCo's
  worlds need none: what is rendered is the ``model`` and ``data`` of their ``unwrapped``;
- ``tells``, names of what the ``info`` of each of its steps tells beside ``success``:
  ``intervened``, whether a person acted in the place of the policy, with ``performed``, the action
  that was carried out; ``late``, whether the step of a world that keeps time came too late. They
  are columns of trajectories (:mod:`rlinf.data.transitions`);
- ``instruction``, what is asked now, a sentence;
- ``save()``, arrays by name, and ``restore(state)``, which takes them in another world of the same
  ``id`` and ``kwargs``, in another process: all that it takes to go on with the open episode to the
  bit, as physics, steps until it is cut off, and generators of random numbers. The module says
  ``SAVES = True`` then. What ``save`` cannot say it refuses by ValueError.
  :mod:`rlinf.envs.simulators.episode_state` has what worlds share.

Where the module says ``SINGLE = True``, there is one world at a time, as a robot has one arm:
samples are collected one after the other, its process closes it after the last of them, and a reset
that it fails at ends the run.

Where the module says ``BATCHED = True``, a world steps many environments: it is made by ``make(id,
kwargs, count, images)`` for ``count`` of them at least, with the cameras of ``task.images``, and
has ``count``. Its spaces are those of one. ``reset(numbers, seeds)`` begins episodes in some of
them and returns what these show, ``[n, ...]``: an array, or ``state`` and pictures by name.
``step(actions)`` takes ``[count, A]`` and returns what all show, rewards, and whether each has
terminated, been truncated, and succeeded, ``[count]`` each; what is shown of one that ended is the
last of its episode.

Episodes that resets begin with the same seed begin in the same state, which algorithms that compare
the samples of a start rely on. A module whose worlds do not keep that says ``UNSEEDED = True``, and
is refused in runs with groups. ``SETS``, tuples of ids by name, are names for several tasks: a run
has a world of each in turns, so they show and take the same.

The module also says what the world needs (:mod:`rlinf.envs.simulators.requirements`).
"""

from rlinf.registry import Registry

simulators = Registry(
    "world",
    {
        "behavior": "rlinf.envs.simulators.behavior:make",
        "calvin": "rlinf.envs.simulators.calvin:make",
        "franka": "rlinf.envs.simulators.franka:make",
        "genesis": "rlinf.envs.simulators.genesis:make",
        "gymnasium": "rlinf.envs.simulators.gymnasium:make",
        "isaaclab": "rlinf.envs.simulators.isaaclab:make",
        "libero": "rlinf.envs.simulators.libero:make",
        "maniskill": "rlinf.envs.simulators.maniskill:make",
        "maniskill_gpu": "rlinf.envs.simulators.maniskill_gpu:make",
        "metaworld": "rlinf.envs.simulators.metaworld:make",
        "robosuite": "rlinf.envs.simulators.robosuite:make",
        "robotwin": "rlinf.envs.simulators.robotwin:make",
        "roboverse": "rlinf.envs.simulators.roboverse:make",
    },
    base="builtins:object",
)
