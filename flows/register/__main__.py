"""The program."""

from flows.register.command import main

raise SystemExit(main())
