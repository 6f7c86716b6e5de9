"""Images of simulators.

The simulator process (:mod:`rlinf.envs.vector_env`) loads this module too, so it imports only the
standard library and numpy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .observations import Arrays, ImageSizes, InvalidEnvConfig, check_cameras, get_instruction

RENDERER_MODEL_FIELDS = (
    *("mesh_vert", "mesh_face", "mesh_normal", "mesh_texcoord", "hfield_data", "tex_data"),
    *("mat_texid", "mat_texrepeat", "mat_texuniform", "skin_vert", "skin_face", "skin_texcoord"),
)
"""Fields of a MuJoCo model that a renderer copies to the GPU."""
_RENDERERS: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
"""Renderers of this process, by digest of these model fields, height and width."""
log = logging.getLogger("rlinf.envs.vector_env")


class CameraWrapper:
    """An environment that renders images on request.

    It calls the environment's ``render_camera(camera, height, width)`` if there is one. Otherwise
    it renders MuJoCo environments with :class:`MujocoCameras`.
    """

    def __init__(self, env: Any, images: ImageSizes) -> None:
        self._env, self._images = env, images
        self._render: Any = getattr(env, "render_camera", None)
        unwrapped = getattr(env, "unwrapped", env)
        if self._render is None:
            if not (hasattr(unwrapped, "model") and hasattr(unwrapped, "data")):
                raise InvalidEnvConfig(
                    "task.images: this simulator renders no images; leave them out"
                )
            self._render = MujocoCameras(unwrapped, images)
        check_cameras(images, getattr(env, "cameras", images))
        self.action_space = env.action_space
        self.observation_space = env.observation_space
        self.num_initial_states = getattr(env, "num_initial_states", 0)
        self.step_info_keys = getattr(env, "step_info_keys", ())
        self.unwrapped = unwrapped
        for name in ("expert_action", "save", "restore"):
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    @property
    def instruction(self) -> str | None:
        return get_instruction(self._env)

    def reset(self, **kwargs: int) -> Any:
        return self._env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self._env.step(action)

    def render_cameras(self) -> Arrays:
        """Return the current images of all cameras."""
        return {name: self._render(name, *size) for name, size in self._images.items()}

    def close(self) -> None:
        self._env.close()


class MujocoCameras:
    """Renders images of a MuJoCo environment, uint8 ``[H, W, 3]``.

    The camera name ``free`` means MuJoCo's default camera. Shadows, reflections and multisampling
    are off, because they take most of the time of software rendering.
    """

    def __init__(self, env: Any, images: ImageSizes) -> None:
        self._env, self._images = env, images
        self._mujoco = importlib.import_module("mujoco")
        self._create_renderers()

    def _create_renderers(self) -> None:
        """Create the renderers of the current model; a reset may rebuild the model."""
        model = self._model = self._env.model
        check_cameras(self._images, [*(model.camera(n).name for n in range(model.ncam)), "free"])
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        # All environments of a task share renderers, which hold copies of meshes and textures.
        arrays = [getattr(model, name, None) for name in RENDERER_MODEL_FIELDS]
        data = [array.tobytes() for array in arrays if array is not None]
        digest = hashlib.blake2b(b"".join(data)).digest()
        self._renderers: dict[tuple[int, ...], Any] = {}
        for size in {tuple(size) for size in self._images.values()}:
            renderer = _RENDERERS.get((digest, *size))
            if renderer is None:
                renderer = _RENDERERS[(digest, *size)] = self._create_renderer(*size)
            self._renderers[size] = renderer

    def _create_renderer(self, height: int, width: int) -> Any:
        limits = self._model.vis.global_  # The model limits the image size.
        limits.offheight = max(limits.offheight, height)
        limits.offwidth = max(limits.offwidth, width)
        try:
            renderer = self._mujoco.Renderer(self._model, height, width)
        except Exception as error:  # a graphics library may raise anything
            raise InvalidEnvConfig(
                f"task.renderer: {os.environ.get('MUJOCO_GL')} does not work here ({error}); "
                "egl needs Debian's libegl1 and libgl1-mesa-dri, osmesa libosmesa6"
            ) from None
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION"):
            renderer.scene.flags[getattr(self._mujoco.mjtRndFlag, flag)] = 0
        return renderer

    def __call__(self, name: str, height: int, width: int) -> np.ndarray:
        if self._env.model is not self._model:
            self._create_renderers()
        mujoco, renderer = self._mujoco, self._renderers[height, width]
        camera = mujoco.MjvCamera()
        if name == "free":
            mujoco.mjv_defaultFreeCamera(self._model, camera)
        else:
            camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            camera.fixedcamid = self._model.camera(name).id
        # renderer.update_scene would use the model that the renderer was created with.
        options = (mujoco.MjvOption(), None, camera, mujoco.mjtCatBit.mjCAT_ALL.value)
        mujoco.mjv_updateScene(self._model, self._env.data, *options, renderer.scene)
        image: np.ndarray = renderer.render()
        return image


@functools.lru_cache(None)
def log_mujoco_warnings() -> None:
    """Log each MuJoCo warning once. By default MuJoCo prints it for every environment and appends
    it to MUJOCO_LOG.TXT in the working directory."""
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError:
        return
    warn = functools.partial(log.warning, "MuJoCo: %s")
    mujoco.set_mju_user_warning(functools.lru_cache(None)(warn))
