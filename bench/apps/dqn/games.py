"""The games: CartPole as it is, Atari as small stacked pictures in grey."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_STACK = 4
_TOP, _BOTTOM = 34, 194  # without the score above and the border below


class Step(NamedTuple):
    """What one action led to."""

    observation: npt.NDArray[Any]
    reward: float
    terminated: bool
    truncated: bool


class Game:
    """A game of gymnasium, played by one collector.

    Attributes:
        shape: Of an observation.
        dtype: Of an observation; uint8 are pictures.
        actions: How many there are to choose from.
    """

    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    def __init__(self, game: Any) -> None:
        self._game = game
        self.shape = tuple(game.observation_space.shape)
        self.dtype = game.observation_space.dtype
        self.actions = int(game.action_space.n)

    def reset(self, seed: int | None = None) -> npt.NDArray[Any]:
        """Begin an episode; with a seed, also everything that is random in it."""
        return self._see(self._game.reset(seed=seed)[0])

    def step(self, action: int) -> Step:
        """Take one action."""
        seen, reward, terminated, truncated, _ = self._game.step(action)
        return Step(self._see(seen), float(reward), bool(terminated), bool(truncated))

    def _see(self, seen: Any) -> npt.NDArray[Any]:
        return np.asarray(seen)

    def close(self) -> None:
        """Free the game."""
        self._game.close()


class Atari(Game):
    """An observation is four pictures of 80x80 grey pixels, the newest last."""

    def __init__(self, game: Any) -> None:
        super().__init__(game)
        self.shape = (_STACK, (_BOTTOM - _TOP) // 2, self.shape[1] // 2)
        self.dtype = np.uint8
        self._pictures: deque[npt.NDArray[Any]] = deque(maxlen=_STACK)

    def reset(self, seed: int | None = None) -> npt.NDArray[Any]:
        self._pictures.clear()
        return super().reset(seed)

    def _see(self, seen: Any) -> npt.NDArray[Any]:
        picture = seen[_TOP:_BOTTOM:2, ::2]
        self._pictures.append(picture)
        while len(self._pictures) < _STACK:
            self._pictures.append(picture)
        return np.stack(self._pictures)


def make(name: str) -> Game:
    """A game by its name.

    Raises:
        ImportError: What it needs is not installed; says how to install it.
        ValueError: There is no such game, or it is not one for DQN.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            "gymnasium is missing: pip install 'tensormq[bench]'"
        ) from error
    options: dict[str, Any] = {"disable_env_checker": True}
    atari = name.startswith("ALE/")
    if atari:
        _bring_atari(gymnasium)
        options |= {"obs_type": "grayscale", "frameskip": 4}
        options["repeat_action_probability"] = 0.0
    try:
        game = gymnasium.make(name, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium cannot make {name!r}: {error}") from error
    spaces = gymnasium.spaces
    if not isinstance(game.action_space, spaces.Discrete):
        raise _unsuitable(name, "actions", game.action_space, "Discrete")
    seen = game.observation_space
    if not isinstance(seen, spaces.Box) or (len(seen.shape) != 1 and not atari):
        raise _unsuitable(name, "observations", seen, "a Box of one dimension")
    return Atari(game) if atari else Game(game)


def _bring_atari(gymnasium: Any) -> None:
    try:
        import ale_py
    except ImportError as error:
        raise ImportError("ale-py is missing: pip install 'tensormq[bench]'") from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)


def _unsuitable(name: str, what: str, found: object, wanted: str) -> ValueError:
    return ValueError(
        f"the {what} of {name} are {found}, and this DQN needs {wanted}: choose a game "
        "such as CartPole-v1 or ALE/Pong-v5"
    )
