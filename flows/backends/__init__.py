"""Backends: the kinds of place where jobs run, behind one interface.

- A *backend* is `process`, `container`, `slurm` or `kubernetes`; key `block` of a profile names it.
- A *job* is one submission of one stage: a LaunchSpec (spec.py) with a run folder of its own. A job
  in *shares* is one submission that the backend runs as several equal parts.
- A *job block* (ProcessJob, SlurmJob, ...) is the Prefect block that holds a job and the backend's
  options. Its `trigger` finds or starts the job.
- A *run* is what `trigger` returns, a StageJobRun (base.py): it follows the job to its outcome.
- A job *ends* by itself, or because a run *stops* it. The Outcome (outcome.py) says how it ended.

A folder per backend has pure rendering, a thin client, and the job block with its run."""
