"""Builds the library with setuptools, of setup.cfg, and compiles what can be compiled.

`setup.cfg` cannot name extension modules, so this stands between it and pip.
"""

from __future__ import annotations

import functools
import pathlib

import setuptools
from setuptools.build_meta import *  # noqa: F403  the hooks that pip calls

SPEED = setuptools.Extension(
    "mq._speed",
    [
        f"mq/_{name}.c"
        for name in "alone copying lock passing repeated speed spinning".split()
    ],
    # So that a source distribution has them.
    depends=[*map(str, pathlib.Path("mq").glob("_*.h")), ".build/backend.py"],
    extra_compile_args=["-O3", "-std=c11", "-pthread"],
    optional=True,  # without a compiler its twins in Python stand in for it
)
# The hooks run `setuptools.setup()`, as where there is no setup.py.
setuptools.setup = functools.partial(setuptools.setup, ext_modules=[SPEED])
