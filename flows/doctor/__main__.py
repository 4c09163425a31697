"""`python -m flows.doctor`."""

from flows.doctor.command import main

if __name__ == "__main__":
    raise SystemExit(main())
