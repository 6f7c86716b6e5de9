"""The simulators of tasks with ``name: gym``: one module for each, which creates its environments.

An environment has the methods of Gymnasium (:mod:`rlinf.envs.vector_env`). A module's ``make(id,
kwargs)`` creates one. The module is imported by its file's path, under the interpreter of
``task.python``, and must run on Python 3.9. It may import the simulator, numpy, the standard
library, and files of its own folder (``from .name import``) that keep to the same rule, but nothing
else of rlinf. ``make`` raises ValueError for an invalid configuration, and ImportError if a package
is missing; a message about a key of ``kwargs`` begins with ``kwargs.KEY``.

Optional members of an environment:

- ``num_initial_states``: the length of a list of initial states. In evaluation, ``reset(seed=,
  initial_state=)`` then receives the index of the group, so that each state is used once;
- ``render_camera(camera, height, width)``: returns the image of one of the environment's
  ``cameras``, uint8 ``[H, W, 3]``. MuJoCo environments do not need it: the ``model`` and ``data``
  of their ``unwrapped`` are rendered;
- ``step_info_keys``: which of these keys the ``info`` of each step has: ``intervened`` (a person
  acted in place of the policy), ``performed`` (the action that was executed then), and ``late`` (a
  step in real time began or ended too late). They become columns of trajectories
  (:mod:`rlinf.data.transitions`);
- ``instruction``: the current instruction, a sentence;
- ``expert_action()``: an expert's action for the current state;
- ``save()`` and ``restore(state)``: arrays by name with everything that is needed to continue the
  open episode exactly in another environment with the same ``id`` and ``kwargs``, in another
  process: physics, steps until the time limit, and random generators. The module then sets
  ``SUPPORTS_STATE_SAVING = True``. ``save`` raises ValueError for a state that it cannot save.
  :mod:`rlinf.envs.simulators.episode_state` has helpers.

Flags of a module:

- ``SINGLE_INSTANCE = True``: only one environment can exist at a time, such as a robot. Samples are
  collected one after another, the process closes the environment after the last sample, and a
  failed reset ends the run;
- ``BATCHED = True``: one object steps many environments. ``make(id, kwargs, count, images)``
  creates it for at least ``count`` environments, with the cameras of ``task.images``. Its attribute
  ``count`` is their number, and its spaces are those of one environment. ``reset(numbers, seeds)``
  begins episodes in the environments with these indices and returns their observations,
  ``[n, ...]``: an array, or ``state`` and images by name. ``step(actions)`` with ``[count, A]``
  returns the observations of all environments, their rewards, and whether each terminated, was
  truncated, and succeeded, ``[count]`` each. The observation of an episode that ended is its last
  one, not the first one of the next episode. A simulator that seeds its environments only when it
  is created has ``start_samples(numbers, seeds)`` too, which is called before the reset of the
  first episodes of samples. It makes the following episodes of each environment depend on its seed
  alone, and later resets may ignore their seeds;
- ``NONDETERMINISTIC = True``: as in Gymnasium, resets with equal seeds may begin in different
  states. Runs with groups are rejected, because the samples of a group must begin in the same
  state;
- ``TASK_SETS``: names of sets of tasks, such as ``MT10``, with their ids. If ``task.id`` is such a
  name, the run assigns its groups to the ids in rotation. All tasks of a set have equal spaces.

The module also has constants for its requirements (:mod:`rlinf.envs.simulators.requirements`).
"""

from rlinf.registry import Registry

simulators = Registry(
    "simulator",
    {
        "behavior": "rlinf.envs.simulators.behavior:make",
        "calvin": "rlinf.envs.simulators.calvin:make",
        "envpool": "rlinf.envs.simulators.envpool:make",
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
        "world_model": "rlinf.envs.simulators.world_model:make",
    },
    base="builtins:object",
)
