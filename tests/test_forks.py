"""A child forked at any moment can go on by itself."""

from __future__ import annotations

import pytest
from fresh_python import output_of

IN_THE_MIDDLE = """
import faulthandler, os, sys, threading, warnings
import torch
from mq.codec import Codec

warnings.simplefilter("ignore")  # of forks beside threads
begun, forking, forked = (threading.Event() for _ in range(3))
codec = Codec()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mq.tensors" and not begun.is_set():
            begun.set()
            forking.wait()
            forked.wait(0.5)  # it is not while this goes on, so this is all of it

def use():
    {use}

os.register_at_fork(before=forking.set, after_in_parent=forked.set)
sys.meta_path.insert(0, Finder())
thread = threading.Thread(target=use)
thread.start()
begun.wait()
if not (child := os.fork()):
    faulthandler.dump_traceback_later(20, exit=True)
    use()
    os._exit(0)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    "use",
    [
        "codec.encode(torch.ones(4))",
        "from mq import loans; loans.room((4,), torch.int)",
    ],
    ids=["packing", "loans"],
)
def test_a_child_forked_amid_the_first_tensor_has_tensors(use: str) -> None:
    """What handles them is imported with the first one, by another thread."""
    program = IN_THE_MIDDLE.format(use=use)
    assert output_of(program).strip() == "0"
