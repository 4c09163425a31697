"""`python -m flows.gc`."""

from flows.gc.command import main

if __name__ == "__main__":
    raise SystemExit(main())
