"""`python -m m2lgdg`: the command line for whom the command itself is not on the path, as on many clusters."""

from m2lgdg.cli import main

main()
