"""The contract as a test suite, for every transport, those of third parties too.

    @pytest.mark.parametrize("case", mq.testing.CASES, ids=str)
    def test_conformance(case):
        mq.testing.run_case("mytransport", case)

or, without a test framework: ``python -m mq.testing mytransport``. The members of a
case are processes, started from a fork server by `multiprocessing`, so a script that
runs cases needs the usual ``if __name__ == "__main__":``.

    @pytest.mark.parametrize("promise", mq.testing.PROMISES)
    def test_link(promise):
        mq.testing.PROMISES[promise](MyLink)

looks at what a link promises below the sessions, which mend much of what it does wrong.
"""

from mq.testing import suite
from mq.testing.cases import CASES, CLAUSES, Case, case, find, run_case
from mq.testing.harness import Group, expect
from mq.testing.links import PROMISES
from mq.testing.member import Future, Member
from mq.testing.proxy import Proxy
from mq.testing.waiting import PEER_TIMEOUT, STEP, MemberDied, StepTimeout, wait_until

__all__ = [
    "CASES",
    "CLAUSES",
    "PEER_TIMEOUT",
    "PROMISES",
    "STEP",
    "Case",
    "Future",
    "Group",
    "Member",
    "MemberDied",
    "Proxy",
    "StepTimeout",
    "case",
    "expect",
    "find",
    "run_case",
    "suite",
    "wait_until",
]
