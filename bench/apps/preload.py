"""What the fork server imports for the applications, beside `bench.preload`.

The first optimizer of a process imports torch's compiler, which takes a second.
"""

from __future__ import annotations

import gc
import importlib

importlib.import_module("torch._dynamo")
gc.collect()
gc.freeze()
