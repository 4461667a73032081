"""What the fork server of the bench imports once, so that a cell starts at once.

Importing torch and the engines anew takes seconds; a process forked from one that has
imported them, but not used them, has them at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from mq import registry

_OURS = ("join", "codec", "loans", "tensors", "arrays", "queue")
_BENCH = ("workloads", "wire", "limits", "raw", "raw_nng", "actor_learner", "small")

# Bare TensorPipe warns of every peer that leaves, between the lines of the progress.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
importlib.import_module("torch")
with contextlib.suppress(ImportError):
    importlib.import_module("gymnasium")
for _name in (*(f"mq.{name}" for name in _OURS), *(f"bench.{name}" for name in _BENCH)):
    importlib.import_module(_name)
for _name in registry.names():
    registry.preload(_name)
# A full collection of all this takes 80 ms, in whichever cell it falls: never again.
gc.collect()
gc.freeze()
