"""What counts as a failure in the log of a server."""

from __future__ import annotations

from pathlib import Path

from tests.yard.server_logs import break_on_purpose, of_servers

FAILED = """12:00:00 | INFO | server - started
[ 115ms] schedule_deployments(){schedule_deployments}
Traceback (most recent call last):
  File "scheduler.py", line 1, in schedule_deployments
sqlalchemy.exc.InvalidRequestError: Can't evaluate bulk DML statement
12:01:00 | INFO | server - goes on
"""
BUSY = """12:00:00 | ERROR | worker_channel - Worker channel heartbeat persistence failed
Traceback (most recent call last):
  File "core.py", line 63, in _connection_worker_thread
sqlite3.OperationalError: database is locked
"""


def test_a_failing_service_is_reported_with_name_and_error(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    log = tmp_path / "home" / "server.log"
    log.write_text(BUSY + FAILED)
    (line,) = of_servers(tmp_path)
    assert line.startswith(f"{log}: [ 115ms] schedule_deployments()")
    assert line.endswith("InvalidRequestError: Can't evaluate bulk DML statement")
    log.write_text(BUSY + BUSY.replace("is locked", "disk image is malformed"))
    (line,) = of_servers(tmp_path)
    assert line.endswith("malformed")
    log.unlink()  # it lies where those of real servers are looked for


def test_a_server_that_a_test_broke_may_fail(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(FAILED)
    break_on_purpose(tmp_path)
    assert list(of_servers(tmp_path)) == []
