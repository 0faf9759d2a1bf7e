"""`python -m vsim` is the `vsim` command."""

from vsim.cli import main

main()
