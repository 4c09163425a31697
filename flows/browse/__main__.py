"""`python -m flows.browse`."""

from flows.browse.command import main

if __name__ == "__main__":
    raise SystemExit(main())
