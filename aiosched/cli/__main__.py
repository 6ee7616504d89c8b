"""``python -m aiosched.cli``."""

from aiosched.cli import main

main()
