"""`python -m flows FLOW RECIPE`: any flow, by its name."""

from flows.cli.flow_commands import main

if __name__ == "__main__":
    raise SystemExit(main())
