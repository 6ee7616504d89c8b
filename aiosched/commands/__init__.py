"""What commands share, those of ``aiosched.cli`` and the benchmarks: flags, engines, the loop."""
