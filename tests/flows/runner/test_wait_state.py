"""What a flow run shows of its waits; on a real server: tests/yard/operator/test_waits_shown.py."""

from __future__ import annotations

from flows.runner.wait_state import LOCK, SLOT, WaitState


def test_a_run_waits_while_a_job_does_and_none_works() -> None:
    found = WaitState()
    assert found.state == ("Running", "")
    found.wait("merge", SLOT, "1 of 1 in use")
    assert found.state == (SLOT, "merge: 1 of 1 in use")
    with found.working("pretrain"):
        assert found.state == ("Running", "")
    with found.working("merge"):  # its backend does not answer
        assert found.state == (SLOT, "merge: 1 of 1 in use")
    found.wait("lock", LOCK, "another run")
    found.end_wait("merge")
    assert found.state == (LOCK, "lock: another run")
    found.end_wait("lock")
    found.end_wait("never waited")
    assert found.state == ("Running", "")
