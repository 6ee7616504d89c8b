"""Tools for testing programs that use aiosched, and aiosched itself."""
