"""`python -m flows.worker`."""

from flows.worker.command import main

if __name__ == "__main__":
    raise SystemExit(main())
