"""`python -m fedhen`."""

from fedhen.cli import main

raise SystemExit(main())
