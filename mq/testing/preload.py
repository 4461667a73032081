"""What the fork server of the harness imports once, so that a member starts in 50 ms.

Importing torch and the engines anew takes seconds; a process forked from one that has
imported them, but not used them, has them at once.
"""

from __future__ import annotations

import importlib

from mq import registry

for _name in ("torch", "numpy", "mq.join", "mq.codec", "mq.loans", "mq.testing"):
    importlib.import_module(_name)
for _name in registry.names():
    if registry.check(_name) is None:
        registry.load(_name)
