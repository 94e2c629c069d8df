"""`python -m kvq`."""

from kvq.cli import main

main()
