"""`python -m flows.goodput`."""

from flows.goodput.report import main

if __name__ == "__main__":
    raise SystemExit(main())
