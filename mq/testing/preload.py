"""What the fork server of the harness imports once, so that a member starts in 30 ms.

Importing torch and the engines anew takes seconds; a process forked from one that has
imported them, but not used them, has them at once.
"""

from __future__ import annotations

import gc
import hashlib
import importlib

import torch

from mq import join, registry

# On a busy machine torch's own threads spin for seconds over a small tensor.
torch.set_num_threads(1)
for _name in ("codec", "loans", "tensors", "arrays", "testing"):
    importlib.import_module(f"mq.{_name}")
for _name in ("directory", "tcp", "torchrun", "unread"):  # what `connect` may import
    importlib.import_module(f"mq.rendezvous.{_name}")
for _name in registry.names():
    registry.preload(_name)
# What the system's own library imports, or looks up, at the first use.
for _name in ("encodings.ascii", "encodings.idna", "multiprocessing.popen_forkserver"):
    importlib.import_module(_name)
hashlib.sha256(b"")
join.versions()
# A collection in a member would look through all of this, and copy its pages.
gc.collect()
gc.freeze()
